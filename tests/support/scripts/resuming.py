"""A training as a user writes it, whose processes are killed: it resumes by itself, and tells what it did.

torchrun --nproc-per-node 2 --max-restarts 3 tests/support/scripts/resuming.py FOLDER STEPS [KILL ...]

A KILL is attempt:step:rank:moment: in this attempt, in this step, this rank kills itself in `backward`, before it
`update`s the parameters, or while it writes a checkpoint (`save`, in a step that does).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch

import autotp
from autotp.models.gpt import GPT, GPTConfig

SAVE_EVERY = 3


def main(folder: Path, steps: int, kills: Sequence[str] = ()) -> None:
    """Trains to `steps`. `FOLDER/told` gets a line for each step: attempt, step, loss."""
    rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]

    def now(moment: str, step: int) -> None:
        if f"{attempt}:{step}:{rank}:{moment}" in kills:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=32, n_layer=2, n_head=2, n_embd=16, dropout=0.1))
    rows = torch.arange(24 * 8).view(24, 8) * 5 % 32
    example = {"tokens": rows[:2], "labels": rows[:2]}
    trainer = autotp.distribute(model, pp=2, microbatches=2, example_inputs=example, timeout=timedelta(seconds=60))
    optimizer = torch.optim.AdamW(autotp.weight_decay_groups(trainer, 0.1), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
    autotp.load_checkpoint(folder / "saved", trainer, optimizer, schedule=schedule)
    next(trainer.parameters()).register_post_accumulate_grad_hook(lambda p: now("backward", trainer.steps + 1))
    for batch in autotp.Sampler(len(rows), 4, trainer):
        if trainer.steps == steps:
            break
        loss = trainer.step(rows[batch], labels=rows[batch].roll(-1, 1))
        now("update", trainer.steps)
        autotp.clip_grad_norm_(trainer, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if rank == 0:
            with (folder / "told").open("a") as file:
                file.write(f"{attempt} {trainer.steps} {loss.item()!r}\n")
        if trainer.steps % SAVE_EVERY == 0:
            autotp.save_checkpoint(folder / "saved", trainer, optimizer, trainer.steps, wait=False, schedule=schedule)
            now("save", trainer.steps)
    state = autotp.full_state_dict(trainer)
    if rank == 0:
        torch.save(state, folder / "state.new")
        os.replace(folder / "state.new", folder / "state")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
