"""Checkpoints of optimizers of whole matrices, and of several optimizers: any layout goes on from any other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_models import gpt
from torch import Tensor
from trainers import SMALL, batch, mine, started, wide_muon

import autotp

Layout = tuple[int, int, int, int]
"""tp, pp, dp, zero."""
MADE = {
    "muon": lambda kind, p: [
        kind(torch.optim.Muon)([x for x in p if x.dim() == 2], lr=0.02),
        torch.optim.SGD([x for x in p if x.dim() != 2], lr=0.1, momentum=0.9),
    ],
    "adafactor": lambda kind, p: [kind(torch.optim.Adafactor)(p, lr=0.01)],
}
Found = tuple[dict[str, Tensor], dict[str, dict[str, Any]]]
"""A model's state, and the states of the parameters that this rank owns."""


def same(kind: Any) -> Any:
    return kind


def made(name: str, layout: Layout, kind: Any = autotp.whole_matrices) -> tuple[autotp.Trainer, list[Any]]:
    trainer, _ = started(layout[:3], model=gpt(seed=0, n_layer=2, **SMALL).double(), zero=layout[3])
    return trainer, MADE[name](kind, list(trainer.parameters()))


def train(trainer: autotp.Trainer, optimizers: list[Any], steps: range) -> None:
    dp = trainer.mesh["dp"]
    for step in steps:
        trainer.step(**mine(batch(step), dp.get_local_rank(), dp.size()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def states(trainer: autotp.Trainer, optimizer: Any) -> dict[str, dict[str, Any]]:
    named = {name: p for name, p in trainer.named_parameters() if optimizer.state.get(p)}
    return {name: copy.deepcopy(optimizer.state[p]) for name, p in named.items()}


def saved(rank: int, n: int, folder: Path, name: str, layout: Layout, kind: Any) -> Found:
    trainer, optimizers = made(name, layout, kind)
    with wide_muon():
        train(trainer, optimizers, range(3))
        autotp.save_checkpoint(folder, trainer, optimizers, 3)
        kept = states(trainer, optimizers[0])
        train(trainer, optimizers, range(3, 6))
    return autotp.full_state_dict(trainer), kept


def resumed(rank: int, n: int, folder: Path, name: str, layout: Layout, kind: Any) -> Found:
    """A checkpoint that was loaded is saved again before any step, and loaded again."""
    trainer, optimizers = made(name, layout, kind)
    assert autotp.load_checkpoint(folder, trainer, optimizers) == 3
    again = folder.with_name("again")
    autotp.save_checkpoint(again, trainer, optimizers, 3)
    later, others = made(name, layout, kind)
    assert autotp.load_checkpoint(again, later, others) == 3
    kept = states(later, others[0])
    with wide_muon():
        train(later, others, range(3, 6))
    return autotp.full_state_dict(later), kept


ONE = (1, 1, 1, 0)
PAIRS: list[tuple[str, Layout, Layout]] = [
    ("muon", (2, 1, 2, 1), (2, 1, 1, 0)), ("muon", (2, 1, 1, 0), ONE), ("muon", ONE, (1, 2, 2, 3)),
    ("adafactor", (3, 1, 1, 0), (2, 1, 1, 0)),
]  # fmt: skip
"""The first one writes with torch's own classes where it is one process, and so does the second one read."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "before", "after"), PAIRS)
def test_states_of_whole_matrices_go_on_in_another_layout(
    tmp_path: Path, name: str, before: Layout, after: Layout
) -> None:
    kinds = [same if layout == ONE else autotp.whole_matrices for layout in (before, after)]
    processes = [layout[0] * layout[1] * layout[2] for layout in (before, after)]
    with_torchs = zip((saved, resumed), processes, (before, after), kinds, strict=True)
    found = [
        run_ranks(run, n, tmp_path / "ckpt", name, layout, kind, timeout=200) for run, n, layout, kind in with_torchs
    ]
    kept: list[dict[str, dict[str, Any]]] = [{}, {}]
    for ranks, every in zip(found, kept, strict=True):
        for _, its in ranks:
            assert not every.keys() & its.keys(), "each state is on one rank"
            every.update(its)
    assert kept[0].keys() == kept[1].keys() and len(kept[0]) > 8
    for key, state in kept[0].items():
        assert state.keys() == kept[1][key].keys()
        assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(kept[1][key][at])) for at, x in state.items()), key
    for key, expected in found[0][0][0].items():
        if expected.dim() > 1:  # Adafactor scales the round-off in a bias whose gradient is 0.
            torch.testing.assert_close(found[1][0][0][key], expected, rtol=0, atol=1e-12, msg=key)
