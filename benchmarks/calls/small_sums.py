"""Measures a sum over ranks of small tensors: by the backend "shared_memory", and by gloo.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/calls/small_sums.py

"alone" is a sum after a sum. "after work" is a sum that comes after a product of 0.5 ms on each rank, as in a model:
its time, without the product's. The ways run in turn; a figure is the median over the rounds, in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotp.experimental.shared_memory import LIMIT, register
from autotp.ops.collectives import communicate

NUMBERS = (512, 4096, 32768)
CALLS = 50
SECONDS = 5e-4
"""The time of a product."""


def ways() -> dict[str, Callable[[Tensor], object]]:
    """Returns the ways to sum a tensor in place: name -> function."""
    register()
    groups: dict[str, Any] = {name: dist.new_group(backend=name) for name in ("gloo", "shared_memory")}
    return {name: partial(_sum, group.group_name) for name, group in groups.items()}


def _sum(group: str, x: Tensor) -> Tensor:
    return communicate("all_reduce_", x, "sum", group)


def work() -> Callable[[], object]:
    """Returns a product that takes about `SECONDS`, or up to twice as long."""
    x = torch.randn(512, 512)
    for rows in (16, 32, 64, 128, 256):
        if _seconds(partial(torch.mm, x[:rows], x)) >= SECONDS:
            return partial(torch.mm, x[:rows], x)
    return partial(torch.mm, x, x)


def _seconds(run: Callable[[], object]) -> float:
    found = []
    for _ in range(CALLS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def measure(numbers: int, rounds: int) -> list[str]:
    """Returns a line for each way."""
    product, x, sums = work(), torch.zeros(numbers), ways()
    times: dict[tuple[str, bool], list[float]] = {}
    for _ in range(rounds):
        for name, add in sums.items():
            for after in (False, True):
                found = []
                for _ in range(CALLS):
                    if after:
                        product()
                    start = time.perf_counter()
                    add(x)
                    found.append(time.perf_counter() - start)
                times.setdefault((name, after), []).append(statistics.median(found) * 1e3)
    lines = []
    for name in sums:
        alone, later = (statistics.median(times[name, after]) for after in (False, True))
        lines.append(f"{numbers:6} numbers  {name:14} {alone:6.3f} ms alone  {later:6.3f} ms after work")
    return lines


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--numbers", type=int, nargs="+", default=list(NUMBERS))
    args = parser.parse_args()
    if max(args.numbers) * 4 > LIMIT:
        parser.error(f"a tensor of more than {LIMIT // 4} numbers goes through gloo: --numbers {NUMBERS[0]}")
    if "RANK" not in os.environ:
        sys.exit("start it by torchrun --nproc-per-node 2 benchmarks/calls/small_sums.py")
    dist.init_process_group("gloo")
    for numbers in args.numbers:
        for line in measure(numbers, args.rounds):
            if dist.get_rank() == 0:
                print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
