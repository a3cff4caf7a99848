"""count_load: a step counts the rows of each expert once, on all ranks together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from errors import message
from ranks import Checks
from small_models import Mixture, assert_values_close
from torch import Tensor, nn
from torch.nn import functional as F

from autotp.ops.grouped_mm import OPERATOR
from autotp.training.distribute import distribute

checks = Checks(timeout=280)


class Layers(nn.Module):
    """Two blocks of four experts, and a bias of their routers that only the loop updates."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Biased(OPERATOR) for _ in range(2))
        self.blocks.append(Biased())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [batch seq 8], y: [batch seq 3]"""
        rows = x.flatten(0, 1)
        for block in self.blocks:
            rows = block(rows)
        return F.mse_loss(self.head(rows), y.flatten(0, 1))


class Biased(Mixture):
    """Chooses by scores with a bias, as DeepSeek-V3, and weighs by scores without it; counts what it chooses."""

    bias: Tensor

    def __init__(self, grouped: Any = None) -> None:
        super().__init__(grouped)
        self.register_buffer("bias", torch.zeros(4))
        self.counts = [0] * 4

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens 8]"""
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(2)[1]
        weights = scores.gather(1, chosen)
        if not torch.compiler.is_compiling() and not isinstance(x.shape[0], torch.SymInt):
            self.note(chosen)
        rows = self._groups if self.grouped else self._rows
        y = rows(x.repeat_interleave(2, 0), chosen.reshape(-1), weights.reshape(-1, 1))
        return x + y.view(-1, 2, 8).sum(1)

    def note(self, chosen: Tensor) -> None:
        """Nothing, but in the model of one device."""


class Counting(Biased):
    def note(self, chosen: Tensor) -> None:
        if torch.is_grad_enabled():
            self.counts = chosen.flatten().bincount(minlength=4).tolist()


def batch(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 3, 8, generator=draw).double(), "y": torch.randn(8, 3, 3, generator=draw).double()}


def updated(bias: Tensor, counts: Tensor) -> None:
    """DeepSeek-V3, section 2.1.2: the bias of an expert with more rows than the mean falls by one speed."""
    counts = counts.double()
    bias += 0.05 * torch.sign(counts.mean() - counts)


def balances_as_one_device(rank: int, **layout: Any) -> None:
    """Three steps, an evaluation beside each (torchtitan#4148), and a bias that is alike on ranks (torchtitan#4154)."""
    torch.manual_seed(0)
    model = Layers().double()
    whole: Any = copy.deepcopy(model)
    for block in whole.blocks:
        block.__class__, block.grouped = Counting, None
    parts = layout.get("dp", 1) * layout.get("microbatches", 1)
    example = {name: x[: 8 // parts] for name, x in batch(0).items()}
    trainer: Any = distribute(model, example_inputs=example, **layout)
    dp, replica = trainer.mesh["dp"].size(), trainer.mesh["dp"].get_local_rank()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, trainer)]
    for step in range(3):
        values = batch(step)
        own = {name: x.chunk(dp)[replica] for name, x in values.items()}
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = whole(**values)
        expected.backward()
        assert_values_close(trainer.step(**own), expected.detach(), rtol=0, atol=1e-10)
        counts = {f"blocks.{i}": block.counts for i, block in enumerate(whole.blocks)}
        assert {name: rows.tolist() for name, rows in trainer.load.rows.items()} == counts
        trainer.evaluate(**{name: x.flip(0) for name, x in own.items()})
        assert {name: rows.tolist() for name, rows in trainer.load.rows.items()} == counts
        for name, buffer in trainer.named_buffers():
            updated(buffer, trainer.load.rows[name.removesuffix(".bias")])
        for block in whole.blocks:
            updated(block.bias, torch.tensor(block.counts))
        for optimizer in optimizers:
            optimizer.step()
    for name, buffer in trainer.named_buffers():
        assert torch.equal(buffer, whole.get_buffer(name)) and bool(buffer.any()), name
    assert trainer.load.imbalance["blocks.0"] == max(counts["blocks.0"]) / 12
    assert "most/mean" in str(trainer.plan) and "blocks.2" in str(trainer.plan)


@checks.on(2)
def replicas_balance_as_one_device(rank: int, n: int) -> None:
    balances_as_one_device(rank, dp=2, microbatches=2)


@checks.on(2)
def experts_over_replicas_balance_as_one_device(rank: int, n: int) -> None:
    balances_as_one_device(rank, dp=2, ep=2)


@checks.on(2)
def experts_cut_by_width_balance_as_one_device(rank: int, n: int) -> None:
    balances_as_one_device(rank, tp=2, sequence_parallel=True)


@checks.on(2)
def stages_balance_as_one_device(rank: int, n: int) -> None:
    balances_as_one_device(rank, pp=2, microbatches=2)


@checks.on(2)
def what_runs_again_counts_once(rank: int, n: int) -> None:
    """Automodel#3140, #3247: a block that backward computes again has chosen, and counted, already."""
    balances_as_one_device(rank, tp=2, recompute="full")


class Attending(nn.Module):
    """Attention; experts for tokens, of which a rank along `cp` has a part, and for means over whole sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.of_tokens, self.of_sequences = Mixture(OPERATOR), Mixture(OPERATOR)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [batch seq 8]"""
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = self.of_tokens(x.flatten(0, 1)).view(x.shape)
        return F.mse_loss(x + self.of_sequences(x.mean(1)).unsqueeze(1), y)


@checks.on(2)
def sequences_are_counted_once(rank: int, n: int) -> None:
    """Each cp rank has the rows of its part in one layer, and all rows in the other one."""
    torch.manual_seed(0)
    model = Attending().double()
    values = {"x": batch(0)["x"], "y": torch.zeros(8, 3, 8).double()}
    trainer = distribute(model, cp=2, example_inputs=values)
    trainer.step(**values)
    assert {name: int(rows.sum()) for name, rows in trainer.load.rows.items()} == {"of_tokens": 48, "of_sequences": 16}


def test_load_needs_a_step() -> None:
    trainer = distribute(Layers().double(), example_inputs=batch(0))
    assert "Trainer.load: no step has counted rows of experts" in message(lambda: trainer.load)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
