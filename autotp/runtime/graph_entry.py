"""A rank's graph for one input signature, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp.compiler import Program, emitted, rank_graph
from autotp.distributed.gather import OutputLayout
from autotp.distributed.mesh import Mesh
from autotp.options import Options
from autotp.passes.capture.captured import Captured, OutputAt
from autotp.passes.capture.guards.guard import Guard
from autotp.passes.emit.attach_parameters import ParameterPlace, attach_parameters
from autotp.passes.emit.bind import bind
from autotp.rules.call import returned
from autotp.rules.traits import draws


@dataclass
class GraphEntry:
    """A graph that is ready to run.

    Attributes:
        analysis: the program that it was made from; `analysis.captured` tests sizes and rebuilds results.
        outlined: the bound graph, with each block as a submodule.
        sources: placeholder before the inputs -> first name of a parameter or buffer, or a constant.
        updated: names of the buffers whose new values are the last outputs.
        held: the layout of each output tensor.
        random: whether it draws random numbers.
        module: the graph for one model, whose blocks read their own parameters.
        operands: the first arguments of `module`, before the inputs, as in `sources`.
        calls: the number of calls so far.
        guard: checks the attributes of the model that the graph depends on.
        input_values: makes the tensors that Python reads before a call, if it reads any.
        last: the number of the module's call that this graph was right for last.
    """

    analysis: Program
    outlined: fx.GraphModule
    sources: dict[str, str | Tensor]
    updated: list[str]
    held: list[OutputLayout]
    random: bool
    module: fx.GraphModule = field(default_factory=lambda: fx.GraphModule(nn.Module(), fx.Graph()))
    operands: Sequence[str | Tensor] = ()
    calls: int = 0
    guard: Guard | None = None
    input_values: InputValuesGraph | None = None
    last: int = 0

    @property
    def assumes(self) -> bool:
        """True if outcomes of activations are assumed, which a call compares after its run."""
        return any(not read.of_inputs for read in self.analysis.captured.asked)

    def reads_as(self, tensors: Sequence[Tensor]) -> bool:
        """True if Python reads of a call's inputs what the graph is right for."""
        if self.input_values is None:
            return True
        found = self.input_values(tensors)
        reads = (read for read in self.analysis.captured.asked if read.of_inputs)
        try:
            return all(read.made(found).is_same(read.outcome) for read in reads)
        except (RuntimeError, IndexError, ValueError):  # After another outcome, later reads may be of nothing.
            return False

    def on(self, places: Mapping[str, ParameterPlace], owner_of: Callable[[str], nn.Module | None]) -> GraphEntry:
        """Returns the graph for a model with parameters at these places, whose blocks read their own parameters."""
        module = attach_parameters(self.outlined, self.analysis.captured.parameters, places, owner_of)
        left = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        return replace(self, module=module, operands=[self.sources[name] for name in left if name in self.sources])


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
                with torch.no_grad():
                    outputs.extend(self.module(*(tensors[x] if isinstance(x, int) else x for x in self.operands)))
            return outputs[x.at] if isinstance(x, OutputAt) else x

        return tensor


def _input_values(captured: Captured, device: torch.device) -> InputValuesGraph | None:
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
        Error: the graph cannot be lowered.
    """
    captured = analysis.captured
    lowered = rank_graph(analysis, mesh.rank, settings.randomness)
    module = emitted(lowered, analysis, settings, mesh.device, mesh.groups)
    names = captured.parameters | captured.buffers
    sources: dict[str, str | Tensor] = {
        node.name: names[node.name] if node.name in names else captured.constants[node.name].to(mesh.device)
        for node in lowered.nodes
        if node.op == "placeholder" and (node.name in names or node.name in captured.constants)
    }
    updated = [captured.buffers[name] for name in analysis.updated]
    count = len(returned(lowered)) - len(updated)
    held = [OutputLayout(analysis.local_outputs.get(i), mesh) for i in range(count)]
    random = any(draws(node) for node in lowered.nodes)
    values = _input_values(captured, mesh.device)
    return GraphEntry(analysis, module, sources, updated, held, random, input_values=values)
