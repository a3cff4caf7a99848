"""A rank's graph for one input signature, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp.compiler import Program, emitted, rank_graph
from autotp.distributed.agreement import Fact
from autotp.distributed.cut_tensors.sharded_tensor import CutOutput, cut_output
from autotp.distributed.device_arguments import inputs_on_host
from autotp.distributed.mesh import Mesh
from autotp.distributed.replica_check import expect_collectives_of_replicas
from autotp.ops.eager_mode import unseen
from autotp.ops.random_state import random_state_of, set_random_state
from autotp.options import Options
from autotp.passes.builder import ancestors, subgraph
from autotp.passes.capture.captured import Captured, OutputAt
from autotp.passes.capture.guards.values import Outcome, ValueRead
from autotp.passes.capture.python_state.guard import Guard
from autotp.passes.emit.attach_parameters import ParameterPlace, attach_parameters
from autotp.passes.emit.bind import bind
from autotp.rules.call import returned
from autotp.rules.traits import draws, draws_from_numpy
from autotp.runtime.graph_digest import draws_alike, order_of, same_cards, same_graph, same_order


@dataclass
class GraphEntry:
    """A graph that is ready to run.

    Attributes:
        analysis: the program that it was made from; `analysis.captured` tests sizes and rebuilds results.
        outlined: the bound graph, with each block as a submodule.
        sources: placeholder before the inputs -> first name of a parameter or buffer, or a constant.
        updated: names of the buffers whose new values are the last outputs.
        count: the number of its other outputs.
        cut: the outputs that stay cut, by position.
        random: whether it draws random numbers.
        numpy_random: whether it draws some from `numpy.random`.
        alike: whether it draws some that must be the same on all ranks.
        order: a checksum of its collectives in order.
        module: the graph for one model, whose blocks read their own parameters.
        operands: the first arguments of `module`, before the inputs, as in `sources`.
        calls: the number of calls so far.
        guard: checks the attributes of the model that the graph depends on.
        input_values: makes the tensors that Python reads before a call, if it reads any.
        last: the number of the module's call that this graph was right for last.
        assumed_reads: makes what Python reads of activations, each by itself.
        warned: whether a warning said that every cp rank computes the whole of it.
        on_host: for each input, whether an operator wants it on the CPU.
    """

    analysis: Program
    outlined: fx.GraphModule
    sources: dict[str, str | Tensor]
    updated: list[str]
    count: int
    cut: Mapping[int, CutOutput]
    random: bool
    numpy_random: bool = False
    alike: bool = False
    order: int = 0
    module: fx.GraphModule = field(default_factory=lambda: fx.GraphModule(nn.Module(), fx.Graph()))
    operands: Sequence[str | Tensor] = ()
    calls: int = 0
    guard: Guard | None = None
    input_values: InputValuesGraph | None = None
    last: int = 0
    assumed_reads: AssumedReads | None = None
    warned: bool = False
    on_host: Sequence[bool] = ()

    @property
    def assumes(self) -> bool:
        """True if outcomes of activations are assumed, which a call compares after its run."""
        return any(not read.of_inputs for read in self.analysis.captured.asked)

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
        values, reads = self.input_values(tensors), self.analysis.captured.asked
        for i, read in enumerate(reads):
            is_due = i >= first and read.of_inputs and (looks or not read.look)
            if is_due and not (outcome := read.made(values)).is_same(read.outcome):
                # After another outcome Python may go on to other reads, so no later one is told.
                return (*(earlier.outcome for earlier in reads[:i]), outcome)
        return None

    def on(self, places: Mapping[str, ParameterPlace], owner_of: Callable[[str], nn.Module | None]) -> GraphEntry:
        """Returns the graph for a model with parameters at these places, whose blocks read their own parameters."""
        module = attach_parameters(self.outlined, self.analysis.captured.parameters, places, owner_of)
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        # Parameters of blocks are no placeholders any more: each block reads its own.
        return replace(self, module=module, operands=[self.sources[name] for name in names if name in self.sources])


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


@dataclass(frozen=True)
class AssumedReads:
    """What Python reads of activations, each read as a graph of its own.

    NOTE [A graph that fails] A graph for an assumed outcome may raise an exception where the model does not: the model
    clamps an index if it is too large, and the graph assumes that it is not. Then the reads are made one after the
    other, without what follows them.

    Attributes:
        graph: the rank's lowered graph.
        captured: the facts of the graph.
        mesh: the device and process groups.
    """

    graph: fx.Graph
    captured: Captured
    mesh: Mesh

    def other(self, operands: Mapping[str, Tensor], first: int) -> tuple[Outcome, ...] | None:
        """Returns the outcomes up to the first read from number `first` on that differs; None if there is none.

        Args:
            operands: placeholder name -> tensor.
        """
        reads, state = self.captured.asked, random_state_of(self.mesh.device)
        for i, read in enumerate(reads):
            if i >= first and not read.of_inputs:
                outcome = self._made(read, operands)
                # Each read runs the graph from its beginning, and must draw the numbers that the call draws.
                set_random_state(self.mesh.device, state)
                if not outcome.is_same(read.outcome):
                    return (*(earlier.outcome for earlier in reads[:i]), outcome)
        return None

    def _made(self, read: ValueRead, operands: Mapping[str, Tensor]) -> Outcome:
        results = returned(self.graph)
        indices = [x.at for x in read.given if isinstance(x, OutputAt)]
        needed = ancestors(results[i] for i in indices)
        order = list(self.graph.nodes)
        drawn = filter(draws, order[: max(map(order.index, needed))])  # They move the random stream.
        part = subgraph(self.graph, [results[i] for i in indices], needed | ancestors(drawn))
        # Later reads run the graph on the same operands, which must not be overwritten.
        module = fx.GraphModule(nn.Module(), bind(part, self.mesh.device, self.mesh.groups, reuse=False))
        inputs = [operands[node.name] for node in part.find_nodes(op="placeholder")]
        with torch.no_grad(), unseen():
            outputs = dict(zip(indices, module(*inputs), strict=True))
        return read.made(lambda x: outputs[x.at] if isinstance(x, OutputAt) else x)


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
    module = emitted(lowered, analysis, settings, mesh.device, mesh.groups)
    names = captured.parameters | captured.buffers
    sources: dict[str, str | Tensor] = {
        node.name: names[node.name] if node.name in names else captured.constants[node.name].to(mesh.device)
        for node in lowered.nodes
        if node.op == "placeholder" and (node.name in names or node.name in captured.constants)
    }
    updated = [captured.buffers[name] for name in analysis.updated]
    # The new values of buffers are the last outputs.
    count = len(returned(lowered)) - len(updated)
    cut = {index: cut_output(layout, mesh) for index, layout in analysis.local_outputs.items() if mesh.size > 1}
    random, of_numpy = (any(map(drawing, lowered.nodes)) for drawing in (draws, draws_from_numpy))
    values = input_values_on(captured, mesh.device)
    stay = inputs_on_host(analysis.graph, captured.inputs)
    entry = GraphEntry(
        analysis, module, sources, updated, count, cut, random, of_numpy, draws_alike(lowered), order_of(lowered),
        input_values=values, on_host=[name in stay for name in captured.inputs],
    )  # fmt: skip
    return replace(entry, assumed_reads=AssumedReads(lowered, captured, mesh)) if entry.assumes else entry
