"""Sampler: the rows of a replica in each step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils import data

from autotp.arguments import expect_arguments
from autotp.errors import Error, within
from autotp.training.trainer import Trainer


class Sampler(data.Sampler[list[int]]):
    """Yields, without end, the rows of this replica's part of each batch: for `DataLoader(batch_sampler=...)`.

    Each epoch has an order of its own, drawn from (seed, epoch). Rows that do not fill a batch are left out. The batch
    of a step depends on the step alone, so there is nothing to save: iteration begins at `trainer.steps`, which
    `load_checkpoint` sets. Ranks that hold one replica together get the same rows.

    Args:
        size: the number of rows of the data set.
        batch_size: the number of rows of a batch, of all replicas together.
        trainer: as `distribute` returned it.
        seed: the seed of the orders; None leaves the rows in their own order.

    Raises:
        Error: the batch does not divide into the replicas, or the data set has fewer rows than a batch.

    Example:
        `Regression` is a linear layer whose `forward(x, y)` returns the mean squared error.

        >>> trainer = autotp.distribute(Regression(), example_inputs=(torch.ones(2, 4), torch.ones(2, 1)))
        >>> rows = autotp.Sampler(6, 2, trainer, seed=None)
        >>> batches = iter(rows)
        >>> [next(batches) for _ in range(4)]
        [[0, 1], [2, 3], [4, 5], [0, 1]]
        >>> loader = torch.utils.data.DataLoader(torch.randn(6, 4), batch_sampler=rows)
        >>> next(iter(loader)).shape
        torch.Size([2, 4])
    """

    def __init__(self, size: int, batch_size: int, trainer: Trainer, seed: int | None = 0) -> None:
        arguments = {"size": size, "batch_size": batch_size, "trainer": trainer, "seed": seed}
        within("Sampler", lambda: expect_arguments(Sampler.__init__, **arguments))
        dp = trainer.mesh["dp"].size()
        if batch_size < 1 or batch_size % dp:
            raise Error(f"Sampler: batch_size={batch_size} does not divide into {dp} replicas", fix=f"batch_size={dp}")
        if size < batch_size:
            raise Error(
                f"Sampler: a data set of {size} rows, and a batch has {batch_size}",
                fix="more rows, or a smaller batch_size",
            )
        self.size, self.batch_size, self.trainer, self.seed = size, batch_size, trainer, seed

    def __iter__(self) -> Iterator[list[int]]:
        step = self.trainer.steps
        while True:
            # The order of an epoch is drawn once, and not for each batch.
            order, epoch = self.order(step // len(self)), step // len(self)
            while step // len(self) == epoch:
                start = step % len(self) * self.batch_size
                yield self._mine(order[start : start + self.batch_size])
                step += 1

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return self.size // self.batch_size

    def order(self, epoch: int) -> list[int]:
        """Returns the numbers of all rows, in the order of one epoch.

        Args:
            epoch: counted from 0.
        """
        if self.seed is None:
            return list(range(self.size))
        # Another seed repeats no order within a million epochs.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        rows: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return rows

    def _mine(self, rows: list[int]) -> list[int]:
        mesh = self.trainer.mesh["dp"]
        share = self.batch_size // mesh.size()
        return rows[mesh.get_local_rank() * share :][:share]
