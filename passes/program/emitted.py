"""The passes of the stage emit that take more than a rank's graph: where it runs, and what of it a call writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from autotp.options import Options
from autotp.passes.emit.bind import bind
from autotp.passes.emit.recompute import recompute
from autotp.passes.program.program import Program


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a rank's graph runs.

    Attributes:
        settings: the options under which it runs: of a training, or of a model without one.
        device: the rank's device.
        groups: mesh axis -> name of the process group; empty for a simulation.
    """

    settings: Options
    device: torch.device
    groups: Mapping[str, str | None]


def bound(p: Program, site: Site, graph: fx.Graph) -> fx.Graph:
    """Returns the graph with the process groups and the device of a site."""
    return bind(graph, site.device, site.groups, p.captured.owned, site.settings.optional("in_place"))


def as_module(p: Program, site: Site, graph: fx.Graph) -> fx.GraphModule:
    """Returns the module of a graph, with a module for each block, unless `outline` is left out."""
    # Backward recomputes blocks, so without blocks there is nothing to recompute.
    if not site.settings.optional("outline"):
        return fx.GraphModule(nn.Module(), graph)
    return recompute(graph, site.settings.recompute, p.updated)
