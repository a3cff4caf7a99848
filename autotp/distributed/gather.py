"""gather: puts together an output or a parameter that is cut."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from autotp.distributed.cut_parameter import Cut, CutTensor
from autotp.distributed.live_models import sorted_by_model
from autotp.distributed.mesh import Mesh
from autotp.distributed.sharded_tensor import Sharded
from autotp.errors import Error
from autotp.ops import collectives, placement_moves
from autotp.sharding.layout import Layout
from autotp.sharding.partition import chunk_sizes

HELD = "autotp_held"
"""The attribute that a parallel model gives each tensor it returns, so that `gather` knows what it is given."""


@dataclass(frozen=True)
class OutputLayout:
    """How an output is held: whole, or cut by a layout over a mesh axis. (In its shape -1 is a size not known yet.)"""

    layout: Layout | None
    mesh: Mesh


def mark(value: Any, held: OutputLayout) -> None:
    """Notes on an output tensor how it is held."""
    if isinstance(value, Tensor):
        setattr(value, HELD, held)


def marked(value: Any) -> Any:
    """A tensor that a parallel model returned cut, as the whole that it is a part of; anything else as it is."""
    held: OutputLayout | None = getattr(value, HELD, None) if isinstance(value, Tensor) else None
    return value if held is None or held.layout is None else Sharded(value, held.layout, held.mesh)


def gather(output: Any) -> Any:
    """Returns whole tensors in place of cut ones: what one device would have returned.

    An output stays cut with `outputs="local"`, and in training beside a loss: logits [batch seq vocab/tp] become
    [batch seq vocab]. A cut parameter, its gradient, and values computed from them element by element are gathered too.
    A whole tensor comes back as it is. The call is differentiable: each rank gets its part of the gradient. Call it on
    every rank.

    Args:
        output: a tensor that the parallel model returned, a parameter of the model, or a structure of such tensors.

    Raises:
        Error: a tensor is neither: it does not belong to a parallel model, or was computed from its output.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        >>> model = autotp.parallelize(model, tp=1, example_inputs=torch.ones(2, 4), outputs="local")
        >>> autotp.gather(model(torch.ones(2, 4))).shape
        torch.Size([2, 4])
        >>> autotp.gather(model[0].weight).shape  # with tp=2 each rank holds [8, 4] of it
        torch.Size([16, 4])
    """
    return pytree.tree_map_only(Tensor, _gathered, output)


def gather_all(output: Any) -> Any:
    """A structure with what is cut in it put together; the rest as it is."""
    return pytree.tree_map(lambda x: _gathered(x) if isinstance(x, Sharded) else x, pytree.tree_map(marked, output))


def _gathered(output: Tensor) -> Tensor:
    if isinstance(output, Sharded):
        return _joined(output.part, output.held, output.mesh)
    if isinstance(output, CutTensor):
        return cast(Tensor, _Whole.apply(output, output.autotp_cut))
    held: OutputLayout | None = getattr(output, HELD, None)
    if held is None and sorted_by_model([output])[0]:
        return output
    if held is None:
        raise Error(
            f"gather: a tensor {list(output.shape)} that is not an output of a parallel model",
            fix="autotp.gather(output) on what the model returned, before anything is computed from it",
        )
    if held.layout is None or held.mesh.size == 1:
        return output
    return _joined(output, held.layout, held.mesh)


class _Whole(torch.autograd.Function):
    """The whole parameter. Each rank that holds some of it gets the gradient of all that it holds.

    (Of what several ranks hold an output has one that counts; a parameter's gradient is the same on all of them.)
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, cut: Cut) -> Tensor:
        """The whole, of a part."""
        ctx.cut = cut
        return _joined(part.detach().as_subclass(Tensor), cut.layout, cut.mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """This rank's part of the gradient."""
        return ctx.cut.layout.take(gradient, ctx.cut.mesh.rank), None


def _joined(local: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    assert layout.dim is not None
    if layout.repeated:
        mine = layout.first(mesh.rank)
        places = tuple(layout.places(mesh.rank, mine))
        return collectives.reduce(
            placement_moves.place(local, layout.dim, tuple(mine), places, layout.shape[layout.dim]), mesh.group
        )
    lengths = layout.lengths()
    size, block = sum(lengths), gcd(*lengths)
    assert lengths == [n * block for n in chunk_sizes(size // block, mesh.size)], "an output is cut in whole blocks"
    whole = collectives.gather(local, mesh.group, layout.dim, size, block)
    order = torch.tensor([i for piece in layout.pieces for a, b in piece for i in range(a, b)])
    if torch.equal(order, torch.arange(size)):
        return whole
    return whole.index_select(layout.dim, order.argsort().to(whole.device))
