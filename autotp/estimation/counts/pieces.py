"""pieces: divides a rank's lowered graph at its blocks, and records each kind of piece once.

Before: the graph of 80 layers on tp=8, for a microbatch
After:  3 records: the first block with the embedding, a block, the last block with head and loss; and how often each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn

from autotp.compiler import Program, emitted, rank_graph
from autotp.errors import Error
from autotp.estimation.counts.record import META, Reads, Record, Value, record
from autotp.passes.capture.pytree import signature_of
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.bind import COMMUNICATING
from autotp.passes.pipeline.loss_totals import TOTAL
from autotp.passes.pipeline.stages import Stage, blocks_in_order, staged
from autotp.passes.plan.propagate import needs_grad
from autotp.rules.call import returned
from autotp.sharding.layout import Layout
from autotp.training.compute_dtype import cast_arguments
from autotp.training.microbatches import batch_tensors, places_of_rows
from autotp.training.pipeline.schedules import Training, analyse_microbatch

CAPTURED_ROWS = 2
"""The rows of the batch that is captured: with one row torch would take their number for a constant."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of one tensor-parallel rank.

    Attributes:
        elements: the elements that the fullest rank holds.
        itemsize: bytes of an element, in the model's own dtype.
        learns: whether it has a gradient.
        whole: whether every tensor-parallel rank holds all of it.
    """

    elements: int
    itemsize: int
    learns: bool
    whole: bool


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A block of the model, with the operators before the first block or behind the last one.

    Attributes:
        name: the block's name; "" for a model without numbered blocks.
        kind: pieces of one kind are alike.
        parameters: the names of the parameters that it reads.
        reads: the names of what its placeholders read, in order.
        sends: the names of what it returns.
    """

    name: str
    kind: int
    parameters: tuple[str, ...]
    reads: tuple[str, ...]
    sends: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A model on `tp` ranks, captured once; it can be recorded for any microbatch.

    Attributes:
        program: the plan of the model.
        graph: the lowered graph of the first rank, which holds the largest shards.
        blocks: the names of the blocks, in order.
        parameters: name -> what the fullest rank holds of it.
        arguments: tensors like those of the captured call, by placeholder.
        training: the options of the training step.
    """

    program: Program
    graph: fx.Graph
    blocks: tuple[str, ...]
    parameters: Mapping[str, Parameter]
    arguments: Mapping[str, Tensor]
    training: Training


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The pieces of a model for one microbatch, in order, and the record of each kind."""

    pieces: tuple[Piece, ...]
    records: tuple[Record, ...]


def lowered(model: nn.Module, arguments: Any, tp: int, training: Training) -> Lowered:
    """Captures a model and lowers it for the first of `tp` ranks.

    Args:
        model: an ordinary model; may be on `meta`.
        arguments: args and kwargs of a call, of any batch.

    Raises:
        Error: as `distribute`.
    """
    skeleton = skeleton_of(model)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    for tensor in skeleton.parameters() if training.compute_dtype else ():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(training.compute_dtype)
    args, kwargs = cast_arguments(signature_of(model).by_name(*arguments), training.compute_dtype)
    tensors = batch_tensors(args, kwargs)
    program = analyse_microbatch(skeleton, args, kwargs, tp, training, None, places_of_rows(tensors, []))
    graph = rank_graph(program, 0, training.randomness)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    names = list(program.captured.parameters)
    parameters = {
        name: Parameter(
            elements=_elements(program.layouts[name].local_shape(0)),
            itemsize=dtypes[name].itemsize, learns=name in learning, whole=program.layouts[name].dim is None,
        )
        for name in program.captured.parameters.values()
    }  # fmt: skip
    return Lowered(
        program=program, graph=graph, blocks=tuple(blocks_in_order(graph, names)), parameters=parameters,
        arguments=dict(zip(program.captured.inputs, tensors, strict=False)), training=training,
    )  # fmt: skip


def _elements(shape: Sequence[int]) -> int:
    total = 1
    for n in shape:
        total *= int(n)
    return total


def recorded(model: Lowered, rows: int, on_gpu: bool = True) -> Recorded:
    """Returns the records of the pieces of a rank for a microbatch of `rows` rows.

    A piece that is like an earlier one is not run again.
    """
    return _recorded(model, model.graph, rows, on_gpu)


def whole_flops(model: Lowered, rows: int) -> float:
    """Returns the FLOPs of products of a microbatch on one device with the whole model, without what is recomputed."""
    one = replace(model, program=replace(model.program, layouts=_uncut(model.program)))
    found = _recorded(one, model.program.graph, rows, True)
    counts = [sum(op.flops for op in each.ops if op.phase != "again") for each in found.records]
    return sum(counts[piece.kind] for piece in found.pieces)


def _uncut(program: Program) -> dict[str, Layout]:
    return {name: Layout(layout.shape) for name, layout in program.layouts.items()}


def _recorded(model: Lowered, graph: fx.Graph, rows: int, on_gpu: bool) -> Recorded:
    names = model.program.captured.parameters
    learners = {place for place, name in names.items() if model.parameters[name].learns}
    learns = needs_grad(graph, frozenset(n for n in graph.nodes if n.name in learners))
    cut = staged(graph, [[name] for name in model.blocks] or [[]], list(names))
    known: dict[Any, int] = {}
    records: list[Record] = []
    pieces: list[Piece] = []
    values: dict[str, Value] = {}
    given = _inputs(model, rows)
    for stage in cut:
        read = [(n, *_value(n, model, {n.name for n in learns}, values, given)) for n in _placeholders(stage.graph)]
        key = _digest(stage, read, names)
        if key not in known:
            known[key] = len(records)
            records.append(_run(stage, model, read, on_gpu))
        kind = known[key]
        sent = [node.name for node in returned(stage.graph) if isinstance(node, fx.Node)]
        values.update(zip(sent, records[kind].sent, strict=False))
        places = tuple(n.name for n in _placeholders(stage.graph))
        own = tuple(names[place] for place in places if place in names)
        block = next(iter(stage.blocks), "")
        pieces.append(Piece(name=block, kind=kind, parameters=own, reads=places, sends=tuple(sent)))
    return Recorded(pieces=tuple(pieces), records=tuple(records))


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _inputs(model: Lowered, rows: int) -> dict[str, Value]:
    """Returns the inputs of a microbatch by placeholder: as they were captured, with another number of rows."""
    batch, found = set(model.program.rows), {}
    for name, tensor in model.arguments.items():
        shape = (rows, *tensor.shape[1:]) if name in batch else tuple(tensor.shape)
        found[name] = Value(shape=shape, dtype=tensor.dtype, learns=False)
    return found


def _value(
    node: fx.Node, model: Lowered, learns: set[str], values: Mapping[str, Value], given: Mapping[str, Value]
) -> tuple[Value, Reads]:
    """Returns what a placeholder of a piece reads."""
    captured, example = model.program.captured, node.meta.get("val")
    if node.name in values:
        return values[node.name], "input"
    if node.name in given:
        return given[node.name], "input"
    if node.name in captured.parameters:
        name = captured.parameters[node.name]
        shape = tuple(model.program.layouts[name].local_shape(0))
        assert isinstance(example, Tensor)
        return Value(shape=shape, dtype=example.dtype, learns=node.name in learns), "parameter"
    if node.name in captured.constants:
        constant = captured.constants[node.name]
        return Value(shape=tuple(constant.shape), dtype=constant.dtype, learns=False), "held"
    assert isinstance(example, Tensor), node.name
    kind: Reads = "input" if node.name.startswith(TOTAL) else "held"
    return Value(shape=tuple(int(n) for n in example.shape), dtype=example.dtype, learns=False), kind


def _digest(stage: Stage, read: Sequence[tuple[fx.Node, Value, Reads]], parameters: Mapping[str, str]) -> Any:
    """Returns a key that pieces of one kind share: the operators, and what they read."""
    number = {node: f"%{i}" for i, node in enumerate(stage.graph.nodes)}
    places = tuple((value, reads) for _, value, reads in read)
    lines = []
    for node in stage.graph.nodes:
        if node.op != "placeholder":
            args = fx.map_arg((node.args, node.kwargs), lambda n: number[n])
            lines.append(f"{getattr(node.target, '__name__', '')} {node.target} {args}")
    return places, tuple(lines)


def _run(stage: Stage, model: Lowered, read: Sequence[tuple[fx.Node, Value, Reads]], on_gpu: bool) -> Record:
    groups = _groups(stage.graph, model.program.tp)
    module = emitted(stage.graph, model.program, model.training, META, {axis: axis for axis in groups})
    try:
        return record(module, [(value, reads) for _, value, reads in read], groups, on_gpu)
    except NotImplementedError as error:
        raise Error(
            f"an operator of `{'`, `'.join(stage.blocks)}` cannot run on meta: {str(error).splitlines()[0]}",
            fix="register_fake of a custom operator, with autograd",
        ) from error


def _groups(graph: fx.Graph, tp: int) -> dict[str, int]:
    """Returns the mesh axes over which a graph communicates, with their sizes: `tp`, or `tp/4` for 4 neighbours."""
    axes = {str(node.args[1]) for node in graph.nodes if node.target in COMMUNICATING}
    return {axis: int(axis.partition("/")[2] or tp) for axis in sorted(axes)}
