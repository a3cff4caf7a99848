"""The common parts of the pretraining scripts: tokens, the layout, the loop with its logs and checkpoints.

Each run has a folder. A run that is started again continues from the newest checkpoint there, in the same layout or in
another. So it works with `torchrun --max-restarts`.
"""

from __future__ import annotations

import json
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from filelock import FileLock
from pretraining import logs
from pretraining.recipes import DTYPES, Recipe
from support import training
from support.training import rank, say
from text import corpus
from text.tokens import Kind, Tokens, prepare
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from torch.utils.data import DataLoader, Dataset, default_collate

import autotp
from autotp.checkpoint.save import saved_steps

HELD_OUT = 0.1  # The last tenth of the sequences.

Batch = dict[str, Tensor]


class Sequences(Protocol):
    """The model's arguments for each sequence, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Batch: ...


def text_of(args: Namespace, kind: Kind) -> tuple[Tokenizer, Tokens]:
    """Returns the tokenizer and the tokens of the text that the run trains on."""
    files = corpus.files(args.data)
    tokenizer, text = prepare(args.cache, kind, lambda: corpus.documents(files), args.vocabulary)
    say(f"{text}, a vocabulary of {tokenizer.get_vocab_size():,}")
    return tokenizer, text


def parted(length: int) -> tuple[range, range]:
    """Returns the numbers of the sequences to train on, and of the held-out sequences, of `length` in all."""
    cut = length - max(1, int(length * HELD_OUT))
    return range(cut), range(cut, length)


def begin(args: Namespace, tokenizer: Tokenizer, text: Tokens, config: Any) -> None:
    """Makes the run's folder: its tokenizer, the model's configuration, and settings that a later run must not change.

    Raises:
        ValueError: the folder exists, and belongs to a run with other settings.
    """
    names = [*Recipe.__dataclass_fields__, "seed"]
    settings = asdict(config) | {name: getattr(args, name) for name in names} | {"text": text.fingerprint}
    file = args.out / "settings.json"
    args.out.mkdir(parents=True, exist_ok=True)
    with FileLock(args.out / ".lock"):
        if not file.exists():
            tokenizer.save(str(args.out / "tokenizer.json"))
            (args.out / "config.json").write_text(json.dumps(asdict(config)))
            file.write_text(json.dumps(settings))
        before = json.loads(file.read_text())
    other = [f"{name}={before.get(name)}" for name in settings if settings[name] != before.get(name)]
    if other:
        raise ValueError(f"{args.out} has a run with {', '.join(other)}. Try another --out, or the same settings")


def distributed(model: nn.Module, args: Namespace, data: Sequences) -> tuple[autotp.Trainer, ShardedGradScaler]:
    """Returns this rank's part of the model, and the scaler of its loss, which scales only in float16."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    scaler = ShardedGradScaler(kind, enabled=args.dtype == "float16")
    trainer = autotp.distribute(
        model,
        tp=args.tp,
        pp=args.pp,
        dp=args.dp,
        microbatches=args.microbatches,
        schedule=args.schedule,
        sequence_parallel=args.sequence_parallel,
        recompute=args.recompute,
        zero=args.zero,
        compute_dtype=DTYPES[args.dtype],
        loss_scaler=scaler if scaler.is_enabled() else None,
        example_inputs=default_collate([data[i] for i in range(args.batch // (args.dp * args.microbatches))]),
    )
    say(f"tp={args.tp} pp={args.pp} dp={args.dp}, {args.microbatches} microbatches, {args.dtype}")
    return trainer, scaler


class Run:
    """A training, which continues from the newest checkpoint in its folder, if there is one.

    Args:
        data: the sequences to train on.
        held_out: a function that returns the loss on held-out sequences, in nats.
    """

    def __init__(
        self, trainer: autotp.Trainer, scaler: ShardedGradScaler, args: Namespace, data: Sequences,
        held_out: Callable[[], float],
    ) -> None:  # fmt: skip
        self.trainer, self.scaler, self.args, self.held_out = trainer, scaler, args, held_out
        groups = autotp.weight_decay_groups(trainer, args.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, args.beta2))
        self.scheduler = scheduled(self.optimizer, args)
        self.state: dict[str, Any] = {"scheduler": self.scheduler, "scaler": scaler}
        self.folder, self.device = args.out / "checkpoints", next(trainer.parameters()).device
        sampler = autotp.Sampler(len(data), args.batch, trainer, seed=args.seed)
        own = torch.Generator()  # Else the loader draws from dropout's generator, once more in a continued run.
        self.batches = DataLoader(cast(Dataset[Batch], data), batch_sampler=sampler, generator=own)

    def train(self) -> float:
        """Trains to the last step, and returns the held-out loss."""
        args, tokens, unseen = self.args, self.args.batch * self.args.block, None
        done = autotp.load_checkpoint(self.folder, self.trainer, self.optimizer, **self.state)
        bar = training.progress("pretraining", args.steps * tokens)
        bar.update(done * tokens)
        with logs.Log(args.out, done) if rank() == 0 else nullcontext() as log, bar:
            for step, batch in zip(range(done + 1, args.steps + 1), self.batches, strict=False):
                values = self.update(batch)
                if step % args.eval_every == 0 or step == args.steps:
                    values["held_out"] = unseen = self.held_out()
                if log:
                    log.write(step, values)
                bar.set_postfix(loss=f"{values['loss']:.3f}", refresh=False)
                bar.update(tokens)
                if step % args.save_every == 0 or step == args.steps:
                    self.save(step)
        return self.held_out() if unseen is None else unseen

    def save(self, step: int) -> None:
        """Writes a checkpoint, and removes the oldest checkpoints if there are more than `--keep`."""
        autotp.save_checkpoint(self.folder, self.trainer, self.optimizer, step, **self.state)
        if rank() == 0:
            keep(self.folder, self.args.keep)

    def update(self, batch: Batch) -> dict[str, float]:
        """Takes one step of the optimizer, and returns its measurements."""
        start, rate = time.perf_counter(), self.optimizer.param_groups[0]["lr"]
        self.optimizer.zero_grad()
        loss = float(self.trainer.step(**{name: value.to(self.device) for name, value in batch.items()}))
        self.scaler.unscale_(self.optimizer)
        norm = float(autotp.clip_grad_norm_(self.trainer, self.args.clip))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        speed = self.args.batch * self.args.block / (time.perf_counter() - start)
        return {"loss": loss, "rate": rate, "norm": norm, "tokens_per_second": speed}


def keep(folder: Path, count: int) -> None:
    """Keeps the newest `count` complete checkpoints, and removes the older ones. Incomplete folders stay."""
    for step in saved_steps(folder)[:-count]:
        path = folder / f"step-{step:08d}"
        # A reader sees it vanish at once. If this process ends now, the next job's first save removes the rest.
        shutil.rmtree(path.rename(folder / f".{path.name}.removed.new"))


def scheduled(optimizer: torch.optim.Optimizer, args: Namespace) -> LRScheduler:
    """Returns the schedule of the learning rate: warm-up, then a cosine."""
    up = LinearLR(optimizer, 1 / args.warmup, total_iters=args.warmup - 1)
    down = CosineAnnealingLR(optimizer, args.steps - args.warmup, args.min_lr)
    return SequentialLR(optimizer, [up, down], [args.warmup])


def held_out_loss(trainer: autotp.Trainer, data: Sequences, args: Namespace, names: Collection[str]) -> float:
    """Returns the mean loss of held-out sequences, in nats for each label; `names` are the arguments to pass."""
    total, labels, replicas = 0.0, 0, trainer.mesh["dp"]
    device = next(trainer.parameters()).device
    for numbers in evenly(len(data), args.batch, args.eval_batches):
        whole = default_collate([data[i] for i in numbers])
        found = int((whole["labels"] >= 0).sum())
        mine = {name: whole[name].chunk(replicas.size())[replicas.get_local_rank()].to(device) for name in names}
        total += float(trainer.evaluate(**mine)) * found
        labels += found
    return total / labels


def evenly(length: int, batch: int, batches: int) -> list[range]:
    """Returns the sequence numbers of up to `batches` batches, spread evenly over `length` sequences.

    Raises:
        ValueError: there are fewer sequences than in a batch.
    """
    count = min(batches, length // batch)
    if count < 1:
        raise ValueError(f"{length} sequences are held out, and a batch is {batch}. Try more text or a smaller --batch")
    every = length // (count * batch)
    return [range(i * batch * every, (i + 1) * batch * every, every) for i in range(count)]
