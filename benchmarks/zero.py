"""Compares the bytes that a replica holds with each stage of ZeRO with the formulas.

    torchrun --nproc-per-node 2 benchmarks/zero.py

P, G and O are the bytes of the parameters, of the gradients and of the optimizer's state (two moments); n is the number
of replicas. The bytes are counted between two microbatches, when gradients exist, and between steps. In a step of stage
3 the first block stays whole from backward of a microbatch to forward of the next one: it is in the formula. The
embeddings and the last norm, which are whole there, too, are not. Source: Rajbhandari et al. 2020, figure 1.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import autotp
from autotp.models.gpt import GPT, GPTConfig
from autotp.passes.emit.rank_program import RankProgram


def held() -> int:
    """Returns the bytes of all floating-point tensors of this process that Python knows."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    tensors = [x for x in tensors if x.is_floating_point() and not x.is_meta]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local if type(x) is not _Fake}
    return sum(size for at, size in storages.items() if at)


_Fake = torch._subclasses.FakeTensor


@contextmanager
def between_microbatches() -> Iterator[list[int]]:
    """Yields a list that gets the bytes held before each microbatch."""
    found: list[int] = []
    before = RankProgram.sum_now

    def sum_now(self: RankProgram, *args: Any) -> None:
        found.append(held())
        before(self, *args)

    RankProgram.sum_now = sum_now  # type: ignore[method-assign]
    try:
        yield found
    finally:
        RankProgram.sum_now = before  # type: ignore[method-assign]


def measured(zero: int, width: int = 64, layers: int = 4) -> dict[str, tuple[float, float]]:
    """Returns moment -> bytes measured and by the formula, both divided by the bytes of the parameters."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=128, n_layer=layers, n_head=4, n_embd=width, dropout=0.0))
    size, block = (sum(p.numel() * p.element_size() for p in part.parameters()) for part in (model, model.h[0]))
    rows = torch.arange(32).view(4, 8) + int(os.environ["RANK"])  # Each replica has its own rows.
    n = int(os.environ["WORLD_SIZE"])
    base = held() - size
    trainer = autotp.distribute(
        model,
        dp=n,
        microbatches=2,
        zero=zero,
        example_inputs={"tokens": rows[:2], "labels": rows[:2]},  # type: ignore[arg-type]
    )
    optimizer = torch.optim.AdamW(trainer.parameters())
    with between_microbatches() as found:
        for _ in range(3):
            trainer.step(rows, labels=rows)
            optimizer.step()
            optimizer.zero_grad()
    at_rest = held()
    share = 1 / n
    p, g, o = (1 if zero < 3 else share), (1 if zero < 2 else share), 2 * (1 if zero < 1 else share)
    rest = (1 if zero < 1 else share) + o
    # The parts from which the whole parameters were gathered, or the block that stays.
    within = {1: share, 2: share, 3: block / size}.get(zero, 0)
    return {
        "in a step": ((found[-1] - base) / size, p + g + o + within),
        "between steps": ((at_rest - base) / size, rest),
    }


def main() -> None:
    """Prints a row for each stage of ZeRO and each moment."""
    rows = [(zero, measured(zero)) for zero in range(4)]
    if torch.distributed.get_rank() == 0:
        print("zero  moment          held / P   formula")
        for zero, found in rows:
            for moment, (bytes_, formula) in found.items():
                print(f"{zero:>4}  {moment:<14} {bytes_:>9.3f} {formula:>9.3f}")


if __name__ == "__main__":
    main()
