"""Lightning on a parallel model: losses, norms, evaluations, files and resumed runs are one device's."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_models import assert_values_close
from torch import Tensor, nn
from torch.nn import functional as F

import autotp
from autotp.integrations.lightning import trainer_strategy

pytest.importorskip("lightning")
pytestmark = pytest.mark.not_on_cards("these loops ask Lightning for the CPU, and draw dropout from its random stream")

STEPS = 10
IGNORED = (
    ".*does not have many workers.*", ".*Checkpoint directory .* exists.*", ".*isinstance.treespec.*",
    ".*all_gather is deprecated.*", ".*The dirpath has changed.*",
    ".*You're using the WeightAveraging callback.*",
)  # fmt: skip


class Words(nn.Module):
    """A model that returns its loss, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 31, bias=False)
        self.double()

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.mlp(self.table(words))).view(-1, 31), labels.view(-1))


EXAMPLE = {"words": torch.zeros(2, 7, dtype=torch.int64), "labels": torch.zeros(2, 7, dtype=torch.int64)}


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        words = torch.randint(0, 31, (7,), generator=torch.Generator().manual_seed(i))
        return {"words": words, "labels": words.roll(-1)}


def library(package: str) -> Any:
    for message in IGNORED:
        warnings.filterwarnings("ignore", message)
    return importlib.import_module(package)


def whole_model() -> Words:
    torch.manual_seed(0)
    return Words()


def module_of(pl: Any, n: int, in_configure: bool) -> Any:
    """A LightningModule, as a user writes it; its model is made parallel before, or in `configure_model`."""
    metrics: Any = importlib.import_module("torchmetrics")

    class Lit(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = whole_model()
            # Ranks that differ begin with the first one's.
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64) + (dist.get_rank() if n > 1 else 0))
            self.count = metrics.SumMetric()
            self.seen: list[Any] = []
            if n > 1 and not in_configure:
                self.model = autotp.parallelize(self.model, n, example_inputs=EXAMPLE)

        def configure_model(self) -> None:
            if n > 1 and in_configure and not isinstance(self.model, autotp.ParallelModule):
                self.model = autotp.parallelize(self.model, n, example_inputs=EXAMPLE)

        def training_step(self, batch: Any, i: int) -> Any:
            loss = self.model(**batch) * self.scale
            self.log("loss", loss, on_epoch=True, sync_dist=True, reduce_fx="sum")
            self.log("count", self.count(len(batch["words"])), on_epoch=True)
            self.seen.append(loss.item())
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            self.seen.append(torch.nn.utils.get_total_norm(gradients).item())

        def validation_step(self, batch: Any, i: int) -> None:
            self.log("tested", self.model(**batch))
            assert self.all_gather(torch.ones(3)).shape == (3,)

        def on_train_epoch_end(self) -> None:
            self.log("summed", self.count.compute())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-2)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Lit()


def trainer_of(pl: Any, n: int, folder: Path, *more: Any, **given: Any) -> Any:
    """One device's trainer, with a strategy of autotp if there are several ranks."""
    strategy = {"strategy": trainer_strategy(pl.__name__)} if n > 1 else {}
    callbacks = importlib.import_module(f"{pl.__name__}.callbacks")
    saved = callbacks.ModelCheckpoint(folder, "{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
    return pl.Trainer(
        accelerator="cpu", max_steps=STEPS, accumulate_grad_batches=2, gradient_clip_val=0.5, logger=False,
        val_check_interval=8, limit_val_batches=2, enable_progress_bar=False, log_every_n_steps=1,
        callbacks=[saved, callbacks.EarlyStopping("tested", patience=9), callbacks.ModelSummary(1), *more],
        **strategy | given,
    )  # fmt: skip


def rows() -> list[Any]:
    return [torch.utils.data.DataLoader(Texts(k), batch_size=2, shuffle=k == 24) for k in (24, 5)]


def trained(rank: int, n: int, folder: Path, package: str, resumed: str = "") -> Any:
    """Ten steps; then the second epoch again, from the checkpoint after the first, with a new model and trainer."""
    pl, found = library(package), []
    for where in ("init", "configure"):
        here = folder / where
        for start in (None, (folder / resumed / "init" if resumed else here) / "epoch=0.ckpt"):
            lit = module_of(pl, n, where == "configure")
            pl.seed_everything(3, workers=True)
            trainer = trainer_of(pl, n, here / "again" if start else here)
            trainer.fit(lit, *rows(), ckpt_path=start)
            assert trainer.global_step == STEPS and trainer.is_global_zero == (rank == 0)
            logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
            state = {name: x for name, x in lit.state_dict().items() if not name.startswith("model.")}
            state |= autotp.full_state_dict(lit.model) if n > 1 else lit.model.state_dict()
            counted = importlib.import_module(f"{package}.utilities.model_summary").ModelSummary(lit, 1)
            found.append((lit.seen, logged, [counted.total_parameters, *counted.param_nums], state))
    return found


def expect_close(found: Any, expected: Any) -> None:
    assert_values_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.rare)])
def test_lightning_loop_and_files_are_one_devices(package: str, tmp_path: Path) -> None:
    one = trained(0, 1, tmp_path / "one", package)
    two = run_ranks(trained, 2, tmp_path / "two", package, timeout=250, fresh=True)
    assert len(one[1][0]) < len(one[0][0]), "it goes on from the second epoch"
    for rank in range(2):
        for i, (*found, state) in enumerate(two[rank]):
            *expected, whole = one[i]
            expect_close(found, expected)
            if rank == 0:
                expect_close(state, whole)
    for where in ("init", "configure"):
        one_file, two_file = (tmp_path / ranks / where / "epoch=0.ckpt" for ranks in ("one", "two"))
        expected, found = (torch.load(path, weights_only=False) for path in (one_file, two_file))
        assert set(found) == set(expected)
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
            expect_close(found[key], expected[key])


@pytest.mark.rare
def test_other_numbers_of_ranks_go_on(tmp_path: Path) -> None:
    """One device goes on from a checkpoint of two ranks, and three ranks do."""
    package = "lightning.pytorch"
    run_ranks(trained, 2, tmp_path / "two", package, timeout=250, fresh=True)
    one = trained(0, 1, tmp_path, package, "two")
    three = run_ranks(trained, 3, tmp_path, package, "two", timeout=250, fresh=True)
    expect_close(three[0][1], one[1])


# ---- what is refused, and what else Lightning calls


def refused(rank: int, n: int, folder: Path, package: str) -> dict[str, str]:
    pl, found = library(package), {}
    strategies: Any = importlib.import_module(f"{package}.strategies")
    lit = module_of(pl, n, False)

    class Parts(type(lit)):  # type: ignore[misc]
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            state = nn.Module.state_dict(self)
            return {name: x.to_local() if hasattr(x, "to_local") else x for name, x in state.items()}

    def parts() -> None:
        lit.__class__ = Parts
        trainer_of(pl, n, folder, max_epochs=1).fit(lit, *rows())

    def missing() -> None:
        if rank == 0:
            torch.save({}, folder / "of-0.ckpt")
        trainer = trainer_of(pl, n, folder)
        trainer.fit(module_of(pl, n, False), *rows(), ckpt_path=folder / f"of-{rank}.ckpt")

    def single() -> None:
        trainer_of(pl, n, folder, strategy=strategies.SingleDeviceStrategy("cpu")).fit(lit, *rows())

    def replicas() -> None:
        trainer_of(pl, n, folder, strategy="auto", devices=n).fit(lit, *rows())

    def in_configure() -> None:
        trainer_of(pl, n, folder, strategy="auto", devices=1).fit(module_of(pl, n, True), *rows())

    for call in (single, replicas, in_configure, missing, parts):
        with pytest.raises((autotp.Error, FileNotFoundError)) as raised:
            call()
        found[call.__name__] = str(raised.value)
    return found


@pytest.mark.rare
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_refuses_other_strategies(package: str, tmp_path: Path) -> None:
    for found in run_ranks(refused, 2, tmp_path, package, timeout=250, fresh=True):
        for name, strategy in {"single": "SingleDevice", "replicas": "DDP", "in_configure": "SingleDevice"}.items():
            assert found[name].startswith(f"{strategy}Strategy does not know that its processes hold one"), found
            assert "Trainer(strategy=trainer_strategy())" in found[name]
        assert "Checkpoint file not found" in found["missing"], found
        assert found["parts"].startswith("checkpoint['state_dict']['"), found
        assert "is another tensor on each rank" in found["parts"]


def averaged(rank: int, n: int, folder: Path) -> list[Any]:
    """Five epochs; then the last three again, from the checkpoint after the second. Names in files are the user's."""
    pl, found = library("lightning.pytorch"), []
    callbacks: Any = importlib.import_module("lightning.pytorch.callbacks")
    options: Any = {"EMAWeightAveraging": {"decay": 0.9}, "StochasticWeightAveraging": {"swa_lrs": 0.1}}
    for name, given in options.items():
        for start in (None, folder / name / "epoch=1.ckpt"):
            lit = module_of(pl, n, False)
            lit.configure_optimizers = lambda: torch.optim.SGD(lit.parameters(), lr=0.1)  # noqa: B023  Called below.
            lit.on_save_checkpoint = lambda file: file.update(
                copied={name.upper(): x.clone() for name, x in lit.state_dict().items()}  # noqa: B023
            )
            saved = callbacks.ModelCheckpoint(folder / name, "{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
            pl.seed_everything(3, workers=True, verbose=False)
            trainer = pl.Trainer(
                accelerator="cpu", max_epochs=5, limit_train_batches=3, logger=False, log_every_n_steps=1,
                callbacks=[getattr(callbacks, name)(**given), saved], enable_progress_bar=False,
                enable_model_summary=False, **({"strategy": trainer_strategy()} if n > 1 else {}),
            )  # fmt: skip
            trainer.fit(lit, *rows(), ckpt_path=start)
            found.append((lit.seen, autotp.full_state_dict(lit.model) if n > 1 else lit.model.state_dict()))
    return found


@pytest.mark.rare
def test_lightning_averages_of_weights_are_one_devices(tmp_path: Path) -> None:
    """They are those of one device, also in checkpoints, and a run goes on from these."""
    expected = averaged(0, 1, tmp_path / "one")
    two = run_ranks(averaged, 2, tmp_path / "two", timeout=250, fresh=True)
    for (seen, weights), first, second in zip(expected, *two, strict=True):
        expect_close((first[0], second[0], first[1]), (seen, seen, weights))
    for path in (tmp_path / "one").glob("*/*.ckpt"):
        one, other = (
            torch.load(p, weights_only=False) for p in (path, tmp_path / "two" / path.relative_to(tmp_path / "one"))
        )
        assert set(other) == set(one)
        for key in {"state_dict", "current_model_state", "averaging_state", "copied"} & set(one):
            expect_close(other[key], one[key])


def beside_replicas(rank: int, n: int, folder: Path) -> str:
    pl = library("lightning.pytorch")
    lit = module_of(pl, 2, False)
    with pytest.raises(autotp.Error) as raised:
        trainer_of(pl, n, folder).fit(lit, *rows())
    return str(raised.value).splitlines()[0]


@pytest.mark.rare
def test_replicas_are_not_one_device(tmp_path: Path) -> None:
    told = "tp=2 of 4 processes: Lightning trains one model on all of its processes"
    assert run_ranks(beside_replicas, 4, tmp_path, timeout=120, fresh=True) == [told] * 4
