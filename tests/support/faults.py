"""What can be done wrong to a parallel model: changes of its ranks' graphs, and the models that they are tried on."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from small_models import Grouped, Mixture
from torch import Tensor, fx, nn

from autotp.compiler import analyse, rank_graph
from autotp.diagnostics.verify import Change, Report, Trial, run_and_compare
from autotp.errors import Error
from autotp.extensions import values_of
from autotp.ops import collectives
from autotp.ops.async_linear import async_linear
from autotp.ops.coalesced import together
from autotp.options import OPTIONAL, Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.check.check import check
from autotp.passes.check.types import Typed
from autotp.passes.lower.local_sizes import Target
from autotp.passes.lower.overlap import separate
from autotp.passes.program.program import CallState, Program
from autotp.sharding.layout import Layout
from autotp.sharding.partition import chunk_bounds

# ---- what `verify` sees. Nodes are told by name, since a graph is made anew for each run


def red(trial: Trial, change: Change) -> bool:
    """True if verify reports a difference, or the ranks cannot even run."""
    try:
        return not run_and_compare(trial, change).ok
    except RuntimeError:
        return True


def wrong(report: Report) -> set[str]:
    """The parameters and inputs whose gradient is wrong."""
    return {d.name for d in report.gradients if not d.error <= report.tolerance}


def calls(trial: Trial, *targets: Any) -> list[fx.Node]:
    """The calls of these functions in a rank's graph, in order."""
    return [node for node in trial.graphs[0].nodes if node.target in targets]


def on(name: str, edit: Callable[[fx.Graph, fx.Node, int], None]) -> Change:
    """The change that edits the node called `name`, on every rank."""

    def change(graph: fx.Graph, rank: int) -> fx.Graph:
        node = next(n for n in graph.nodes if n.name == name)
        with graph.inserting_after(node):
            edit(graph, node, rank)
        return graph

    return change


def drop(graph: fx.Graph, node: fx.Node, rank: int) -> None:
    """A conjugate, or one of several parameters that are read together."""
    source: Any = node.args[0]
    node.replace_all_uses_with(source.args[0][node.args[1]] if source.target is together else source)
    graph.erase_node(node)


def repeat(graph: fx.Graph, node: fx.Node, rank: int) -> None:
    """Applies a function to its own result."""
    behind(node.target, *node.args[1:])(graph, node, rank)


def behind(function: Any, *args: Any) -> Callable[[fx.Graph, fx.Node, int], None]:
    """Puts a call of `function` between a node and its readers."""

    def edit(graph: fx.Graph, node: fx.Node, rank: int) -> None:
        new = graph.call_function(function, (node, *args))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    return edit


def conjugate(graph: fx.Graph, node: fx.Node, rank: int) -> None:
    """A copy where a reduce belongs, and a reduce where a copy does."""
    node.target = collectives.copy if node.target is collectives.reduce else collectives.reduce
    node.args = node.args[:2]


def argument(at: int, change: Callable[[Any], Any]) -> Callable[[fx.Graph, fx.Node, int], None]:
    def edit(graph: fx.Graph, node: fx.Node, rank: int) -> None:
        node.update_arg(at, change(node.args[at]))

    return edit


def bias_before_reduce(graph: fx.Graph, node: fx.Node, rank: int) -> None:
    """add(reduce(x), b) -> reduce(add(x, b)): every rank adds the bias."""
    (add,) = node.users
    bias = next(arg for arg in add.args if arg is not node)
    product = node.args[0]
    with graph.inserting_before(node):
        node.update_arg(0, graph.call_function(torch.ops.aten.add.Tensor, (product, bias)))
    add.replace_all_uses_with(node)
    graph.erase_node(add)


def apart(trial: Trial) -> Trial:
    """The same, its groups of products taken apart: so every conjugate is a node, and can be broken."""
    return replace(trial, graphs=tuple(map(separate, trial.graphs)))


def resliced(trial: Trial, name: str, pieces: list[tuple[int, int]]) -> Trial:
    """The same with a parameter cut elsewhere."""
    layout = replace(trial.analysis.layouts[name], pieces=tuple((piece,) for piece in pieces))
    return replace(trial, analysis=replace(trial.analysis, layouts=trial.analysis.layouts | {name: layout}))


# ---- what `check` refuses: node -> changes of the same node in a copy of its graph


aten = torch.ops.aten
KINDS = (
    collectives.copy,
    collectives.reduce,
    collectives.scatter,
    collectives.gather,
    collectives.all_gather,
    collectives.reduce_scatter,
    collectives.all_to_all,
)

NodeChange = Callable[[fx.Node], Any]


def replace_with(node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)


def after(node: fx.Node, target: Any, *rest: Any) -> fx.Node:
    """A new call on `node`, with its example value."""
    with node.graph.inserting_after(node):
        new = node.graph.call_function(target, (node, *rest))
    new.meta = dict(node.meta)
    return new


def is_item(node: fx.Node) -> bool:
    """True for one of several parameters that are read together."""
    return node.target is operator.getitem and getattr(node.args[0], "target", None) is together


def omit(node: fx.Node) -> Iterator[NodeChange]:
    """No conjugate."""
    if node.target in KINDS:
        yield lambda n: replace_with(n, n.args[0])
    if is_item(node):
        yield lambda n: replace_with(n, n.args[0].args[0][n.args[1]])


def twice(node: fx.Node) -> Iterator[NodeChange]:
    """The same conjugate, or its opposite, once more."""
    if node.target in KINDS[:2]:
        for kind in KINDS[:2]:
            yield lambda n, kind=kind: replace_with(n, after(n, kind, *n.args[1:]))


def another(node: fx.Node) -> Iterator[NodeChange]:
    """Another conjugate in its place."""
    alike = KINDS[:2] if node.target in KINDS[:2] else KINDS[2:]
    for kind in alike if node.target in KINDS else ():
        if kind is not node.target:
            yield lambda n, kind=kind: setattr(n, "target", kind)
    if node.target is collectives.reduce:
        reducer = "sum" if node.args[2:] == ("max",) else "max"
        yield lambda n: setattr(n, "args", (*n.args[:2], reducer))


def misplace(node: fx.Node) -> Iterator[NodeChange]:
    """A wrong dimension, size or block of a conjugate."""
    for at in range(2, len(node.args)) if node.target in KINDS[2:] else ():
        if isinstance(node.args[at], fx.Node):  # A length that the inputs' sizes decide.
            yield lambda n, at=at: n.update_arg(at, 2)
            continue
        for by in (-1, 1):
            yield lambda n, at=at, by=by: n.update_arg(at, n.args[at] + by)  # type: ignore[operator]
    if node.target in KINDS[2:]:
        yield lambda n: setattr(n, "args", (*n.args[:4], 2) if len(n.args) == 4 else n.args[:4])
        yield lambda n: n.update_arg(1, "dp")
    if node.target is collectives.share:
        yield lambda n: n.update_arg(1, "tp")
        yield lambda n: n.update_arg(3, n.args[3][:-1])
    if node.target is together:
        yield lambda n: n.update_arg(1, "dp" if n.args[1] == "tp" else "tp")
        for i, at in enumerate(node.args[2]):  # type: ignore[arg-type]
            for other in [(0, ((0, 1),))] if at is None else [None, (at[0], at[1][:-1])]:
                yield lambda n, i=i, at=other: n.update_arg(2, (*n.args[2][:i], at, *n.args[2][i + 1 :]))
    if is_item(node):
        yield lambda n: n.update_arg(1, (n.args[1] + 1) % len(n.args[0].args[0]))


def bypass(node: fx.Node) -> Iterator[NodeChange]:
    """One reader reads what comes before the conjugate."""
    for i in range(len(node.users) if node.target in KINDS else 0):
        yield lambda n, i=i: list(n.users)[i].replace_input_with(n, n.args[0])


def late(node: fx.Node) -> Iterator[NodeChange]:
    """A conjugate behind its reader, such as a bias that is added before the reduction."""

    def change(n: fx.Node, i: int) -> None:
        reader = list(n.users)[i]
        reader.replace_input_with(n, n.args[0])
        replace_with(reader, after(reader, n.target, *n.args[1:]))

    for i, reader in enumerate(node.users if node.target in KINDS else ()):
        if reader.op == "call_function" and isinstance(reader.meta.get("val"), Tensor):
            yield lambda n, i=i: change(n, i)


def insert(node: fx.Node) -> Iterator[NodeChange]:
    """A conjugate that nothing asks for."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.is_floating_point():
        for kind in KINDS[:2]:
            yield lambda n, kind=kind: replace_with(n, after(n, kind, "tp"))


def miscount(node: fx.Node) -> Iterator[NodeChange]:
    """Another number: a local size, a start, a bound, a dimension, a scale, a flag."""

    def change(n: fx.Node, at: int, by: Callable[[Any], Any]) -> None:
        seen = iter(range(10**6))
        turned = lambda a: by(a) if isinstance(a, int | float) and next(seen) == at else a  # noqa: E731
        n.args = fx.node.map_aggregate(n.args, turned)

    numbers: list[Any] = []
    fx.node.map_aggregate(node.args, lambda a: numbers.append(a) if isinstance(a, int | float) else None)
    for at, number in enumerate(numbers if node.op == "call_function" and node.target not in KINDS else ()):
        if isinstance(number, bool):
            yield lambda n, at=at: change(n, at, operator.not_)
        else:
            yield lambda n, at=at: change(n, at, lambda a: a + 1)
            yield lambda n, at=at: change(n, at, lambda a: a * 2)


def skip(node: fx.Node) -> Iterator[NodeChange]:
    """No operator, where one operand has the shape of the result."""
    if node.op == "call_function" and node.target not in KINDS and isinstance(node.meta.get("val"), Tensor):
        for i, operand in enumerate(node.all_input_nodes):
            value = operand.meta.get("val")
            if isinstance(value, Tensor) and list(map(str, value.shape)) == list(map(str, node.meta["val"].shape)):
                yield lambda n, i=i: replace_with(n, n.all_input_nodes[i])


def swap(node: fx.Node) -> Iterator[NodeChange]:
    """The first two operands the other way round; another operator."""
    both = [isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), Tensor) for arg in node.args[:2]]
    if both == [True, True] and node.target not in (aten.add.Tensor, aten.mul.Tensor, aten.eq.Tensor):
        yield lambda n: setattr(n, "args", (n.args[1], n.args[0], *n.args[2:]))
    others = {
        aten.add.Tensor: aten.sub.Tensor,
        aten.gelu.default: aten.silu.default,
        aten.relu.default: aten.abs.default,
    }
    if node.target in others:
        yield lambda n: setattr(n, "target", others[n.target])


def confuse(node: fx.Node) -> Iterator[NodeChange]:
    """Another value of the same shape, the one computed last before."""
    earlier: dict[str, list[int]] = {}
    for i, n in enumerate(node.graph.nodes):
        if n is node:
            break
        earlier.setdefault(_shape(n), []).append(i)
    for operand in node.all_input_nodes if node.target not in KINDS else ():
        found = earlier.get(_shape(operand), []) if isinstance(operand.meta.get("val"), Tensor) else []
        names = [list(node.graph.nodes)[i].name for i in found[-3:]]
        for name in names:
            if name != operand.name:
                yield lambda n, a=operand.name, b=name: n.replace_input_with(_named(n.graph, a), _named(n.graph, b))


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype} {list(map(str, value.shape))}" if isinstance(value, Tensor) else ""


def _named(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def expose(node: fx.Node) -> Iterator[NodeChange]:
    """An output before its conjugate, or with one more."""
    for i, value in enumerate(node.args[0] if node.op == "output" else ()):  # type: ignore[arg-type, var-annotated]
        for kind in KINDS[:2]:

            def change(n: fx.Node, i: int = i, kind: Any = kind) -> None:
                outs = list(n.args[0])  # type: ignore[arg-type]
                outs[i] = after(outs[i], kind, "tp")
                n.args = (tuple(outs),)

            if value.meta["val"].is_floating_point():
                yield change


def regroup(node: fx.Node) -> Iterator[NodeChange]:
    """Something else of products that are one operator."""
    if node.target is operator.getitem and getattr(node.args[0], "target", None) is async_linear:
        yield lambda n: n.update_arg(1, (n.args[1] + 1) % len(n.args[0].args[4]))
    if node.target is not async_linear:
        return
    yield lambda n: n.update_arg(0, next(x for x in n.all_input_nodes if x is not n.args[0]))
    yield lambda n: n.update_arg(1, "dp")
    yield lambda n: n.update_arg(2, (1, 2, 1) if n.args[2] is None else None)
    yield lambda n: n.update_arg(3, (0, 1) if n.args[3] is None else None)
    for at in (4, 5, 6):
        yield lambda n, at=at: n.update_arg(at, n.args[at][::-1])
        yield lambda n, at=at: n.update_arg(at, n.args[at][:-1])
    yield lambda n: n.update_arg(5, (None,) * len(n.args[5]))
    yield lambda n: n.update_arg(6, tuple(not turn for turn in n.args[6]))
    yield from miscount(node)


WAYS = (omit, twice, another, misplace, bypass, late, insert, miscount, skip, swap, confuse, expose)


def changed(graph: fx.Graph, at: int, change: NodeChange) -> fx.Graph:
    """A copy of a graph in which the node at a position is changed."""
    copy, env = fx.Graph(), {}
    for node in graph.nodes:
        env[node] = copy.node_copy(node, lambda n: env[n])
    change(list(copy.nodes)[at])
    return copy


# ---- the models that are broken for `check`, how they are called, and how they are cut


# ---- models


class Decoder(nn.Module):
    """A GPT of one layer: fused q | k | v, dropout, the head tied to the embedding, cross-entropy."""

    def __init__(self, heads: int = 4, dropout: float = 0.2, vocab: int = 131) -> None:
        super().__init__()
        self.heads, self.p, hidden = heads, dropout, 8 * heads
        self.tokens, self.places = nn.Embedding(vocab, hidden), nn.Embedding(8, hidden)
        self.norm_1, self.norm_2, self.norm = (nn.LayerNorm(hidden) for _ in range(3))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 10), nn.Linear(10, hidden)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        """tokens, labels: [batch seq]"""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.size(1), device=tokens.device))
        x = F.dropout(x, self.p, self.training)
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, -1)  # [batch seq hidden] each
        q, k, v = (y.view(*y.shape[:2], self.heads, 8).transpose(1, 2) for y in (q, k, v))
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(y), self.p, self.training)
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        logits = F.linear(self.norm(x), self.tokens.weight)
        return logits if labels is None else (F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class Encoder(nn.Module):
    """A BERT of one layer: separate q, k, v, attention and loss written out, dropout on weights, norms after."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.kinds = nn.Embedding(61, 12), nn.Embedding(2, 12)
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))
        self.up, self.down = nn.Linear(12, 10), nn.Linear(10, 12)
        self.norm_1, self.norm_2, self.head = nn.LayerNorm(12), nn.LayerNorm(12), nn.Linear(12, 61)

    def forward(self, tokens: Tensor, kinds: Tensor, padding: Tensor, labels: Tensor) -> Tensor:
        """All: [batch seq]"""
        x = self.tokens(tokens) + self.kinds(kinds)
        q, k, v = (f(x).unflatten(-1, (6, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))  # [batch heads seq 2]
        scores = q @ k.transpose(-1, -2) / math.sqrt(2) + (1 - padding[:, None, None].to(x.dtype)) * -1e4
        weights = F.dropout(scores.softmax(-1), 0.2, self.training)  # [batch heads seq seq]
        x = self.norm_1(x + self.out((weights @ v).transpose(1, 2).flatten(2)))
        x = self.norm_2(x + self.down(torch.relu(self.up(x))))
        losses = F.nll_loss(self.head(x).log_softmax(-1).transpose(1, 2), labels, reduction="none")
        return (losses * padding).sum() / padding.sum()


class Moving(nn.Module):
    """Values that are cut along one axis and read along another: every conjugate is somewhere in here."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """`names`: the layers in the order in which their axes are cut."""
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 72), nn.Linear(24, 12)
        sizes = {"first": (12, 10), "middle": (10, 14), "last": (14, 5)}
        for name in names:
            self.add_module(name, nn.Linear(*sizes[name]))
        self.register_buffer("slopes", torch.linspace(0.1, 0.9, 6))

    slopes: Tensor

    def forward(self, x: Tensor) -> Any:
        """x: [batch seq 12]"""
        fused = self.qkv(x)
        q, k, v = (y.unflatten(-1, (6, 4)).transpose(1, 2) for y in fused.split(24, -1))  # [batch heads seq 4]
        apart = torch.arange(x.size(1), device=x.device) - torch.arange(x.size(1), device=x.device)[:, None]
        weights = (q @ k.mT + self.slopes.view(1, 6, 1, 1).to(x.dtype) * apart).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return self.last(torch.tanh(self.middle(F.gelu(self.first(x))))), fused, weights.transpose(1, 2).flatten(2, 3)


class Exchanging(nn.Module):
    """A value that is cut along its width, between products over its rows that are cut along the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.rows, self.down = nn.Linear(5, 12), nn.Linear(6, 6), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch 6 5]"""
        mixed = self.rows(self.up(x).relu().transpose(1, 2)).relu().transpose(1, 2)
        return self.down(mixed)


# ---- cases


@dataclass(frozen=True)
class Case:
    """A model, how it is called, and how it is cut."""

    model: nn.Module
    inputs: dict[str, Tensor]
    tp: int = 2
    outputs: Any = "auto"
    randomness: Any = "exact"
    layouts: Any = None
    experts: Any = "width"
    sequence_parallel: bool = False
    without: tuple[str, ...] = ()
    overlap: Any = "none"

    def analysed(self) -> Program:
        choices = Options(self.outputs, self.experts, self.sequence_parallel, self.without, overlap=self.overlap)
        return analyse(skeleton_of(self.model), (), self.inputs, self.tp, choices, CallState(layouts=self.layouts))

    def target(self, analysis: Program, rank: int) -> Target:
        return Target("tp", self.tp, rank, self.randomness, frozenset(analysis.local_outputs))


def parts(shape: tuple[int, ...], dim: int, tp: int, times: int = 1, block: int = 1) -> Layout:
    """`times` parts of a dimension side by side, each cut in whole blocks."""
    n = shape[dim] // times
    bounds = [chunk_bounds(n // block, tp, rank) for rank in range(tp)]
    pieces = [tuple((i * n + a * block, i * n + b * block) for i in range(times) if b > a) for a, b in bounds]
    return Layout(shape, dim, tuple(pieces))


def moving(tp: int, cuts: dict[str, int]) -> Case:
    """`Moving`, its heads cut, and of other weights the dimensions `cuts`."""
    model = made(Moving(tuple(dict.fromkeys(name.split(".")[0] for name in cuts))))
    given: dict[str, tuple[int, ...]] = {"qkv.weight": (0, 3, 4), "qkv.bias": (0, 3, 4), "out.weight": (1, 1, 4)}
    given |= {name: (dim,) for name, dim in cuts.items()}
    layouts = {name: Layout(tuple(p.shape)) for name, p in model.named_parameters()}
    for name, (dim, *how) in given.items():
        layouts[name] = parts(layouts[name].shape, dim, tp, *how)
    return Case(model, {"x": torch.randn(2, 3, 12, dtype=torch.float64)}, tp, "full", layouts=layouts)


def exchanging(tp: int) -> Case:
    """`Exchanging`, of which each product is cut along another axis."""
    model = made(Exchanging())
    cuts = {"up.weight": 0, "up.bias": 0, "rows.weight": 0, "rows.bias": 0, "down.weight": 1}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    layouts = {name: parts(shape, cuts[name], tp) if name in cuts else Layout(shape) for name, shape in shapes.items()}
    return Case(model, {"x": torch.randn(2, 6, 5, dtype=torch.float64)}, tp, layouts=layouts)


def made(model: nn.Module, train: bool = True) -> nn.Module:
    """The model in float64, every parameter random: a bias of 0 would hide a bug."""
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model.double().train(train)


def tokens(vocab: int, step: int = 5) -> Tensor:
    return torch.arange(6).mul(step).add(1).remainder(vocab).view(2, 3)


def decoder(tp: int, train: bool = True, outputs: str = "auto", randomness: str = "exact", heads: int = 4) -> Case:
    inputs = {"tokens": tokens(131)} | ({"labels": tokens(131, 4)} if train else {})
    return Case(made(Decoder(heads), train), inputs, tp, outputs, randomness)


def one_row(found: Case) -> Case:
    """The same rows, one behind the other: a batch of one row."""
    return replace(found, inputs={name: x.reshape(1, -1) for name, x in found.inputs.items()})


def encoder(tp: int, train: bool = True, randomness: str = "exact") -> Case:
    padding = torch.tensor([[1, 1, 1], [1, 1, 0]])
    inputs = {"tokens": tokens(61), "kinds": tokens(2), "padding": padding, "labels": tokens(61, 3)}
    return Case(made(Encoder(), train), inputs, tp, randomness=randomness)


def grouped(layout: str, outputs: str) -> Case:
    """Two key/value heads on four ranks: each is on two of them, its weights too."""
    plain, model = (made(Grouped(2, 3, layout, cache)) for cache in (False, True))
    inputs = {"x": torch.randn(2, 3, 12, dtype=torch.float64)}
    layouts = Case(plain, inputs, 4).analysed().layouts  # As trained; where its keys are returned, too, it is cut so.
    return Case(model, inputs, 4, outputs, layouts=layouts)


@cache
def case(name: str) -> tuple[Case, Program]:
    found = CASES[name]()
    return found, found.analysed()


CASES: dict[str, Callable[[], Case]] = {
    "decoder": lambda: decoder(2),
    "decoder-fast": lambda: decoder(2, randomness="fast"),
    "sequence": lambda: replace(decoder(2), sequence_parallel=True),
    "sequence-fast": lambda: replace(encoder(3, randomness="fast"), sequence_parallel=True),
    "decoder-bare": lambda: replace(decoder(2), without=OPTIONAL),
    "sequence-bare": lambda: replace(decoder(2), sequence_parallel=True, without=OPTIONAL),
    "decoder-eval": lambda: decoder(3, train=False),
    "encoder": lambda: encoder(2),
    "grouped": lambda: grouped("separate", "full"),
    "grouped-local": lambda: grouped("separate", "local"),
    "grouped-fused": lambda: grouped("per-group", "full"),
    "experts": lambda: Case(made(Mixture()), {"x": torch.randn(5, 8, dtype=torch.float64)}, experts="expert"),
    "gathering": lambda: moving(
        2, {"last.weight": 1, "middle.weight": 0, "middle.bias": 0, "first.weight": 0, "first.bias": 0}
    ),
    "exchanging": lambda: exchanging(2),
    "scattering": lambda: moving(
        2, {"first.weight": 0, "first.bias": 0, "middle.weight": 1, "middle.bias": 0, "last.weight": 1}
    ),
}


# ---- verdicts of `check`


PARTS = 3  # One node of so many is broken in a test.
if "batch" in values_of("overlap"):
    CASES |= {
        "halves": lambda: replace(decoder(2), overlap="batch"),
        "halves-of-a-row": lambda: replace(one_row(decoder(2)), overlap="batch"),
        "halves-bare": lambda: replace(encoder(2), overlap="batch", without=OPTIONAL),
    }
RARE = (
    "gathering",
    "decoder-fast",
    "halves-of-a-row",
    "halves-bare",
    "decoder-eval",
    "decoder-bare",
    "sequence-bare",
    "scattering",
    "grouped-local",
    "grouped-fused",
    "sequence-fast",
)


def graphs_of(found: Case, analysis: Program, apart: bool = True) -> list[fx.Graph]:
    """Each rank's graph, its groups of products taken apart: so every conjugate is a node, and can be broken."""
    graphs = [rank_graph(analysis, rank, found.randomness) for rank in range(found.tp)]
    return [separate(graph) for graph in graphs] if apart else graphs


def typed(found: Case, analysis: Program, graph: fx.Graph, rank: int, **other: Any) -> dict[fx.Node, tuple[Typed, ...]]:
    captured = analysis.captured
    given = {
        "layouts": {place: analysis.layouts[name] for place, name in captured.parameters.items()},
        "trainable": {*captured.parameters, *captured.inputs},
        "to": found.target(analysis, rank),
        "local_outputs": analysis.local_outputs,
    }
    return check(graph, analysis.graph, **(given | other))  # type: ignore[arg-type]


def refusal(found: Case, analysis: Program, graphs: Iterable[fx.Graph], **other: Any) -> Error | None:
    """Why the first rank that refuses its graph does; None if none does."""
    for rank, graph in enumerate(graphs):
        try:
            typed(found, analysis, graph, rank, **other)
        except Error as error:
            return error
    return None
