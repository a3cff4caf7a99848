"""compiled: compiles the blocks of a graph, each once for all blocks that compute alike.

    Before: b = h_0(x); c = h_1(b)      After: the same, and the graph of both is compiled by torch.compile

NOTE [Torch functions in a compilation]
A parallel model runs with torch functions off, so that its parts give no warnings. While torch compiles, it computes
symbolic sizes by torch functions of its own: `torch.sym_min` of a size fails without them, where a length is cut into
parts. So a compiled block runs with torch functions on, on plain tensors.

NOTE [Compiled on all ranks or on none]
torch compiles a function anew for sizes that it does not know, and after eight times runs it uncompiled. Where ranks
have parts of other lengths, one of them comes to this limit before the others. A block that is not compiled gathers its
input again in backward, so the ranks would communicate in different orders. There the limit is an error.

NOTE [Inductor's order]
Inductor moves the gradients of weights behind everything else, to keep less at a time, and fuses what reads a sum with
what was computed before it. Then nothing is left between the start of a sum and the wait. So blocks that communicate
are compiled with its own passes for overlap, and without the one for memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp.errors import Error
from autotp.ops.async_linear import async_linear, separate_products
from autotp.ops.collectives import halo
from autotp.passes.emit.async_tensor_parallel import (
    BlockFusion,
    FusedPairs,
    has_collectives,
    inductor_options,
    with_inductor_options,
)
from autotp.passes.emit.attach_parameters import BlockCall
from autotp.passes.emit.bind import COMMUNICATING
from autotp.passes.emit.kept_values.checkpointed import Checkpointed
from autotp.passes.emit.kept_values.recomputed import Recomputed

OVERLAP = {
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_communication_preserving_peak_memory",
        "sink_waits_iterative",
        "reorder_communication_preserving_peak_memory",
    ],
}
"""Options of Inductor for blocks that communicate: NOTE [Inductor's order]"""


class Compiled(nn.Module):
    """A graph that torch compiles when it is first called.

    Attributes:
        inner: the graph.
        fusion: counts what torch fuses for async tensor parallelism; None: it is not asked to.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.fusion: BlockFusion | None = None

    def forward(self, *args: Any) -> Any:
        """Runs the graph, on tensors that may be of a class of autotp."""
        if torch.compiler.is_compiling():
            # A compilation around this one has the block in its own graph.
            return self.inner(*args)
        plain = [x.as_subclass(Tensor) if isinstance(x, Tensor) and _has_class(x) else x for x in args]
        try:
            with torch._C._EnableTorchFunction():
                result = self.inner(*plain)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise Error(
                "torch has compiled a block for other sizes as often as it may, and would run it uncompiled from here "
                "on, on this rank alone",
                fix="torch._dynamo.config.recompile_limit = 64, and accumulated_recompile_limit as well",
                alternative="inputs of fewer lengths: padded sequences; torch._dynamo.mark_dynamic(tokens, 1)",
            ) from error
        if self.fusion is not None:
            self.fusion.expect_some()
        return result


def _has_class(x: Tensor) -> bool:
    return type(x) not in (Tensor, nn.Parameter)


def compile_blocks(module: nn.Module, options: Mapping[str, Any], fused: FusedPairs | None = None) -> None:
    """Compiles the blocks of a graph. Of a block that runs again as a whole only the inner graph is compiled.

    Args:
        module: the graph, with its blocks as submodules.
        options: as for `torch.compile`.
        fused: counts what torch fuses for async tensor parallelism; None: it is not asked to.

    Raises:
        Error: torch shall fuse collectives with products, and no block has any that it fuses; or Inductor shall compile
            a block that reads halos.
    """
    if fused is not None:
        _expect_collectives(module)
    if options.get("backend", "inductor") == "inductor":
        _expect_no_halos(module)
    made: dict[nn.Module, nn.Module] = {}
    for name, part in list(module._modules.items()):  # Also a graph that is there under two names.
        assert part is not None
        # Blocks that compute alike share one graph, which is compiled once.
        work = part.work if isinstance(part, BlockCall) else part
        if work not in made:
            made[work] = _compiled(work, options, fused)
        if isinstance(part, BlockCall):
            part.work = made[work]
        else:
            setattr(module, name, made[work])


def _expect_no_halos(module: nn.Module) -> None:
    """Raises Error for a block that reads keys of other ranks: in backward of its compiled code ranks would hang.

    Ranks read different numbers of keys, and Inductor orders collectives by what they send: on each rank differently.
    """
    blocks = [part for part in module.modules() if isinstance(part, fx.GraphModule) and part is not module]
    if any(block.graph.find_nodes(op="call_function", target=halo) for block in blocks):
        raise Error(
            "compile_blocks() would make the ranks of cp wait for each other forever: each reads the keys that its "
            "queries see, and torch's Inductor puts the collectives in another order on each rank",
            fix='compile_blocks(backend="aot_eager")',
            alternative='cp_attention="heads", with which all ranks send alike',
        )


def _expect_collectives(module: nn.Module) -> None:
    """Raises Error if torch shall fuse collectives with products, and no block of a graph has any that it fuses."""
    blocks = [part for part in module.modules() if isinstance(part, fx.GraphModule) and part is not module]
    if not any(has_collectives(block.graph) for block in blocks):
        raise Error(
            "compile_blocks(async_tp=True) would fuse nothing: no block of a graph has an all-gather or "
            "a reduce-scatter",
            fix="a model whose plan has a line `sequence` with cut operators: print(model.plan)",
            alternative="compile_blocks()",
        )


def _separate(block: nn.Module) -> None:
    """Makes collectives and products operators of their own: torch fuses a collective with the product beside it."""
    assert isinstance(block, fx.GraphModule)
    for node in block.graph.find_nodes(op="call_function", target=async_linear):
        node.target = separate_products
    block.recompile()


def _compiled(work: nn.Module, options: Mapping[str, Any], fused: FusedPairs | None) -> nn.Module:
    if isinstance(work, Recomputed):
        work = work.compilable
    if isinstance(work, Checkpointed):
        work.inner = _compiled(work.inner, options, fused)
        return work
    # It may have been compiled before, with other options.
    compiled = work if isinstance(work, Compiled) else Compiled(work)
    fusible = fused is not None and isinstance(compiled.inner, fx.GraphModule) and has_collectives(compiled.inner.graph)
    compiled.fusion = BlockFusion(fused) if fusible else None  # type: ignore[arg-type]
    if fusible:
        _separate(compiled.inner)
    compiled.inner.compile(
        **_overlapping(compiled.inner, options) if compiled.fusion is None else compiled.fusion.options(options)
    )
    return compiled


def _overlapping(block: nn.Module, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments of `torch.compile` for a block; those of the user count more than ours."""
    graph = block.graph if isinstance(block, fx.GraphModule) else fx.Graph()
    communicates = any(node.target in COMMUNICATING for node in graph.nodes)
    if not communicates or options.get("backend", "inductor") != "inductor":
        return options
    return with_inductor_options(options, OVERLAP | inductor_options(options))
