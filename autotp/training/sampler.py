"""Which rows of a data set a replica takes at each step, and which parameters decay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import data

from autotp.errors import Error
from autotp.training.trainer import Trainer


class Sampler(data.Sampler[list[int]]):
    """Without end, the rows of this replica's part of each batch: for `DataLoader(dataset, batch_sampler=...)`.

    Each epoch is in an order of its own, drawn from (seed, epoch); what does not fill a batch is left out. A step's
    batch depends on nothing but the step, so there is nothing to save: one begins at `trainer.steps`, which
    `load_checkpoint` sets. Ranks that hold one replica together are given the same rows.

    Args:
        size: of the data set.
        batch_size: of all replicas together.
        seed: of the orders; None leaves the rows as they are.

    Raises:
        Error: the batch does not divide into the replicas, or the data set has fewer rows.
    """

    def __init__(self, size: int, batch_size: int, trainer: Trainer, seed: int | None = 0) -> None:
        dp = trainer.mesh["dp"].size()
        if batch_size < 1 or batch_size % dp:
            raise Error(f"Sampler: batch_size={batch_size} does not divide into {dp} replicas", fix=f"batch_size={dp}")
        if size < batch_size:
            raise Error(f"Sampler: a data set of {size} rows, and a batch has {batch_size}")
        self.size, self.batch_size, self.trainer, self.seed = size, batch_size, trainer, seed

    def __iter__(self) -> Iterator[list[int]]:
        step = self.trainer.steps
        while True:
            order, epoch = self.order(step // len(self)), step // len(self)
            while step // len(self) == epoch:
                at = step % len(self) * self.batch_size
                yield self._mine(order[at : at + self.batch_size])
                step += 1

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.size // self.batch_size

    def order(self, epoch: int) -> list[int]:
        """All rows, as they come in one epoch."""
        if self.seed is None:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        found: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return found

    def _mine(self, rows: list[int]) -> list[int]:
        mesh = self.trainer.mesh["dp"]
        share = self.batch_size // mesh.size()
        return rows[mesh.get_local_rank() * share :][:share]


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameters for an optimizer: matrices, which decay, and vectors (biases, the weights of norms), which do not.

    Both groups are there on every rank, whatever its stages hold.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
