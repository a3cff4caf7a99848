"""channels: on a part of the channels, torch's own operators; on a rank without channels, empty results and gradients.

A rank's part of the result is that part of the whole result: of 5 groups, ranks have 2, 2, 1 and none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import some
from torch import Tensor

from autotp.ops import channels

RANGES = [(0, 2), (2, 4), (4, 5), (5, 5)]
DEPTHWISE = some(5, 1, 3)


def part(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    return x.narrow(dim, start, stop - start).detach().requires_grad_()


CASES: dict[str, tuple[Tensor, Callable[[Tensor, int, int], Tensor], Callable[[Tensor], Tensor]]] = {
    "depthwise": (
        some(2, 5, 7),
        lambda x, a, b: channels.convolution(x, DEPTHWISE[a:b], [1], [1], [1]),
        lambda x: F.conv1d(x, DEPTHWISE, None, 1, 1, 1, 5),
    ),
    "pool": (
        some(2, 5, 6, 6),
        lambda x, a, b: channels.by_channel(x, F.max_pool2d, 1, ([2, 2],)),
        lambda x: F.max_pool2d(x, [2, 2]),
    ),
    "batch-norm": (
        some(4, 5, 3),
        lambda x, a, b: channels.batch_norm(x, some(5)[a:b], None, None, None, True, 0.1, 1e-5),
        lambda x: F.batch_norm(x, None, None, some(5), None, training=True),
    ),
    "group-norm": (
        some(2, 5, 3, 4),
        lambda x, a, b: channels.group_norm(x, some(5, 3)[a:b], some(5, 3)[a:b], 1e-5),
        lambda x: F.group_norm(x.flatten(1, 2), 5, some(15), some(15)).unflatten(1, (5, 3)),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_channel_operators_on_parts_equal_the_whole(name: str, start: int, stop: int) -> None:
    x, mine, torchs = CASES[name]
    whole, local = part(x, 0, 0, x.shape[0]), part(x, 1, start, stop)
    expected, found = torchs(whole), mine(local, start, stop)
    torch.testing.assert_close(found, expected[:, start:stop])
    (expected.sin().sum()).backward()
    (found.sin().sum()).backward()
    assert whole.grad is not None
    torch.testing.assert_close(local.grad, whole.grad[:, start:stop])


@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_conv_transpose_on_parts_of_groups_equals_the_whole(start: int, stop: int) -> None:
    """A transposed convolution has its groups first, and each group has channels of its own."""
    x, weight = some(2, 5 * 2, 6), some(5, 2, 3, 3)
    expected = F.conv_transpose1d(x, weight.flatten(0, 1), None, 2, 1, 1, 5)
    local = x.unflatten(1, (5, 2))[:, start:stop].flatten(1, 2)
    found = channels.conv_transpose(local, weight[start:stop], [2], [1], [1], [1])
    torch.testing.assert_close(found, expected.unflatten(1, (5, 3))[:, start:stop].flatten(1, 2))


@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_batch_norm_moving_returns_new_statistics(start: int, stop: int) -> None:
    """New ones are returned; those that are given stay as they are."""
    x, mean, var = some(4, 5, 3), some(5), some(5).abs()
    wanted = mean.clone(), var.clone()
    expected = F.batch_norm(x, *wanted, training=True)
    given = mean[start:stop].clone(), var[start:stop].clone()
    found = channels.batch_norm_moving(x[:, start:stop], None, None, *given, 0.1, 1e-5)
    torch.testing.assert_close(found[0], expected[:, start:stop])
    assert given[0].equal(mean[start:stop]) and given[1].equal(var[start:stop])
    if stop > start:  # A rank without channels has no statistics to keep.
        torch.testing.assert_close(found[1:], (wanted[0][start:stop], wanted[1][start:stop]))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("stride", [1, 2, (3,)])
@pytest.mark.parametrize("padding", [0, 1, (2,), "same", "valid"])
@pytest.mark.parametrize("dilation", [1, (2,)])
@pytest.mark.parametrize("kernel", [1, 4, 5])
def test_example_convolutions_have_the_shapes_of_results(stride: Any, padding: Any, dilation: Any, kernel: int) -> None:
    """Those of example values are those of the operator, with a batch and without, and of empty parts."""
    for shape in ((2, 6, 19), (6, 18)):
        x = torch.randn(shape)
        for out in (4, 0):
            weight = torch.randn(out, 3, kernel)
            if padding != "same" or stride == 1:
                given = x, weight, stride, padding, dilation
                assert channels.convolution_like(*given).shape == channels.convolution(*given).shape
        if not isinstance(padding, str):
            weight = torch.randn(2, 3, 5, kernel)
            rest = x, weight, stride, padding, 0, dilation
            assert channels.conv_transpose_like(*rest).shape == channels.conv_transpose(*rest).shape
