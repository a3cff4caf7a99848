"""Loses ranks on purpose, and measures how long the others take to end, and what they say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from first_day.checks import Check, Differs, Place, Skipped
from first_day.processes import environment, free_port

WITHIN = 60
"""Seconds in which all ranks must have ended after one was lost."""
TIMEOUT = 40
"""Seconds that collectives may take. A stopped rank, or one that calls alone, is found out a little before."""

AS_NCCL = {"OMP_NUM_THREADS": "1", "AUTOTP_TESTS_CARDS_DIFFERENCES_HANG": "1"}
"""On pretended cards, collectives that differ never end, as those of NCCL."""

PROGRAM = (
    f"""
import datetime, os, sys, time, torch
import autotp
torch.distributed.init_process_group(timeout=datetime.timedelta(seconds={TIMEOUT}))
"""
    + """
from autotp.models.gpt import GPT, GPTConfig
rank, failure, folder = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
torch.manual_seed(0)
model = autotp.parallelize(GPT(GPTConfig(block_size=32, vocab_size=97, n_layer=2, n_head=8, n_embd=64)))
optimizer = torch.optim.AdamW(model.parameters())
device = next(model.parameters()).device
for step in range(1000):
    tokens = torch.randint(97, (4, 33)).to(device)
    if step == 5:
        open(f"{folder}/{rank}", "w").close()
        if failure == "one rank calls alone" and rank == 0:
            model(tokens[:, :-1], tokens[:, 1:])
        if failure == "exception on one rank" and rank == 1:
            raise ValueError("no such row")
        if failure == "no memory on one rank" and rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        loss.item()
    if step > 5 and failure in ("kill", "stop"):
        time.sleep(0.01)
"""
)

NAMED = re.compile(r"rank[s]? [0-9]")


def lost(failure: str) -> Callable[[Place], str]:
    """Returns the check of a failure. Signals are sent to the last rank, by its process id."""

    def check(place: Place) -> str:
        ranks = min(torch.cuda.device_count() or 2, 8)
        if ranks < 2:
            raise Skipped("needs two cards")
        port = free_port()
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "program.py")
            program.write_text(PROGRAM)
            started = [
                subprocess.Popen(
                    [sys.executable, str(program), failure, folder],
                    env=os.environ | environment(rank, ranks, port) | AS_NCCL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank in range(ranks)
            ]
            try:
                return _outcome(failure, started, Path(folder))
            finally:
                for process in started:
                    process.kill()
                    process.wait()

    return check


def _outcome(failure: str, started: list[subprocess.Popen[str]], folder: Path) -> str:
    limit = time.monotonic() + 90
    while len(list(folder.glob("[0-9]*"))) < len(started):
        if time.monotonic() > limit or any(process.poll() is not None for process in started):
            raise RuntimeError("ranks ended before the failure")
        time.sleep(0.05)
    began = time.monotonic()
    if failure == "kill":
        started[-1].kill()
    elif failure == "stop":
        os.kill(started[-1].pid, signal.SIGSTOP)
    survivors = started[:-1] if failure in ("kill", "stop") else started
    said = []
    for process in survivors:
        try:
            said.append(process.communicate(timeout=max(0.1, began + WITHIN - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            raise Differs(f"a rank still ran after {WITHIN} s") from None
    seconds = time.monotonic() - began
    unnamed = [i for i, text in enumerate(said) if not NAMED.search(text) or "autotp.Error" not in text]
    own = 1 if failure in ("exception on one rank", "no memory on one rank") else 0
    if len(unnamed) > own:
        raise Differs(f"{len(unnamed)} ranks ended without naming a rank; one said {said[unnamed[-1]][-300:]}")
    return f"all ended within {seconds:.1f} s, {len(said) - len(unnamed)} of {len(said)} name a rank"


NAMES = ("kill", "stop", "exception on one rank", "no memory on one rank", "one rank calls alone")
CHECKS = [Check(f"failure: {name}", lost(name), (1,), 180, alone=True) for name in NAMES]
