"""Lightning Fabric on a parallel model: losses, norms, clipping, files and resumed runs are one device's."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import message
from hugging_face import Rows, expect_close, llama_in_float64
from ranks import run_ranks
from torch import nn

import autotp
from autotp.integrations.lightning import fabric_strategy

pytest.importorskip("lightning")
pytestmark = pytest.mark.not_on_cards("these loops ask Lightning for the CPU, and draw dropout from its random stream")


class Scaled(nn.Module):
    """A model, and a parameter beside it, which begins with the first rank's value."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.model: Any = llama_in_float64(attention_dropout=0.1)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64) + (dist.get_rank() if n > 1 else 0))
        if n > 1:
            self.model = autotp.parallelize(self.model, n, randomness="exact")

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.model(**batch).loss * self.scale


def fabric_of(package: str, n: int, **given: Any) -> Any:
    warnings.filterwarnings("ignore", ".*isinstance.treespec.*")
    strategy = {"strategy": fabric_strategy(package)} if n > 1 else {}
    fabric = importlib.import_module(package).Fabric(accelerator="cpu", **strategy | given)
    fabric.launch()
    return fabric


def trained(rank: int, n: int, folder: Path, package: str) -> Any:
    """Four steps of two batches; then the last two again, from a file, with a new model and optimizer."""
    results = []
    for start in (0, 2):
        fabric = fabric_of(package, n)
        fabric.seed_everything(3, workers=True, verbose=False)
        model: Any = Scaled(n)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
        model, optimizer = fabric.setup(model, optimizer)
        assert (fabric.world_size, fabric.global_rank) == (1, 0), "one device"
        loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(Rows(16), 2, shuffle=True))
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
        file = folder / "two.ckpt"
        if start:
            rest = fabric.load(file, state)
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
                fabric.save(file, state | {"step": 2, "drawn": torch.get_rng_state()})
        inner = model.module
        whole = autotp.full_state_dict(inner.model) if n > 1 else inner.model.state_dict()
        results.append((said, {"scale": inner.scale.detach(), **whole}))
        assert fabric.is_global_zero == (rank == 0)
    return results


@pytest.mark.timeout(300)
@pytest.mark.parametrize("package", ["lightning.fabric", pytest.param("lightning_fabric", marks=pytest.mark.rare)])
def test_fabric_loop_and_files_are_one_devices(package: str, tmp_path: Path) -> None:
    one = trained(0, 1, tmp_path / "one", package)
    assert len(one[0][0]) == 12 and len(one[1][0]) == 6
    expect_close(one[1], (one[0][0][6:], one[0][1]))
    two = run_ranks(trained, 2, tmp_path / "two", package, timeout=250, fresh=True)
    for rank in range(2):
        for i, (losses, weights) in enumerate(two[rank]):
            expect_close(losses, one[i][0])
            if rank == 0:
                expect_close(weights, one[i][1])
    expected, file = (torch.load(tmp_path / ranks / "two.ckpt", weights_only=False) for ranks in ("one", "two"))
    assert set(file) == set(expected)
    expect_close(file["model"], expected["model"])
    expect_close(file["optimizer"]["state"], expected["optimizer"]["state"])


def refused(rank: int, n: int, folder: Path, package: str) -> dict[str, str]:
    errors = {}
    strategies: Any = importlib.import_module(f"{package}.strategies")

    def single() -> None:
        fabric_of(package, n, strategy=strategies.SingleDeviceStrategy("cpu")).setup(Scaled(n))

    def replicas() -> None:
        fabric_of(package, n, strategy="ddp", devices=n).setup(Scaled(n))

    def missing() -> None:
        if rank == 0:
            torch.save({}, folder / "of-0.ckpt")
        fabric = fabric_of(package, n)
        fabric.load(folder / f"of-{rank}.ckpt", {"model": fabric.setup(Scaled(n))})

    def parts() -> None:
        fabric = fabric_of(package, n)
        model = fabric.setup(Scaled(n))
        head = model.module.model.lm_head.weight.detach()
        fabric.save(folder / "whole.ckpt", {"state": {"head": head}})
        saved = torch.load(folder / "whole.ckpt", weights_only=True)["state"]["head"]
        assert torch.equal(saved, llama_in_float64(attention_dropout=0.1).lm_head.weight)
        fabric.save(folder / "parts.ckpt", {"state": {"head": head.to_local()}})

    for call in (single, replicas, missing, parts):
        errors[call.__name__] = message(call)
    return errors


@pytest.mark.rare
@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_fabric_refuses_other_strategies(package: str, tmp_path: Path) -> None:
    for errors in run_ranks(refused, 2, tmp_path, package, timeout=250, fresh=True):
        assert errors["single"].startswith("SingleDeviceStrategy does not know that its processes hold one"), errors
        assert "Fabric(strategy=fabric_strategy())" in errors["single"]
        assert "DistributedDataParallel over ranks [0, 1] of one" in errors["replicas"], errors
        assert "there is no checkpoint" in errors["missing"] and "of-1.ckpt" in errors["missing"], errors
        assert "is another tensor on each rank" in errors["parts"]


def beside_replicas(rank: int, n: int) -> str:
    model = autotp.parallelize(llama_in_float64(), 2)
    return message(lambda: fabric_of("lightning.fabric", n).setup(model)).splitlines()[0]


@pytest.mark.rare
def test_replicas_are_not_one_device() -> None:
    told = "tp=2 of 4 processes: Lightning trains one model on all of its processes"
    assert run_ranks(beside_replicas, 4, timeout=120, fresh=True) == [told] * 4
