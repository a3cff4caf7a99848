"""Measures a head and what reads its logits over a large vocabulary: the most memory, and the time.

    OMP_NUM_THREADS=1 python benchmarks/calls/large_loss.py              counted on meta: 151,936 words, 8,192 tokens
    OMP_NUM_THREADS=1 python benchmarks/calls/large_loss.py --measure    on this CPU, a quarter of these tokens
    OMP_NUM_THREADS=1 python benchmarks/calls/large_loss.py --time       32,000 words, one rank, beside plain torch

It runs the graph of the first rank, without communication, forward and backward, and counts the storages that operators
return and that still exist, after each operator. The most of them is the row, without the gradients of weight and
input, which any way has to make. What an operator takes for itself while it runs is not counted.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.compiler import analyse, rank_graph
from autotp.options import Options
from autotp.passes.emit.bind import bind

WORDS, TOKENS, WIDTH = 151_936, 8_192, 3_584
WAYS: dict[str, dict[str, Any]] = {"logits": {"without": ("linear_cross_entropy",)}, "chunks": {}}
READERS = "loss", "policy", "divergence"
GOAL = 0.6  # GiB


class Most(TorchDispatchMode):
    """A mode that records which of the storages that operators have made exist after each operator."""

    keeps_no_tensor = True  # So operators write into memory as they do without it.

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}  # The number is the place in `sizes`.
        self.sizes: list[int] = []
        self.existed: list[list[int]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in pytree.tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in given:
                self.made[storage._cdata] = StorageWeakRef(storage), len(self.sizes)
                self.sizes.append(storage.nbytes())
        self.made = {at: row for at, row in self.made.items() if not row[0].expired()}
        self.existed.append([place for _, place in self.made.values()])
        return result

    def bytes(self, apart: list[Tensor]) -> int:
        """Returns the most bytes that existed at a time, without those of some tensors."""
        left_out = {self.made[x.untyped_storage()._cdata][1] for x in apart}
        return max(sum(self.sizes[place] for place in places if place not in left_out) for places in self.existed)


class Head(nn.Module):
    """A head and what reads its logits, as in a causal language model of transformers.

    Args:
        reader: "loss", cross-entropy; "policy", log-probabilities and entropy, as in GRPO; "divergence" from a frozen
            head of the same size.
    """

    def __init__(self, words: int, width: int, reader: str = "loss") -> None:
        super().__init__()
        self.head, self.reader = nn.Linear(width, words, bias=False), reader
        if reader == "divergence":
            self.teacher = nn.Linear(width, words, bias=False).requires_grad_(False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(hidden).float()
        match self.reader:
            case "policy":
                every = logits.log_softmax(-1)
                entropy = -(every.exp() * every).sum(-1)
                return (every.gather(-1, labels.unsqueeze(-1)).squeeze(-1) + 0.01 * entropy).mean()
            case "divergence":
                target = self.teacher(hidden.detach()).float().log_softmax(-1)
                rows = F.kl_div(logits.log_softmax(-1), target, reduction="none", log_target=True).sum(-1)
                return rows.mean()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def first_rank(
    words: int, width: int, tp: int, tokens: int, dtype: torch.dtype, way: str, reader: str = "loss"
) -> fx.GraphModule:
    """Returns the graph of the first rank; its arguments are its part of each weight, the rows and the labels."""
    with torch.device("meta"):
        model, hidden = Head(words, width, reader).to(dtype), torch.empty(2, tokens // 2, width, dtype=dtype)
        labels = torch.empty(2, tokens // 2, dtype=torch.int64)
    cut = {name: "vocab" if tp > 1 else "whole" for name, _ in model.named_children()}
    options = Options(cut=cut, **WAYS[way])
    graph = rank_graph(analyse(model, (hidden, labels), {}, tp, options), 0, "fast")
    return fx.GraphModule(nn.Module(), bind(graph, torch.device("cpu"), {"tp": None}))


def operands(words: int, width: int, tp: int, tokens: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns the part of the weight, rows and labels, of which the first two have gradients."""
    torch.manual_seed(0)
    weight = torch.empty(-(-words // tp), width, dtype=dtype, device=device)
    rows = torch.empty(2, tokens // 2, width, dtype=dtype, device=device)
    if device != "meta":
        weight.normal_(std=0.02)
        rows.normal_()
    labels = torch.arange(tokens, device=device).view(2, -1) * 7 % words
    return [weight.requires_grad_(), rows.requires_grad_(), labels]


@dataclass(frozen=True)
class Row:
    """The most bytes of a way, beside the gradients of weight and input."""

    way: str
    tp: int
    bytes: int
    reader: str = "loss"

    def __str__(self) -> str:
        return f"{self.reader:<12}{self.way:<8}{self.tp:>4}{self.bytes / 2**30:>10.2f} GiB"


def most_bytes(
    way: str, tp: int, device: str, words: int = WORDS, tokens: int = TOKENS, width: int = WIDTH, reader: str = "loss"
) -> Row:
    """Returns the most bytes of a rank's forward and backward in bfloat16."""
    dtype = torch.bfloat16
    run = first_rank(words, width, tp, tokens, dtype, way, reader)
    weight, rows, labels = operands(words, width, tp, tokens, dtype, device)
    teacher = [weight.detach().clone()] if reader == "divergence" else []
    with Most() as most:
        run(weight, *teacher, rows, labels)[0].backward()
    return Row(way, tp, most.bytes([x.grad for x in (weight, rows) if x.grad is not None]), reader)


def ratio(words: int = 32_000, tokens: int = 1_024, width: int = 512, rounds: int = 9, reader: str = "loss") -> float:
    """Returns the time of a step of head and reader on one rank, divided by plain torch's in the same round: the median.

    Seconds are those of this process on the CPU, in float32.
    """
    run = first_rank(words, width, 1, tokens, torch.float32, "chunks", reader)
    weight, rows, labels = operands(words, width, 1, tokens, torch.float32, "cpu")
    model = Head(words, width, reader)
    teacher = []
    with torch.no_grad():
        if reader == "divergence":
            teacher = [model.teacher.weight.copy_(weight * 1.5)]
    model.head.weight = nn.Parameter(weight.detach())
    weight = model.head.weight

    def plain() -> Tensor:
        loss: Tensor = model(rows, labels)
        return loss

    def seconds(loss: Any) -> float:
        start = time.process_time()
        loss().backward()
        weight.grad = rows.grad = None
        return time.process_time() - start

    ways = plain, lambda: run(weight, *teacher, rows, labels)[0]
    torch.testing.assert_close(ways[0](), ways[1]())
    times = [[seconds(way) for way in ways] for _ in range(rounds + 1)][1:]
    return median(ours / theirs for theirs, ours in times)


def main() -> None:
    """Prints the rows that are asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--time", action="store_true")
    given = parser.parse_args()
    if given.time:
        for reader in READERS:
            share = ratio(reader=reader)
            print(f"{reader}, one rank, 32,000 words: {share:.2f} of plain torch's time", flush=True)
        return
    device, tokens = ("cpu", TOKENS // 4) if given.measure else ("meta", TOKENS)
    width = 256 if given.measure else WIDTH
    for tp in (1, 2, 4, 8):
        for reader in READERS:
            for way in WAYS:
                print(most_bytes(way, tp, device, tokens=tokens, width=width, reader=reader), flush=True)


if __name__ == "__main__":
    main()
