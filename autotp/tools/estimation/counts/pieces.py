"""pieces: divides a rank's lowered graph at its blocks, and records each kind of piece once.

Before: the graph of 80 layers on tp=8, for a microbatch
After:  3 records: the first block with the embedding, a block, the last block with head and loss; and how often each
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn

from autotp.compiler import Captures, emitted_operators, rank_graph
from autotp.errors import Error
from autotp.model_library import library
from autotp.passes.builder import copied
from autotp.passes.canonicalize.custom_vjp import fuse
from autotp.passes.capture.pytree import signature_of
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.bind import COMMUNICATING
from autotp.passes.emit.memory.budget import Budget
from autotp.passes.fingerprint import operators_as_text
from autotp.passes.pipeline.loss_totals import TOTAL
from autotp.passes.pipeline.stages import Stage, blocks_in_order, staged
from autotp.passes.plan.experts.expert_parallel import EP, exchanges, with_own_experts
from autotp.passes.plan.propagate import needs_grad
from autotp.passes.program.program import Program
from autotp.rules.call import returned
from autotp.rules.traits import draws
from autotp.sharding.layout import Layout
from autotp.tools.estimation.counts.depth import name_in_block, shorten, whole_order
from autotp.tools.estimation.counts.record import META, Reads, Record, Value, record
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
        of_experts: whether ranks along `ep` have some experts of it each.
    """

    elements: int
    itemsize: int
    learns: bool
    of_experts: bool = False

    @property
    def bytes(self) -> int:
        """The bytes of the elements."""
        return self.elements * self.itemsize


@dataclass(frozen=True, kw_only=True)
class ModelPiece:
    """A block of the model, with the operators before the first block or behind the last one.

    Attributes:
        name: the block's name; "" for a model without numbered blocks.
        kind: pieces of one kind are alike.
        parameters: the names of the parameters that it reads.
        reads: the names of what its placeholders read, in order.
        sends: the names of what it returns.
        boundary: the number of them that the next piece reads; the others are values that it computes again.
    """

    name: str
    kind: int
    parameters: tuple[str, ...]
    reads: tuple[str, ...]
    sends: tuple[str, ...]
    boundary: int


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A model on `tp` ranks, captured once; it can be recorded for any microbatch.

    Attributes:
        name: the name of the model's class.
        program: the plan of the model.
        graph: the lowered graph of the first rank, which holds the largest shards.
        captured_blocks: the names of the blocks of the graph, in order.
        order: name of a block of the whole model, and of the captured block that it is like; in order.
        parameters: name -> what the fullest rank holds of it, of the whole model.
        arguments: tensors like those of the captured call, by placeholder.
        training: the options of the training step.
    """

    name: str
    program: Program
    graph: fx.Graph
    captured_blocks: tuple[str, ...]
    order: tuple[tuple[str, str], ...]
    parameters: Mapping[str, Parameter]
    arguments: Mapping[str, Tensor]
    training: Training

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks of the whole model, in order."""
        return tuple(name for name, _ in self.order)

    @property
    def row(self) -> str:
        """The shapes of the tensors of a row, such as "[2048], [2048]" for tokens and labels."""
        return ", ".join(str(list(x.shape[1:])) for x in self.arguments.values())

    @property
    def row_tokens(self) -> int:
        """The tokens of a row: the length of the first tensor, if it has a whole number for each; else 0."""
        first = next(iter(self.arguments.values()), None)
        is_ids = first is not None and first.dim() == 2 and not first.is_floating_point()
        return first.shape[1] if first is not None and is_ids else 0

    @cached_property
    def divided(self) -> Divided:
        """The graph in pieces."""
        return _divided(self, self.graph)


PieceReads = tuple[int, tuple[tuple[Value, Reads], ...]]
"""The number of a piece of the graph, and what its placeholders read, in order."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The pieces of a model for one microbatch, in order, and the record of each kind.

    Attributes:
        reads: of each kind, the first piece of it in the graph, and what it reads.
        peaks: of each kind, what `own_peaks` of `activations.py` returns, once it was needed.
    """

    pieces: tuple[ModelPiece, ...]
    records: tuple[Record, ...]
    reads: tuple[PieceReads, ...]
    peaks: dict[int, Mapping[str, int]] = field(default_factory=dict, compare=False)


class Capturing:
    """A model and a call of it, which are captured once for all numbers of ranks.

    Args:
        model: an ordinary model; may be on `meta`.
        arguments: args and kwargs of a call, of any batch.
    """

    def __init__(self, model: nn.Module, arguments: Any) -> None:
        self.model, self.arguments, self.captures = model, arguments, Captures()

    @cached_property
    def short(self) -> tuple[nn.Module, dict[str, int]]:
        """The model on `meta` with a few of the blocks that are alike; path of a list -> its number of blocks."""
        skeleton = skeleton_of(self.model)
        return skeleton, shorten(skeleton)

    @cached_property
    def whole(self) -> nn.Module:
        """The model on `meta` with all blocks."""
        return skeleton_of(self.model)


def lowered(call: Capturing, tp: int, training: Training, checked: bool = True) -> Lowered:
    """Captures a model and lowers it for the first of `tp` ranks. Of blocks that are alike it captures a few.

    Args:
        checked: whether the types of the graph are checked.

    Raises:
        Error: as `distribute`.
    """
    skeleton, lengths = call.short
    if lengths:
        try:
            short_model = _lowered(call, skeleton, lengths, tp, training, checked)
        except Exception:  # A model that counts on its number of blocks: captured whole, it says what is wrong.
            short_model = None
        if short_model is not None and _middles_are_alike(short_model, lengths):
            return short_model
    return _lowered(call, call.whole, {}, tp, training, checked)


def lowered_again(model: Lowered, training: Training) -> Lowered:
    """Lowers a model for a schedule that needs another graph of the same program, without the check of types."""
    program = replace(model.program, options=training)
    graph = rank_graph(program, 0, training.randomness, checked=False)
    return replace(model, program=program, graph=graph, training=training)


def _lowered(
    call: Capturing, skeleton: nn.Module, lengths: Mapping[str, int], tp: int, training: Training, checked: bool
) -> Lowered:
    model, whole = call.model, dict(call.model.named_parameters())
    # The graph computes in this dtype. What a parameter takes in memory is asked of the model itself, below.
    for tensor in skeleton.parameters() if training.compute_dtype else ():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(training.compute_dtype)
    args, kwargs = signature_of(model).by_name(*call.arguments)
    args, kwargs = cast_arguments((args, library().with_documents(model, kwargs)), training.compute_dtype)
    tensors = batch_tensors(args, kwargs)
    last = training.cp - 1  # Its queries read the most keys.
    rows = places_of_rows(tensors, [])
    program = analyse_microbatch(skeleton, args, kwargs, tp, training, None, rows, last, call.captures)
    exchanged = exchanges(program.graph, program.captured.parameters)
    stacks = {name for names in exchanged for name in names}
    program = replace(program, layouts=with_own_experts(program.layouts, exchanged, training.ep, 0))
    graph = rank_graph(program, 0, training.randomness, checked=checked)
    blocks = blocks_in_order(graph, list(program.captured.parameters))
    order = whole_order(blocks, lengths)
    # A parameter outside of blocks keeps its name here; a model without blocks has no order, and adds its names below.
    names = {name_in_block(name, captured, block): name for name in program.layouts for block, captured in order}
    names |= {name: name for name in program.layouts if name in whole} if not order else {}
    parameters = {
        name: Parameter(
            elements=math.prod(map(int, program.layouts[captured].local_shape(0))), itemsize=whole[name].element_size(),
            learns=whole[name].requires_grad, of_experts=captured in stacks,
        )
        for name, captured in names.items() if name in whole
    }  # fmt: skip
    return Lowered(
        name=type(model).__name__, program=program, graph=graph, captured_blocks=tuple(blocks), order=order,
        parameters=parameters, arguments=dict(zip(program.captured.inputs, tensors, strict=False)), training=training,
    )  # fmt: skip


def _middles_are_alike(model: Lowered, lengths: Mapping[str, int]) -> bool:
    """True if in each shortened list the second block computes what the third does."""
    divided = model.divided
    texts = {next(iter(stage.blocks), ""): text for stage, text in zip(divided.stages, divided.texts, strict=True)}
    return all(texts.get(f"{path}.1") == texts.get(f"{path}.2") is not None for path in lengths)


def _text(stage: Stage) -> str:
    """Returns the fingerprint of a piece."""
    nodes = [node for node in stage.graph.nodes if node.op not in ("placeholder", "output")]
    return operators_as_text(_placeholders(stage.graph), nodes, returned(stage.graph))


def recorded(model: Lowered, rows: int, on_gpu: bool = True, early_stop: bool = True) -> Recorded:
    """Returns the records of the pieces of a rank for a microbatch of `rows` rows.

    A piece that is like an earlier one is not run again. The last two arguments are those of `record`.
    """
    return _recorded(model, model.divided, rows, on_gpu, early_stop)


def whole_flops(model: Lowered, rows: int) -> float:
    """Returns the FLOPs of products of a microbatch on one device with the whole model, without what is recomputed."""
    uncut = replace(model, program=replace(model.program, layouts=_uncut(model.program)))
    graph = fuse(model.program.sequences.uncut_graph or model.program.graph)
    counted = _recorded(uncut, _divided(uncut, graph), rows, True)
    counts = [sum(op.flops for op in piece_record.ops if op.phase != "again") for piece_record in counted.records]
    return sum(counts[piece.kind] for piece in counted.pieces)


def _uncut(program: Program) -> dict[str, Layout]:
    # One device would have all experts; a product of as many rows with fewer of them has as many FLOPs.
    return {name: Layout(layout.shape, rows=layout.rows) for name, layout in program.layouts.items()}


@dataclass(frozen=True, kw_only=True)
class Divided:
    """A rank's graph in pieces, for any microbatch.

    Attributes:
        stages: the pieces.
        texts: of each piece, what `_text` returns.
        shared: of each piece, the names of what `_shared` returns.
        learns: the names of the values that a gradient flows through.
        modules: (number of a piece, on a GPU) -> its emitted graph, once it was needed.
        budgets: (number of a piece, on a GPU) -> the budget of its graph under `memory`, once it was needed.
    """

    stages: tuple[Stage, ...]
    texts: tuple[str, ...]
    shared: tuple[tuple[str, ...], ...]
    learns: frozenset[str]
    modules: dict[tuple[int, bool], fx.GraphModule] = field(default_factory=dict)
    budgets: dict[tuple[int, bool], Budget] = field(default_factory=dict)


def _divided(model: Lowered, graph: fx.Graph) -> Divided:
    names = model.program.captured.parameters
    learners = {place for place, name in names.items() if model.parameters[name].learns}
    learns = needs_grad(graph, frozenset(n for n in graph.nodes if n.name in learners))
    # As if each block were a stage: pieces end where stages can. A model without blocks is one piece.
    cut = staged(graph, [[name] for name in model.captured_blocks] or [[]], list(names))
    return Divided(
        stages=tuple(cut), texts=tuple(map(_text, cut)), learns=frozenset(n.name for n in learns),
        shared=tuple(tuple(n.name for n in _shared(stage.graph, model.arguments)) for stage in cut),
    )  # fmt: skip


def _recorded(model: Lowered, divided: Divided, rows: int, on_gpu: bool, early_stop: bool = True) -> Recorded:
    names = model.program.captured.parameters
    records_by_key: dict[Any, int] = {}
    records: list[Record] = []
    reads: list[PieceReads] = []
    pieces: list[ModelPiece] = []
    values: dict[str, Value] = {}
    inputs = _inputs(model, rows)
    for i, stage in enumerate(divided.stages):
        read = [(n, *_value(n, model, divided.learns, values, inputs)) for n in _placeholders(stage.graph)]
        # A text has the sizes of the capture. What is read says those of this microbatch, and where gradients flow.
        key = tuple((value, how) for _, value, how in read), divided.texts[i]
        if key not in records_by_key:
            records_by_key[key] = len(records)
            reads.append((i, key[0]))
            try:
                records.append(_run(i, divided, model, read, on_gpu, early_stop))
            except Exception as error:
                if isinstance(error, Error):
                    raise
                if (cp := model.training.cp) > 1:
                    raise Error(
                        f"the graph of one of cp={cp} parts of a sequence does not run: {str(error).splitlines()[0]}",
                        fix=f"lengths that {cp} divides, also inside the model, as the patches of an image",
                    ) from error
                if rows == CAPTURED_ROWS:
                    raise
                _recorded(model, divided, CAPTURED_ROWS, on_gpu, early_stop)  # It raises what is no matter of rows.
                raise Error(
                    f"the graph of {CAPTURED_ROWS} rows does not run for {rows}: {str(error).splitlines()[0]}",
                    fix="a part of the model whose rows are independent",
                ) from error
        number = records_by_key[key]
        # Shared values come last: `boundary` divides what the next piece reads from what it computes again.
        sent = [*(node.name for node in returned(stage.graph)), *divided.shared[i]]
        values.update(zip(sent, records[number].sent, strict=False))
        places = tuple(n.name for n in _placeholders(stage.graph))
        parameters = tuple(names[place] for place in places if place in names)
        block = next(iter(stage.blocks), "")
        piece = ModelPiece(
            name=block, kind=number, parameters=parameters, reads=places, sends=tuple(sent),
            boundary=len(returned(stage.graph)),
        )  # fmt: skip
        pieces.append(piece)
    return Recorded(pieces=_whole(pieces, model.order), records=tuple(records), reads=tuple(reads))


def _whole(pieces: Sequence[ModelPiece], order: Sequence[tuple[str, str]]) -> tuple[ModelPiece, ...]:
    """Returns the pieces of the whole model: those of captured blocks, as often as they stand for blocks."""
    if not order:
        return tuple(pieces)
    places = {piece.name: i for i, piece in enumerate(pieces)}
    repeated: list[ModelPiece] = []
    for block, captured in order:
        like = pieces[places[captured]]
        before = pieces[places[captured] - 1] if repeated else None
        # A repeated block reads what the repeated block before it sent. Under one name, 80 residual streams would count
        # as one.
        received = dict(zip(before.sends[: before.boundary], repeated[-1].sends, strict=False)) if before else {}
        names = {name: f"{name} of {block}" for name in like.sends[: like.boundary]} | received
        repeated.append(
            replace(
                like, name=block, parameters=tuple(name_in_block(name, captured, block) for name in like.parameters),
                reads=tuple(names.get(name, name) for name in like.reads),
                sends=tuple(names.get(name, name) for name in like.sends),
            )
        )  # fmt: skip
    return tuple(repeated)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _inputs(model: Lowered, rows: int) -> dict[str, Value]:
    """Returns the inputs of a microbatch by placeholder: as they were captured, with another number of rows."""
    batch, inputs = set(model.program.rows), {}
    for name, tensor in model.arguments.items():
        shape = (rows, *tensor.shape[1:]) if name in batch else tuple(tensor.shape)
        inputs[name] = Value(shape=shape, dtype=tensor.dtype, learns=False)
    return inputs


def _value(
    node: fx.Node, model: Lowered, learns: Collection[str], values: Mapping[str, Value], inputs: Mapping[str, Value]
) -> tuple[Value, Reads]:
    """Returns what a placeholder of a piece reads."""
    captured, example = model.program.captured, node.meta.get("val")
    if node.name in values:
        return values[node.name], "input"
    if node.name in inputs:
        return inputs[node.name], "input"
    if node.name in captured.parameters:
        name = captured.parameters[node.name]
        # The example is as large as the whole parameter; the first rank has the largest part of it.
        shape = tuple(model.program.layouts[name].local_shape(0))
        assert isinstance(example, Tensor)
        return Value(shape=shape, dtype=example.dtype, learns=node.name in learns), "parameter"
    if node.name in captured.constants:
        constant = captured.constants[node.name]
        return Value(shape=tuple(constant.shape), dtype=constant.dtype, learns=False), "held"
    assert isinstance(example, Tensor), node.name
    # A total of the loss comes with each microbatch. What is left are buffers.
    reads: Reads = "input" if node.name.startswith(TOTAL) else "held"
    return Value(shape=tuple(int(n) for n in example.shape), dtype=example.dtype, learns=False), reads


def _shared(graph: fx.Graph, input_names: Collection[str]) -> list[fx.Node]:
    """Returns the values that depend on inputs only, such as masks, and that other operators read.

    Pieces compute them each for itself, and keep them once: by their names it is seen that they are one.
    """
    made: set[fx.Node] = set()
    for node in graph.nodes:
        computed = node.op == "call_function" and all(operand in made for operand in node.all_input_nodes)
        if (node.op == "placeholder" and node.name in input_names) or (computed and not draws(node)):
            made.add(node)
    tensors = (n for n in graph.nodes if n in made and n.op != "placeholder" and isinstance(n.meta.get("val"), Tensor))
    return [node for node in tensors if any(user not in made and user.op != "output" for user in node.users)]


def returning_shared(divided: Divided, i: int) -> fx.Graph:
    """Returns a copy of the graph of a piece that also returns the values that several pieces compute."""
    graph, names = divided.stages[i].graph, divided.shared[i]
    copy, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op != "output":
            env[node] = copied(copy, node, env.__getitem__)
    copy.output(tuple(env[n] for n in (*returned(graph), *(n for n in graph.nodes if n.name in names))))
    return copy


def _run(
    i: int, divided: Divided, model: Lowered, read: Sequence[tuple[fx.Node, Value, Reads]], on_gpu: bool,
    early_stop: bool,
) -> Record:  # fmt: skip
    stage, groups = divided.stages[i], piece_groups(model, i, divided)
    # One module for GPUs, one for CPUs: `record` exchanges operators in the module itself.
    if (i, on_gpu) not in divided.modules:
        module = emitted_operators(
            returning_shared(divided, i), model.program, model.training, META, {axis: axis for axis in groups}
        )
        divided.modules[i, on_gpu] = module
    try:
        values = [(value, reads) for _, value, reads in read]
        return record(divided.modules[i, on_gpu], values, groups, on_gpu, early_stop)
    except NotImplementedError as error:
        raise Error(
            f"an operator of `{'`, `'.join(stage.blocks)}` cannot run on meta: {str(error).splitlines()[0]}",
            fix="register_fake of a custom operator, with autograd",
        ) from error


def piece_groups(model: Lowered, i: int, divided: Divided | None = None) -> dict[str, int]:
    """Returns the mesh axes over which a piece communicates, with their sizes: `tp`, or `tp/4` for 4 neighbours."""
    graph, training = (divided or model.divided).stages[i].graph, model.training
    sizes = {"tp": model.program.tp, "cp": training.cp, EP: training.ep}
    axes = {str(node.args[1]) for node in graph.nodes if node.target in COMMUNICATING}
    return {axis: int(axis.partition("/")[2] or sizes[axis]) for axis in sorted(axes)}
