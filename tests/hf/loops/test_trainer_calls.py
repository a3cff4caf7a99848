"""transformers.Trainer on a parallel model: losses, norms, evaluations, files and resumed runs are one device's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face import Rows, expect_close, llama_in_float64
from ranks import run_ranks

import autotp

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

KEPT = ("loss", "grad_norm", "eval_loss", "learning_rate", "step", "total_flos")


def trainer_of(model: Any, folder: Path, **more: Any) -> Any:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 6, "logging_steps": 1,
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2,
        # Adam divides by small gradients, and so shows the noise of float32: less with a greater epsilon.
        "adam_epsilon": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1.0,
        "report_to": [], "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(folder), **(given | more))
    return transformers.Trainer(model=model, args=arguments, train_dataset=Rows(24), eval_dataset=Rows(5))


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
def test_training_and_its_files(tmp_path: Path) -> None:
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
def test_compiled(tmp_path: Path) -> None:
    """Trainer compiles the model before its first call: each kind of call is captured outside of Dynamo."""
    expected = compiled(0, 1, tmp_path / "one")
    for found in run_ranks(compiled, 2, tmp_path / "two", timeout=250):
        expect_close(found, expected)
