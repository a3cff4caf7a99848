"""Ranks that run checks in turn, as torchrun starts them: a process each, which is ended if a check takes too long."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from first_day.checks import Check, Differs, Place, Row, Skipped, Verdict

START = 90  # seconds that processes have to import everything and to meet
LAST_WORDS = 3  # seconds the other ranks have to answer once one has failed


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Returns the variables that torchrun sets for a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    """Returns a port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_checks(checks: Sequence[Check], ranks: int, small: bool, until: float) -> Iterator[Row]:
    """Runs checks in turn on so many ranks, and yields a row for each.

    After one that failed or took too long, the rest runs in new processes. `until`: the end, on `time.monotonic()`.
    """
    rest = list(checks)
    while rest:
        for row in _run_until_failure(rest, ranks, small, until):
            rest = rest[1:]
            yield row


def _run_until_failure(checks: Sequence[Check], ranks: int, small: bool, until: float) -> Iterator[Row]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        names = [check.name for check in checks]
        arguments = [(names, Place(rank, ranks, small), port, folder) for rank in range(ranks)]
        processes: list[BaseProcess] = [context.Process(target=_rank, args=args, daemon=True) for args in arguments]
        for process in processes:
            process.start()
        try:
            for number, check in enumerate(checks):
                allowed = check.seconds + (START if number == 0 else 0)
                began = time.monotonic()
                rows = _wait(folder, number, processes, min(began + allowed, until))
                row = _joined(check, ranks, rows, time.monotonic() - began)
                yield row
                if row.verdict == "FAILED":
                    return
        finally:
            for process in processes:
                process.join(0 if len(list(folder.iterdir())) < ranks * len(checks) else LAST_WORDS)
                process.kill()
                process.join()


def _rank(names: Sequence[str], place: Place, port: int, folder: Path) -> None:
    """Runs one rank: all checks, until one fails; each result is a file."""
    from first_day.table import CHECKS  # It imports the modules that import this one.

    os.environ.update(environment(place.rank, place.ranks, port))
    torch.set_num_threads(1)
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    checks = {check.name: check for check in CHECKS}
    for number, name in enumerate(names):
        verdict, figures, detail = _outcome(checks[name], place)
        gc.collect()  # A model is in cycles of references, and CUDA's allocator does not ask Python to collect.
        unfinished = folder / f"{number}.{place.rank}.part"
        unfinished.write_text(json.dumps([verdict, figures, detail]))
        unfinished.rename(folder / f"{number}.{place.rank}.json")
        if verdict == "FAILED":
            break
    with suppress(Exception):
        dist.destroy_process_group()


def _outcome(check: Check, place: Place) -> tuple[Verdict, str, str]:
    torch.manual_seed(0)
    try:
        return "ok", check.run(place), ""
    except Skipped as reason:
        return "skipped", str(reason), ""
    except Differs as difference:
        return "DIFFERS", str(difference), ""
    except BaseException as error:
        return "FAILED", f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)[-12:])


Answer = tuple[Verdict, str, str]


def _wait(folder: Path, number: int, processes: Sequence[BaseProcess], deadline: float) -> list[Answer]:
    """Returns the answer of each rank; after a failure it does not wait long for the others."""
    answers: list[Answer] = [("FAILED", "took too long", "")] * len(processes)
    open_ranks = set(range(len(processes)))
    while open_ranks and time.monotonic() < deadline:
        for rank in sorted(open_ranks):
            over = not processes[rank].is_alive()
            file = folder / f"{number}.{rank}.json"
            if file.exists():
                answers[rank] = tuple(json.loads(file.read_text()))
            elif over:
                answers[rank] = ("FAILED", f"rank {rank} died with exit code {processes[rank].exitcode}", "")
            else:
                continue
            open_ranks.discard(rank)
            if answers[rank][0] == "FAILED":
                deadline = min(deadline, time.monotonic() + LAST_WORDS)
        time.sleep(0.02)
    return answers


def _joined(check: Check, ranks: int, answers: Sequence[Answer], seconds: float) -> Row:
    """Returns the row of a check: the worst answer, and of a failure the one that is not only late."""
    order = ("FAILED", "DIFFERS", "skipped", "ok")
    late = "took too long"
    verdict, figures, detail = min(answers, key=lambda answer: (order.index(answer[0]), answer[1] == late))
    return Row(check.name, ranks, verdict, figures, round(seconds, 1), detail[-2000:])
