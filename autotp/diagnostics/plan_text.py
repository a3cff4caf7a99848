"""The plan as a table: which parameters are cut and why, what a step costs, and what stays whole."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx

from autotp.compiler import Program, flat_graph
from autotp.ops import collectives
from autotp.ops.coalesced import together
from autotp.ops.overlapped_linear import columns
from autotp.passes.canonicalize.custom_vjp import backward_of
from autotp.passes.lower.overlap import separate
from autotp.passes.plan.match import contracts
from autotp.passes.plan.propagate import needs_grad
from autotp.rules.call import outputs_of
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import find
from autotp.sharding.layout import Layout
from autotp.source_location import block_in, layer_of, line_of

WIDTH = 100

FORWARD = {
    "reduce": "all-reduce", "gather": "all-gather", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
}  # fmt: skip
BACKWARD = {
    "copy": "all-reduce", "share": "all-reduce", "together": "all-reduce", "scatter": "all-gather",
    "all_gather": "reduce-scatter", "reduce_scatter": "all-gather",
}  # fmt: skip
"""What each conjugate sends, forward and backward."""


@dataclass(frozen=True)
class CutRow:
    """A parameter that is cut.

    Attributes:
        name: its name in the model.
        layout: how it is held.
        forward, backward: the collective that its operator causes, or "".
        why: the pattern that its axis was recognised in.
    """

    name: str
    layout: Layout
    forward: str
    backward: str
    why: str


@dataclass(frozen=True)
class WholeRow:
    """Something that stayed replicated: a parameter, or an operator that autotp has no rule for."""

    name: str
    shape: tuple[int, ...]
    at: str
    reason: str
    in_block: bool = False


@dataclass(frozen=True)
class Sent:
    """One collective of a step.

    Attributes:
        kind: all-reduce, all-gather, reduce-scatter.
        module: the module that waits for it.
        bytes: of the tensor it carries.
        backward: it runs in backward.
        parameter: it carries the gradient of a parameter, not of an activation.
    """

    kind: str
    module: str
    bytes: int
    backward: bool
    parameter: bool


@dataclass(frozen=True)
class Traffic:
    """Collectives of one step; their bytes are those for the inputs of `shapes`."""

    sends: tuple[Sent, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def forward(self) -> dict[str, int]:
        """Kind -> how many."""
        return dict(Counter(sent.kind for sent in self.sends if not sent.backward))

    @property
    def backward(self) -> dict[str, int]:
        """Kind -> how many."""
        return dict(Counter(sent.kind for sent in self.sends if sent.backward))

    @property
    def forward_bytes(self) -> int:
        return sum(sent.bytes for sent in self.sends if not sent.backward)

    @property
    def backward_bytes(self) -> int:
        return sum(sent.bytes for sent in self.sends if sent.backward)


@dataclass(frozen=True)
class Plan:
    """What a model's parameters become on `tp` ranks, returned by `explain`; `str(plan)` is a table of 100 columns.

    Attributes:
        model: the name of the model's class.
        tp: the number of ranks.
        cuts: the parameters that are cut, with the collectives that they cause and the reason.
        whole: the parameters and operators that stay replicated, with source line and reason.
        bytes_total: bytes of all parameters.
        bytes_rank: bytes of the parameters of the rank that holds most.
        traffic: the collectives of a step, forward and backward, and their bytes.
        along_sequence: the number of operators that are cut along the sequence; None without `sequence_parallel`.
        outputs: the layouts of the outputs that stay cut.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        >>> plan = autotp.explain(model, 2, example_inputs=torch.ones(2, 4))
        >>> plan.bytes_total, plan.bytes_rank, plan.traffic.forward, plan.traffic.backward
        (592, 304, {'all-reduce': 1}, {})
        >>> [(whole.name, whole.reason) for whole in plan.whole]
        [('2.bias', 'read after the reduction, by every rank')]
    """

    model: str
    tp: int
    cuts: tuple[CutRow, ...]
    whole: tuple[WholeRow, ...]
    bytes_total: int
    bytes_rank: int
    traffic: Traffic
    along_sequence: int | None = None
    outputs: tuple[Layout, ...] = ()

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def report(analysis: Program, model: str) -> Plan:
    """The plan of an analysed model."""
    places = {n.name: n for n in analysis.graph.nodes if n.op == "placeholder"}
    nodes = {name: places[place] for place, name in analysis.captured.parameters.items()}
    dtypes = {name: node.meta["val"].dtype.itemsize for name, node in nodes.items()}
    layouts = analysis.layouts.items()
    cuts = tuple(_cut(name, nodes[name], layout, analysis) for name, layout in layouts if layout.dim is not None)
    whole = [_whole(name, nodes[name], analysis) for name, layout in layouts if layout.dim is None]
    total = sum(_count(layout.shape) * dtypes[name] for name, layout in layouts)
    ranks = [sum(_count(lay.local_shape(r)) * dtypes[n] for n, lay in layouts) for r in range(analysis.tp)]
    count = traffic(flat_graph(analysis, 0, "fast"), analysis)
    outputs = tuple(layout for _, layout in sorted(analysis.local_outputs.items()))
    everything = (*whole, *_unknown(analysis))
    return Plan(model, analysis.tp, cuts, everything, total, max(ranks), count, _along_sequence(analysis), outputs)


def _is_along(value: fx.Node, analysis: Program) -> bool:
    """True for what is cut along a sequence."""
    leaf = analysis.decision.cuts.get(value)
    return leaf is not None and find(leaf) in {find(other) for other in analysis.decision.scattered.values()}


def _along_sequence(analysis: Program) -> int | None:
    """How many operators are cut along a sequence, if that was asked for."""
    sequences = {find(leaf) for leaf in analysis.decision.scattered.values()}
    cut = [leaf for leaf in analysis.decision.cuts.values() if find(leaf) in sequences]
    return len(cut) if analysis.options.sequence_parallel else None


def traffic(graph: fx.Graph, analysis: Program) -> Traffic:
    """The collectives of a lowered graph, forward and backward."""
    again = _gathered_again(graph, analysis)
    graph, sends = separate(graph), []
    learnt, graded = _learning(graph, analysis)
    own = backward_of(graph)
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.target is not together and getattr(collectives, name, None) is not node.target:
            continue
        for side, table in enumerate((FORWARD, BACKWARD if node in graded else {})):
            if name in table:
                read, back = node.all_input_nodes, bool(side) or node in own
                size = max(sum(map(_bytes, outputs_of(n))) for n in ((node,) if len(read) > 1 else (node, *read)))
                sends.append(Sent(table[name], layer_of(node), size, back, all(n in learnt for n in read)))
    return Traffic((*sends, *again), analysis.captured.example)


def _learning(graph: fx.Graph, analysis: Program) -> tuple[frozenset[fx.Node], set[fx.Node]]:
    """The parameters of a graph, and what a gradient flows through to them."""
    learnt = frozenset(node for node in graph.nodes if node.name in analysis.captured.parameters)
    return learnt, needs_grad(graph, learnt)


def _gathered_again(graph: fx.Graph, analysis: Program) -> list[Sent]:
    """What products that are one operator gather a second time, in backward, rather than keep it."""
    (_, graded), found = _learning(graph, analysis), []
    for node in graph.nodes:
        if node.target is columns and node.args[2] is not None and any(w in graded for w in node.args[4]):
            x, (dim, length, *_) = node.args[0], node.args[2]
            whole = list(x.meta["val"].shape)
            whole[dim] = length.meta["val"] if isinstance(length, fx.Node) else length
            size = _elements(whole) * x.meta["val"].dtype.itemsize
            found.append(Sent("all-gather", layer_of(node), size, True, False))
    return found


def _bytes(value: torch.Tensor) -> int:
    """Bytes of an example value, its symbolic sizes as captured; one that values decide counts as none."""
    return _elements(value.shape) * value.dtype.itemsize


def _elements(shape: Iterable[Any]) -> int:
    return _count(n if isinstance(n, int) else int(n.node.hint or 0) for n in shape)


def _count(shape: Iterable[Any]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def _cut(name: str, node: fx.Node, layout: Layout, analysis: Program) -> CutRow:
    leaf = analysis.decision.held[node]
    chosen = next(c for c in analysis.decision.chosen if find(c.leaf) is find(leaf))
    forward = backward = ""
    for reader in node.users:
        factor = analysis.axes.bound[reader].cuttable(leaf) if reader in analysis.axes.bound else None
        product = contracts(analysis.axes.bound.get(reader))
        weighs = product or has(reader.target, Trait.LOOKUP)
        if factor is not None and weighs and not factor.outs and factor.summed:
            forward = "reduce-scatter" if reader in analysis.decision.scattered else "all-reduce"
        elif factor is not None and product:
            along = any(_is_along(operand, analysis) for operand in reader.all_input_nodes)
            forward, backward = ("all-gather", "reduce-scatter") if along else (forward, "all-reduce")
    size = find(leaf).size
    why = f"{size} {chosen.name}: {chosen.pattern}" if chosen.name else f"an axis of {size} that all its readers divide"
    return CutRow(name, layout, forward, backward, why)


def _whole(name: str, node: fx.Node, analysis: Program) -> WholeRow:
    reader = next(iter(node.users), None)
    shape = tuple(node.meta["val"].shape)
    if reader is None:
        return WholeRow(name, shape, "?", "nothing reads it on these inputs")
    matrix = len(shape) > 1 and not has(reader.target, Trait.LOOKUP)
    in_block = matrix and block_in(name) != ""
    return WholeRow(name, shape, line_of(reader), _reason(node, reader, analysis), in_block)


def _reason(node: fx.Node, reader: fx.Node, analysis: Program) -> str:
    bound, kind = analysis.axes.bound.get(reader), str(reader.target)
    if analysis.tp == 1:
        return "there is one rank"
    if bound is not None and not bound.known:
        return f"{kind} has no rule"
    if "norm" in kind:
        return "the norm needs the whole width"
    if has(reader.target, Trait.LOOKUP):
        return "a small table, or one looked up by counted positions"
    if reader in analysis.hoisted:
        return "every rank needs all that it gives"
    if contracts(bound):
        return "cutting it would cost more than it divides"
    if reader in analysis.decision.cuts:
        return "read whole by work that is divided along another axis"
    if any(_is_reduced(operand, analysis) for operand in reader.all_input_nodes):
        return "read after the reduction, by every rank"
    return "read by work that every rank does whole"


def _is_reduced(value: fx.Node, analysis: Program) -> bool:
    """True for what cut work sums over ranks."""
    leaf = analysis.decision.cuts.get(value)
    factor = analysis.axes.bound[value].cuttable(leaf) if leaf is not None else None
    return factor is not None and not factor.outs and factor.summed


def _unknown(analysis: Program) -> Iterator[WholeRow]:
    for node, bound in analysis.axes.bound.items():
        if not bound.known:
            value = node.meta["val"]
            shape = tuple(str(n) for n in value.shape) if isinstance(value, torch.Tensor) else ()
            yield WholeRow(f"{layer_of(node)} {node.target}".strip(), shape, line_of(node), "no rule: replicated")  # type: ignore[arg-type]


# ---- text


def _lines(plan: Plan) -> Iterator[str]:
    yield f"{plan.model} on tp={plan.tp}"
    yield ""
    if plan.cuts:
        cuts = [(c.name, (str(c.layout), c.forward, c.backward, c.why)) for c in plan.cuts]
        yield from _table(("cut", "shape", "forward", "backward", "why"), _folded(cuts))
        yield ""
    if plan.whole:
        whole = [(w.name, (str(list(w.shape)).replace("'", ""), w.reason, w.at.split("  ")[0])) for w in plan.whole]
        yield from _table(("whole on every rank", "shape", "why", "at"), _folded(whole))
        yield ""
    yield from _totals(plan)


def _totals(plan: Plan) -> Iterator[str]:
    share = plan.bytes_rank / plan.bytes_total if plan.bytes_total else 1.0
    yield f"parameters  {_size(plan.bytes_total)}, the fullest rank holds {_size(plan.bytes_rank)} ({share:.1%})"
    if plan.along_sequence is not None:
        none = "nothing: no sum over ranks has an axis along which an attention sums"
        yield f"sequence    {f'{plan.along_sequence} operators are cut along it' if plan.along_sequence else none}"
    if plan.outputs:
        alike = Counter(str(layout).replace("-1", "?") for layout in plan.outputs)
        held = ", ".join(f"{n} x {text}" if n > 1 else text for text, n in alike.items())
        yield f'outputs     {held} stay cut: autotp.gather makes them whole, or outputs="full"'
    t = plan.traffic
    inputs = " ".join("x".join(map(str, shape)) for shape in t.shapes)
    for name, counts, size in (("forward", t.forward, t.forward_bytes), ("backward", t.backward, t.backward_bytes)):
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "no collective"
        yield f"{name:<12}{kinds}; {_size(size)} for inputs {inputs}"


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _folded(rows: Sequence[tuple[str, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Rows that differ in layer numbers only as one row, the numbers as a range; then `{weight,bias}`, `{q,k,v}`."""
    layers: dict[tuple[str, ...], list[list[int]]] = {}
    for name, rest in rows:
        layers.setdefault((re.sub(r"\d+", "#", name), *rest), []).append([int(n) for n in re.findall(r"\d+", name)])
    folded = [(_numbered(template, numbers), *others) for (template, *others), numbers in layers.items()]
    return _joined(_joined(folded, 1), 2)


def _joined(rows: list[tuple[str, ...]], place: int) -> list[tuple[str, ...]]:
    """Rows whose names differ only in the part at `place`, counted from the end, as one row."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, *others in rows:
        parts = name.split(".")
        own = ""
        if len(parts) >= place:
            own, parts[-place] = parts[-place], "{}"
        found.setdefault((".".join(parts), *others), []).append(own)
    return [(name.replace("{}", _either(own)), *others) for (name, *others), own in found.items()]


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else "{" + ",".join(names) + "}"


def _numbered(template: str, found: list[list[int]]) -> str:
    """The template with each number, or the range of numbers, in its place."""
    for column in zip(*found, strict=True):
        template = template.replace("#", _range(sorted(set(column))), 1)
    return template


def _range(numbers: list[int]) -> str:
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return text if len(numbers) == 1 else "{" + text + "}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Columns two spaces apart within WIDTH; the widest gives way, its text broken over lines."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        widest = max(range(len(widths)), key=lambda i: widths[i])
        widths[widest] -= 1
    for row in [head, *rows]:
        cells = [_broken(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in range(max(map(len, cells))):
            parts = [(cell[line] if line < len(cell) else "").ljust(w) for cell, w in zip(cells, widths, strict=True)]
            yield "  ".join(parts).rstrip()


def _broken(text: str, width: int) -> list[str]:
    """The text in lines of at most `width`, broken behind spaces, dots or commas where there are any."""
    lines = []
    while len(text) > width:
        at = max((text.rfind(mark, 0, width) + 1 for mark in " .,"), default=0) or width
        lines.append(text[:at])
        text = text[at:].lstrip()
    return [*lines, text]
