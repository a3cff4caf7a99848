"""Measures how much of the rows' way to their experts a step waits for, with the batch whole and in halves.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/calls/dispatch.py

Two replicas of a small mixture have half of its experts each (`distribute(dp=2, ep=2)`). They are on one machine, and
the link between them is that of `benchmarks/overlap.py`: it takes a given part of a step, and no time of a processor.
It carries the exchanges of rows and of their counts; sums of gradients take no time on it. Each round has a step of
each way on each link; what is hidden is the part of the link's time that a step does not wait for. All numbers are
medians over the rounds, with their quartiles.

Its clock is the processor time of the thread that computes, set forward by each wait. So other work on the machine does
not count, nor that one rank waits for the other: both would compute for as long.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from overlap import ALL_TO_ALL, HEADER, LINK, Row, connect

import autotp

WAYS: dict[str, dict[str, Any]] = {"whole": {}, "halves": {"overlap": "batch"}}


def trainers(rows: int, length: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Returns a step of each way."""
    steps = {}
    tokens = torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(dist.get_rank()))
    batch = {"input_ids": tokens, "labels": tokens}
    for way, options in WAYS.items():
        torch.manual_seed(0)
        config = MixtralConfig(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, attn_implementation="sdpa",
            experts_implementation="grouped_mm", max_position_embeddings=length,
        )  # fmt: skip
        trainer = autotp.distribute(MixtralForCausalLM(config), example_inputs=batch, dp=2, ep=2, **options)

        def step(trainer: autotp.Trainer = trainer) -> torch.Tensor:
            trainer.zero_grad()
            return trainer.step(**batch)

        steps[way] = step
    return steps


def measure(rows: int, length: int, rounds: int, shares: Sequence[float]) -> list[Row]:
    """Returns a row of each way on each link."""
    LINK.only, LINK.by_processor = ALL_TO_ALL, True
    steps = trainers(rows, length)
    for step in steps.values():
        for _ in range(3):
            step()
    LINK.reset()
    free = torch.tensor(statistics.median(taken(steps["whole"])[0] for _ in range(3)), dtype=torch.float64)
    dist.broadcast(free, 0)
    times: dict[tuple[float, str], list[tuple[float, float]]] = {(share, way): [] for share in shares for way in WAYS}
    LINK.reset()
    taken(steps["whole"])
    speed = free.item() / LINK.bytes  # Of a link that takes as long as the step.
    carried = dict.fromkeys(times, 0.0)
    for _ in range(rounds):
        for (share, way), each in times.items():
            LINK.reset(share * speed)
            each.append(taken(steps[way]))
            carried[share, way] = LINK.bytes * share * speed
    free_times = {key: [seconds - waited for seconds, waited in each] for key, each in times.items()}
    return [
        Row(
            "mixtral", way, share, free_times[share, way], free_times[share, "whole"], [seconds for seconds, _ in each],
            carried[share, way],
        )
        for (share, way), each in times.items()
    ]  # fmt: skip


def taken(step: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Returns the seconds of a step by the link's clock, and the part of them for which it waits."""
    begin, waited = LINK.now(), LINK.waited
    step()
    return LINK.now() - begin, LINK.waited - waited


def main() -> None:
    """Prints the table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="rows of each replica")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--shares", type=float, nargs="+", default=(0.25, 0.5), help="parts of a step for the link")
    args = parser.parse_args()
    connect(timeout=timedelta(minutes=5))
    measured = measure(args.rows, args.length, args.rounds, args.shares)
    if dist.get_rank() == 0:
        print(HEADER, *measured, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
