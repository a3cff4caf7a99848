"""Compares a step of torch's Muon on the parts of a model, by `autotp.whole_matrices`, with its step on one device.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/calls/muon.py --rounds 7

Only the optimizer's step is timed, of all matrices but the embeddings. Each rank also holds the whole model, and steps
its matrices by torch's own class: "one device". The steps run in turn. Both get the same gradients, and the results are
compared: they have to be equal bit for bit. "sent" is what a rank sends to others in a step, and the ratio compares
it with an all-gather of the matrices. With n ranks the work of a step is 1/n, if the matrices divide well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autotp
from autotp.experimental.whole_matrices import matrices

sys.path.insert(0, str(Path(__file__).parents[1]))
from step import SHAPES, Shape, build, in_turn

ONE, PARTS = "one device", "parts"
RATE = 1e-4
"""The learning rate: parameters do not change much from step to step."""


@contextmanager
def bytes_sent() -> Iterator[list[int]]:
    """Yields a list that gets the bytes which each all-to-all of this rank sends to other ranks."""
    found: list[int] = []
    before = matrices.communicate

    def counted(name: str, x: Tensor, to: Any, of: Any, group: Any) -> Any:
        found.append(x.numel() * x.element_size() - of[dist.get_rank()])
        return before(name, x, to, of, group)

    matrices.communicate = counted  # type: ignore[assignment]
    try:
        yield found
    finally:
        matrices.communicate = before


@dataclass(frozen=True)
class Row:
    """The median seconds of a step on one device and on parts, the bytes that this rank sends, and of an all-gather."""

    shape: str
    one: float
    parts: float
    sent: int
    gather: float

    def __str__(self) -> str:
        return (
            f"{self.shape:<12}{self.one * 1e3:>10.1f}{self.parts * 1e3:>10.1f}{self.parts / self.one:>8.3f}"
            f"{self.sent / 1e6:>10.2f}{self.sent / self.gather:>8.3f}"
        )


HEADER = f"{'shape':<12}{'one ms':>10}{'parts ms':>10}{'ratio':>8}{'sent MB':>10}{'ratio':>8}"


def measure(name: str, config: Shape, rounds: int) -> Row:
    """Returns the row of a shape.

    Raises:
        RuntimeError: a matrix differs from that of one device.
    """
    whole, inputs = build(config, 2, "cpu")
    parallel = autotp.parallelize(build(config, 2, "cpu")[0], device="cpu")
    parallel(**inputs)
    names = [name for name, p in whole.named_parameters() if p.dim() == 2 and not _is_table(name)]
    for name_, p in whole.named_parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name_)))
        parallel.get_parameter(name_).grad = parallel.layouts[name_].take(p.grad, dist.get_rank()).clone()
    optimizers = {
        ONE: torch.optim.Muon([whole.get_parameter(name) for name in names], lr=RATE),
        PARTS: autotp.whole_matrices(torch.optim.Muon)([parallel.get_parameter(name) for name in names], lr=RATE),
    }
    for _ in range(5):  # Ranks compare more in the first steps.
        for optimizer in optimizers.values():
            optimizer.step()
    with bytes_sent() as sent:
        for optimizer in optimizers.values():
            optimizer.step()
    for name_ in names:
        own = parallel.layouts[name_].take(whole.get_parameter(name_).detach(), dist.get_rank())
        if not torch.equal(own, parallel.get_parameter(name_).detach().to_local()):
            raise RuntimeError(f"{name_} differs from that of one device")
    times = in_turn({way: optimizer.step for way, optimizer in optimizers.items()}, rounds, "cpu")
    one, parts = (statistics.median(each.wall for each in times[way]) for way in (ONE, PARTS))
    size, n = sum(whole.get_parameter(name_).nbytes for name_ in names), dist.get_world_size()
    return Row(name, one, parts, sum(sent), size * (n - 1) / n)


def _is_table(name: str) -> bool:
    return any(part in name for part in ("wte", "wpe", "embed", "lm_head"))


def main() -> None:
    """Prints the table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["gpt-30M", "llama-30M"], choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(f"tp={dist.get_world_size()}, torch {torch.__version__}, {args.rounds} rounds", HEADER, sep="\n")
    for name in args.shapes:
        row = measure(name, SHAPES[name], args.rounds)
        if dist.get_rank() == 0:
            print(row, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
