"""Operators on the channels that a rank holds: convolutions, norms and poolings.

torch refuses some of them on a rank without channels. There they compute on one channel of zeros, and the result drops
this channel, so that backward, vmap and second derivatives are torch's own. The number of groups follows from shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def convolution(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """Returns a convolution without a bias.

    Args:
        x: [* (groups in) places...]
        weight: [(groups out) in kernel...]
        stride, padding, dilation: as torch's.

    Returns:
        [* (groups out) places...]
    """
    places = weight.dim() - 2
    dim, channels = x.dim() - places - 1, weight.shape[0]
    # In this order: the channels of a group, then of x, whose number gives the groups, then the outputs of a group.
    weight = _at_least(weight, 1, 1)
    x = _at_least(x, dim, weight.shape[1])
    groups = x.shape[dim] // weight.shape[1]
    weight = _at_least(weight, 0, groups)
    made = CONVOLUTIONS[places](x, weight, None, stride, padding, dilation, groups)
    return made if channels else made.narrow(dim, 0, 0)


def conv_transpose(x: Tensor, weight: Tensor, stride: Any, padding: Any, output_padding: Any, dilation: Any) -> Tensor:
    """Returns a transposed convolution without a bias.

    Args:
        x: [* (groups in) places...]
        weight: [groups in out kernel...]
        stride, padding, output_padding, dilation: as torch's.

    Returns:
        [* (groups out) places...]
    """
    places, channels = weight.dim() - 3, weight.shape[0] * weight.shape[2]
    dim = x.dim() - places - 1
    for d in range(3):
        weight = _at_least(weight, d, 1)
    x = _at_least(x, dim, weight.shape[0] * weight.shape[1])
    rest = (None, stride, padding, output_padding, weight.shape[0], dilation)
    made = TRANSPOSED[places](x, weight.flatten(0, 1), *rest)
    return made if channels else made.narrow(dim, 0, 0)


def convolution_like(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """Returns an empty tensor of the sizes of `convolution`, for example values.

    torch's own function for sizes compares the number of rows with 16, to select a kernel.
    """
    places = weight.dim() - 2
    sizes = []
    for i, length in enumerate(x.shape[x.dim() - places :]):
        # (n + 2 p - d (k - 1) - 1)//s + 1, as in the documentation of torch.nn.Conv2d.
        reach = _of(dilation, i) * (weight.shape[2 + i] - 1)
        total_padding = {"same": reach, "valid": 0}[padding] if isinstance(padding, str) else 2 * _of(padding, i)
        sizes.append((length + total_padding - reach - 1) // _of(stride, i) + 1)
    return x.new_empty((*x.shape[: x.dim() - places - 1], weight.shape[0], *sizes))


def conv_transpose_like(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, output_padding: Any, dilation: Any
) -> Tensor:
    """Returns an empty tensor of the sizes of `conv_transpose`, for example values: see `convolution_like`."""
    places = weight.dim() - 3
    sizes = []
    for i, length in enumerate(x.shape[x.dim() - places :]):
        # (n - 1) s - 2 p + d (k - 1) + o + 1, as in the documentation of torch.nn.ConvTranspose2d.
        reach = _of(dilation, i) * (weight.shape[3 + i] - 1)
        sizes.append((length - 1) * _of(stride, i) - 2 * _of(padding, i) + reach + _of(output_padding, i) + 1)
    return x.new_empty((*x.shape[: x.dim() - places - 1], weight.shape[0] * weight.shape[2], *sizes))


def _of(numbers: Any, i: int) -> int:
    """Returns the number of a dimension; a single number is that of all."""
    number: int = numbers if isinstance(numbers, int) else numbers[i if len(numbers) > 1 else 0]
    return number


def by_channel(x: Tensor, op: Callable[..., Tensor], dim: int, args: tuple[Any, ...]) -> Any:
    """Returns `op(x, *args)` for an operator on each channel by itself: pooling, interpolation.

    Args:
        x: [* channels places...]
        op: an operator that returns a tensor, or a tuple of tensors, with the channels in the same dimension as `x`.
        dim: the dimension of the channels.
    """
    if x.shape[dim]:
        return op(x, *args)
    made = op(_at_least(x, dim, 1), *args)
    if isinstance(made, Tensor):
        return made.narrow(dim, 0, 0)
    return tuple(part.narrow(dim, 0, 0) for part in made)


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, training: bool,
    momentum: float, eps: float,
) -> Tensor:  # fmt: skip
    """Normalises each channel by its mean and variance: those of the batch in training, else the given ones.

    It does not write into `mean` and `var`.

    Args:
        x: [n channels places...]
        weight, bias, mean, var: [channels], or None.
    """
    return _normalised(x, weight, bias, mean, var, training, momentum, eps)[0]


def batch_norm_moving(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises each channel by its mean and variance in the batch; also returns new running mean and variance.

    Args:
        x: [n channels places...]
        weight, bias: [channels], or None.
        mean, var: [channels], the old running mean and variance, which are not written into.
    """
    # Clones: `torch.batch_norm` writes the new statistics into them.
    return _normalised(x, weight, bias, mean.detach().clone(), var.detach().clone(), True, momentum, eps)


def _normalised(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Any, Any]:
    none = x.shape[1] == 0
    operands: list[Any] = [
        operand if operand is None or not none else _at_least(operand, 0, 1) for operand in (weight, bias, mean, var)
    ]
    how = training, momentum, eps, torch.backends.cudnn.enabled
    made = torch.batch_norm(_at_least(x, 1, 1), operands[0], operands[1], operands[2], operands[3], *how)
    return (made.narrow(1, 0, 0) if none else made), mean, var


def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalises each group of channels over all its channels and places.

    Args:
        x: [n groups channels places...]
        weight, bias: [groups channels], or None.
    """
    full = _at_least(x, 1, 1)
    scale, shift = (None if operand is None else _at_least(operand, 0, 1).flatten() for operand in (weight, bias))
    made = F.group_norm(full.flatten(1, 2), full.shape[1], scale, shift, eps).unflatten(1, full.shape[1:3])
    return made if x.shape[1] else made.narrow(1, 0, 0)


def _at_least(x: Tensor, dim: int, channels: int) -> Tensor:
    """Returns `x`; if `dim` is empty, `x` with so many channels of zeros."""
    if x.shape[dim]:
        return x
    zeros = x.new_zeros([channels if d == dim else n for d, n in enumerate(x.shape)])
    return torch.cat([x, zeros], dim)
