"""Every way of breaking a rank's graph is refused, or changes no number and no gradient."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autotp import collectives, parallel
from autotp.errors import Error
from autotp.layout import Layout
from autotp.lockstep import run_lockstep
from autotp.partition import chunk_bounds
from autotp.passes.bind import bind
from autotp.passes.capture import skeleton_of
from autotp.passes.check import check
from autotp.passes.local import Target
from autotp.passes.typed import Typed
from autotp.transform import Analysis, analyse, rank_graph

aten = torch.ops.aten
KINDS = (
    collectives.copy,
    collectives.reduce,
    collectives.scatter,
    collectives.gather,
    collectives.all_gather,
    collectives.reduce_scatter,
)

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

    def analysed(self) -> Analysis:
        return analyse(skeleton_of(self.model), (), self.inputs, self.tp, self.outputs, self.layouts)

    def target(self, analysis: Analysis, rank: int) -> Target:
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


def encoder(tp: int, train: bool = True, randomness: str = "exact") -> Case:
    padding = torch.tensor([[1, 1, 1], [1, 1, 0]])
    inputs = {"tokens": tokens(61), "kinds": tokens(2), "padding": padding, "labels": tokens(61, 3)}
    return Case(made(Encoder(), train), inputs, tp, randomness=randomness)


@cache
def case(name: str) -> tuple[Case, Analysis]:
    found = CASES[name]()
    return found, found.analysed()


CASES: dict[str, Callable[[], Case]] = {
    "decoder": lambda: decoder(2),
    "decoder-fast": lambda: decoder(2, randomness="fast"),
    "decoder-eval": lambda: decoder(3, train=False),
    "encoder": lambda: encoder(2),
    "gathering": lambda: moving(
        2, {"last.weight": 1, "middle.weight": 0, "middle.bias": 0, "first.weight": 0, "first.bias": 0}
    ),
    "scattering": lambda: moving(
        2, {"first.weight": 0, "first.bias": 0, "middle.weight": 1, "middle.bias": 0, "last.weight": 1}
    ),
}


# ---- what is asked


def graphs_of(found: Case, analysis: Analysis) -> list[fx.Graph]:
    return [rank_graph(analysis, rank, found.randomness) for rank in range(found.tp)]


def typed(
    found: Case, analysis: Analysis, graph: fx.Graph, rank: int, **other: Any
) -> dict[fx.Node, tuple[Typed, ...]]:
    captured = analysis.captured
    given = {
        "held": {place: analysis.layouts[name] for place, name in captured.parameters.items()},
        "trainable": {*captured.parameters, *captured.inputs},
        "to": found.target(analysis, rank),
        "local_outputs": analysis.local_outputs,
    }
    return check(graph, analysis.graph, **(given | other))  # type: ignore[arg-type]


def refusal(found: Case, analysis: Analysis, graphs: Iterable[fx.Graph], **other: Any) -> Error | None:
    """Why the first rank that refuses its graph does; None if none does."""
    for rank, graph in enumerate(graphs):
        try:
            typed(found, analysis, graph, rank, **other)
        except Error as error:
            return error
    return None


def results(found: Case, analysis: Analysis, graphs: list[fx.Graph]) -> list[Tensor]:
    """Outputs of every rank in lockstep, and the gradients of every rank's parameters and floating inputs."""
    captured, queue = analysis.captured, list(found.inputs.values())
    own, buffers = dict(found.model.named_parameters()), dict(found.model.named_buffers())
    rows = []
    for rank, graph in enumerate(graphs):
        row: list[Tensor] = []
        for name in [node.name for node in graph.nodes if node.op == "placeholder"]:
            if name in captured.parameters:
                name = captured.parameters[name]
                row.append(analysis.layouts[name].take(own[name].detach(), rank).requires_grad_())
            elif name in captured.buffers:
                row.append(buffers[captured.buffers[name]])
            elif name in captured.constants:
                row.append(captured.constants[name])
            else:
                given = queue[captured.inputs.index(name)].clone()
                row.append(given.requires_grad_(given.is_floating_point()))
        rows.append(row)
    torch.manual_seed(0)
    outputs = run_lockstep([bind(graph, torch.device("cpu"), {}) for graph in graphs], rows)
    weights = [[torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape) for y in row] for row in outputs]
    torch.autograd.backward(
        [sum((y * w).sum() for y, w in zip(*both, strict=True)) for both in zip(outputs, weights, strict=True)]
    )
    leaves = [x for row in rows for x in row if x.requires_grad]
    return [y.detach() for row in outputs for y in row] + [
        x.new_zeros(x.shape) if x.grad is None else x.grad for x in leaves
    ]


def harmless(found: Case, analysis: Analysis, graphs: list[fx.Graph]) -> bool:
    """True if these graphs give the outputs and the gradients that the right ones do."""
    expected = results(found, analysis, graphs_of(found, analysis))
    try:
        got = results(found, analysis, graphs)
    except Exception:
        return False
    scale = max(float(x.abs().max()) for x in expected if x.numel())
    return all(
        x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=1e-10 * scale, equal_nan=False)
        for x, y in zip(expected, got, strict=True)
    )


# ---- ways to break a graph: node -> changes of the same node in a copy of its graph

Change = Callable[[fx.Node], Any]


def replace_with(node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)


def after(node: fx.Node, target: Any, *rest: Any) -> fx.Node:
    """A new call on `node`, with its example value."""
    with node.graph.inserting_after(node):
        new = node.graph.call_function(target, (node, *rest))
    new.meta = dict(node.meta)
    return new


def drop(node: fx.Node) -> Iterator[Change]:
    """No conjugate."""
    if node.target in KINDS:
        yield lambda n: replace_with(n, n.args[0])


def twice(node: fx.Node) -> Iterator[Change]:
    """The same conjugate, or its opposite, once more."""
    if node.target in KINDS[:2]:
        for kind in KINDS[:2]:
            yield lambda n, kind=kind: replace_with(n, after(n, kind, *n.args[1:]))


def another(node: fx.Node) -> Iterator[Change]:
    """Another conjugate in its place."""
    alike = KINDS[:2] if node.target in KINDS[:2] else KINDS[2:]
    for kind in alike if node.target in KINDS else ():
        if kind is not node.target:
            yield lambda n, kind=kind: setattr(n, "target", kind)
    if node.target is collectives.reduce:
        reducer = "sum" if node.args[2:] == ("max",) else "max"
        yield lambda n: setattr(n, "args", (*n.args[:2], reducer))


def misplace(node: fx.Node) -> Iterator[Change]:
    """A wrong dimension, size or block of a conjugate."""
    for at in range(2, len(node.args)) if node.target in KINDS[2:] else ():
        for by in (-1, 1):
            yield lambda n, at=at, by=by: n.update_arg(at, n.args[at] + by)
    if node.target in KINDS[2:]:
        yield lambda n: setattr(n, "args", (*n.args[:4], 2) if len(n.args) == 4 else n.args[:4])
        yield lambda n: n.update_arg(1, "dp")


def bypass(node: fx.Node) -> Iterator[Change]:
    """One reader reads what comes before the conjugate."""
    for i in range(len(node.users) if node.target in KINDS else 0):
        yield lambda n, i=i: list(n.users)[i].replace_input_with(n, n.args[0])


def late(node: fx.Node) -> Iterator[Change]:
    """A conjugate behind its reader, such as a bias that is added before the reduction."""

    def change(n: fx.Node, i: int) -> None:
        reader = list(n.users)[i]
        reader.replace_input_with(n, n.args[0])
        replace_with(reader, after(reader, n.target, *n.args[1:]))

    for i, reader in enumerate(node.users if node.target in KINDS else ()):
        if reader.op == "call_function" and isinstance(reader.meta.get("val"), Tensor):
            yield lambda n, i=i: change(n, i)


def insert(node: fx.Node) -> Iterator[Change]:
    """A conjugate that nothing asks for."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.is_floating_point():
        for kind in KINDS[:2]:
            yield lambda n, kind=kind: replace_with(n, after(n, kind, "tp"))


def miscount(node: fx.Node) -> Iterator[Change]:
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


def skip(node: fx.Node) -> Iterator[Change]:
    """No operator, where one operand has the shape of the result."""
    if node.op == "call_function" and node.target not in KINDS and isinstance(node.meta.get("val"), Tensor):
        for i, operand in enumerate(node.all_input_nodes):
            value = operand.meta.get("val")
            if isinstance(value, Tensor) and list(map(str, value.shape)) == list(map(str, node.meta["val"].shape)):
                yield lambda n, i=i: replace_with(n, n.all_input_nodes[i])


def swap(node: fx.Node) -> Iterator[Change]:
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


def confuse(node: fx.Node) -> Iterator[Change]:
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


def expose(node: fx.Node) -> Iterator[Change]:
    """An output before its conjugate, or with one more."""
    for i, value in enumerate(node.args[0] if node.op == "output" else ()):  # type: ignore[arg-type, var-annotated]
        for kind in KINDS[:2]:

            def change(n: fx.Node, i: int = i, kind: Any = kind) -> None:
                outs = list(n.args[0])  # type: ignore[arg-type]
                outs[i] = after(outs[i], kind, "tp")
                n.args = (tuple(outs),)

            if value.meta["val"].is_floating_point():
                yield change


WAYS = (drop, twice, another, misplace, bypass, late, insert, miscount, skip, swap, confuse, expose)


def changed(graph: fx.Graph, at: int, change: Change) -> fx.Graph:
    """A copy of a graph in which the node at a position is changed."""
    copy, env = fx.Graph(), {}
    for node in graph.nodes:
        env[node] = copy.node_copy(node, lambda n: env[n])
    change(list(copy.nodes)[at])
    return copy


# ---- tests


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", CASES)
def test_what_is_broken_is_refused(name: str, way: Callable[[fx.Node], Iterator[Change]]) -> None:
    found, analysis = case(name)
    graphs = graphs_of(found, analysis)
    passed = []
    for at, node in enumerate(graphs[0].nodes):
        for i, change in enumerate(way(node)):
            broken = [changed(graph, at, change) for graph in graphs]
            if refusal(found, analysis, iter(broken)) is None and not harmless(found, analysis, broken):
                passed.append(f"{node.format_node()} #{i}")
    assert passed == []


def test_every_conjugate_is_broken() -> None:
    seen = {node.target for name in CASES for node in graphs_of(*case(name))[0].nodes}
    assert seen > set(KINDS)
    forms = {parallel.embedding, parallel.gather, parallel.class_terms, parallel.exact_dropout, parallel.fast_attention}
    assert seen > forms
