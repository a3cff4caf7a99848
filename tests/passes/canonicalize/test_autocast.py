"""autocast: with autocast off, the written-out casts give the dtypes and numbers that autocast gives."""

from collections.abc import Callable

import pytest
import torch
from graphs import Function, draft, lines, ops, run, some
from torch import Tensor

from autotp.passes.canonicalize.autocast import autocast
from autotp.passes.capture.autocast_regions import Autocast, enter_autocast, exit_autocast
from autotp.passes.capture.capture import capture

OFF, BF16 = Autocast(), Autocast("cpu", torch.bfloat16)
X, W = some(3, 4, dtype=torch.float32), some(4, 4, dtype=torch.float32)


def linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w)


def double(x: Tensor, w: Tensor) -> Tensor:
    """Autocast leaves float64 alone."""
    return linear(x.double(), w.double())


def pointwise(x: Tensor, w: Tensor) -> Tensor:
    """Is none of autocast's."""
    return torch.relu(x) * x


def twice(x: Tensor, w: Tensor) -> Tensor:
    """The second product reads what is bfloat16 already."""
    return linear(linear(x, w), w)


def precise(x: Tensor, w: Tensor) -> Tensor:
    """An operator that autocast runs in float32."""
    return torch.nn.functional.mse_loss(linear(x, w), x.bfloat16())


def widest(x: Tensor, w: Tensor) -> Tensor:
    """`cat` of two dtypes is in the wider one, with autocast or without."""
    return torch.cat([linear(x, w), x])


def as_many_as_values_say(x: Tensor, w: Tensor) -> Tensor:
    """How many values differ, and how often one is repeated, is not known on tensors without values."""
    often = x[:, 0].repeat_interleave((x[:, 1] > 0).long() + 1)
    return linear(x, w) + torch.unique_consecutive(x[:, 0]).sum() + often.sum()


def split_as_values_say(x: Tensor, w: Tensor) -> Tensor:
    """The sizes of the parts add up to the rows, which is not known on tensors without values (JetMoe's experts)."""
    counts = (x[:, 0] > -9).long().tolist()
    parts = torch.cat([linear(rows, w) for rows in x.split(counts)])
    return torch.zeros(3, 4, dtype=parts.dtype).index_add(0, torch.arange(3), parts)


def transformed(x: Tensor, w: Tensor) -> Tensor:
    """There is no Fourier transform of bfloat16: autocast casts to float32."""
    return torch.fft.fft(linear(x, w)).real


def off_inside(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = linear(x, w)
    return linear(y, w)


def on_inside(x: Tensor, w: Tensor) -> Tensor:
    """Regions in regions: what was on before is on again behind each."""
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, w)
        with torch.autocast("cpu", enabled=False):
            y = linear(y.float(), w)
        y = linear(y, w)
    return linear(y.float(), w)


def defaulted(x: Tensor, w: Tensor) -> Tensor:
    """A region without a dtype has the device's."""
    with torch.autocast("cpu"):
        return linear(x, w)


@pytest.mark.parametrize(
    ("function", "around", "casts"),
    [
        pytest.param(linear, OFF, 0, id="off"),
        pytest.param(linear, BF16, 2, id="linear"),
        pytest.param(twice, BF16, 3, id="second-product"),
        pytest.param(double, BF16, 2, id="float64"),
        pytest.param(pointwise, BF16, 0, id="pointwise"),
        pytest.param(precise, BF16, 5, id="in-float32"),
        pytest.param(widest, BF16, None, id="widest"),
        pytest.param(as_many_as_values_say, BF16, 3, id="sizes-of-values"),
        pytest.param(split_as_values_say, BF16, None, id="parts-of-values"),
        pytest.param(transformed, BF16, 3, id="fourier"),
        pytest.param(off_inside, BF16, 2, id="off-inside"),
        pytest.param(on_inside, OFF, None, id="on-inside"),
        pytest.param(defaulted, OFF, 2, id="default-dtype"),
    ],
)
def test_autocast_written_out_gives_autocast_s_numbers(
    function: Callable[..., Tensor], around: Autocast, casts: int | None
) -> None:
    graph = autocast(capture(Function(function), (X, W), {}, around).graph, around)
    assert not {enter_autocast, exit_autocast} & {node.target for node in graph.nodes}
    assert casts is None or ops(graph).count("to") == casts
    with around.on():
        expected = function(X, W)
    found = run(graph, [X, W])[0]
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_autocast_does_the_docstring_s_example() -> None:
    graph = autocast(capture(Function(linear), (X, W), {}, BF16).graph, BF16)
    assert lines(graph) == [
        "to(tensors_0, bfloat16)",
        "to_1 = to(tensors_1, bfloat16)",
        "linear(to, to_1)",
        "return linear",
    ]


def test_autocast_leaves_regions_of_another_device() -> None:
    """There it casts what a graph on this device does not have."""

    def make(call: Callable[..., torch.fx.Node], x: torch.fx.Node) -> torch.fx.Node:
        region = call(enter_autocast, "cuda", torch.float16, True, None)
        y = call(torch.ops.aten.mm.default, x, x)
        call(exit_autocast, region)
        return y

    graph = draft(make, x=W)
    assert lines(autocast(graph, OFF)) == lines(graph)
