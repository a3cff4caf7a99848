"""Compares the idle time of pipeline ranks with the formulas, on a model whose blocks only sleep.

    torchrun --nproc-per-node 4 benchmarks/predicted/bubble.py

A block sleeps in forward, and for the same time in backward. "Ideal" is the time that a rank sleeps in a step; "idle"
is the rest of the step. Source of the formulas, (p-1)/m and (p-1)/(m v): Narayanan et al. 2021, section 2.2.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from torch import Tensor, nn

import autotp

SECONDS = 0.3  # The other work of a block takes 3 ms on one core.


@torch.library.custom_op("bubble::sleep", mutates_args=())
def sleep(x: Tensor) -> Tensor:
    """Returns a copy of `x` after the sleep. x: [...]"""
    time.sleep(SECONDS)
    return x.clone()


@sleep.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


sleep.register_autograd(lambda ctx, grad: sleep(grad))


class Block(nn.Module):
    """x + sleep(W x). x: [batch width]"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + sleep(self.linear(x))


class Slow(nn.Module):
    """Blocks, and the mean of their output."""

    def __init__(self, blocks: int, width: int = 8) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x.mean()


def idle(pp: int, microbatches: int, schedule: str, blocks: int, rounds: int = 3) -> float:
    """Returns the idle time divided by the ideal time, the median of several steps."""
    autotp.rule(torch.ops.bubble.sleep.default, "b w -> b w")
    x = torch.ones(2 * microbatches, 8)
    trainer = autotp.distribute(
        Slow(blocks),
        pp=pp,
        microbatches=microbatches,
        schedule=schedule,
        example_inputs=x[:2],  # type: ignore[arg-type]
    )
    ideal, times = 2 * SECONDS * blocks / pp * microbatches, []
    for _ in range(1 + rounds):
        began = time.perf_counter()
        trainer.step(x)
        times.append(time.perf_counter() - began)
    return (statistics.median(times[1:]) - ideal) / ideal


def main() -> None:
    """Prints a row for each number of microbatches and schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="*", default=[4, 8, 16])
    args = parser.parse_args()
    world, rows = int(os.environ["WORLD_SIZE"]), []
    for microbatches in args.microbatches:
        for schedule, v in (("1F1B", 1), ("interleaved", 2)):
            found = idle(world, microbatches, schedule, 2 * world)
            rows.append((schedule, microbatches, found, (world - 1) / (microbatches * v)))
    if torch.distributed.get_rank() == 0:
        print(f"p={world}  schedule     microbatches  idle/ideal  formula")
        for schedule, microbatches, found, formula in rows:
            print(f"      {schedule:<12} {microbatches:>12}  {found:>10.3f}  {formula:>7.3f}")


if __name__ == "__main__":
    main()
