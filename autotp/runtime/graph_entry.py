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
        analysis: what it was made from; `analysis.captured` has the guard on sizes and the structure of the outputs.
        outlined: the bound graph, each block a submodule.
        sources: placeholder before the inputs -> a parameter's or buffer's first name, or a constant.
        updated: buffers that the graph returns new values of, last.
        held: how each output tensor is held.
        random: whether it draws random numbers.
        module: the graph for one model, whose blocks read their parameters themselves.
        operands: what that is called with before the inputs, as `sources`.
        calls: how many there were.
        guard: the attributes of the model that it was captured with.
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
        """The graph for a model whose parameters lie at these places: its blocks read theirs themselves."""
        module = attach_parameters(self.outlined, self.analysis.captured.parameters, places, owner_of)
        left = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        return replace(self, module=module, operands=[self.sources[name] for name in left if name in self.sources])


def prepare(analysis: Program, mesh: Mesh, settings: Options) -> GraphEntry:
    """The graph of this rank, bound to its device and process group.

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
