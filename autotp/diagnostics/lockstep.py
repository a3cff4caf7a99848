"""Simulates all ranks of a tensor-parallel model in one process, node by node.

The ranks' graphs differ in numbers only. An ordinary node runs once for each rank; a collective runs once on the
tensors of all ranks, with its conjugate as backward. The simulation is deterministic and needs no process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autotp.compiler import rank_program
from autotp.ops import collectives, custom_vjp
from autotp.ops.async_linear import async_linear, products
from autotp.ops.attention.documents import keys_seen, known_documents
from autotp.ops.coalesced import together
from autotp.ops.collectives import joined_terms
from autotp.ops.custom_vjp import Vjp
from autotp.ops.experts import exchange
from autotp.ops.random_state import random_state_of, set_random_state
from autotp.options import Options
from autotp.passes.emit.attach_parameters import BlockCall, ParameterPlace, places
from autotp.passes.emit.kept_values.recomputed import Recomputed
from autotp.passes.emit.rank_program import RankProgram
from autotp.passes.emit.zero.room import Room
from autotp.passes.emit.zero.sharded_unit import ShardedUnit
from autotp.passes.plan.experts.expert_parallel import CP_COPIES, EP
from autotp.passes.program.emitted import Seat
from autotp.passes.program.program import Program
from autotp.sharding.layout import Range
from autotp.sharding.partition import chunk_sizes
from autotp.sharding.placement import JOINED
from autotp.sharding.strides import laid_out, order_of_dimensions
from autotp.training.process_groups import ranks_of_experts

Ranks = tuple[Tensor, ...]


@dataclass(frozen=True)
class Grid:
    """How simulated ranks stand: replicas outermost, then ranks along `cp`, then those along `tp`.

    Attributes:
        dp: the number of replicas that run together.
        cp: the number of context-parallel ranks.
        ep: the number of ranks that experts are cut over.
    """

    dp: int = 1
    cp: int = 1
    ep: int = 1

    def groups(self, axis: str, count: int) -> list[list[int]]:
        """Returns the ranks of each group along a mesh axis, of `count` ranks."""
        ranks = torch.arange(count).view(self.dp, self.cp, -1)
        if axis in (EP, CP_COPIES):
            rows = ranks_of_experts(ranks.movedim(-1, 0), self.ep)[axis]
        else:
            rows = ranks.movedim(1, -1).flatten(0, 1) if axis == "cp" else ranks.flatten(0, 1)
        groups: list[list[int]] = rows.tolist()
        return groups


ONE_MODEL = Grid()
"""The ranks of one replica along `tp`."""


Runs = fx.Graph | nn.Module
"""One rank's graph, or a module that `emit` made of it or of its blocks."""


def run_lockstep(ranks: Sequence[Runs], inputs: Sequence[Sequence[Any]], grid: Grid = ONE_MODEL) -> list[Any]:
    """Returns the outputs of every rank.

    Args:
        ranks: the graph of each rank, or its module: all tensor-parallel ranks of the first context-parallel rank, then
            those of the next; then those of the next replica.
        inputs: for each rank the values of its placeholders, in order.
        grid: the numbers of replicas and of context-parallel ranks.
    """
    if isinstance(ranks[0], BlockCall):
        calls = cast(Sequence[BlockCall], ranks)
        operands = [call.operands_of(row) for call, row in zip(calls, inputs, strict=True)]
        return run_lockstep([call.work for call in calls], operands, grid)
    if isinstance(ranks[0], Recomputed):
        return _recomputed(cast(Sequence[Recomputed], ranks), inputs, grid)
    graphs = [rank if isinstance(rank, fx.Graph) else cast(fx.GraphModule, rank).graph for rank in ranks]
    return _run(graphs, ranks, inputs, grid)


def run_programs(programs: Sequence[RankProgram], given: Sequence[Mapping[str, Tensor]], grid: Grid) -> list[Any]:
    """Returns the outputs of every rank, as `run_lockstep`. given: as for `RankProgram.operands`"""
    operands = [program.operands(values) for program, values in zip(programs, given, strict=True)]
    return run_lockstep([program.module for program in programs], operands, grid)


def simulated(
    graph: fx.Graph, tensors: Mapping[str, Tensor], program: Program, model: nn.Module, settings: Options, rank: int,
    rows: Collection[str] = (), room: Room[ShardedUnit] | None = None,
    stored: Mapping[str, Range] = MappingProxyType({}),
) -> RankProgram:  # fmt: skip
    """Returns a rank's graph as on processes, but that it reads the parameters of the simulated rank.

    Args:
        tensors: the rank's parameters and buffers, by name.
        model: the whole model, whose blocks the graph has.
        rank: the tensor-parallel rank.
        rows, room: the parameters that ZeRO divides over replicas, and the room of the rank. The nodes that gather them
            run, on whole parameters.
        stored: parameter of experts -> the first one that the rank stores, and the one after its last.
    """
    ready = rank_program(graph, program, settings, torch.device("cpu"), {}, Seat(rank=rank))
    ready = ready.gathering([x for x in ready.sources.values() if isinstance(x, str) and x in rows], None, room)
    where = places(model)[1]
    names = {(id(module), key): name for name, (module, key) in where.items()}
    blocks = dict(model.named_modules(remove_duplicate=False))
    # Operators outside of blocks have the name "", and no module is called for them.
    del blocks[""]

    def read(place: ParameterPlace) -> Tensor:
        name = names[id(place[0]), place[1]]
        # A view, so that all ranks' gradients of experts are in one tensor.
        return tensors[name][slice(*stored[name])] if name in stored else tensors[name]

    return replace(ready.attached(where, blocks.get, read), read_rows=read)


def _recomputed(ranks: Sequence[Recomputed], inputs: Sequence[Sequence[Any]], grid: Grid) -> list[Any]:
    """Runs a block on all ranks, whose operators run again in backward."""
    inner, width = [rank.inner for rank in ranks], len(inputs[0])

    def run(*flat: Any) -> list[Any]:
        return run_lockstep(inner, [flat[i * width : (i + 1) * width] for i in range(len(inner))], grid)

    if not torch.is_grad_enabled():
        return run_lockstep(inner, inputs, grid)
    flat = [x for row in inputs for x in row]
    outputs: list[Any] = checkpoint(run, *flat, use_reentrant=False, preserve_rng_state=ranks[0].draws)
    return outputs


def _run(graphs: Sequence[fx.Graph], ranks: Sequence[Runs], inputs: Sequence[Sequence[Any]], grid: Grid) -> list[Any]:
    """Runs the graphs node by node, each node on all ranks."""
    envs: list[dict[str, Any]] = [{} for _ in graphs]
    queues = [iter(values) for values in inputs]
    for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
        collective = COLLECTIVES.get(nodes[0].target)
        if nodes[0].op == "output":
            return [_arguments(node, env)[0][0] for node, env in zip(nodes, envs, strict=True)]
        if nodes[0].op == "placeholder":
            values: Sequence[Any] = [next(queue) for queue in queues]
        elif collective is not None:
            arguments = [_arguments(node, env)[0] for node, env in zip(nodes, envs, strict=True)]
            values = _collective(collective, arguments, grid)
        elif nodes[0].op == "call_module":
            modules = cast(Sequence[nn.Module], ranks)
            parts = [rank.get_submodule(str(node.target)) for rank, node in zip(modules, nodes, strict=True)]
            operands = [_arguments(node, env)[0] for node, env in zip(nodes, envs, strict=True)]
            values = run_lockstep(parts, operands, grid)
        elif nodes[0].op == "get_attr":
            modules = cast(Sequence[nn.Module], ranks)
            values = [rank.get_submodule(str(node.target)) for rank, node in zip(modules, nodes, strict=True)]
        elif isinstance(nodes[0].target, Vjp):
            arguments = [_arguments(node, env)[0] for node, env in zip(nodes, envs, strict=True)]
            run = partial(run_lockstep, grid=grid)
            values = custom_vjp.run_vjps_in_lockstep([node.target for node in nodes], arguments, run)
        else:
            values = _each(nodes, envs)
        for node, env, value in zip(nodes, envs, values, strict=True):
            env[node.name] = value
    raise AssertionError("a graph ends in its output")


def _collective(collective: Callable[..., Any], arguments: Sequence[Sequence[Any]], grid: Grid) -> list[Any]:
    """Runs a collective in each group of its axis."""
    results: list[Any] = [None] * len(arguments)
    for group in grid.groups(str(arguments[0][1]), len(arguments)):
        rows = [arguments[i] for i in group]
        # Of other collectives only the operand differs between ranks.
        values = collective(rows) if collective in OF_ROWS else collective(*(row[0] for row in rows), rest=rows[0][2:])
        for i, value in zip(group, values, strict=True):
            results[i] = value
    return results


def _each(nodes: Sequence[fx.Node], envs: Sequence[dict[str, Any]]) -> list[Any]:
    """Runs an ordinary node on every rank, always from the same random state."""
    cpu = torch.device("cpu")
    state, values = random_state_of(cpu), []
    for node, env in zip(nodes, envs, strict=True):
        set_random_state(cpu, state)
        args, kwargs = _arguments(node, env)
        run: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        values.append(run(*args[node.op == "call_method" :], **kwargs))
    return values


def _arguments(node: fx.Node, env: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return fx.map_arg((node.args, node.kwargs), lambda n: env[n.name])


# ---- the conjugates on all ranks' tensors


def _sum(xs: Ranks) -> Ranks:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    # Each rank has memory of its own, as processes have.
    return tuple(total.clone() for _ in xs)


def _join(xs: Ranks, dim: int) -> Ranks:
    whole = torch.cat(xs, dim)
    return tuple(whole.clone() for _ in xs)


def _take(xs: Ranks, dim: int, size: int, block: int) -> Ranks:
    sizes = [n * block for n in chunk_sizes(size // block, len(xs))]
    starts = [sum(sizes[:r]) for r in range(len(xs))]
    return tuple(x.narrow(dim, start, n).clone() for x, start, n in zip(xs, starts, sizes, strict=True))


FORWARDS: dict[str, Callable[..., Ranks]] = {
    "copy": lambda xs: tuple(x.clone() for x in xs),
    "reduce": lambda xs: _sum(xs),
    "scatter": lambda xs, dim, size, block=1: _take(xs, dim, size, block),
    "gather": lambda xs, dim, size, block=1: _join(xs, dim),
    "all_gather": lambda xs, dim, size, block=1: _join(xs, dim),
    "reduce_scatter": lambda xs, dim, size, block=1: _take(_sum(xs), dim, size, block),
    "all_to_all": lambda xs, dim, size, to_dim, to_size, block=1, to_block=1: _take(
        _join(xs, dim), to_dim, to_size, to_block
    ),
}
CONJUGATE = {
    "copy": "reduce", "reduce": "copy", "scatter": "gather", "gather": "scatter",
    "all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "all_to_all",
}  # fmt: skip


class _Conjugate(torch.autograd.Function):
    """One collective on all ranks' tensors, with its conjugate as backward."""

    @staticmethod
    def forward(ctx: Any, name: str, rest: tuple[Any, ...], *xs: Tensor) -> Ranks:
        ctx.kind, ctx.rest = name, rest
        return FORWARDS[name](xs, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rest = ctx.rest
        if ctx.kind == "all_to_all":  # Its own conjugate, with the dimensions exchanged.
            dim, size, to_dim, to_size, *blocks = rest
            rest = to_dim, to_size, dim, size, *blocks[::-1]
        return None, None, *_Conjugate.apply(CONJUGATE[ctx.kind], rest, *grads)


def conjugate(name: str) -> Callable[..., Ranks]:
    """Returns a collective of FORWARDS on the tensors of all ranks."""

    def run(*xs: Tensor, rest: tuple[Any, ...]) -> Ranks:
        if name == "reduce" and rest[:1] == ("max",):
            maximum = torch.stack([x.detach() for x in xs]).amax(0)
            return tuple(maximum.clone() for _ in xs)
        if name == "reduce" and rest and rest[0] in JOINED:
            # A rank's gradient reaches its own part only.
            parts = [[x if r == rank else x.detach() for r, x in enumerate(xs)] for rank in range(len(xs))]
            return tuple(joined_terms(torch.stack(row), rest[0]) for row in parts)
        if name in ("copy", "reduce"):
            return _Conjugate.apply(name, (), *xs)
        moved = _Conjugate.apply(name, (rest[0] % xs[0].dim(), *rest[1:]), *xs)
        # As the collectives do it: a result lies in memory in its operand's order.
        return tuple(laid_out(y, order_of_dimensions(x)) for x, y in zip(xs, moved, strict=True))

    return run


def _halo(*xs: Tensor, rest: tuple[Any, ...]) -> Ranks:
    """Runs `halo(x, axis, dim, size, before, ends, chunk, after)`; autograd adds gradients of what ranks share."""
    dim, size, before, ends, chunk, after = rest
    dim, sequence = dim % xs[0].dim(), torch.cat(xs, dim)
    keys = keys_seen(size, len(xs), before, known_documents(ends, size), chunk, after)
    read = [sequence.narrow(dim, first, stop - first) for first, stop in keys]
    return tuple(laid_out(y, order_of_dimensions(x)) for x, y in zip(xs, read, strict=True))


Ranges = tuple[Range, ...]


class _Share(torch.autograd.Function):
    """`share` on the ranks of one group, which hold the same values at their `ranges` of `dim`."""

    @staticmethod
    def forward(ctx: Any, dim: int, ranges: list[Ranges], *xs: Tensor) -> Ranks:
        ctx.where = dim, [torch.tensor([i for a, b in row for i in range(a, b)], dtype=torch.int64) for row in ranges]
        return tuple(x.clone() for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dim, indices = ctx.where
        (total,) = _sum(tuple(g.index_select(dim, index) for g, index in zip(grads, indices, strict=True)))[:1]
        return None, None, *(grad.index_copy(dim, index, total) for grad, index in zip(grads, indices, strict=True))


def _share(arguments: Sequence[Sequence[Any]]) -> Sequence[Tensor]:
    """Runs `share(x, axis, dim, ranges)`; the axis is all ranks, or groups of neighbours (`tp/4`)."""
    run = int(str(arguments[0][1]).partition("/")[2] or len(arguments))
    copies: list[Tensor] = []
    for start in range(0, len(arguments), run):
        group = arguments[start : start + run]
        copies += _Share.apply(group[0][2], [row[3] for row in group], *(row[0] for row in group))
    return copies


def _together(arguments: Sequence[Sequence[Any]]) -> Sequence[tuple[Tensor, ...]]:
    """Runs `together(xs, axis, where)`, tensor by tensor."""
    columns = []
    for i, where in enumerate(arguments[0][2]):
        rows = [(row[0][i], row[1], *(row[2][i] or ())) for row in arguments]
        columns.append(_share(rows) if where is not None else conjugate("copy")(*(row[0] for row in rows), rest=()))
    return list(zip(*columns, strict=True))


def _async_linear(arguments: Sequence[Sequence[Any]]) -> Sequence[tuple[Tensor, ...]]:
    """Runs `async_linear(x, axis, gathered, ...)`: the conjugate, then the products."""
    gathered = arguments[0][2]
    collective = conjugate("copy" if gathered is None else "all_gather")
    read = collective(*(row[0] for row in arguments), rest=gathered or ())
    return [products(x, *row[3:]) for x, row in zip(read, arguments, strict=True)]


def _exchange_counts(arguments: Sequence[Sequence[Any]]) -> list[Tensor]:
    """Runs `exchange_counts(chosen, axis, number, grouped, None)`: `verify` has no capacity."""
    choices = [(chosen, number, grouped) for chosen, _, number, grouped, _ in arguments]
    sent = [exchange.rows_to_send(*choice, ranks=len(arguments)) for choice in choices]
    received = torch.stack(sent).transpose(0, 1)
    return [
        exchange.table_of_rows(*choice, of_rank, of_others)
        for choice, of_rank, of_others in zip(choices, sent, received, strict=True)
    ]


def _select_own(arguments: Sequence[Sequence[Any]]) -> list[Tensor]:
    """Runs `select_own(weights, axis, ranks)`."""
    return [weights.chunk(ranks)[place] for place, (weights, _, ranks) in enumerate(arguments)]


def _sent(xs: Sequence[Tensor], numbers: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns what each rank gets of the rows of all. numbers: for each rank, how many rows it sends to each"""
    pieces = [x.split(list(row)) for x, row in zip(xs, numbers, strict=True)]
    return [torch.cat(arrived) for arrived in zip(*pieces, strict=True)]


def _to_experts(arguments: Sequence[Sequence[Any]]) -> list[Tensor]:
    """Runs `to_experts(x, axis, table, places)`."""
    arrived = _sent([row[0] for row in arguments], [exchange.rows_by_rank(row[2])[0] for row in arguments])
    return [exchange.in_experts_order(x, row[3]) for x, row in zip(arrived, arguments, strict=True)]


def _to_rows(arguments: Sequence[Sequence[Any]]) -> list[Tensor]:
    """Runs `to_rows(x, axis, table, places)`."""
    rows = [row[0].index_select(0, row[3]) for row in arguments]
    return _sent(rows, [exchange.rows_by_rank(row[2])[1] for row in arguments])


COLLECTIVES: dict[Any, Callable[..., Any]] = {
    **{getattr(collectives, name): conjugate(name) for name in FORWARDS},
    collectives.halo: _halo,
    collectives.share: _share,
    together: _together,
    async_linear: _async_linear,
    exchange.exchange_counts: _exchange_counts,
    exchange.to_experts: _to_experts,
    exchange.to_rows: _to_rows,
    exchange.select_own: _select_own,
}
"""Operator -> what it does to the tensors of all ranks. Extensions add theirs."""
OF_ROWS = {_share, _together, _async_linear, _exchange_counts, _to_experts, _to_rows, _select_own}
"""Those of them that take the arguments of all ranks, row by row."""
