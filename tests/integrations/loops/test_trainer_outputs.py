"""Trainer reads the loss of a model alone: the logits beside it are not computed, unless somebody reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from errors import message
from hugging_face import Rows, expect_close, llama_in_float64, on_cpu
from ranks import run_ranks

import autotp
from autotp.passes.canonicalize.only_loss import NotReturned
from autotp.passes.program import canonicalized

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def trained(rank: int, n: int, folder: Path, how: str = "") -> tuple[list[Any], int]:
    """The logged losses, and the number of graphs without logits."""
    model: Any = llama_in_float64()
    model = autotp.parallelize(model, n, outputs="full" if how == "full" else "auto") if n > 1 else model
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2,
        "learning_rate": 1e-2, "report_to": [], "use_cpu": on_cpu(n > 1), "disable_tqdm": True, "save_strategy": "no",
        "label_smoothing_factor": 0.1 * (how == "smooth"),
    }  # fmt: skip

    class Reading(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
            loss = loss + 1e-2 * outputs.logits.logsumexp(-1).square().mean()
            return (loss, outputs) if return_outputs else loss

    def of_logits(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        logits = outputs["logits"].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels.flatten())

    trainer = (Reading if how == "read" else transformers.Trainer)(
        model=model, args=transformers.TrainingArguments(str(folder), **settings), train_dataset=Rows(8),
        eval_dataset=Rows(5), compute_metrics=lambda read: {"mean": float(read.predictions.mean())},
        compute_loss_func=of_logits if how == "function" else None,
    )  # fmt: skip
    with patch.object(canonicalized, "only_loss", wraps=canonicalized.only_loss) as without_logits:
        trainer.train()
    rows = [{k: v for k, v in row.items() if k in ("loss", "grad_norm", "eval_loss", "eval_mean")}
            for row in trainer.state.log_history]  # fmt: skip
    if n > 1 and not how:
        inputs = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "labels": torch.ones(2, 4, dtype=torch.int64)}
        assert not isinstance(trainer.model.train()(**inputs).logits, NotReturned)  # A call of one's own.
    return rows, without_logits.call_count


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["", "full", "read", "smooth", "function"])
def test_a_step_is_one_devices_and_has_logits_only_for_readers(how: str, tmp_path: Path) -> None:
    expected, _ = trained(0, 1, tmp_path / "one", how)
    assert {"eval_mean"} <= set().union(*expected)
    for rows, graphs in run_ranks(trained, 2, tmp_path / "two", how, timeout=250, fresh=True):
        expect_close(rows, expected)
        assert bool(graphs) == (how == "")


def hooked(rank: int, n: int, folder: Path) -> None:
    model: Any = autotp.parallelize(llama_in_float64(), n)
    model.register_forward_hook(lambda _, args, outputs: outputs.logits.sum())
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=1, report_to=[], use_cpu=on_cpu(True), disable_tqdm=True, save_strategy="no"
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows(8))
    assert message(trainer.train) == (
        '`logits` was not computed: with outputs="loss", as in a Trainer, a call in training returns its loss only\n'
        '  try      parallelize(..., outputs="full")\n'
        "  or       model.eval() before a call whose tensors are read"
    )


@pytest.mark.timeout(300)
def test_a_hook_that_reads_logits_gets_one_error(tmp_path: Path) -> None:
    run_ranks(hooked, 2, tmp_path, timeout=250, fresh=True)
