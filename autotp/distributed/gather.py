"""gather: joins the parts of a cut output or parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autotp.distributed.cut_tensors.cut_parameter import CutTensor, plain_whole
from autotp.distributed.cut_tensors.sharded_tensor import Sharded, as_sharded, whole


def gather(output: Any) -> Any:
    """Returns whole tensors in place of cut ones: what one device would have returned.

    An output stays cut with `outputs="local"`, and in training beside a loss, as logits do. What is computed from it
    and is still cut, such as a cast or a slice of rows, a cut parameter, its gradient, and values computed from them
    element by element are gathered too. A whole tensor comes back as it is. The call is differentiable: each rank gets
    its part of the gradient. Call it on every rank.

    Args:
        output: a tensor that the parallel model returned, a parameter of the model, or a structure of such tensors.

    Raises:
        Error: a rank did not call it, within the timeout of the group.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        >>> model = autotp.parallelize(model, tp=1, example_inputs=torch.ones(2, 4), outputs="local")
        >>> autotp.gather(model(torch.ones(2, 4))).shape
        torch.Size([2, 4])
        >>> autotp.gather(model[0].weight).shape  # with tp=2 each rank holds [8, 4] of it
        torch.Size([16, 4])
    """
    return _mapped(lambda x: _gathered(as_sharded(x)) if isinstance(x, Tensor) else x, output)


def gather_all(output: Any) -> Any:
    """Returns a structure with its cut tensors gathered, and other values unchanged."""
    return _mapped(lambda x: _gathered(x) if isinstance(x, Sharded) else x, _mapped(as_sharded, output))


def _mapped(function: Callable[[Any], Any], output: Any) -> Any:
    """Returns the structure with `function` of each value. A `torch.Size` stays; torch would make a tuple of it."""
    return pytree.tree_map(function, output, is_leaf=lambda x: isinstance(x, torch.Size))


def _gathered(output: Tensor) -> Tensor:
    if isinstance(output, Sharded):
        return whole(output)
    return plain_whole(output) if isinstance(output, CutTensor) else output
