"""Files of a checkpoint that are not what was written: an error that names the file, and nothing is changed."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks
from torch.optim.lr_scheduler import StepLR
from trainers import bit_flips, changed, fingerprint, started, torn, trained

import autotp


def damaged(rank: int, n: int, folder: str, count: int) -> None:
    """Tries every kind of damage on every file."""
    trainer, optimizer = started((2, 1, 1), dropout=0.1)
    schedule = StepLR(optimizer, 1)
    trained(trainer, optimizer, range(2))
    autotp.save_checkpoint(folder, trainer, optimizer, 2, schedule=schedule)
    trained(trainer, optimizer, range(2, 3))
    before, draw = fingerprint(trainer, optimizer), random.Random(0)
    files = sorted(Path(folder, "step-00000002").iterdir())
    assert [file.name for file in files] == ["manifest.json", "rank-00000.tensors", "rank-00001.tensors"]
    for file in files:
        for content in [*bit_flips(file, draw, count), *torn(file, draw, count // 5)]:
            if content == file.read_bytes():
                continue
            with changed(file, rank, content):
                with pytest.raises(autotp.Error) as raised:
                    autotp.load_checkpoint(folder, trainer, optimizer, schedule=schedule)
                assert str(file) in str(raised.value)
        assert fingerprint(trainer, optimizer) == before
    assert autotp.load_checkpoint(folder, trainer, optimizer, schedule=schedule) == 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [15, pytest.param(300, marks=pytest.mark.rare)])
def test_damage_is_seen(count: int, tmp_path: Path) -> None:
    run_ranks(damaged, 2, str(tmp_path), count, timeout=500)


def mixed(rank: int, n: int, folder: str) -> str:
    """A file of an older step stands in the place of a newer one's."""
    trainer, optimizer = started((2, 1, 1))
    for step in (1, 2):
        trained(trainer, optimizer, range(step - 1, step))
        autotp.save_checkpoint(folder, trainer, optimizer, step)
    if rank == 0:
        shutil.copy(*(Path(folder) / f"step-0000000{step}" / "rank-00001.tensors" for step in (1, 2)))
    dist.barrier()
    before = fingerprint(trainer, optimizer)
    with pytest.raises(autotp.Error) as raised:
        autotp.load_checkpoint(folder, trainer, optimizer)
    assert fingerprint(trainer, optimizer) == before
    return str(raised.value).replace(folder, "")


def test_a_file_of_an_older_step(tmp_path: Path) -> None:
    for rank, text in enumerate(run_ranks(mixed, 2, str(tmp_path), timeout=100)):
        assert re.sub("`.*?`", "NAME", text).splitlines()[:2] == [
            "load_checkpoint: /step-00000002/rank-00001.tensors is damaged: NAME is not what was written",
            "  try      remove /step-00000002",
        ], rank
