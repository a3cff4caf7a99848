"""The first use of NVIDIA cards, pretended ones or the machine's: what README shows, threads, hooks, orders, waits."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cards.pretend import REAL
from cards.spies import collective_order, host_waits
from ranks import ROOT, Checks, job
from small_models import gpt, gradient_differences, tokens
from torch import Tensor, nn
from trainers import batch, started

import autotp

checks = Checks(cards=True)
WARM = 5
"""Steps after which nothing is compared, captured or measured any more."""


@pytest.mark.timeout(300)
def test_every_block_of_the_readme_runs_on_cards(tmp_path: Path) -> None:
    """In order, on two ranks of torchrun, in one folder."""
    page = ROOT / "README.md"
    with job(tmp_path / "here", "blocks.py", [str(page)], 0, cards=True) as ranks:
        said, _ = ranks.communicate(timeout=280)
    assert ranks.returncode == 0 and " blocks ran" in said, said[-3000:]


def made(rank: int, **options: Any) -> tuple[Any, Any, Callable[[Any], Tensor]]:
    """A GPT in float64 and the same made parallel, both on this rank's card, and a step of either."""
    whole = gpt(seed=0, n_head=4).double().to(f"cuda:{rank}")
    parallel = autotp.parallelize(copy.deepcopy(whole), **options)
    x, y = (each.to(f"cuda:{rank}") for each in tokens(4, 8))
    return whole, parallel, lambda model: model(x, y)


@checks.on(2, 3)
def gradients_equal_those_of_one_device(rank: int, n: int) -> None:
    for options in ({}, {"sequence_parallel": True}, {"recompute": "full"}, {"overlap": "batch"}):
        whole, parallel, step = made(rank, **options)
        step(whole).backward()
        step(parallel).backward()
        assert max(gradient_differences(whole, parallel)) < 1e-12, options


@checks.on(2)
def hooks_run_in_the_thread_of_the_device(rank: int, n: int) -> None:
    """Of parameters and of modules; gradients are those of one device, whichever thread computes them."""
    whole, parallel, step = made(rank)
    threads: list[int] = []
    for model in (whole, parallel):
        for p in model.parameters():
            p.register_hook(lambda gradient: threads.append(threading.get_ident()))
            p.register_post_accumulate_grad_hook(lambda p: threads.append(threading.get_ident()))
        step(model).backward()
    assert threads and threading.get_ident() not in threads
    assert max(gradient_differences(whole, parallel)) < 1e-12


@checks.on(2)
def second_derivatives_equal_those_of_one_device(rank: int, n: int) -> None:
    """Of a penalty on the gradient of the input."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double().to(f"cuda:{rank}")
    parallel = autotp.parallelize(copy.deepcopy(whole), example_inputs=torch.ones(2, 4, dtype=torch.double))
    for model in (whole, parallel):
        x = torch.linspace(0, 1, 8, dtype=torch.double, device=f"cuda:{rank}").view(2, 4).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert max(gradient_differences(whole, parallel)) < 1e-12


@checks.on(2)
def a_warm_step_makes_the_host_wait_for_nothing(rank: int, n: int) -> None:
    for options in ({}, {"sequence_parallel": True}, {"recompute": "full"}, {"overlap": "batch"}):
        _, parallel, step = made(rank, **options)
        optimizer = torch.optim.AdamW(parallel.parameters())
        for _ in range(WARM + 1):
            with host_waits() as traffic:
                step(parallel).backward()
                torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert not traffic.waits, f"{options}:\n{traffic}"


@checks.on(2)
def a_model_that_was_moved_is_refused_until_it_is_back(rank: int, n: int) -> None:
    """As `Accelerator(cpu=True)` moves it. Optimizers and hooks stay, and nothing of the failed call is left."""
    whole, parallel, step = made(rank)
    step(parallel)
    parallel.cpu()
    with pytest.raises(autotp.Error, match="parameters are on cpu, and the model was made parallel on cuda"):
        step(parallel)
    parallel.cuda()
    step(whole).backward()
    step(parallel).backward()
    assert max(gradient_differences(whole, parallel)) < 1e-12


WAYS: tuple[dict[str, Any], ...] = ({}, {"sequence_parallel": True}, {"recompute": "full"}, {"overlap": "batch"})


def memory_once_collected(before: int) -> int:
    """The bytes on the card behind a collection; a thread of NCCL may have the last tensors for a moment."""
    until = time.monotonic() + 10
    while gc.collect() >= 0 and torch.cuda.memory_allocated() > before and time.monotonic() < until:
        pass
    return torch.cuda.memory_allocated()


def memory_at_rest() -> int:
    """The bytes on the card once they stay the same for a second: earlier checks may have left the last of theirs."""
    memory, since = torch.cuda.memory_allocated(), time.monotonic()
    while time.monotonic() < since + 1:
        gc.collect()
        if torch.cuda.memory_allocated() != memory:
            memory, since = torch.cuda.memory_allocated(), time.monotonic()
    return memory


@checks.on(2)
def the_memory_of_a_model_is_free_when_nobody_has_it(rank: int, n: int) -> None:
    """Behind `gc.collect()`, as docs/questions.md says."""
    before = memory_at_rest()
    for options in WAYS:
        parts = made(rank, **options)
        for _ in range(2):
            parts[2](parts[1]).backward()
        assert torch.cuda.memory_allocated() > before
        del parts
        assert memory_once_collected(before) <= before, options
    for zero in (0, 1, 3):
        trainer, optimizer = started((1, 1, 2), zero=zero)
        trainer.step(**{name: x.chunk(2)[rank] for name, x in batch(0).items()})
        optimizer.step()
        del trainer, optimizer
        assert memory_once_collected(before) <= before, zero


LAYOUTS: tuple[tuple[int, int, int], ...] = ((2, 1, 1), (1, 2, 1), (1, 1, 2))


@checks.on(2)
def collectives_come_in_one_order_on_all_ranks(rank: int, n: int) -> None:
    """Of each group; ranks of one stage start the same ones, over all groups. NCCL would pair others, or hang."""
    if REAL:
        return
    for layout in LAYOUTS:
        for zero in (0, 1, 3) if layout[2] > 1 else (0,):
            trainer, optimizer = started(layout, zero=zero)
            rows = {name: x.chunk(layout[2])[rank % layout[2]] for name, x in batch(0).items()}
            trainer.step(**rows)
            with collective_order() as order:
                trainer.step(**rows)
                optimizer.step()
            every: list[Any] = [None] * n
            dist.all_gather_object(every, [line for line in order if "send" not in line and "recv" not in line])
            assert every[0] == every[1], (layout, zero)


@pytest.mark.parametrize("n, name", checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
