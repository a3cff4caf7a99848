"""Measures what the comparison of replicas before an optimizer's step costs, beside the step of a training.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/calls/compared_steps.py

Two replicas of a GPT train with `distribute(dp=2)` and AdamW. Before the first four steps, and each 64th after, they
compare all parameters and gradients by checksums. "comparison" is the time of one, with the wait for the other rank,
and "step" the time of a step without it: medians. "of 64 steps" is the comparison divided by 64 steps. "operators" are
those that a card runs for its checksums, and "bytes read" what they read of its memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.distributed.fingerprint import bits_of_all
from autotp.models.gpt import GPT, GPTConfig
from autotp.runtime.torch_hooks import optimizer_guard

SHAPES = {"tiny": (2, 64), "small": (4, 256), "30M": (8, 512)}
"""Name -> layers and width."""
TOKENS = 128
READS = 2
"""How often a checksum reads each byte."""


class Operators(TorchDispatchMode):
    """Counts the operators that run, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operators_of(tensors: list[Tensor]) -> int:
    """Returns the operators that a card runs for the checksums of these tensors."""
    with Operators() as operators:
        bits_of_all(tensors)
    return operators.count


def steps(trainer: autotp.Trainer, count: int, every: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of steps without their comparisons, and those of the comparisons."""
    optimizer, compared = torch.optim.AdamW(trainer.parameters()), list[float]()
    compare: Callable[..., None] = optimizer_guard._compare

    def timed(*args: Any) -> None:
        start = time.perf_counter()
        compare(*args)
        compared.append(time.perf_counter() - start)

    rest = list[float]()
    with patch.object(optimizer_guard, "_compare", timed), patch.object(optimizer_guard, "EVERY", every):
        for step in range(count):
            tokens = (torch.arange(4 * TOKENS).view(4, TOKENS) * 7 + 2 * step + dist.get_rank()) % 997
            before, start = sum(compared), time.perf_counter()
            trainer.step(tokens, tokens.roll(1, 1))
            optimizer.step()
            optimizer.zero_grad()
            rest.append(time.perf_counter() - start - (sum(compared) - before))
    return rest[1:], compared[1:]


def measure(name: str, count: int = 17, every: int = 2) -> str:
    """Returns a row of the table."""
    layers, width = SHAPES[name]
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=layers, n_head=4, n_embd=width, vocab_size=1000, block_size=TOKENS))
    example = torch.zeros(2, TOKENS, dtype=torch.long)
    trainer = autotp.distribute(model, tp=1, dp=2, example_inputs=(example, example))
    step, comparison = map(statistics.median, steps(trainer, count, every))
    tensors = [x for p in trainer.parameters() for x in (p.detach(), torch.zeros_like(p))]
    size = sum(x.nbytes for x in tensors)
    return (
        f"| {name} | {sum(p.numel() for p in trainer.parameters()) / 1e6:.1f}M | {step * 1e3:.0f} "
        f"| {comparison * 1e3:.1f} | {comparison / step:.1%} | {comparison / step / optimizer_guard.EVERY:.2%} "
        f"| {operators_of(tensors)} | {READS * size / 1e6:.0f} |"
    )


def main() -> None:
    """Prints the table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    first = int(os.environ["RANK"]) == 0
    heads = ("model", "parameters", "step, ms", "comparison, ms", "of a step", "of 64 steps", "operators", "MB read")
    if first:
        print(f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", sep="\n", flush=True)
    for name in args.shapes:
        row = measure(name)
        if first:
            print(row, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
