"""Measures a layer of experts over two replicas beside the same layer written by hand with `all_to_all_single`.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/calls/plain_experts.py

Both have a router, the best two of eight experts for each token, half of the experts on each rank, and a loss; a step
is forward, backward, and the sum of the router's gradient. The layer by hand sorts rows by their experts, exchanges
counts and rows, and multiplies the rows of each expert. Ways take turns within a round. The ratio is that of times of
the same round: its median and quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from step import in_turn

import autotp
from autotp.ops.grouped_mm import OPERATOR  # torch's own has no float32 on the CPU.

HIDDEN, WIDTH, EXPERTS, TOP = 256, 512, 8, 2


class Experts(nn.Module):
    """A mixture as transformers writes it: rows are sorted by their experts, computed in groups, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [tokens hidden]"""
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        ordered, order = chosen.flatten().sort()
        ends = torch.histc(ordered.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        rows = OPERATOR(F.gelu(OPERATOR(x[order // TOP], self.up, ends)), self.down, ends)
        rows = (rows * weights.reshape(-1, 1)[order])[order.argsort()]
        return F.mse_loss(x + rows.view(-1, TOP, HIDDEN).sum(1), y)


class ByHand(Experts):
    """One of the ranks of the same layer: it has the parameters of its own experts."""

    def __init__(self, whole: Experts) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.load_state_dict(whole.state_dict())
        self.up, self.down = (nn.Parameter(w.detach().chunk(ranks)[rank].clone()) for w in (whole.up, whole.down))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        order = chosen.flatten().argsort(stable=True)
        sent = chosen.flatten().bincount(minlength=EXPERTS)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        table = torch.stack([sent, received]).view(2, ranks, -1).tolist()
        to_rank, from_rank = ([sum(row) for row in side] for side in table)
        rows = self._moved(x[order // TOP], to_rank, from_rank)
        # Rows arrive rank after rank; each expert multiplies its own of all ranks.
        pieces = rows.split([n for row in table[1] for n in row])
        own = len(self.up)
        made = [F.gelu(torch.cat(pieces[i::own]) @ self.up[i]) @ self.down[i] for i in range(own)]
        by_rank = [part.split([row[i] for row in table[1]]) for i, part in enumerate(made)]
        rows = torch.cat([by_rank[i][rank] for rank in range(ranks) for i in range(own)])
        rows = self._moved(rows, from_rank, to_rank) * weights.flatten()[order].unsqueeze(-1)
        combined = torch.zeros_like(rows).index_copy(0, order, rows)
        return F.mse_loss(x + combined.view(-1, TOP, HIDDEN).sum(1), y)

    def _moved(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        moved: Tensor = all_to_all_single(rows.new_empty(sum(received), HIDDEN), rows, received, sent)
        return moved

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the loss of all ranks' rows. Its gradients are summed as those of `distribute`."""
        self.zero_grad()
        loss = self(x, y) / dist.get_world_size()
        loss.backward()
        dist.all_reduce(self.router.weight.grad)
        total = loss.detach()
        dist.all_reduce(total)
        return total


def ways(tokens: int) -> dict[str, Callable[[], Tensor]]:
    """Returns a step of each way, on the same rows."""
    torch.manual_seed(0)
    whole, draw = Experts(), torch.Generator().manual_seed(dist.get_rank())
    batch = {name: torch.randn(tokens, HIDDEN, generator=draw) for name in ("x", "y")}
    by_hand, ranks = ByHand(whole), dist.get_world_size()
    trainer: Any = autotp.distribute(whole, dp=ranks, ep=ranks, example_inputs=batch)

    def step() -> Tensor:
        trainer.zero_grad()
        loss: Tensor = trainer.step(**batch)
        return loss

    return {"by hand": lambda: by_hand.step(**batch), "autotp": step}


def measure(tokens: int, rounds: int) -> list[str]:
    """Returns a line of each way: the median in milliseconds, and the ratio to the layer by hand with quartiles."""
    steps = ways(tokens)
    for step in steps.values():
        for _ in range(5):
            step()
    times = {way: [taken.wall for taken in each] for way, each in in_turn(steps, rounds, "cpu").items()}
    lines = []
    for way, each in times.items():
        ratios = [ours / theirs for ours, theirs in zip(each, times["by hand"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        lines.append(
            f"{tokens:>6} tokens  {way:<8}{statistics.median(each) * 1e3:>9.1f} ms{middle:>8.3f}  {low:.2f}-{high:.2f}"
        )
    return lines


def main() -> None:
    """Prints the table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=(512, 2048), help="tokens of each replica")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    for tokens in args.tokens:
        lines = measure(tokens, args.rounds)
        if dist.get_rank() == 0:
            print(*lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
