"""A training that saves after each step, beside another one that does so in the same folder, for tests.

torchrun --nproc-per-node 2 tests/support/scripts/beside.py FOLDER SAVED SEED

It goes on until there is `FOLDER/enough`; then `FOLDER/state` gets the model as it was saved last.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import autotp
from autotp.models.gpt import GPT, GPTConfig


def main(folder: Path, saved: Path, seed: int) -> None:
    """Trains."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(block_size=8, vocab_size=49, n_layer=2, n_head=4, n_embd=16, dropout=0.0))
    rows = torch.arange(32).view(4, 8)
    example = {"tokens": rows[:2], "labels": rows[:2]}
    trainer = autotp.distribute(model, tp=2, microbatches=2, example_inputs=example, timeout=timedelta(seconds=60))
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.01)
    enough = torch.tensor(False)
    while not enough:
        trainer.step(rows, labels=rows)
        optimizer.step()
        optimizer.zero_grad()
        step = 1000 * seed + trainer.steps  # No other job has one of this number.
        autotp.save_checkpoint(saved, trainer, optimizer, step, wait=step % 2 == 0)
        enough = torch.tensor((folder / "enough").exists())
        dist.broadcast(enough, 0)
    state = autotp.full_state_dict(trainer)
    if dist.get_rank() == 0:
        torch.save(state, folder / "state")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
