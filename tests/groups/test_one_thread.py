"""one_thread: regions of one thread nest; a second thread is an error in both, until the group is another one."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
import torch.distributed as dist
from ranks import run_ranks

import autotp
from autotp.groups.one_thread import is_waiting, one_thread

MEETS = "two threads use the process group of axis `tp` at once"


def regions(rank: int, n: int, place: str) -> None:
    group = str(dist.group.WORLD.group_name)
    with one_thread("outer", group):
        with one_thread("inner", group):
            assert is_waiting()
        assert is_waiting()
    assert not is_waiting()

    def enter() -> None:
        with pytest.raises(autotp.Error, match=f"^second: {MEETS}"), one_thread("second", group):
            pytest.fail("the region was entered")
        met.append(True)

    met = list[bool]()
    with pytest.raises(autotp.Error, match=f"^first: {MEETS}"), one_thread("first", group):
        other = Thread(target=enter)
        other.start()
        other.join()
    assert met
    with pytest.raises(autotp.Error, match=MEETS), one_thread("later", group):
        pytest.fail("nobody knows what the threads have received")
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=n)
    assert str(dist.group.WORLD.group_name) == group
    with one_thread("anew", group), one_thread("inner", group):
        assert is_waiting()
    assert not is_waiting()


def test_one_thread_refuses_a_second_thread_until_a_new_group(tmp_path: Path) -> None:
    run_ranks(regions, 1, (tmp_path / "meet").as_uri(), alone=True)
