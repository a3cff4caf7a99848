"""Measures how much of the rows' way to their experts a step waits for, with the batch whole and in halves.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/calls/dispatch.py

Two replicas of a small mixture have half of its experts each (`distribute(dp=2, ep=2)`). They are on one machine, and
the link between them is that of `benchmarks/overlap.py`: it takes a given part of a step, and no time of a processor.
Each round has a step of each way on each link; what is hidden is the part of the link's time that a step does not wait
for. All numbers are medians over the rounds, with their quartiles.
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
from overlap import LINK, Row, connect
from step import in_turn

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
    LINK.reset()
    steps = trainers(rows, length)
    carried = {}
    for way, step in steps.items():
        for _ in range(4):
            step()
        LINK.reset()
        step()
        carried[way] = LINK.bytes
    free = statistics.median(taken.wall for taken in in_turn({"": steps["whole"]}, 5, "cpu")[""])
    agreed = torch.tensor(free, dtype=torch.float64)
    dist.broadcast(agreed, 0)
    speeds = {share: share * agreed.item() / carried["whole"] for share in shares}

    def on_link(step: Callable[[], torch.Tensor], speed: float) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            LINK.reset(speed)
            return step()

        return run

    turns = in_turn(
        {(way, s): on_link(step, v) for s, v in {0.0: 0.0, **speeds}.items() for way, step in steps.items()},
        rounds, "cpu",
    )  # fmt: skip
    LINK.reset()
    times = {key: [taken.wall for taken in each] for key, each in turns.items()}
    return [
        Row("mixtral", way, s, times[way, 0.0], times["whole", 0.0], times[way, s], carried[way] * speed)
        for s, speed in speeds.items()
        for way in steps
    ]


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
        print(*measured, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
