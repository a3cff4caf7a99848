"""A training that ends while it saves, for tests.

torchrun --nproc-per-node 2 tests/support/scripts/ending.py FOLDER (destroy | exit | full | killed NUMBER)
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autotp
from autotp.checkpoint.files import tensor_pieces as pieces
from autotp.models.gpt import GPT, GPTConfig


def main(folder: Path, mode: str, number: int = 0) -> None:
    """Saves twice; the second time it does not wait, and ends."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=49, n_layer=2, n_head=4, n_embd=16, dropout=0.0))
    rows = torch.arange(32).view(4, 8)
    example = {"tokens": rows[:2], "labels": rows[:2]}
    given: dict[str, Any] = {"example_inputs": example, "timeout": timedelta(seconds=60)}
    trainer = autotp.distribute(model, tp=2, microbatches=2, **given)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.01)
    trainer.step(rows, labels=rows)
    optimizer.step()
    autotp.save_checkpoint(folder / "saved", trainer, optimizer, 1)
    if mode == "full" and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if mode == "killed" and rank == number % 2:
        _die_at(random.Random(number).randrange(1, 40))
    autotp.save_checkpoint(folder / "saved", trainer, optimizer, 2, wait=mode == "killed")
    if mode == "destroy":
        dist.destroy_process_group()


def _die_at(count: int) -> None:
    """This process is killed when it writes a tensor, so many of them later."""
    left, convert = [count], pieces.bytes_of

    def bytes_of(tensor: torch.Tensor) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return convert(tensor)

    pieces.bytes_of = bytes_of


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
