"""Files of a checkpoint that are not what was written: an error that names the file, and nothing is changed."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from trainers import Layout, batch, bit_flips, changed, edited, fingerprint, mine, started, torn, trained

import autotp
from autotp.sharding.boxes import local_of


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
def test_load_checkpoint_names_the_damaged_file(count: int, tmp_path: Path) -> None:
    run_ranks(damaged, 2, str(tmp_path), count, timeout=500)


# ---- what a manifest says, with a checksum that fits

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 1.5, float("nan"), "", "x", "../file", [], {}, [[]], {"": 0}, [1, 2, 3]
)  # fmt: skip


def places_in(content: Any) -> Iterator[tuple[Any, Any]]:
    """Each entry of nested dicts and lists, as the dict or list that has it, and its key."""
    for key, value in list(content.items() if isinstance(content, dict) else enumerate(content)):
        yield content, key
        if isinstance(value, dict | list):
            yield from places_in(value)


def odd(rank: int, n: int, folder: str, count: int) -> int:
    """Puts other values into a manifest. Returns how many were refused; the others are data that anything may be."""
    trainer, optimizer = started((1, 1, 1), layers=1)
    trained(trainer, optimizer, range(1))
    autotp.save_checkpoint(folder, trainer, optimizer, 1)
    before, draw, refused = fingerprint(trainer, optimizer), random.Random(0), 0
    manifest = Path(folder, "step-00000001", "manifest.json")

    def change(content: dict[str, Any]) -> None:
        at, key = draw.choice(list(places_in(content)))
        at[key] = draw.choice(ODD)

    for _ in range(count):
        with changed(manifest, rank, manifest.read_bytes()):
            edited(manifest.parent, change)
            try:
                autotp.load_checkpoint(folder, trainer, optimizer)
            except autotp.Error:
                refused += 1
                assert fingerprint(trainer, optimizer) == before
        assert autotp.load_checkpoint(folder, trainer, optimizer) == 1
    return refused


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=[pytest.mark.rare, pytest.mark.timeout(600)])])
def test_load_checkpoint_of_odd_values_is_an_error_or_loads(count: int, tmp_path: Path) -> None:
    """Each is an Error that changes nothing, or loads: no other exception leaves `load_checkpoint`."""
    (refused,) = run_ranks(odd, 1, str(tmp_path), count, timeout=500)
    assert 0.9 * count < refused


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


def test_load_checkpoint_sees_a_file_of_an_older_step(tmp_path: Path) -> None:
    for rank, text in enumerate(run_ranks(mixed, 2, str(tmp_path), timeout=100)):
        assert re.sub("`.*?`", "NAME", text).splitlines()[:2] == [
            "load_checkpoint: /step-00000002/rank-00001.tensors is damaged: NAME is not what was written",
            "  try      remove /step-00000002",
        ], rank


# ---- every file in the place of every other, in each layout


def all_that_is_loaded(trainer: autotp.Trainer, optimizers: list[Any], thing: Any) -> str:
    """This rank's part of what a checkpoint may change, as text."""
    states = [one.state.get(p, {}) for one in optimizers for group in one.param_groups for p in group["params"]]
    options = [{k: v for k, v in group.items() if k != "params"} for one in optimizers for group in one.param_groups]
    tensors = [p.detach() for p in trainer.parameters()], [list(state.items()) for state in states]
    texts = torch.utils._pytree.tree_map_only(Tensor, lambda x: local_of(x).tolist(), tensors)
    return repr((texts, options, thing.state_dict(), torch.get_rng_state().tolist(), trainer.steps))


def optimizers_of(trainer: autotp.Trainer, whole: bool) -> list[Any]:
    matrices = [p for p in trainer.parameters() if p.dim() == 2] if whole else []
    others = [p for p in trainer.parameters() if not any(p is matrix for matrix in matrices)]
    muon = [autotp.whole_matrices(torch.optim.Muon)(matrices, lr=0.01)] if whole else []
    return [*muon, AdamW(others, lr=0.01)]


def stepped(trainer: autotp.Trainer, optimizers: list[Any], steps: range) -> None:
    torch.manual_seed(steps.stop)
    dp = trainer.mesh["dp"]
    for step in steps:
        trainer.step(**mine(batch(step), dp.get_local_rank(), dp.size()))
        for one in optimizers:
            one.step()
            one.zero_grad()


def replaced_by(at: Path, others: list[Path]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What may stand in the place of a file, with how it gets there."""
    for other in (folder / at.name for folder in others if (folder / at.name).exists()):
        yield f"a copy of {other}", lambda other=other: shutil.copy(other, at)  # type: ignore[misc]
        yield f"a link to {other}", lambda other=other: (at.unlink(), at.symlink_to(other))  # type: ignore[misc]
        yield f"the same file as {other}", lambda other=other: (at.unlink(), os.link(other, at))  # type: ignore[misc]
    yield "a folder", lambda: (at.unlink(), at.mkdir())
    yield "a link to itself", lambda: (at.unlink(), at.symlink_to(at.name))
    yield "a link to nothing", lambda: (at.unlink(), at.symlink_to("nothing"))
    yield "a pipe", lambda: (at.unlink(), os.mkfifo(at))
    yield "zeros", lambda: at.write_bytes(bytes(at.stat().st_size))
    yield "another order", lambda: at.write_bytes(at.read_bytes()[1:] + at.read_bytes()[:1])
    yield "other line ends", lambda: at.write_bytes(at.read_bytes().replace(b"\n", b"\r\n"))
    rest = next((file for file in at.parent.glob("rank-*") if file != at), at)
    if at != rest:
        yield "another rank's", lambda: shutil.copy(rest, at) if at.suffix == rest.suffix else at.unlink()


HARMLESS: dict[str, Callable[[Path], Any]] = {
    "read only": lambda step: [file.chmod(0o444) for file in step.iterdir()],
    "more files": lambda step: [
        (step / name).write_bytes(b"x") for name in ("rank-00009.tensors", ".metadata", "a.py")
    ],
    "links": lambda step: [
        (file.rename(step.parent / file.name), file.symlink_to(step.parent / file.name))
        for file in list(step.iterdir())
    ],
}


def in_the_wrong_place(rank: int, n: int, root: str, layout: Layout, whole: bool, more: dict[str, Any]) -> int:
    """Each is an error that names the file, on every rank, and nothing is changed; or all values are those saved."""
    folders = {name: Path(root, name) for name in ("layout", "older", "good", "damaged")}
    elsewhere, _ = started((1, 2, 1) if layout != (1, 2, 1) else (2, 1, 1))
    autotp.save_checkpoint(folders["layout"], elsewhere, optimizers_of(elsewhere, whole), 2)
    (trainer, _), thing = started(layout, dropout=0.1, **more), Kept()
    optimizers = optimizers_of(trainer, whole)
    stepped(trainer, optimizers, range(1))
    autotp.save_checkpoint(folders["older"], trainer, optimizers, 1, thing=thing)
    stepped(trainer, optimizers, range(1, 2))
    autotp.save_checkpoint(folders["good"], trainer, optimizers, 2, thing=thing)
    saved = all_that_is_loaded(trainer, optimizers, thing)
    step, count = folders["damaged"] / "step-00000002", 0
    others = [folders["layout"] / "step-00000002", folders["older"] / "step-00000001"]

    def damaged_by(change: Callable[[], Any]) -> None:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folders["damaged"], ignore_errors=True)
            shutil.copytree(folders["good"], folders["damaged"])
            change()
        dist.barrier()

    def load() -> int:
        return autotp.load_checkpoint(folders["damaged"], trainer, optimizers, thing=thing)

    stepped(trainer, optimizers, range(2, 3))
    thing.tensor.zero_()
    before = all_that_is_loaded(trainer, optimizers, thing)
    for name in sorted(path.name for path in (folders["good"] / "step-00000002").iterdir()):
        for what, change in replaced_by(step / name, others):
            damaged_by(change)
            with pytest.raises(autotp.Error, match="step-00000002") as told:
                load()
            assert name in str(told.value) or name == "manifest.json", (what, told.value)
            assert all_that_is_loaded(trainer, optimizers, thing) == before, what
            count += 1
    for what, harmless in HARMLESS.items():
        damaged_by(lambda harmless=harmless: harmless(step))  # type: ignore[misc]
        stepped(trainer, optimizers, range(2, 3))
        assert load() == 2 and all_that_is_loaded(trainer, optimizers, thing) == saved, what
        count += 1
    return count


class Kept:
    """Something that is saved by name."""

    def __init__(self) -> None:
        self.tensor = torch.arange(40.0)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "pair": (1, [0.5, None])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "whole", "more"),
    [
        ((2, 1, 1), True, {}),
        ((1, 2, 1), False, {}),
        ((1, 1, 2), False, {"zero": 3}),
        ((1, 1, 2), True, {"zero": 1}),
    ],
    ids=["tp-whole", "pp", "zero3", "zero1-whole"],
)
def test_load_checkpoint_sees_files_that_were_swapped(
    layout: Layout, whole: bool, more: dict[str, Any], tmp_path: Path
) -> None:
    counts = run_ranks(in_the_wrong_place, 2, str(tmp_path), layout, whole, more, timeout=250)
    assert counts[0] == counts[1] > 40
