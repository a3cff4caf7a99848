"""transformers.Trainer on a parallel model: losses, norms, evaluations, files and resumed runs are one device's."""

from __future__ import annotations

import copy
import importlib
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from errors import message
from hugging_face import LLAMA, Rows, expect_close, llama_in_float64, on_cpu
from ranks import run_ranks
from small_models import assert_values_close

import autotp

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

RANDOM = "its numbers are compared with those of one device on the CPU, which draws from another random stream"
KEPT = ("loss", "grad_norm", "eval_loss", "learning_rate", "step", "total_flos")


def trainer_of(model: Any, folder: Path, its: dict[str, Any] | None = None, **more: Any) -> Any:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 6, "logging_steps": 1,
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2,
        # Adam divides by small gradients, and so shows the noise of float32: less with a greater epsilon.
        "adam_epsilon": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1.0,
        "report_to": [], "use_cpu": on_cpu(isinstance(model, autotp.ParallelModule)), "disable_tqdm": True,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(folder), **(given | more))
    rows = {"train_dataset": Rows(24), "eval_dataset": Rows(5)}
    return transformers.Trainer(model=model, args=arguments, **(rows | (its or {})))


def log_of(trainer: Any) -> list[dict[str, float]]:
    return [{key: row[key] for key in KEPT if key in row} for row in trainer.state.log_history]


def trained(rank: int, n: int, folder: Path) -> tuple[Any, ...]:
    """Six steps; then the last two again from the checkpoint after four, with a new model and trainer."""
    whole = llama_in_float64()
    torch.manual_seed(5 + rank)  # The loader's order is that of the first process.
    logs, states = [], []
    for resumed in (None, str(folder / "checkpoint-4")):
        model: Any = copy.deepcopy(whole)
        model = autotp.parallelize(model, n) if n > 1 else model
        trainer = trainer_of(model, folder, load_best_model_at_end=resumed is None, metric_for_best_model="loss")
        trainer.train(resume_from_checkpoint=resumed)
        logs.append(log_of(trainer))
        states.append(autotp.full_state_dict(model) if n > 1 else model.state_dict())
    if n > 1:
        with pytest.raises(autotp.Error, match="tp rank 1 sees other files in"):
            trainer._load_optimizer_and_scheduler(str(folder / ("checkpoint-6", "elsewhere")[rank]))
    assert trainer.num_examples(trainer.get_train_dataloader()) == 24
    assert model.num_parameters() == whole.num_parameters()
    return logs, states


@pytest.mark.timeout(300)
def test_trainer_losses_and_files_are_one_devices(tmp_path: Path) -> None:
    expected = trained(0, 1, tmp_path / "one")
    found = run_ranks(trained, 2, tmp_path / "two", timeout=250, fresh=True)
    for rank in range(2):
        expect_close(found[rank][0], expected[0])
    expect_close(found[0][1], expected[1])
    names = [sorted(path.name for path in (tmp_path / it / "checkpoint-6").iterdir()) for it in ("one", "two")]
    assert set(names[1]) - set(names[0]) == {"autotp.checksums.json"} and set(names[0]) <= set(names[1])
    last = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "two" / "checkpoint-6")
    expect_close(
        last.state_dict(), transformers.LlamaForCausalLM.from_pretrained(tmp_path / "one" / "checkpoint-6").state_dict()
    )
    states = [torch.load(tmp_path / it / "checkpoint-6" / "optimizer.pt") for it in ("one", "two")]
    expect_close(states[1], states[0])
    # One device goes on from the ranks' checkpoint.
    alone = trainer_of(llama_in_float64(), tmp_path / "two")
    alone.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-4"))
    expect_close(log_of(alone), expected[0][1])


def compiled(rank: int, n: int, folder: Path) -> list[dict[str, float]]:
    model: Any = llama_in_float64()
    model = autotp.parallelize(model, n) if n > 1 else model
    more = {"torch_compile": True, "torch_compile_backend": "eager"} if n > 1 else {}
    trainer = trainer_of(model, folder, save_strategy="no", max_steps=2, **more)
    trainer.train()
    return log_of(trainer)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_trainer_compiles_the_model_as_on_one_device(tmp_path: Path) -> None:
    """Trainer compiles the model before its first call: each kind of call is captured outside of Dynamo."""
    expected = compiled(0, 1, tmp_path / "one")
    for found in run_ranks(compiled, 2, tmp_path / "two", timeout=250):
        expect_close(found, expected)


# ---- what else users ask a Trainer for


def with_dropout(rank: int, n: int, folder: Path) -> list[Any]:
    """Four steps; then the last two again, after other random numbers."""
    found = []
    for start in (None, str(folder / "checkpoint-2")):
        torch.manual_seed(11 if start else 5)
        model: Any = llama_in_float64(attention_dropout=0.3)
        if n > 1:
            model = autotp.parallelize(model, n, randomness="exact")
        trainer = trainer_of(model, folder, max_steps=4, save_steps=2, eval_strategy="no")
        trainer.train(resume_from_checkpoint=start)
        weights = autotp.full_state_dict(model) if n > 1 else model.state_dict()
        found.append((log_of(trainer), weights, torch.rand(3)))
    return found


@pytest.mark.timeout(300)
@pytest.mark.not_on_cards(RANDOM)
def test_a_resumed_run_draws_the_same_numbers(tmp_path: Path) -> None:
    """Dropout and the order of rows go on where they were, on each rank, as on one device."""
    expected, again = with_dropout(0, 1, tmp_path / "one")
    assert len({row["loss"] for row in expected[0] if "loss" in row}) == 4 and again[0] == expected[0]
    ranks = run_ranks(with_dropout, 2, tmp_path / "two", timeout=250, fresh=True)
    for rank, (through, resumed) in enumerate(ranks):
        assert resumed[0] == through[0] and torch.equal(resumed[2], through[2])
        expect_close(through[0], expected[0])
        assert_values_close(through[2], expected[2], rtol=0, atol=0)
        if rank == 0:
            assert resumed[1].keys() == through[1].keys() == expected[1].keys()
            assert all(torch.equal(resumed[1][name], x) for name, x in through[1].items())
            expect_close(through[1], expected[1])


def best_of(rank: int, n: int, folder: Path) -> tuple[Any, ...]:
    """The greatest loss is the best here: that of the first checkpoint."""
    model: Any = llama_in_float64()
    model = autotp.parallelize(model, n) if n > 1 else model
    trainer = trainer_of(
        model, folder, load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True
    )
    trainer.train()
    weights = autotp.full_state_dict(model) if n > 1 else model.state_dict()
    return Path(trainer.state.best_model_checkpoint).name, log_of(trainer), trainer.evaluate()["eval_loss"], weights


@pytest.mark.timeout(300)
def test_the_best_checkpoint_is_not_the_last(tmp_path: Path) -> None:
    name, log, loss, weights = best_of(0, 1, tmp_path / "one")
    assert (
        name == "checkpoint-2" and loss == pytest.approx(log[2]["eval_loss"], rel=1e-6) and loss > log[-2]["eval_loss"]
    )
    found = run_ranks(best_of, 2, tmp_path / "two", timeout=250, fresh=True)
    for each in found:
        assert each[0] == name
        expect_close(each[1:3], (log, loss))
    expect_close(found[0][3], weights)
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "two" / "checkpoint-2", dtype=torch.float64)
    expect_close(dict(saved.state_dict()), found[0][3])


def asked(rank: int, n: int, folder: Path) -> list[Any]:
    """What a Trainer asks a model's class for."""
    from transformers.utils import can_return_loss, find_labels

    found = []
    for kind in ("LlamaForCausalLM", "LlamaForQuestionAnswering", "LlamaForSequenceClassification"):
        torch.manual_seed(0)
        model: Any = getattr(transformers, kind)(transformers.LlamaConfig(**LLAMA, pad_token_id=0))
        model = autotp.parallelize(model, n) if n > 1 else model
        trainer = trainer_of(model, folder)
        trainer._set_signature_columns_if_needed()
        names = trainer.get_decay_parameter_names(model)
        found.append(
            (
                find_labels(type(model)), can_return_loss(type(model)), trainer.can_return_loss, trainer.label_names,
                sorted(trainer._signature_columns), trainer.model_accepts_loss_kwargs, type(model).__name__,
                type(model).__module__, model.main_input_name, names,
            )
        )  # fmt: skip
    return found


def test_what_a_trainer_asks_the_class(tmp_path: Path) -> None:
    expected = asked(0, 1, tmp_path)
    assert [row[0] for row in expected] == [["labels"], ["start_positions", "end_positions"], ["labels"]]
    assert run_ranks(asked, 2, tmp_path) == [expected] * 2


# ---- settings that need more than elementwise steps


SETTINGS: dict[str, dict[str, Any]] = {
    "adafactor": {"optim": "adafactor"},
    "neftune": {"neftune_noise_alpha": 5.0},
    "fused": {"optim": "adamw_torch_fused"},
    "sgd": {"optim": "sgd"},
    "adagrad": {"optim": "adagrad"},
    "rmsprop": {"optim": "rmsprop"},
    "muon": {},
}


def set_so(rank: int, n: int, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Four steps, and the last two again from a checkpoint; then a call without what the settings switch on."""
    found = {}
    row = {key: x[None] for key, x in Rows(1)[0].items()}
    for name in names:
        for start in (None, str(folder / name / "checkpoint-2")):
            torch.manual_seed(5)
            model: Any = llama_in_float64()
            for p in model.parameters() if name == "muon" else ():  # It steps matrices only.
                p.requires_grad_(p.dim() == 2)
            model = autotp.parallelize(model, n) if n > 1 else model
            its = {"optimizer_cls_and_kwargs": (torch.optim.Muon, {"lr": 1e-2})} if name == "muon" else {}
            trainer = trainer_of(model, folder / name, its, max_steps=4, **SETTINGS[name])
            trainer.train(resume_from_checkpoint=start)
            weights = autotp.full_state_dict(model) if n > 1 else model.state_dict()
            found[f"{name} {start is not None}"] = log_of(trainer), model.train()(**row).loss.item(), weights
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("adafactor",), id="adafactor"),
        pytest.param(("neftune",), id="neftune", marks=pytest.mark.not_on_cards(RANDOM)),
        pytest.param(("fused", "sgd"), id="elementwise", marks=pytest.mark.rare),
        pytest.param(("adagrad", "rmsprop", "muon"), id="others", marks=pytest.mark.rare),
    ],
)
def test_trainer_settings_are_as_on_one_device(names: Sequence[str], tmp_path: Path) -> None:
    """`optim=` that needs no further package, and noise on embeddings."""
    expected = set_so(0, 1, tmp_path / "one", names)
    found = run_ranks(set_so, 2, tmp_path / "two", names, timeout=250, fresh=True)
    for name, (log, loss, weights) in expected.items():
        for each in found:
            expect_close(each[name][:2], (log, loss))
        expect_close(found[0][name][2], weights)
    first = names[0]
    states = [torch.load(tmp_path / it / first / "checkpoint-4" / "optimizer.pt") for it in ("one", "two")]
    expect_close(states[1]["state"], states[0]["state"])


def in_backward(rank: int, n: int, folder: Path) -> None:
    model = autotp.parallelize(llama_in_float64(), n)
    for name in ("lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"):
        trainer = trainer_of(model, folder, optim=name, optim_target_modules=["mlp"])
        assert message(trainer.train).splitlines() == [
            f'optim="{name}" steps in backward, each parameter by its own gradient, and ranks have parts of these',
            '  try      optim="adafactor" or "adamw_torch"',
        ]
    with pytest.raises(ImportError, match="galore"):  # As on one device.
        trainer_of(model, folder, optim="galore_adamw", optim_target_modules=["mlp"]).train()


def test_trainer_refuses_steps_in_backward(tmp_path: Path) -> None:
    run_ranks(in_backward, 2, tmp_path)


# ---- the hub


class Hub:
    """A hub that keeps folders, or one that cannot be reached."""

    def __init__(self, folder: Path, fails: str = "") -> None:
        self.folder, self.fails = folder, fails

    def __call__(self) -> Hub:
        return self

    def create_repo(self, name: str, **_: Any) -> Any:
        if self.fails == "create":
            raise ConnectionError("there is no network")
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, repo_id: str, folder_path: str, run_as_future: bool = False, **_: Any) -> Any:
        assert repo_id == "me/mine"
        if self.fails == "upload":
            raise ConnectionError("there is no network")
        shutil.copytree(folder_path, self.folder, ignore=shutil.ignore_patterns("checkpoint-*"), dirs_exist_ok=True)
        done: Future[None] = Future()
        done.set_result(None)
        return done if run_as_future else "pushed"

    def model_info(self, *_: Any, **__: Any) -> Any:
        raise ConnectionError("there is no network")


def pushed(rank: int, n: int, folder: Path) -> list[str]:
    """A training that pushes its checkpoints; then hubs that fail, and what each rank is told of them."""
    module: Any = importlib.import_module("transformers.trainer")
    told = []
    for fails in ("", "create", "upload"):
        torch.manual_seed(5)
        model: Any = llama_in_float64()
        model = autotp.parallelize(model, n) if n > 1 else model
        with patch.object(module, "hf_api", Hub(folder / f"hub{fails}", fails)):
            try:
                trainer = trainer_of(
                    model, folder / f"out{fails}", max_steps=2, push_to_hub=True, hub_model_id="mine",
                    **({"save_strategy": "no"} if fails == "upload" else {}),
                )  # fmt: skip
                trainer.train()
                found = trainer.push_to_hub()
                told.append(found if rank == 0 else repr(found))
            except Exception as error:
                told.append(str(error).splitlines()[0])
    return told


@pytest.mark.timeout(300)
def test_trainer_pushes_to_a_hub_what_one_device_does(tmp_path: Path) -> None:
    """It gets what one device pushes. If it cannot be reached, all ranks are told, when one device is."""
    missing = "there is no network"
    assert pushed(0, 1, tmp_path / "one") == ["pushed", missing, missing]
    found = run_ranks(pushed, 2, tmp_path / "two", timeout=250, fresh=True)
    assert found[0] == ["pushed", missing, missing]
    assert found[1][0] == "None" and all(missing in text for text in found[1][1:])
    names = [sorted(path.name for path in (tmp_path / it / "hub").iterdir()) for it in ("one", "two")]
    assert names[1] == sorted([*names[0], "autotp.checksums.json"]) and "model.safetensors" in names[0]
    models = [transformers.LlamaForCausalLM.from_pretrained(tmp_path / it / "hub") for it in ("one", "two")]
    expect_close(models[1].state_dict(), models[0].state_dict())
