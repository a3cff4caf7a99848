"""The benchmark of the host's time has a row for each way, in a process without other groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from calls import host_time


@pytest.fixture
def sends_nothing() -> Any:
    assert host_time.fake_pg  # It registers the backend.
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_each_way_has_a_row(sends_nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "DEPTHS", (1, 2))
    monkeypatch.setattr(host_time, "WAYS", {"tp": {}})
    found = [row.split() for row in host_time.rows("llama", rounds=2)]
    assert [row[1] for row in found] == ["step", "step", "token", "token"]
    assert all(float(row[-2]) > 0 for row in found)
