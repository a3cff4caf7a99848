"""The benchmark of the host's time: what a layer costs in each way, in a process without other groups.

Time varies from run to run, and counts do not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from calls import host_time
from calls.host_time import PLAIN


@pytest.fixture
def sends_nothing() -> Any:
    assert host_time.fake_pg  # It registers the backend.
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_layer_has_fewer_operators_than_on_one_device(sends_nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of one input, and slices that share out a dimension, are one function of backward each.

    Frames of Python, of which one device has 234 and 188, are what collectives and their regions take.
    """
    monkeypatch.setattr(host_time, "DEPTHS", (2, 3))
    monkeypatch.setattr(host_time, "WAYS", {"tp": {}})
    counted = {}
    for row in host_time.rows("llama", rounds=2):  # The first calls of a kind compare the ranks.
        what, *way = row[8:].split()[:-7]
        counts = [float(number) for number in row.split()[-3:]]
        counted[what, " ".join(way)] = counts
    operators, backward, _ = counted["step", PLAIN]
    assert counted["step", "tp"][0] <= 0.88 * operators and counted["step", "tp"][1] <= 0.77 * backward, counted
    assert counted["token", "tp"][0] <= counted["token", PLAIN][0], counted
    frames = {way: counted[way][2] for way in (("step", "tp"), ("token", "tp"))}
    assert frames["step", "tp"] <= 350 and frames["token", "tp"] <= 310, frames  # Before: 377 and 571.
