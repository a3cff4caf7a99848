"""Compares the bytes that a rank keeps for backward in each layer of a GPT with Korthikanti et al. 2022.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/activations.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 benchmarks/activations.py --sequences

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

With --sequences the ranks cut the sequence (`cp`), and gather keys and values. Then a rank keeps 1/cp of what one rank
keeps, but for keys and values: these are whole, 2 s b h elements. It sends keys and values once in forward, and their
gradients once in backward, (cp - 1)/cp of them each; and one sum of the parameters' gradients.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.models.gpt import GPT, GPTConfig
from autotp.source_location import block_in

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

    keeps_no_tensor = True  # So operators write into memory as they do without it.

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


SEQUENCE_HEADER = (
    f"{'cp':<4}{'KB a layer':>11}{'expected':>10}{'ratio':>7}{'of one rank':>13}{'sent forward':>15}{'backward':>11}"
)
WITHIN = 0.05


@dataclass(frozen=True)
class SequenceRow:
    """Bytes of a layer on one rank."""

    cp: int
    kept: float
    expected: float
    first: float
    forward: float
    backward: float

    @property
    def ratio(self) -> float:
        return self.kept / self.expected

    def __str__(self) -> str:
        return (
            f"{self.cp:<4}{self.kept / 1e3:>11.1f}{self.expected / 1e3:>10.1f}{self.ratio:>7.3f}"
            f"{self.kept / self.first:>13.2f}{self.forward / 1e3:>12.1f} KB{self.backward / 1e3:>8.1f} KB"
        )


def sent(config: GPTConfig, batch: int, cp: int) -> tuple[float, float]:
    """Returns the bytes of keys and values that a rank receives in a layer's forward, and sends in its backward."""
    if cp == 1:
        return 0.0, 0.0
    tokens = torch.zeros(batch, config.block_size, dtype=torch.long)
    inputs = {"tokens": tokens, "labels": tokens}
    plan = autotp.explain(GPT(replace(config, n_layer=2)), 1, cp=cp, cp_attention="gather", example_inputs=inputs)
    own = [s for s in plan.traffic.over("cp").sends if block_in(s.module) == "h.1" and not s.parameter]
    forward, backward = (sum(s.bytes for s in own if s.backward == back) * (cp - 1) / cp for back in (False, True))
    return forward, backward


def measure_sequences(config: GPTConfig, batch: int, ranks: int) -> list[SequenceRow]:
    """Returns a row for each number of ranks that divides `ranks`."""
    rows: list[SequenceRow] = []
    whole = 2 * config.block_size * batch * config.n_embd * 4
    for cp in (n for n in range(1, ranks + 1) if ranks % n == 0):
        mesh = init_device_mesh("cpu", (ranks // cp, cp, 1), mesh_dim_names=("dp", "cp", "tp"))
        found = of_a_layer(config, batch, mesh=mesh, cp_attention="gather")
        first = rows[0].kept if rows else found
        rows.append(SequenceRow(cp, found, (first - whole) / cp + whole, first, *sent(config, batch, cp)))
    return rows


def main() -> None:
    """Prints the table on the first rank; 1 if a figure is not within a tenth of its formula."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequences", action="store_true", help="cut sequences of 1,024 tokens over the ranks")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    if args.sequences:
        return sequences(args.batch)
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


def sequences(batch: int) -> None:
    """Prints the table of cut sequences; 1 if a figure is not within a twentieth of what is expected."""
    config = GPTConfig(block_size=1024, vocab_size=512, n_head=8, n_embd=256, dropout=0.0)
    rows = measure_sequences(config, batch, dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"GPT, 1024 tokens, batch {batch}, width {config.n_embd}, {config.n_head} heads, float32")
        print(SEQUENCE_HEADER, *rows, sep="\n")
    dist.destroy_process_group()
    raise SystemExit(int(any(abs(row.ratio - 1) > WITHIN for row in rows)))


if __name__ == "__main__":
    main()
