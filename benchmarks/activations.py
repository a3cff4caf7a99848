"""Compares the bytes that a rank keeps for backward in each layer of a GPT with Korthikanti et al. 2022.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/activations.py

It counts the storages that operators of a forward return and that still exist after the forward: each storage once,
without parameters. The figure of a layer is the difference between a deeper and a shallower model, for each layer.

NOTE [The formulas]
Per layer of s tokens, b rows, hidden size h, a heads and t ranks the paper has, in bytes, s b h times (sections 4, 5)

    10 + 24/t + 5 a s/(h t)      34/t + 5 a s/(h t)      34/t      2
    tensor parallel              and along the sequence  selective full recompute (2/t along the sequence)

for elements of 2 bytes and masks of 1. With e bytes an element, and m and n a mask of what is whole and of what is cut,
these are: whole, 4 e + 2 m: the inputs of two norms, of q/k/v and of the first linear; the masks of two dropouts. Cut,
12 e: q, k, v and the input of the projection; the input and the output of GeLU, of 4 h each. Scores, 2 e + n: softmax,
its mask, and the product of both. Attention with dropout keeps where it is causal, s by s bytes, s/(b h); without, it
is fused and keeps no scores, but a number a row and head, e a/h. Two numbers a row of each norm are kept, too, 4 e/h.
A mask of torch.dropout on the CPU takes e bytes, ours (of what is cut) 1.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from step import loss_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.models.gpt import GPT, GPTConfig

WAYS: dict[str, dict[str, Any]] = {
    "tensor parallel": {},
    "and sequence": {"sequence_parallel": True},
    "and selective": {"sequence_parallel": True, "recompute": "selective"},
    "full": {"recompute": "full"},
    "full and sequence": {"sequence_parallel": True, "recompute": "full"},
}
TOLERANCE = 0.1


class Made(TorchDispatchMode):
    """A mode that records the storages that operators allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def living(self, apart: nn.Module) -> int:
        """Returns the bytes of recorded storages that are still referenced, without the parameters in `apart`."""
        gc.collect()
        parameters = {p.untyped_storage()._cdata for p in apart.parameters()}
        living = {at: size for at, (storage, size) in self.found.items() if not storage.expired()}
        return sum(size for at, size in living.items() if at not in parameters)


def kept(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Returns the bytes that a forward keeps for its backward."""
    model(**inputs)  # The first call captures, and allocates the constants.
    with Made() as made:
        loss = loss_of(model(**inputs))
        found = min(made.living(model) for _ in range(3))  # A thread of gloo lets go of a tensor a moment later.
    loss.backward()
    return found


def of_a_layer(config: GPTConfig, batch: int, **given: Any) -> float:
    """Returns the bytes that a rank keeps in each layer."""
    found = []
    for layers in (2, 4):
        torch.manual_seed(0)
        model = autotp.parallelize(GPT(replace(config, n_layer=layers)).train(), check_inputs="never", **given)
        tokens = torch.randint(config.vocab_size, (batch, config.block_size))
        found.append(kept(model, {"tokens": tokens, "labels": tokens}))
    return (found[1] - found[0]) / 2


@dataclass(frozen=True)
class Formula:
    """What an element and masks take here, in bytes, and what attention keeps. NOTE [The formulas]"""

    element: int
    whole_mask: int
    cut_mask: int

    def __call__(self, way: str, config: GPTConfig, batch: int, tp: int) -> float:
        """Returns the bytes of one rank and one layer."""
        e, s, h, a = self.element, config.block_size, config.n_embd, config.n_head
        dropout = config.dropout > 0
        if way.startswith("full"):
            return s * batch * h * e / (tp if "sequence" in way else 1)
        along_sequence, keeps_scores = way.startswith("and"), dropout and "selective" not in way
        masks = 0 if not dropout else 2 * self.cut_mask if along_sequence else 2 * self.whole_mask
        region = (4 * e + 4 * e / h + masks) / (tp if along_sequence else 1)
        scores = (2 * e + self.cut_mask) * a * s / h if keeps_scores else 0 if dropout else e * a / h
        causal = s / (batch * h) if keeps_scores else 0
        return s * batch * h * (region + causal + (12 * e + scores) / tp)


FORMULA = Formula(element=4, whole_mask=4, cut_mask=1)
HEADER = f"{'dropout':<9}{'way':<20}{'KB a layer':>11}{'formula':>9}{'ratio':>7}  of the first"


@dataclass(frozen=True)
class Row:
    """Bytes of a layer, measured and by the formula."""

    dropout: float
    way: str
    measured: float
    expected: float
    first: float

    def __str__(self) -> str:
        ratio = self.measured / self.expected
        return (
            f"{self.dropout:<9}{self.way:<20}{self.measured / 1e3:>11.1f}{self.expected / 1e3:>9.1f}{ratio:>7.3f}"
            f"  {self.measured / self.first:.2f}"
        )


def measure(config: GPTConfig, batch: int, tp: int, ways: Collection[str] = tuple(WAYS)) -> list[Row]:
    """Returns a row for each way of recomputing."""
    rows: list[Row] = []
    for way in ways:
        found = of_a_layer(config, batch, **WAYS[way])
        first = rows[0].measured if rows else found
        rows.append(Row(config.dropout, way, found, FORMULA(way, config, batch, tp), first))
    return rows


def main() -> None:
    """Prints the table on the first rank; 1 if a figure is not within a tenth of its formula."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    config = GPTConfig(block_size=256, vocab_size=512, n_head=8, n_embd=256)
    tp = dist.get_world_size()
    rows = [row for p in (0.1, 0.0) for row in measure(replace(config, dropout=p), args.batch, tp)]
    if dist.get_rank() == 0:
        sizes = f"{config.block_size} tokens, batch {args.batch}, width {config.n_embd}, {config.n_head} heads"
        print(f"GPT, {sizes}, tp={tp}, float32")
        print(HEADER, *rows, sep="\n")
    dist.destroy_process_group()
    off = [row for row in rows if abs(row.measured / row.expected - 1) > TOLERANCE]
    raise SystemExit(int(bool(off)))


if __name__ == "__main__":
    main()
