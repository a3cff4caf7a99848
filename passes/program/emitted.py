"""The passes of the stage emit that take more than a rank's graph: where it runs, and what of it a call writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from autotp.groups.process_group import seat as seat_in
from autotp.options import Options
from autotp.passes.emit.bind import COMMUNICATING, bind
from autotp.passes.emit.count_load import count_load
from autotp.passes.emit.kept_values.recompute import recompute
from autotp.passes.emit.memory.budget import Allowance, budget_of
from autotp.passes.emit.memory.under_budget import hints, under_budget
from autotp.passes.emit.zero.room import FEWEST, whole_bytes
from autotp.passes.pipeline.loss_totals import TOTAL
from autotp.passes.program.program import Program
from autotp.rules.call import placeholders
from autotp.source_location import block_of


@dataclass(frozen=True, kw_only=True)
class Seat:
    """The facts of a rank that a budget of memory needs.

    Attributes:
        rank: the tensor-parallel rank.
        kept_calls: the number of microbatches whose values the graph keeps at a time.
        replicas: the number of replicas, over which ZeRO divides states.
        share: the part of the rank's memory that this graph may use.
        microbatches: of a step, in each replica.
        gathers_once: whether all that ZeRO gathers stays until a step ends.
    """

    rank: int = 0
    kept_calls: int = 1
    replicas: int = 1
    share: float = 1.0
    microbatches: int = 1
    gathers_once: bool = True


FIRST_SEAT = Seat()


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a rank's graph runs.

    Attributes:
        settings: the options under which it runs: of a training, or of a model without one.
        device: the rank's device.
        groups: mesh axis -> name of the process group; empty for a simulation.
        seat: where the rank is, for a budget.
    """

    settings: Options
    device: torch.device
    groups: Mapping[str, str | None]
    seat: Seat = FIRST_SEAT


def bound(p: Program, site: Site, graph: fx.Graph) -> fx.Graph:
    """Returns the graph with the process groups and the device of a site."""
    return bind(graph, site.device, site.groups, p.captured.owned, site.settings.optional("in_place"))


def counting(p: Program, site: Site, graph: fx.Graph) -> fx.Graph:
    """Returns the graph, which counts the rows of its experts."""
    return count_load(graph, p.captured.parameters)


def as_module(p: Program, site: Site, graph: fx.Graph) -> fx.GraphModule:
    """Returns the module of a graph, with a module for each block, unless `outline` is left out."""
    # Backward recomputes blocks, so without blocks there is nothing to recompute.
    if not site.settings.optional("outline"):
        return fx.GraphModule(nn.Module(), graph)
    if site.settings.memory is None:
        return recompute(graph, site.settings.recompute, p.updated)
    return _under_budget(p, site, site.settings.memory, graph)


def _under_budget(p: Program, site: Site, memory: int | str, graph: fx.Graph) -> fx.GraphModule:
    """Returns the module of a graph that keeps what a budget lets it keep, chosen for the captured call if it is known.

    Raises:
        Error: it does not fit.
    """
    seat, captured = site.seat, p.captured
    sources = held_tensors(p, graph, seat.rank)
    fixed, learning = fixed_bytes(p, graph, site.settings, seat)
    allowance = Allowance(
        memory=memory, fixed=fixed, calls=seat.kept_calls, share=seat.share,
        microbatches=seat.microbatches * seat.replicas,
    )  # fmt: skip
    groups = {name: seat_in(name) for name in site.groups.values() if name is not None}
    if not site.groups:  # A simulation names axes, also parts of them: `tp/4` is four neighbours along `tp`.
        names = {str(node.args[1]) for node in graph.nodes if node.target in COMMUNICATING}
        sizes = {"tp": p.tp, "cp": p.options.cp}
        counts = {name: int(name.partition("/")[2] or sizes[name]) for name in names}
        groups = {name: (0 if name == "cp" else seat.rank % count, count) for name, count in counts.items()}
    even = all(len(set(layout.lengths())) == 1 for layout in p.layouts.values() if layout.dim is not None)
    module = under_budget(graph, p.updated, allowance, site.device, sources, groups, even, learning)
    given = {name for name in placeholders(graph) if name not in sources}
    known = all(name in captured.inputs or name.startswith(TOTAL) for name in given) and not p.call.cut_inputs
    examples = hints(graph, given) if known and torch.is_grad_enabled() else None
    budget = budget_of(module)
    assert budget is not None
    budget.agrees = known and bool(site.groups)  # Of a cut input, the part of one rank alone may grow.
    if examples is not None:
        with p.call.autocast.off():  # As where the graph runs: its casts are operators.
            budget.choose(examples)
    return module


def held_tensors(p: Program, graph: fx.Graph, rank: int) -> dict[str, Tensor]:
    """Returns, by placeholder, tensors like the parameters, buffers and constants that a rank's graph reads."""
    captured, sources = p.captured, dict[str, Tensor]()
    # Lowering has made examples anew, which do not say who learns.
    examples = {node.name: node.meta["val"] for node in captured.graph.find_nodes(op="placeholder")}
    for node in graph.find_nodes(op="placeholder"):
        name, value = node.name, node.meta.get("val")
        if name in captured.constants:
            sources[name] = captured.constants[name]
        elif name in captured.parameters or name in captured.buffers:
            assert isinstance(value, Tensor)
            layout = p.layouts.get((captured.parameters | captured.buffers)[name])
            shape = tuple(value.shape) if layout is None else layout.local_shape(rank)
            empty = torch.empty(shape, dtype=value.dtype, device="meta")
            sources[name] = empty.requires_grad_(examples[name].requires_grad)
    return sources


def fixed_bytes(p: Program, graph: fx.Graph, settings: Options, seat: Seat = FIRST_SEAT) -> tuple[int, dict[str, int]]:
    """Returns the bytes of the parameters and buffers of a graph; and of each parameter what it has if it learns.

    Those of the rank that holds most. Under `distribute(compute_dtype=...)` parameters are taken to be in float32, with
    a copy in the dtype of computation.
    """
    zero, cast = getattr(settings, "zero", 0), getattr(settings, "compute_dtype", None)
    total, learning, beside = 0.0, dict[str, int](), Counter[str]()
    blocks = {node.name: {block_of(user) for user in node.users} for node in graph.find_nodes(op="placeholder")}
    for name, x in held_tensors(p, graph, 0).items():
        own = x.numel() * (4 if cast is not None and x.is_floating_point() else x.itemsize)
        if name in p.captured.parameters:
            layout = p.layouts.get(p.captured.parameters[name])
            replicas = seat.replicas // (1 if layout is None or layout.rows is None else settings.ep)  # Of its experts.
            states = bytes_of_states(x.numel(), own, settings.state_bytes)
            fixed, learning[name] = parameter_bytes(own, states, zero, replicas)
            total += fixed
            block = next(iter(blocks[name])) if len(blocks[name]) == 1 else ""
            beside[block] += bytes_beside(own, x.nbytes, zero, replicas)
        else:
            total += x.nbytes
    few = zero == 3 and seat.replicas > 1 and not seat.gathers_once
    return int(total + whole_bytes(beside, FEWEST if few else None)), learning


def bytes_of_states(elements: int, own: float, state_bytes: float | None) -> float:
    """Returns the bytes of the optimizer's states of a parameter.

    Args:
        own: bytes of the parameter.
        state_bytes: the option: for each element; None for two states like the parameter.
    """
    return 2 * own if state_bytes is None else elements * state_bytes


def parameter_bytes(own: int, states: float, zero: int, replicas: int) -> tuple[float, int]:
    """Returns the bytes of a parameter that the optimizer steps; and of its gradient and its states, if it learns.

    Args:
        own: bytes of the whole parameter in its own dtype.
        states: bytes of the optimizer's states of the whole parameter.
        zero, replicas: the stage of ZeRO, and the replicas over which it divides.
    """
    share = {stage: replicas if zero >= stage else 1 for stage in (1, 2)}
    return own / share[1], int(own / share[2] + states / share[1])


def bytes_beside(own: int, computed: int, zero: int, replicas: int) -> int:
    """Returns the bytes of a parameter as it is computed with, beside the part that the optimizer steps.

    Args:
        computed: bytes of the whole parameter in the dtype of computation.
        own, zero, replicas: as of `parameter_bytes`.
    """
    return computed if (zero and replicas > 1) or computed != own else 0
