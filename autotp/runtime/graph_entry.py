"""A rank's graph for one input signature, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, fx, nn

from autotp.compiler import Analysis, rank_graph
from autotp.distributed.gather import Held
from autotp.distributed.mesh import Mesh
from autotp.options import Settings
from autotp.passes.capture.guards.guard import Guard
from autotp.passes.emit.attach_parameters import Place, own
from autotp.passes.emit.bind import bind
from autotp.passes.emit.recompute import outline
from autotp.rules.call import draws, returned


@dataclass
class Entry:
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

    analysis: Analysis
    outlined: fx.GraphModule
    sources: dict[str, str | Tensor]
    updated: list[str]
    held: list[Held]
    random: bool
    module: fx.GraphModule = field(default_factory=lambda: fx.GraphModule(nn.Module(), fx.Graph()))
    operands: Sequence[str | Tensor] = ()
    calls: int = 0
    guard: Guard | None = None

    def on(self, places: Mapping[str, Place], owner_of: Callable[[str], nn.Module | None]) -> Entry:
        """The graph for a model whose parameters lie at these places: its blocks read theirs themselves."""
        module = own(self.outlined, self.analysis.captured.parameters, places, owner_of)
        left = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        return replace(self, module=module, operands=[self.sources[name] for name in left if name in self.sources])


def prepare(analysis: Analysis, mesh: Mesh, settings: Settings) -> Entry:
    """The graph of this rank, bound to its device and process group.

    Raises:
        Error: the graph cannot be lowered.
    """
    captured = analysis.captured
    lowered = rank_graph(analysis, mesh.rank, settings.randomness)
    graph = bind(lowered, mesh.device, mesh.groups, captured.owned, settings.optional("reuse"))
    names = captured.parameters | captured.buffers
    sources: dict[str, str | Tensor] = {
        node.name: names[node.name] if node.name in names else captured.constants[node.name].to(mesh.device)
        for node in graph.nodes
        if node.op == "placeholder" and (node.name in names or node.name in captured.constants)
    }
    updated = [captured.buffers[name] for name in analysis.updated]
    count = len(returned(graph)) - len(updated)
    held = [Held(analysis.local_outputs.get(i), mesh) for i in range(count)]
    module = (
        outline(graph, settings.recompute, analysis.updated)
        if settings.optional("outline")
        else fx.GraphModule(nn.Module(), graph)
    )
    return Entry(analysis, module, sources, updated, held, any(draws(node) for node in graph.nodes))
