"""Lightning and Fabric with `accelerator="cuda"`: losses and parameters of a parallel model are one device's."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
from ranks import Checks
from torch import Tensor, nn
from torch.nn import functional as F

import autotp
from autotp.integrations.lightning import fabric_strategy, trainer_strategy

pytest.importorskip("lightning")
checks = Checks(cards=True)
STEPS = 4


class Words(nn.Module):
    """A model that returns its loss, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(31, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 31, bias=False)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.mlp(self.table(words))).view(-1, 31), words.roll(-1).view(-1))


def batches() -> list[Tensor]:
    """Different in each step, on the CPU as a loader gives them."""
    return [torch.arange(14).view(2, 7) * (step + 3) % 31 for step in range(STEPS)]


def expected() -> tuple[list[float], Words]:
    """Losses and the trained model of one device."""
    model = Words()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()
    for words in batches():
        loss = model(words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def expect_trained(losses: list[float], parallel: nn.Module) -> None:
    one, model = expected()
    assert losses == pytest.approx(one, rel=1e-9)
    for name, tensor in autotp.full_state_dict(parallel).items():
        torch.testing.assert_close(tensor.cpu(), model.state_dict()[name], rtol=1e-9, atol=1e-11)


def parallel_words(n: int) -> nn.Module:
    return autotp.parallelize(Words(), n, example_inputs=batches()[0])


@checks.on(2)
def fabric_trains(rank: int, n: int) -> None:
    warnings.simplefilter("ignore")
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cuda", strategy=fabric_strategy())
    fabric.launch()
    parallel, losses = parallel_words(n), list[float]()
    model, optimizer = fabric.setup(parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2))
    for words in fabric.setup_dataloaders(torch.utils.data.DataLoader(batches(), batch_size=None)):
        assert words.is_cuda
        loss = model(words)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    expect_trained(losses, parallel)


@checks.on(2)
def lightning_trains(rank: int, n: int) -> None:
    warnings.simplefilter("ignore")
    pl = importlib.import_module("lightning.pytorch")
    losses: list[float] = []

    class Lit(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = parallel_words(n)

        def training_step(self, words: Tensor, i: int) -> Tensor:
            assert words.is_cuda
            loss: Tensor = self.model(words)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    lit = Lit()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    pl.Trainer(accelerator="cuda", strategy=trainer_strategy(), max_epochs=1, **quiet).fit(
        lit, torch.utils.data.DataLoader(batches(), batch_size=None)
    )
    expect_trained(losses, lit.model)


@pytest.mark.parametrize("n, name", checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
