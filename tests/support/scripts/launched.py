"""Starts two ranks that print their place and part, for tests: launched.py spawn | notebook | by-launcher [PORT]."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

import autotp


def train() -> None:
    """Prints this rank's place, the shape of its part, and the loss after a step."""
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    model: Any = autotp.parallelize(whole, 2, example_inputs=torch.ones(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    loss = model(torch.ones(2, 4)).square().mean().item()
    sys.stdout.write(f"{model.mesh} {model.layouts['0.weight']} {loss:.6f}\n")  # In one piece, unlike print.
    sys.stdout.flush()


def spawned(rank: int, file: str) -> None:
    """What torch.multiprocessing.spawn calls."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        torch.multiprocessing.spawn(spawned, (sys.argv[2],), nprocs=2)
    elif sys.argv[1] == "notebook":
        from accelerate import notebook_launcher

        notebook_launcher(train, (), num_processes=2, use_port=sys.argv[2])
    else:
        train()
