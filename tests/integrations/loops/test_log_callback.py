"""log_callback: Trainer logs tokens a second and MFU; TensorBoard, the progress bar and its state have them."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from errors import message
from hugging_face import Rows, llama_in_float64, on_cpu
from ranks import run_ranks

import autotp
from autotp.tools.estimation import throughput as throughput_module

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
KEYS = ("tokens_per_second", "mfu")


def trainer_of(model: Any, folder: Path, **more: Any) -> Any:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 5, "logging_steps": 2,
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no", "disable_tqdm": True, "report_to": [],
        "use_cpu": on_cpu(isinstance(model, autotp.ParallelModule)), "include_num_input_tokens_seen": "all",
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(folder), **(given | more))
    return transformers.Trainer(model, arguments, train_dataset=Rows(64), eval_dataset=Rows(4))


def estimated(**layout: Any) -> autotp.Estimate:
    row = Rows(1)[0]
    batch = {name: torch.stack([x, x]) for name, x in row.items()}
    return autotp.estimate(llama_in_float64(), gpu="a100-80gb", batch=8, example_inputs=batch, **layout)


def trained(rank: int, n: int, estimate: autotp.Estimate, folder: Path) -> list[dict[str, float]]:
    """The logs of a training on a clock where each reading is a second behind the one before."""
    model = autotp.parallelize(llama_in_float64(), estimate.layout.tp)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "board"))
        trainer = trainer_of(model, folder, report_to=["tensorboard"])
        readings = itertools.count()
        patch.setattr(throughput_module, "time", SimpleNamespace(perf_counter=lambda: float(next(readings))))
        autotp.Throughput(estimate).log_to(trainer)
        trainer.train()
    history: list[dict[str, float]] = trainer.state.log_history
    return history


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "tp"), [(2, 2), (4, 2)], ids=["one-replica", "two-replicas"])
def test_logs_have_the_numbers_of_the_whole_job(n: int, tp: int, tmp_path: Path) -> None:
    """The tokens of all replicas, those of a replica once; the first step, and evaluations, are left out."""
    estimate = estimated(tp=tp, dp=n // tp)
    found = run_ranks(trained, n, estimate, tmp_path, timeout=200)
    step = 2 * 2 * 12 * (n // tp)  # rows of a call, calls, tokens of a row, replicas
    for history in found:
        logs = [row for row in history if "loss" in row]
        assert [row["tokens_per_second"] for row in logs] == [step, 2 * step]  # After steps 2 and 4, of one and of two.
        peak = n * estimate.device.vector_flops
        expected = [estimate.flops * row["tokens_per_second"] / estimate.tokens / peak for row in logs]
        assert [row["mfu"] for row in logs] == pytest.approx(expected)
        assert not any(key in row for row in history if "loss" not in row for key in KEYS)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/tokens_per_second")] == [step, 2 * step]
    assert [event.step for event in events.Scalars("train/mfu")] == [2, 4]


def test_the_progress_bar_shows_them(tmp_path: Path, capsys: Any) -> None:
    trainer = trainer_of(llama_in_float64(), tmp_path, disable_tqdm=False, eval_strategy="no", max_steps=2)
    autotp.Throughput(estimated()).log_to(trainer)
    trainer.train()
    shown = capsys.readouterr()
    assert all(f"'{key}': " in shown.out + shown.err for key in KEYS)


def test_a_second_call_takes_the_place_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(llama_in_float64(), tmp_path, eval_strategy="no", max_steps=2)
    clock = SimpleNamespace(perf_counter=lambda: float(trainer.state.global_step))  # A step takes a second.
    monkeypatch.setattr(throughput_module, "time", clock)
    meter = autotp.Throughput(estimated())
    for _ in range(2):
        meter.log_to(trainer)
    trainer.train()
    (log,) = [row for row in trainer.state.log_history if "loss" in row]
    assert log["tokens_per_second"] == 2 * 2 * 12  # Of the second step.


def test_what_counts_no_tokens_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(llama_in_float64(), tmp_path, include_num_input_tokens_seen="no")
    assert message(lambda: autotp.Throughput().log_to(trainer)) == (
        "Throughput.log_to: this Trainer counts no tokens\n"
        '  try      TrainingArguments(..., include_num_input_tokens_seen="all")'
    )
