"""A rank's graph for one input signature, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx, nn

from autotp.compiler import rank_graph, rank_program
from autotp.distributed.agreement import Fact
from autotp.distributed.cut_tensors.sharded_tensor import CutOutput, cut_output
from autotp.distributed.device_arguments import inputs_on_host
from autotp.distributed.mesh import Mesh
from autotp.distributed.replica_check import expect_collectives_of_replicas
from autotp.errors import Error
from autotp.ops.eager_mode import is_recorded, unseen
from autotp.ops.random_state import random_state_of, set_random_state
from autotp.options import Options
from autotp.passes.builder import ancestors, subgraph
from autotp.passes.capture.captured import Captured, OutputAt, contradicted
from autotp.passes.capture.guards.values import NO_VALUES, KnownValues, Outcome, ValueRead, first_other
from autotp.passes.capture.python_state.code_names import named
from autotp.passes.capture.python_state.guard import Guard
from autotp.passes.emit.bind import bind
from autotp.passes.emit.rank_program import RankProgram
from autotp.passes.pipeline.documents import document_inputs, reads_documents
from autotp.passes.program.emitted import Seat
from autotp.passes.program.program import Program
from autotp.rules.call import returned
from autotp.rules.traits import draws, draws_from_numpy
from autotp.runtime.calls.graph_digest import draws_alike, order_of, same_cards, same_graph, same_order
from autotp.runtime.tree import attribute_of, original_class, table_of


@dataclass
class GraphEntry:
    """A graph that is ready to run.

    Attributes:
        analysis: the program that it was made from; `analysis.captured` tests sizes and rebuilds results.
        ready: the graph that runs, for one model once it is kept.
        cut: the outputs that stay cut, by position.
        random: whether it draws random numbers.
        numpy_random: whether it draws some from `numpy.random`.
        alike: whether it draws some that must be the same on all ranks.
        order: a checksum of its collectives in order.
        calls: the number of calls so far.
        guard: checks the attributes of the model that the graph depends on.
        input_values: makes the tensors that Python reads before a call, if it reads any.
        last: `Executable.count` when it was used last.
        other_assumed: makes what Python reads of activations, each by itself; None if it reads nothing of them.
        warned: whether a warning said that every cp rank computes the whole of it.
        on_host: for each input, whether an operator wants it on the CPU.
    """

    analysis: Program
    ready: RankProgram
    cut: Mapping[int, CutOutput]
    random: bool
    numpy_random: bool = False
    alike: bool = False
    order: int = 0
    calls: int = 0
    guard: Guard | None = None
    input_values: InputValuesGraph | None = None
    last: int = 0
    other_assumed: Callable[[Callable[[str], Tensor], int], KnownValues | None] | None = None
    warned: bool = False
    on_host: Sequence[bool] = ()

    @property
    def updated(self) -> list[str]:
        """Names of the buffers whose new values are the last outputs."""
        return [self.analysis.captured.buffers[name] for name in self.analysis.updated]

    @property
    def assumes(self) -> bool:
        """True if outcomes of activations are assumed, which a call compares after its run."""
        return self.analysis.captured.assumes

    @cached_property
    def reads_documents(self) -> bool:
        """True if attention reads where packed documents end."""
        return any(map(reads_documents, self.analysis.graph.nodes))

    @cached_property
    def documents(self) -> Collection[str]:
        """The inputs that say where packed documents end, and that attention reads."""
        return document_inputs(self.analysis.graph).keys()

    @property
    def keeps_masks(self) -> bool:
        """True if it is right for each padding of a call whose other values it is right for: NOTE [Looks at masks]"""
        return not any(read.look and read.outcome.value for read in self.analysis.captured.asked)

    def facts(self, text: str, mesh: Mesh) -> list[Fact]:
        """Returns what the ranks of a mesh must have alike. text: the `digest`, perhaps with settings behind it"""
        order = [same_order(self.order)] if mesh.cp > 1 else []
        return [same_graph(text, mesh), *order, *same_cards(mesh, self.alike)]

    def other_reads(self, tensors: Sequence[Tensor], first: int = 0, looks: bool = True) -> tuple[Outcome, ...] | None:
        """Returns the outcomes up to the first read of a call's inputs that differs; None if all are the graph's.

        Args:
            tensors: the graph's inputs.
            first: the number of reads whose outcomes are known to be the graph's.
            looks: whether it looks at masks.
        """
        if self.input_values is None:
            return None
        values = self.input_values(tensors)
        return first_other(
            self.analysis.captured.asked,
            lambda i, read: i >= first and read.of_inputs and (looks or not read.look),
            lambda read: read.made(values),
        )


@dataclass(frozen=True)
class InputValuesGraph:
    """The graph of what Python reads of the inputs' values, on a rank's device.

    Attributes:
        module: the graph.
        operands: for each placeholder a constant, or the place of a tensor among the inputs.
    """

    module: fx.GraphModule
    operands: Sequence[Tensor | int]

    def __call__(self, tensors: Sequence[Tensor]) -> Callable[[Any], Any]:
        """Returns a function that gives the tensor of each `OutputAt`. The graph runs when it is first called."""
        outputs: list[Any] = []

        def tensor(x: Any) -> Any:
            if not outputs:
                with torch.no_grad(), unseen():
                    outputs.extend(self.module(*(tensors[x] if isinstance(x, int) else x for x in self.operands)))
            return outputs[x.at] if isinstance(x, OutputAt) else x

        return tensor


def other_assumed(
    graph: fx.Graph, captured: Captured, mesh: Mesh, value_of: Callable[[str], Tensor], first: int
) -> KnownValues | None:
    """Makes what Python reads of activations, each read by a part of the graph; returns what they give if it is other.

    NOTE [A graph that fails] A graph for an assumed outcome may raise an exception where the model does not: the model
    clamps an index if it is too large, and the graph assumes that it is not. Then the reads are made one after the
    other, without what follows them.

    Args:
        graph: the rank's lowered graph.
        value_of: returns the tensor of a placeholder, of which only those that a read needs are asked for.
        first: the number of reads whose outcomes are known.
    """
    state, results, order = random_state_of(mesh.device), returned(graph), list(graph.nodes)

    def made(read: ValueRead) -> Outcome:
        indices = [x.at for x in read.given if isinstance(x, OutputAt)]
        needed = ancestors(results[i] for i in indices)
        drawn = filter(draws, order[: max(map(order.index, needed))])  # They move the random stream.
        part = subgraph(graph, [results[i] for i in indices], needed | ancestors(drawn))
        # Later reads run the graph on the same operands, which must not be overwritten.
        module = fx.GraphModule(nn.Module(), bind(part, mesh.device, mesh.groups, reuse=False))
        with torch.no_grad(), unseen():
            outputs = module(*(value_of(node.name) for node in part.find_nodes(op="placeholder")))
        # Each read runs the graph from its beginning, and must draw the numbers that the call draws.
        set_random_state(mesh.device, state)
        return read.made(lambda x: outputs[indices.index(x.at)] if isinstance(x, OutputAt) else x)

    outcomes = first_other(captured.asked, lambda i, read: i >= first and not read.of_inputs, made)
    return None if outcomes is None else KnownValues(captured.attempt.values.places, outcomes)


class _Assuming(Protocol):
    @property
    def analysis(self) -> Program: ...


Graph = TypeVar("Graph", bound=_Assuming)
Rest = TypeVar("Rest")
Ran = tuple[Sequence[Any], Rest]
"""The outputs of a graph, and what a caller needs beside them."""


def run_until_right(
    prepare: Callable[[KnownValues], Graph],
    run: Callable[[Graph], Ran[Rest]],
    read: Callable[[Graph, int], KnownValues | None],
    compare: Callable[[Captured, Sequence[Any], int], KnownValues | None] = contradicted,
) -> tuple[Graph, Ran[Rest]]:
    """Returns the graph that is right for a call, and what it computed: NOTE [What Python reads of tensors]

    Args:
        prepare: returns the graph for a call of which this much is known.
        run: runs a graph.
        read: makes the reads of a graph's call without it; returns what they give if it is not what the graph assumes.
            The number is that of the reads whose outcomes are known.
        compare: `contradicted`, perhaps outside of a compilation.
    """
    ran: Ran[Rest] | None = None
    contradiction: KnownValues | None = NO_VALUES
    while contradiction is not None:  # This ends: each turn knows the outcome of at least one more read.
        graph, first = prepare(contradiction), len(contradiction.outcomes)
        captured = graph.analysis.captured
        can_read = captured.assumes and not torch.compiler.is_compiling()
        contradiction = read(graph, first) if can_read and is_recorded() else None
        if contradiction is not None:
            continue  # A graph that is not right must not be recorded.
        try:
            ran = run(graph)
        except (IndexError, RuntimeError, ValueError) as error:  # NOTE [A graph that fails]
            # An Error is of a lost rank, for example.
            contradiction = read(graph, first) if can_read and not isinstance(error, Error) else None
            if contradiction is None:
                raise
        else:
            contradiction = compare(captured, ran[0], first) if captured.assumes else None
    assert ran is not None
    return graph, ran


def guard_of(captured: Captured, model: nn.Module, modules: Mapping[str, nn.Module], version: int) -> Guard:
    """Returns the guard of a graph for a model as it is now.

    Args:
        modules: the model's modules by path.
        version: `Tree.version` now.
    """
    opened = captured.attempt.opened
    names = named(model, {name for _, name in captured.reads}, lambda module: original_class(type(module)))
    numbers = opened.numbers - opened.fixed
    return Guard(
        captured.reads, opened.slots, numbers, captured.written, modules, attribute_of, table_of, names, version
    )


def input_values_on(captured: Captured, device: torch.device) -> InputValuesGraph | None:
    """Returns the graph of what Python reads of the inputs' values; None if it reads nothing."""
    if captured.input_values is None or not any(read.of_inputs for read in captured.asked):
        return None
    graph = bind(captured.input_values, device, {}, reuse=False)
    operands = [
        captured.inputs.index(node.name) if node.name in captured.inputs else captured.constants[node.name].to(device)
        for node in graph.find_nodes(op="placeholder")
    ]
    return InputValuesGraph(fx.GraphModule(nn.Module(), graph), operands)


def prepare(analysis: Program, mesh: Mesh, settings: Options) -> GraphEntry:
    """Returns the graph of this rank, bound to its device and process group.

    Raises:
        Error: the graph cannot be lowered, or has a collective over the ranks of the model.
    """
    captured = analysis.captured
    expect_collectives_of_replicas(captured.graph, mesh)
    lowered = rank_graph(analysis, mesh.rank, settings.randomness)
    ready = rank_program(lowered, analysis, settings, mesh.device, mesh.groups, Seat(rank=mesh.rank))
    cut = {index: cut_output(layout, mesh) for index, layout in analysis.local_outputs.items() if mesh.size > 1}
    random, of_numpy = (any(map(drawing, lowered.nodes)) for drawing in (draws, draws_from_numpy))
    values = input_values_on(captured, mesh.device)
    stay = inputs_on_host(analysis.graph, captured.inputs)
    entry = GraphEntry(
        analysis, ready, cut, random, of_numpy, draws_alike(lowered), order_of(lowered),
        input_values=values, on_host=[name in stay for name in captured.inputs],
    )  # fmt: skip
    return replace(entry, other_assumed=partial(other_assumed, lowered, captured, mesh)) if entry.assumes else entry
