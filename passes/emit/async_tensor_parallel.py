"""async_tensor_parallel: lets torch compute products in parts beside their collectives, and counts what it fused.

    Before: y = addmm(b, reshape(all_gather(x)), w)
    After:  y = add(reshape(mm(reshape(all_gather(x)), w)), b), of which torch makes fused_all_gather_matmul(x, [w])

torch calls this asynchronous tensor parallelism: a gather and the products that read it, or a product and its
reduce-scatter, become one operator, which sends a part while it computes another. Inductor finds them by their form
(NOTE [What torch finds] in `autotp/ops/collectives.py`), on NVIDIA GPUs with symmetric memory. It fuses no product that
adds a bias, so the bias is added behind it.

Source: torch/_inductor/fx_passes/micro_pipeline_tp.py of torch 2.13.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autotp.errors import Error
from autotp.ops.async_linear import async_linear, separate_products
from autotp.ops.collectives import all_gather, reduce_scatter

aten = torch.ops.aten
LINEARS = async_linear, separate_products
SWITCH, BEFORE, BEHIND = "_micro_pipeline_tp", "post_grad_custom_pre_pass", "post_grad_custom_post_pass"
"""Options of Inductor: torch's pass, and the passes that run before and behind it."""


@dataclass(frozen=True)
class Pairs:
    """Numbers of collectives: gathers that products read, and reduce-scatters of products."""

    all_gathers: int = 0
    reduce_scatters: int = 0

    def __add__(self, other: Pairs) -> Pairs:
        return Pairs(self.all_gathers + other.all_gathers, self.reduce_scatters + other.reduce_scatters)

    def __bool__(self) -> bool:
        return self.all_gathers + self.reduce_scatters > 0


@dataclass
class FusedPairs:
    """What torch fused in compiled blocks, which it compiles in their first forward and backward.

    Attributes:
        graphs: for each graph that was compiled, the collectives that are fused, and all that there were.
    """

    graphs: list[tuple[Pairs, Pairs]] = field(default_factory=list)

    @property
    def fused(self) -> Pairs:
        """The collectives that are fused with products."""
        return sum((fused for fused, _ in self.graphs), Pairs())

    @property
    def collectives(self) -> Pairs:
        """All gathers and reduce-scatters, fused or not."""
        return sum((every for _, every in self.graphs), Pairs())

    def __str__(self) -> str:
        if not self.graphs:
            return "no graph was compiled yet: torch compiles in the first forward, and in the first backward"
        some, every, n = self.fused, self.collectives, len(self.graphs)
        gathers = f"{some.all_gathers} of {every.all_gathers} all-gathers"
        scatters = f"{some.reduce_scatters} of {every.reduce_scatters} reduce-scatters"
        return f"{n} graph{'s' * (n > 1)}: {gathers} and {scatters} are fused with products"


def expect_async_tp(tp: int, sequence_parallel: bool, device: torch.device, backend: str, compiler: Any) -> None:
    """Raises Error where torch could fuse nothing.

    Args:
        tp: the number of ranks.
        backend: the name of the process group's backend.
        compiler: the argument `backend` of `torch.compile`.
    """
    if tp == 1:
        raise Error(
            "compile_blocks(async_tp=True) would fuse nothing: with tp=1 nothing is sent", fix="compile_blocks()"
        )
    if not sequence_parallel:
        raise Error(
            "compile_blocks(async_tp=True) would fuse nothing: products are followed by all-reduces, and "
            "torch fuses all-gathers and reduce-scatters",
            fix="sequence_parallel=True of autotp.parallelize",
            alternative="compile_blocks()",
        )
    if compiler != "inductor":
        raise Error(
            "compile_blocks(async_tp=True) would fuse nothing: the fusing is a pass of Inductor, and the backend is "
            f"{compiler!r}",
            fix="compile_blocks(async_tp=True), without backend=",
            alternative=f"compile_blocks(backend={compiler!r})",
        )
    if device.type != "cuda" or backend != "nccl" or not dist.is_nccl_available():
        raise Error(
            "compile_blocks(async_tp=True) would fuse nothing: torch needs the symmetric memory of NVIDIA GPUs under "
            f"NCCL, and the ranks are on {device.type} under {backend or 'no backend'}",
            fix="compile_blocks()",
        )


def enable_symmetric_memory(group: str) -> None:
    """Enables torch's symmetric memory for a process group. All its ranks call this."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(group)  # type: ignore[arg-type]


def has_collectives(graph: fx.Graph) -> bool:
    """True if a block's graph has a gather that a product may read, or a reduce-scatter."""
    return any(
        node.target in (all_gather, reduce_scatter) or (node.target in LINEARS and node.args[2] is not None)
        for node in graph.nodes
    )


def inductor_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of Inductor among arguments of `torch.compile`, those of a mode included."""
    from torch._inductor import list_mode_options

    return {**(list_mode_options(kwargs["mode"]) if kwargs.get("mode") else {}), **(kwargs.get("options") or {})}


def with_inductor_options(kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `torch.compile` with these options; it takes no mode beside options."""
    return {key: value for key, value in kwargs.items() if key != "mode"} | {"options": dict(options)}


class BlockFusion:
    """What torch fused in one block.

    Attributes:
        model: what it fused in all blocks of the model.
        own: what it fused in the graphs of this block.
        told: the number of graphs that `expect_some` has seen.
    """

    def __init__(self, model: FusedPairs) -> None:
        self.model, self.own, self.told = model, FusedPairs(), 0

    def options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of `torch.compile` with torch's pass switched on.

        torch keeps no compiled code on disk for later jobs: it would not run the pass again, and nothing were counted.
        """
        from torch._inductor import config
        from torch._inductor.custom_graph_pass import get_custom_graph_passes

        user_options = inductor_options(kwargs)
        before, after = (
            get_custom_graph_passes(user_options.get(name, getattr(config, name))) for name in (BEFORE, BEHIND)
        )
        # Around torch's pass, and without taking the place of passes that the user has set.
        pass_options = {SWITCH: True, BEFORE: [*before, without_bias], BEHIND: [*after, self.count]}
        return with_inductor_options(kwargs, user_options | pass_options)

    def count(self, graph: fx.Graph) -> None:
        """Counts the collectives of a graph behind torch's pass."""
        fused = fused_pairs(graph)
        for pairs in (self.own, self.model):
            pairs.graphs.append((fused, fused + collectives(graph)))

    def expect_some(self) -> None:
        """Raises Error if torch has compiled a graph of this block since the last call, and has fused nothing in any.

        Such an error comes from a forward: backward runs in a thread of torch's.
        """
        compiled, self.told = len(self.own.graphs) > self.told, len(self.own.graphs)
        if compiled and not self.own.fused:
            raise Error(
                "compile_blocks(async_tp=True): torch fused 0 of the collectives of a block with products",
                fix="sequences whose length tp divides",
                alternative="compile_blocks()",
                got=str(self.own),
            )


def without_bias(graph: fx.Graph) -> None:
    """Rewrites the products of gathers so that a bias is added behind them, in the gather's number of dimensions."""
    from torch._inductor.fx_passes.micro_pipeline_tp import find_all_gather_patterns

    for match in find_all_gather_patterns(graph):
        whole = match.res_node
        for rows in [whole, *_users(whole, aten.reshape.default)]:
            for node in _users(rows, aten.addmm.default):
                bias, operand, weight = _operands(node)
                # torch looks for a product between two reshapes, so the sum has to be behind the second one.
                views = [view for view in _users(node, aten.reshape.default) if rows is whole or _are_rows(view, whole)]
                if operand is rows and weight is not rows and not node.kwargs and bias.meta["val"].dim() == 1 and views:
                    _add_behind(graph, node, views[0])


def _operands(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _users(node: fx.Node, target: Callable[..., Any]) -> list[fx.Node]:
    return [user for user in node.users if user.target is target]


def _are_rows(view: fx.Node, whole: fx.Node) -> bool:
    """True if two values have the same dimensions, but for the last."""
    view_shape, whole_shape = view.meta["val"].shape, whole.meta["val"].shape
    return len(view_shape) == len(whole_shape) and all(map(operator.eq, view_shape[:-1], whole_shape[:-1]))


def _add_behind(graph: fx.Graph, node: fx.Node, view: fx.Node) -> None:
    """Replaces `view` of bias + rows @ weight by a sum of the product's view and the bias."""
    bias, rows, weight = _operands(node)
    with graph.inserting_before(node):
        product = _written(graph, aten.mm.default, rows, weight)
        total = _written(graph, aten.add.Tensor, _written(graph, aten.reshape.default, product, view.args[1]), bias)
        view.replace_all_uses_with(total)
        graph.erase_node(view)
        # Other readers of the rows get those of the sum.
        if node.users:
            flat = _written(graph, aten.reshape.default, total, [-1, weight.meta["val"].shape[1]])
            node.replace_all_uses_with(flat)
    graph.erase_node(node)


def _written(graph: fx.Graph, target: Callable[..., Any], *args: Any) -> fx.Node:
    call = graph.call_function(target, args)
    call.meta["val"] = target(*fx.node.map_aggregate(args, lambda a: a.meta["val"] if isinstance(a, fx.Node) else a))
    return call


def fused_pairs(graph: fx.Graph) -> Pairs:
    """Returns the collectives that torch has fused with products."""
    return _count(graph, "symm_mem", ("fused_all_gather_",), ("fused_matmul_reduce_scatter", "fused_scaled_matmul_red"))


def collectives(graph: fx.Graph) -> Pairs:
    """Returns the gathers and reduce-scatters of a graph that are operators of their own."""
    return _count(graph, "_c10d_functional", ("all_gather_into_tensor",), ("reduce_scatter_tensor",))


def _count(graph: fx.Graph, space: str, gathers: tuple[str, ...], scatters: tuple[str, ...]) -> Pairs:
    targets = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    names = [target.name().partition("::")[2] for target in targets if target.namespace == space]
    return Pairs(sum(name.startswith(gathers) for name in names), sum(name.startswith(scatters) for name in names))
