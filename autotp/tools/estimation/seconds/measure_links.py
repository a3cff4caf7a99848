"""measure_links: times all-reduces and all-gathers among ranks: those of a launch, or two that it starts itself.

A process that is alone starts one process for each of two CPU ranks, or for each GPU; they meet in a temporary folder.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autotp.errors import Error

SIZES = (2**12, 2**16, 2**20, 2**23)
"""Bytes of the tensors, on CPUs; GPUs take eight times as many."""
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """What ranks measured together.

    Attributes:
        ranks: their number.
        bandwidth: bytes/s of one direction of a ring.
        latency: seconds for a message of no length.
    """

    ranks: int
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Timed:
    """A collective that was timed; `rounds` as in `links.RINGS`."""

    rounds: int
    size: int
    seconds: float


def fitted(times: Sequence[Timed], ranks: int) -> MeasuredLink:
    """Returns latency and bandwidth of a ring with the least relative errors of these times.

    A ring of n ranks takes `rounds (n - 1) (latency + size / n / bandwidth)` seconds (links.py).
    """
    steps = ranks - 1
    # Each equation is divided by its time: the squares are those of relative errors, so small tensors count as large
    # ones.
    rows = [(t.rounds * steps / t.seconds, t.rounds * steps * t.size / ranks / t.seconds) for t in times]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
    whole = aa * bb - ab * ab
    latency, inverse = (a * bb - b * ab) / whole, (b * aa - a * ab) / whole
    smallest, largest = min(times, key=lambda t: t.size), max(times, key=lambda t: t.size)
    if latency <= 0:  # Of no latency that could be seen: what the smallest took, at most.
        latency = smallest.seconds / smallest.rounds / steps / 10
    if inverse <= 0:
        inverse = largest.seconds / largest.rounds / steps * ranks / largest.size
    return MeasuredLink(ranks=ranks, bandwidth=1 / inverse, latency=latency)


def timed(group: Any, device: torch.device, seconds: float) -> MeasuredLink:
    """Returns the link of a group's ranks, which call it together; the fastest run of each collective counts."""
    ranks, timings = dist.get_world_size(group), []
    for size in (n * (8 if device.type == "cuda" else 1) for n in SIZES):
        part = torch.ones(size // 4 // ranks, device=device)
        whole = torch.ones(part.numel() * ranks, device=device)
        runs = {
            2: partial(dist.all_reduce, whole, group=group),
            1: partial(dist.all_gather_single, whole, part, group=group),
        }
        for rounds, run in runs.items():
            timings.append(Timed(rounds, whole.numel() * 4, _fastest(run, group, device, seconds / 2 / len(SIZES))))
            whole.fill_(1)
    return fitted(timings, ranks)


def _fastest(run: Any, group: Any, device: torch.device, seconds: float) -> float:
    """Returns the seconds of the fastest run. All ranks run as often: as the slowest of them finds right."""
    duration = torch.tensor(_once(run, device), device=device)
    dist.all_reduce(duration, dist.ReduceOp.MAX, group=group)
    times = max(5, min(2000, int(seconds / max(1e-6, float(duration)))))
    return min(_once(run, device) for _ in range(times))


def _once(run: Any, device: torch.device) -> float:
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


# ---- processes of its own


def measured_alone(device_type: str, seconds: float) -> MeasuredLink | None:
    """Returns the link of ranks that are started for it; None where there is one GPU only. device_type: "cpu" or "cuda"

    Raises:
        Error: the processes cannot meet, or one of them fails.
    """
    ranks = 2 if device_type == "cpu" else torch.cuda.device_count()
    if ranks < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        module = "autotp.tools.estimation.seconds.measure_links"
        command = [sys.executable, "-m", module, folder, str(ranks), device_type]
        started = [
            subprocess.Popen(
                [*command, str(seconds), str(rank)], env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=2 * TIMEOUT.total_seconds() + seconds) for process in started]
        except subprocess.TimeoutExpired as error:
            raise Error("the processes that measure the links do not end", fix="torchrun, with your network") from error
        finally:
            for process in started:
                # It waits for one that has failed.
                if process.poll() is None:
                    process.kill()
                    process.communicate()
    failed = [err for process, (_, err) in zip(started, outputs, strict=True) if process.returncode]
    if failed:
        why = (failed[0].decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise Error(f"the processes that measure the links fail: {why}", fix="torchrun, with your network")
    # The last line: a library may have printed others before.
    return MeasuredLink(**json.loads(outputs[0][0].decode().splitlines()[-1]))


def _environment() -> dict[str, str]:
    """Returns the variables for the processes: they meet on loopback, and know no launcher."""
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if "lo" in (name for _, name in socket.if_nameindex()):
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return variables


def _main(folder: str, ranks: str, device_type: str, seconds: str, rank: str) -> None:
    """Runs one rank; the first prints what was measured."""
    device = torch.device(device_type, int(rank)) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(str(Path(folder) / "store"), int(ranks))
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=int(rank), world_size=int(ranks), timeout=TIMEOUT)
    link = timed(dist.group.WORLD, device, float(seconds))
    dist.barrier()
    dist.destroy_process_group()
    if rank == "0":
        print(json.dumps(vars(link)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
