"""Lightning Fabric on a parallel model: losses, norms, clipping, files and resumed runs are one device's."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hugging_face import Rows, expect_close, llama_in_float64
from ranks import run_ranks
from torch import nn

import autotp

pytest.importorskip("lightning")
pytestmark = pytest.mark.not_on_cards("these loops ask Lightning for the CPU, and draw dropout from its random stream")
STRATEGIES = ("auto", "single", "model")
"""DistributedDataParallel, which Fabric takes for several devices; each of the two others by name."""


class Scaled(nn.Module):
    """A model, and a parameter beside it, which begins with the first rank's value."""

    def __init__(self, n: int, in_setup: bool) -> None:
        super().__init__()
        self.model: Any = llama_in_float64(attention_dropout=0.1)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64) + (dist.get_rank() if n > 1 else 0))
        if n > 1 and not in_setup:
            self.model = autotp.parallelize(self.model, n, randomness="exact")

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.model(**batch).loss * self.scale


def divided(module: Any, mesh: Any) -> Any:
    """What a user gives ModelParallelStrategy."""
    module.model = autotp.parallelize(module.model, mesh=mesh["tensor_parallel"], randomness="exact")
    return module


def fabric_of(package: str, how: str, n: int, **given: Any) -> Any:
    warnings.filterwarnings("ignore", ".*isinstance.treespec.*")
    library = importlib.import_module(package)
    strategies = importlib.import_module(f"{package}.strategies")
    made: dict[str, Any] = {
        "auto": lambda: {"devices": n},
        "single": lambda: {"strategy": strategies.SingleDeviceStrategy("cpu")},
        "model": lambda: {"strategy": strategies.ModelParallelStrategy(divided), "devices": n},
    }
    fabric = library.Fabric(accelerator="cpu", **(made[how]() | given))
    fabric.launch()
    return fabric


def trained(rank: int, n: int, folder: Path, package: str, strategies: tuple[str, ...], resumed: str = "") -> Any:
    """Four steps of two batches; then the last two again, from a file, with a new model and optimizer."""
    found = []
    for how in strategies:
        for start in (0, 2):
            fabric = fabric_of(package, how, n)
            fabric.seed_everything(3, workers=True, verbose=False)
            model: Any = Scaled(n, how == "model")
            if how == "model":
                model = fabric.setup_module(model)
                optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2))
            else:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
                model, optimizer = fabric.setup(model, optimizer)
            loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(Rows(16), 2, shuffle=True))
            state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
            at = folder / how / "two.ckpt"
            if start:
                rest = fabric.load((folder / resumed / "auto" / "two.ckpt") if resumed else at, state)
                assert state["step"] == start and rest.keys() == {"drawn"}
            said, batches = [], list(loader)
            if start:  # Dropout goes on where it was.
                torch.set_rng_state(rest["drawn"])
            for step in range(start, 4):
                for part, batch in enumerate(batches[2 * step : 2 * step + 2]):
                    with fabric.no_backward_sync(model, enabled=part == 0):
                        loss = model(batch)
                        fabric.backward(loss / 2)
                    said.append(fabric.all_reduce(loss.detach(), reduce_op="sum").item())
                    assert fabric.all_gather(torch.ones(3)).shape == (3,)
                said.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    fabric.save(at, state | {"step": 2, "drawn": torch.get_rng_state()})
            inner = model.module
            whole = autotp.full_state_dict(inner.model) if n > 1 else inner.model.state_dict()
            found.append((said, {"scale": inner.scale.detach(), **whole}))
            assert fabric.is_global_zero == (rank == 0)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("package", ["lightning.fabric", pytest.param("lightning_fabric", marks=pytest.mark.rare)])
def test_loop(package: str, tmp_path: Path) -> None:
    one = trained(0, 1, tmp_path / "one", package, ("single",))
    assert len(one[0][0]) == 12 and len(one[1][0]) == 6
    expect_close(one[1], (one[0][0][6:], one[0][1]))
    two = run_ranks(trained, 2, tmp_path / "two", package, STRATEGIES, timeout=250, fresh=True)
    for rank in range(2):
        for i, (said, weights) in enumerate(two[rank]):
            expect_close(said, one[i % 2][0])
            if rank == 0:
                expect_close(weights, one[i % 2][1])
    expected = torch.load(tmp_path / "one" / "single" / "two.ckpt", weights_only=False)
    for how in STRATEGIES:
        found = torch.load(tmp_path / "two" / how / "two.ckpt", weights_only=False)
        assert set(found) == set(expected)
        expect_close(found["model"], expected["model"])
        expect_close(found["optimizer"]["state"], expected["optimizer"]["state"])


def refused(rank: int, n: int, folder: Path) -> dict[str, str]:
    found = {}
    strategies: Any = importlib.import_module("lightning.fabric.strategies")

    model = Scaled(n, False)

    def sharded() -> None:
        strategies.FSDPStrategy().setup_module(model)

    def sharded_with_optimizer() -> None:
        strategies.FSDPStrategy().setup_module_and_optimizers(model, [])

    def missing() -> None:
        if rank == 0:
            torch.save({}, folder / "of-0.ckpt")
        fabric = fabric_of("lightning.fabric", "auto", n)
        fabric.load(folder / f"of-{rank}.ckpt", {"model": fabric.setup(Scaled(n, False))})

    def parts() -> None:
        fabric = fabric_of("lightning.fabric", "auto", n)
        model = fabric.setup(Scaled(n, False))
        head = model.module.model.lm_head.weight.detach()
        fabric.save(folder / "whole.ckpt", {"state": {"head": head}})
        saved = torch.load(folder / "whole.ckpt", weights_only=True)["state"]["head"]
        assert torch.equal(saved, llama_in_float64(attention_dropout=0.1).lm_head.weight)
        fabric.save(folder / "parts.ckpt", {"state": {"head": head.to_local()}})

    for call in (sharded, sharded_with_optimizer, missing, parts):
        with pytest.raises(autotp.Error) as raised:
            call()
        found[call.__name__] = str(raised.value)
    return found


@pytest.mark.rare
def test_refused(tmp_path: Path) -> None:
    for found in run_ranks(refused, 2, tmp_path, timeout=250, fresh=True):
        for name in ("sharded", "sharded_with_optimizer"):
            assert found[name].splitlines() == [
                "FSDPStrategy divides a model among replicas, and these are the ranks of one parallel model",
                '  try      Fabric(strategy="auto"), or strategy=ModelParallelStrategy()',
            ]
        assert "there is no checkpoint" in found["missing"]
        assert "is another tensor on each rank" in found["parts"]


def beside_replicas(rank: int, n: int) -> str:
    model = autotp.parallelize(llama_in_float64(), 2)
    with pytest.raises(autotp.Error) as raised:
        fabric_of("lightning.fabric", "auto", n).setup(model)
    return str(raised.value).splitlines()[0]


@pytest.mark.rare
def test_replicas_are_not_one_device() -> None:
    told = "DDPStrategy with tp=2 of 4 processes: Lightning takes the other ranks of each model for replicas"
    assert run_ranks(beside_replicas, 4, timeout=120, fresh=True) == [told] * 4
