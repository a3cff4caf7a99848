"""optimizer_steps: a rank that leaves out an optimizer's step is told, also on a stage that shares no parameter."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import autotp
from autotp.distributed.peers import heartbeat
from autotp.runtime.torch_hooks.optimizer_steps import NEVER, NOTHING_TO_STEP, steps_taken

STEPS = 5


class Block(nn.Module):
    """x: [rows, length, 8] -> the same"""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(x)
        return out


class Untied(nn.Module):
    """tokens: [rows, length] -> loss [], the mean of the rows' means"""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


BATCH = torch.arange(16).view(4, 4)


def untied(tp: int = 1, pp: int = 2, dp: int = 1) -> autotp.Trainer:
    """Two stages that share no parameter."""
    torch.manual_seed(0)
    trainer = autotp.distribute(Untied(), tp=tp, pp=pp, dp=dp, microbatches=2, example_inputs=BATCH)
    assert not trainer.shared
    return trainer


def left_out(rank: int, n: int, layout: tuple[int, int, int]) -> tuple[int, str]:
    """The last rank leaves out a step late, when parameters are no longer compared."""
    trainer = untied(*layout)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.01)
    for step in range(12):
        try:
            trainer.step(BATCH)
        except autotp.Error as error:
            with pytest.raises(autotp.Error, match="different numbers of optimizer steps"):
                trainer.evaluate(BATCH)  # A loop that goes on is told again.
            return step, str(error)
        if step != 7 or rank < n - 1:
            optimizer.step()
        optimizer.zero_grad()
    return 12, ""


@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 1, 1), pytest.param((1, 1, 2), marks=pytest.mark.rare)], ids=str)
def test_a_rank_that_leaves_out_a_step_is_told_in_the_next_call(layout: tuple[int, int, int]) -> None:
    for step, text in run_ranks(left_out, 2, layout):
        assert step == 8
        assert "Trainer.step: ranks took different numbers of optimizer steps" in text
        assert "0 on " in text and "rank 1" in text and "optimizer.step() on all ranks" in text


def of_other_kinds(rank: int, n: int) -> None:
    """Each kind of parameters has an optimizer, where a stage has this kind; evaluation, accumulation and a new one."""
    trainer = untied()
    kinds = [list(trainer.parameters()), [p for name, p in trainer.named_parameters() if "embed" in name]]
    optimizers = [torch.optim.SGD(kind, lr=0.01) for kind in kinds if kind]
    assert len(optimizers) == 2 - rank
    for step in range(STEPS):
        trainer.step(BATCH)
        trainer.evaluate(BATCH)
        trainer.step(BATCH)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 2:
            optimizers[0] = torch.optim.SGD(kinds[0], lr=0.02)
    assert steps_taken(trainer) == 1
    trainer.evaluate(BATCH)
    assert steps_taken(trainer) == 0


def frozen_stage(rank: int, n: int) -> None:
    trainer = untied()
    if rank == 0:
        trainer.requires_grad_(False)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.01)
    for _ in range(STEPS):
        trainer.step(BATCH)
        if rank == 1:
            optimizer.step()
    assert steps_taken(trainer) == (NOTHING_TO_STEP if rank == 0 else 1)


def no_optimizer(rank: int, n: int) -> list[str]:
    """One device may train less than it has gradients of."""
    trainer = untied()
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.01) if rank == 1 else None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            trainer.step(BATCH)
            if optimizer is not None:
                optimizer.step()
    if rank == 0:
        assert steps_taken(trainer) == NEVER
    return [str(one.message) for one in told if "no optimizer" in str(one.message)]


def allowed(rank: int, n: int) -> list[str]:
    of_other_kinds(rank, n)
    frozen_stage(rank, n)
    return no_optimizer(rank, n)


def test_a_stage_may_step_alone_with_a_warning() -> None:
    for told in run_ranks(allowed, 2):
        assert len(told) == 1 and told[0].startswith("pp rank 0 trained parameters and no optimizer stepped them")


class Mlp(nn.Module):
    """x: [rows, 8] -> loss []"""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.mlp(x)).square().mean()


def compiled(rank: int, n: int) -> str:
    """Rank 1 leaves out a batch late; all batches are one, and nothing is compared in a compiled call."""
    heartbeat.INTERVAL = 0.05
    torch.manual_seed(0)
    model = autotp.parallelize(Mlp().double(), n, timeout=timedelta(seconds=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    forward = torch.compile(model, backend="eager")
    x = torch.ones(2, 8).double()
    try:
        for step in range(400):
            if rank == 0 or step != 20:
                forward(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
    except (autotp.Error, RuntimeError) as error:  # The rank that waits gets the error of its process group.
        return str(error)
    return ""


def test_compiled_ranks_that_come_apart_are_told_of_optimizer_steps() -> None:
    found = run_ranks(compiled, 2, alone=True)
    assert all(found) and any("collectives at step" in text and "of its optimizers" in text for text in found)
