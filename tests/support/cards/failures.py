"""Programs of two ranks with cards, of which the last one fails: `ended` runs one, and returns how its processes ended.

The processes are started as srun starts them, or as torchrun does; nobody ends the others if one ends.
"""

from __future__ import annotations

import faulthandler
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import PRELOADED, expect_cards
from small_models import gpt
from trainers import SMALL, batch

import autotp
from autotp.distributed import agreement
from autotp.distributed.peers.heartbeat import lost_ranks
from cards.pretend import pretend, pretended

RANKS = 2
TIMEOUT = timedelta(seconds=8)
DEVICE = torch.device("cuda")
Call = Callable[[], Any]


@dataclass(frozen=True)
class End:
    """How a process ended.

    Attributes:
        status: its exit status; negative for a signal.
        text: what it printed, errors included.
        error_file: what it wrote into torchrun's file; "" for nothing.
        seconds: from the failure of the last rank to the end of this one.
    """

    status: int
    text: str
    error_file: str
    seconds: float


def trainer() -> autotp.Trainer:
    example = {name: x[:2] for name, x in batch(0).items()}
    return autotp.distribute(gpt(seed=0, **SMALL), tp=RANKS, microbatches=2, example_inputs=example, timeout=TIMEOUT)


def rows() -> dict[str, torch.Tensor]:
    return {name: x.to(DEVICE) for name, x in batch(0).items()}


def step(folder: Path) -> Call:
    it = trainer()
    return lambda: it.step(**rows()).item()


def evaluate(folder: Path) -> Call:
    it = trainer()
    return lambda: it.evaluate(**rows()).item()


def save_checkpoint(folder: Path) -> Call:
    it = trainer()
    optimizer, steps = torch.optim.AdamW(it.parameters(), lr=0.01), itertools.count()
    it.step(**rows())
    optimizer.step()
    return lambda: autotp.save_checkpoint(folder / "saved", it, optimizer, next(steps))


def load_checkpoint(folder: Path) -> Call:
    it = trainer()
    optimizer = torch.optim.AdamW(it.parameters(), lr=0.01)
    it.step(**rows())
    optimizer.step()
    autotp.save_checkpoint(folder / "saved", it, optimizer, 1)
    return lambda: autotp.load_checkpoint(folder / "saved", it, optimizer)


def from_pretrained(folder: Path) -> Call:
    return lambda: autotp.from_pretrained(folder / "hf", tp=RANKS, timeout=TIMEOUT)


def generate(folder: Path) -> Call:
    from hugging_face import built, prompt

    model = autotp.parallelize(built("gpt2"), RANKS, timeout=TIMEOUT)
    given = {name: x.to(DEVICE) for name, x in prompt().items()}
    return lambda: model.generate(**given, max_new_tokens=3, min_new_tokens=3)


def train(folder: Path) -> Call:
    """One call is all that transformers' Trainer does in its first steps."""
    import transformers
    from hugging_face import built

    model = autotp.parallelize(built("gpt2").train(), RANKS, timeout=TIMEOUT)
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    arguments = transformers.TrainingArguments(
        str(folder / "out"), max_steps=2, logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    return lambda: transformers.Trainer(model=model, args=arguments, train_dataset=data).train()


CALLS = {
    call.__name__: call for call in (step, evaluate, save_checkpoint, load_checkpoint, from_pretrained, generate, train)
}
KILL, STOP, RAISE, MEMORY, ALONE = "kill", "stop", "raise", "memory", "alone"
"""The last rank is killed or stopped; raises ValueError, or has no memory, in a collective; is not in a call."""


def program(rank: int, name: str, how: str, folder: Path, at: int) -> None:
    """What each rank runs: a call without a failure, then calls in which the last rank fails."""
    call = CALLS[name](folder)
    call()
    if how == ALONE:
        _note_time(folder)
        while rank > 0 and not lost_ranks():  # It computes something by itself, and then goes on.
            time.sleep(0.1)
    elif rank == RANKS - 1:
        _fail_at(at, how, folder, in_backward=how == MEMORY and name in ("step", "train"))
        if name == "save_checkpoint":  # Its ranks agree through the CPU, and start no collective of cards.
            _fail_at_agreements(at, how, folder)
    while True:
        call()


def _fail_at(at: int, how: str, folder: Path, in_backward: bool) -> None:
    """This process fails when it starts its `at`-th collective from here; it has a thread for backward."""
    count = itertools.count()

    def fail(name: str, call: str, number: int) -> str:
        if not (in_backward and torch._C._current_graph_task_id() < 0) and next(count) == at:
            _fail(how, folder)
        return ""

    pretended().set_fault(fail)


def _fail_at_agreements(at: int, how: str, folder: Path) -> None:
    """This process fails when it agrees with the others for the `at`-th time from here."""
    count, agrees = itertools.count(), agreement.sum_ints

    def sum_ints(*args: Any) -> Any:
        if next(count) == at:
            _fail(how, folder)
        return agrees(*args)

    agreement.sum_ints = sum_ints


def _fail(how: str, folder: Path) -> None:
    _note_time(folder)
    if how == RAISE:
        raise ValueError("no rows")
    if how == MEMORY:
        raise torch.OutOfMemoryError("CUDA out of memory")
    os.kill(os.getpid(), signal.SIGKILL if how == KILL else signal.SIGSTOP)


def _note_time(folder: Path) -> None:
    (folder / "failed").touch()


def ended(
    name: str, how: str, folder: Path, by: str = "torchrun", at: int = 2, silently: bool = True, limit: float = 100.0
) -> list[End]:
    """Returns how each rank of a program ended, by rank; a stopped one is killed once the others have ended.

    Args:
        by: the launcher whose variables the processes have.
        at: the number of the collective in which the last rank fails.
        silently: whether NCCL itself notices nothing of a lost peer.
        limit: seconds after which all are killed.
    """
    expect_cards()
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = dist.TCPStore("127.0.0.1", 0, RANKS, True, wait_for_workers=False)
    environments = [_environment(by, rank, store.port, folder) for rank in range(RANKS)]
    run = functools.partial(program, name=name, how=how, folder=folder, at=at)
    processes = [
        context.Process(target=_rank, args=(rank, environments[rank], run, folder, silently)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    end, ends = time.monotonic() + limit, dict[int, float]()
    try:
        while len(ends) < RANKS - (how == STOP) and time.monotonic() < end:
            multiprocessing.connection.wait([it.sentinel for it in processes if it.is_alive()], 0.2)
            ends |= {rank: time.time() for rank, it in enumerate(processes) if not it.is_alive() and rank not in ends}
        late = [rank for rank in range(RANKS) if processes[rank].is_alive() and not (how == STOP and rank == RANKS - 1)]
        for rank in late:  # Their threads are printed.
            os.kill(processes[rank].pid, signal.SIGABRT)
            processes[rank].join(5.0)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not late, f"ranks {late} did not end by themselves:\n{[_text(folder, rank) for rank in range(RANKS)]}"
    return [_end(rank, processes[rank].exitcode, ends.get(rank, time.time()), folder) for rank in range(RANKS)]


def _end(rank: int, status: int | None, when: float, folder: Path) -> End:
    file, failed = folder / f"error-{rank}.json", folder / "failed"
    assert failed.exists(), f"no rank failed:\n{[_text(folder, rank) for rank in range(RANKS)]}"
    written = file.read_text() if file.exists() else ""
    return End(int(status or 0), _text(folder, rank), written, when - failed.stat().st_mtime)


def _text(folder: Path, rank: int) -> str:
    return Path(folder, f"printed-{rank}").read_text()


def _environment(by: str, rank: int, port: int, folder: Path) -> dict[str, str]:
    """What the launcher tells a rank. (Ranks are forked from a server, which has the environment of its start.)"""
    if by == "srun":
        job = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": RANKS, "SLURM_JOB_ID": os.getpid()}
        return {name: str(value) for name, value in (job | {"SLURM_STEP_ID": port}).items()}
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    file = {"TORCHELASTIC_ERROR_FILE": folder / f"error-{rank}.json"}
    nccl = {name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL")}
    return {name: str(value) for name, value in (place | store | file | nccl).items()}


def _rank(rank: int, environment: dict[str, str], run: Callable[[int], None], folder: Path, silently: bool) -> None:
    os.environ.update(environment)
    with Path(folder, f"printed-{rank}").open("w", buffering=1) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        sys.stdout = sys.stderr = file
        faulthandler.enable(file)
        torch.set_num_threads(1)
        pretend()
        pretended().lose_silently(silently)
        try:
            run(rank)
        except BaseException:
            sys.last_value = sys.exc_info()[1]  # type: ignore[assignment]  # As at the end of an interpreter.
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            sys.exit(1)


__all__ = ["ALONE", "CALLS", "KILL", "MEMORY", "RAISE", "STOP", "End", "ended"]
