"""room: what a device has for tensors, and what a job takes of a device, are one rule."""

import pytest

from autotp.costs.hardware import GIB, KINDS
from autotp.costs.links import RankGroup
from autotp.costs.room import CHANNEL_BYTES, MISSED, axis_groups, buffer_bytes, reserved, tensor_room
from autotp.tools.estimation.error_bars import memory_bar
from autotp.tools.estimation.result import KINDS_OF_TENSORS

A100, CPU = KINDS["a100-80gb"], KINDS["cpu-gloo"]
NODE, NETWORK = RankGroup(size=8, stride=1), RankGroup(size=48, stride=8)


def test_buffers_are_those_of_channels() -> None:
    assert buffer_bytes([NODE, NETWORK, RankGroup(size=1, stride=1)], A100) == pytest.approx(26 * CHANNEL_BYTES)
    assert buffer_bytes([NODE], CPU) == 0


def test_a_rank_is_in_a_group_along_each_axis_and_in_one_of_all() -> None:
    sizes = [(group.size, group.stride) for group in axis_groups((4, 1, 2, 3))]
    assert sizes == [(4, 1), (1, 4), (2, 4), (3, 8), (24, 1)]


@pytest.mark.parametrize("name", KINDS)
def test_tensors_that_fill_their_room_fill_the_device(name: str) -> None:
    device = KINDS[name]
    room, buffers = tensor_room(device, (4, 1, 2)), buffer_bytes(axis_groups((4, 1, 2)), device)
    assert reserved(room, MISSED * room, buffers) == pytest.approx(device.memory) and room < device.memory - GIB


def test_the_room_is_for_the_widest_error_bar() -> None:
    bars = [memory_bar(category, is_gpu) for category in KINDS_OF_TENSORS for is_gpu in (True, False)]
    assert max(bars) <= MISSED < max(bars) + 0.01
