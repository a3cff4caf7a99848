"""A rank's graph for one input signature, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, fx, nn

from autotp.compiler import Program, emitted, rank_graph
from autotp.distributed.gather import OutputLayout
from autotp.distributed.mesh import Mesh
from autotp.options import Options
from autotp.passes.capture.guards.guard import Guard
from autotp.passes.emit.attach_parameters import ParameterPlace, attach_parameters
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

    def on(self, places: Mapping[str, ParameterPlace], owner_of: Callable[[str], nn.Module | None]) -> GraphEntry:
        """Returns the graph for a model with parameters at these places, whose blocks read their own parameters."""
        module = attach_parameters(self.outlined, self.analysis.captured.parameters, places, owner_of)
        left = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        return replace(self, module=module, operands=[self.sources[name] for name in left if name in self.sources])


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
    return GraphEntry(analysis, module, sources, updated, held, any(draws(node) for node in lowered.nodes))
