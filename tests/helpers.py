"""What the tests share: functions run on real ranks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

PRELOADED = ["torch", "autotp", "torch.export._trace", "transformers.modeling_utils"]
"""What every rank would import, or most: forked, they have it already."""
LAST_WORDS = 0.5  # seconds the other ranks have to answer once one has failed


EXPECTED = (
    ".*this rank's part", ".* is captured for the",  # Tests compare parts, and change models.
    "Converting a tensor with requires_grad", "The .grad attribute of a Tensor that is not a leaf",
    "There is a performance drop",
)  # fmt: skip
"""Warnings that tests on ranks give rise to, of autotp and of torch."""


class Died(RuntimeError):
    """A rank ended without an answer."""


@dataclass(frozen=True)
class Reply:
    """What a rank returned, or what it raised and where."""

    value: Any = None
    error: BaseException | None = None
    where: str = ""


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 60,
    may_die: Sequence[int] = (),
    fresh: bool = False,
) -> list[Any]:
    """What `fn(rank, n, *args)` returned on each of `n` real processes, by rank; None for one of `may_die` that died.

    Within `fn`, a module-level function, the default process group is initialised (gloo, one thread a rank) and the
    environment is as torchrun sets it. A rank that is done lives on until all are.

    Args:
        timeout: in seconds, for the whole run and for each collective.
        fresh: each rank is an interpreter of its own, as torchrun's are, with a hash seed of its own: sets of strings
            have another order on each. (Forked from one server, all have its seed.) A start costs seconds more.

    Raises:
        Exception: what a rank raised first, with its traceback there as the cause.
        Died: a rank died.
        TimeoutError: a rank was not done in time.
    """
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory() as folder, _started(payload, n, folder, timeout, fresh) as ranks:
        replies = _replies(ranks, time.monotonic() + timeout, may_die)
    errors = {rank: reply.error for rank, reply in replies.items() if reply.error is not None}
    failed = [rank for rank, error in errors.items() if not (isinstance(error, Died) and rank in may_die)]
    if failed:  # a death counts before what it made the others raise
        rank = min(failed, key=lambda rank: not isinstance(errors[rank], Died))
        raise errors[rank] from RuntimeError(f"on rank {rank} of {n}:\n{replies[rank].where}")
    late = [rank for rank in range(n) if rank not in replies]
    if late:
        raise TimeoutError(f"{fn.__name__}: ranks {late} of {n} not done in {timeout} s")
    return [replies[rank].value for rank in range(n)]


@contextmanager
def _started(
    payload: bytes, n: int, folder: str, timeout: float, fresh: bool
) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """The running ranks; these, and nothing else, are killed in the end."""
    context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
    if not fresh:
        context.set_forkserver_preload(PRELOADED)
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(n):
            here, there = context.Pipe()
            process = context.Process(target=_rank, args=(payload, rank, n, folder, timeout, there), daemon=True)
            with _hash_seed(2 * rank + 1 if fresh else None):
                process.start()
            there.close()  # so that reading ends when the rank does
            ranks.append((process, here))
        yield ranks
    finally:
        for rank_and_pipe in ranks:
            _end(*rank_and_pipe)


@contextmanager
def _hash_seed(seed: int | None) -> Iterator[None]:
    """A region in which interpreters that are started have this hash seed."""
    before = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = str(seed)
    try:
        yield
    finally:
        os.environ.pop("PYTHONHASHSEED", None)
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


def _end(process: BaseProcess, pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.join()


def _replies(ranks: list[tuple[BaseProcess, Connection]], deadline: float, may_die: Sequence[int]) -> dict[int, Reply]:
    """What has come by `deadline`, or soon after the first failure that was not expected, in order of arrival."""
    silent = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    replies: dict[int, Reply] = {}
    while silent and (left := deadline - time.monotonic()) > 0:
        ready = wait(list(silent), left)
        for pipe in [pipe for pipe in silent if pipe in ready]:
            rank = silent.pop(pipe)
            try:
                replies[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                ranks[rank][0].join(LAST_WORDS)
                replies[rank] = Reply(error=Died(f"rank {rank} of {len(ranks)}, exit code {ranks[rank][0].exitcode}"))
            if replies[rank].error is not None and rank not in may_die:
                deadline = min(deadline, time.monotonic() + LAST_WORDS)
    return replies


def _rank(payload: bytes, rank: int, n: int, folder: str, timeout: float, pipe: Connection) -> None:
    try:
        reply = pickle.dumps(Reply(_run(payload, rank, n, folder, timeout)))
    except BaseException as error:
        reply = _failure(error)
    pipe.send_bytes(reply)
    pipe.poll(None)  # the peers may still be reading from this rank


def _run(payload: bytes, rank: int, n: int, folder: str, timeout: float) -> Any:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in (place | rendezvous).items()})
    torch.set_num_threads(1)
    file = Path(folder, "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=n, timeout=timedelta(seconds=timeout))
    fn, args = pickle.loads(payload)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # setup.cfg asks for the same, of the process of pytest only.
        for message in EXPECTED:
            warnings.filterwarnings("ignore", message, UserWarning)
        return fn(rank, n, *args)


def _failure(error: BaseException) -> bytes:
    where = "".join(traceback.format_exception(error))
    try:
        reply = pickle.dumps(Reply(error=error, where=where))
        pickle.loads(reply)
    except Exception:  # an exception that cannot travel
        return pickle.dumps(Reply(error=RuntimeError(repr(error)), where=where))
    return reply


class Checks:
    """Functions that assert on real ranks, batched: one launch for each number of ranks and module.

    A file registers its functions with `@checks.on(2, 4)` and ends in one test over `checks.cases()`.
    """

    def __init__(self, timeout: float = 240, fresh: bool = False) -> None:
        self.timeout, self.fresh = timeout, fresh
        self.functions: dict[tuple[int, bool], list[Callable[[int, int], None]]] = {}
        self.outcomes: dict[tuple[int, bool], list[dict[str, str]] | BaseException] = {}

    def on(self, *sizes: int, rare: bool = False) -> Callable[[Callable[[int, int], None]], Callable[[int, int], None]]:
        """Registers a module-level function of the rank and the number of ranks; a `rare` one is for `--all` only."""

        def register(fn: Callable[[int, int], None]) -> Callable[[int, int], None]:
            for n in sizes:
                self.functions.setdefault((n, rare), []).append(fn)
            return fn

        return register

    def cases(self) -> list[Any]:
        """Parameters `n, name` for each function and size."""
        found = [(n, fn.__name__, rare) for (n, rare), functions in self.functions.items() for fn in functions]
        return [pytest.param(n, name, marks=[pytest.mark.rare] * rare, id=f"{n}-{name}") for n, name, rare in found]

    def expect(self, n: int, name: str) -> None:
        """Fails with the traceback of the first rank on which the function failed."""
        key = next(key for key, functions in self.functions.items() if key[0] == n and name in map(_name, functions))
        if key not in self.outcomes:
            try:
                self.outcomes[key] = run_ranks(_in_turn, n, self.functions[key], timeout=self.timeout, fresh=self.fresh)
            except Exception as error:
                self.outcomes[key] = error
        outcome = self.outcomes[key]
        if isinstance(outcome, BaseException):
            raise outcome
        for rank, found in enumerate(outcome):
            assert name in found, f"not run on rank {rank}: {list(found)[-1]} failed before"
            assert not found[name], f"on rank {rank} of {n}:\n{found[name]}"


def _name(fn: Callable[..., Any]) -> str:
    return fn.__name__


def _in_turn(rank: int, n: int, functions: Sequence[Callable[[int, int], None]]) -> dict[str, str]:
    """Function name -> what it raised, or nothing. Ends at the first failure on any rank: then nothing is in step."""
    found: dict[str, str] = {}
    for fn in functions:
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                fn(rank, n)
            found[fn.__name__] = ""
        except BaseException as error:  # pytest's own failures are no Exceptions
            found[fn.__name__] = "".join(traceback.format_exception(error))
        failed = torch.tensor(bool(found[fn.__name__]), dtype=torch.int32)
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed:
            break
    return found
