"""Step time against the floor: forward and backward of a GPT, autotp and Megatron-style layers by hand, in turn.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/step.py

Prints a table: medians over interleaved steps of one run, and the median of the ratios step by step. Losses and
gradient norms of the two are compared first.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron import MegatronGPT
from torch import Tensor, nn

import autotp
from autotp.models.gpt import GPT, GPTConfig

SHAPES = {
    "tiny": GPTConfig(block_size=128, vocab_size=1024, n_layer=4, n_head=4, n_embd=128, dropout=0.0),
    "small": GPTConfig(block_size=256, vocab_size=8192, n_layer=6, n_head=8, n_embd=256, dropout=0.0),
    "30M": GPTConfig(block_size=256, vocab_size=8192, n_layer=8, n_head=8, n_embd=512, dropout=0.0),
}


def timed(step: Callable[[], Tensor]) -> float:
    """Seconds of one step, the ranks started together."""
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def stepper(model: nn.Module, tokens: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """One forward and backward, gradients dropped before."""

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(tokens, labels)
        loss.backward()
        return loss

    return step


def compare(name: str, config: GPTConfig, batch: int, steps: int) -> list[str]:
    """A row of the table."""
    torch.manual_seed(0)
    gpt = GPT(config).train()
    tokens, labels = (torch.randint(config.vocab_size, (batch, config.block_size)) for _ in range(2))
    rank, tp = dist.get_rank(), dist.get_world_size()
    by_hand = stepper(MegatronGPT(copy.deepcopy(gpt), rank, tp), tokens, labels)
    ours = stepper(autotp.parallelize(gpt, check_inputs="never"), tokens, labels)
    difference = float((by_hand() - ours()).abs())
    assert difference < 1e-4, f"{name}: the losses differ by {difference}"
    for _ in range(2):
        by_hand(), ours()
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(steps):
        order = ((0, by_hand), (1, ours)) if i % 2 else ((1, ours), (0, by_hand))
        for side, step in order:
            times[side].append(timed(step))
    floor, mine = (statistics.median(side) for side in times)
    ratios = statistics.median(b / a for a, b in zip(*times, strict=True))
    return [
        name,
        f"{sum(p.numel() for p in GPT(config).parameters()) / 1e6:.1f}M",
        f"{floor * 1e3:.1f}",
        f"{mine * 1e3:.1f}",
        f"{ratios:.3f}",
    ]


def main() -> None:
    """Prints the table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rows = [compare(name, SHAPES[name], args.batch, args.steps) for name in args.shapes]
    if dist.get_rank() == 0:
        machine = f"{platform.processor() or platform.machine()}, torch {torch.__version__}"
        threads = f"{torch.get_num_threads()} thread a rank"
        print(f"{machine}, tp={dist.get_world_size()}, batch {args.batch}, {args.steps} steps each in turn, {threads}")
        print(f"{'shape':8}{'parameters':>12}{'by hand ms':>12}{'autotp ms':>12}{'ratio':>8}")
        for row in rows:
            print(f"{row[0]:8}{row[1]:>12}{row[2]:>12}{row[3]:>12}{row[4]:>8}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
