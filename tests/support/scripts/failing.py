"""A program whose second rank fails after `parallelize`, for tests: torchrun --nproc-per-node 2 failing.py FOLDER."""

from __future__ import annotations

import torch

import autotp


def read_rows(rank: int) -> torch.Tensor:
    """Returns rows."""
    if rank == 1:
        raise ValueError("a file of rows is not there")
    return torch.ones(2, 4)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = autotp.parallelize(torch.nn.Linear(4, 6), 2, example_inputs=torch.ones(2, 4))
    model(read_rows(model.mesh.rank))
