"""trl_heads: TRL's trainers on a parallel model; the formula of their head is what their Function computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from graphs import small
from hugging_face import LLAMA, expect_close, on_cpu, texts, words
from ranks import run_ranks
from small_models import assert_values_close

import autotp
from autotp.integrations.loops.trl_heads import formula_of, log_probabilities
from autotp.passes.lower.losses import linear_cross_entropy

trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")
KEPT = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "rewards/margins", "rewards/accuracies", "logps/chosen")


@pytest.mark.parametrize("given", [{}, {"final_logit_softcapping": 2.0, "logit_scale": 0.5, "temperature": 1.7}])
def test_formula_of_the_head_equals_trls_function(given: dict[str, Any]) -> None:
    """Every output, and the gradients of those two that have one."""
    from trl.kernels import ChunkedLogProbFunction

    assert formula_of(ChunkedLogProbFunction) is log_probabilities and formula_of(torch.autograd.Function) is None
    more = {"temperature": 1.0, "chunk_size": 16, "final_logit_softcapping": None, "logit_scale": 1.0} | given
    found = []
    for compute in (ChunkedLogProbFunction.apply, log_probabilities):
        torch.manual_seed(0)
        hidden, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((9, 8), (37, 8), (37,)))
        targets = torch.arange(9) * 4
        with torch.no_grad():
            weight[8] = 20 * hidden[2]  # One target is the first of the greatest logits.
        outputs = compute(
            hidden, weight, bias, targets, *more.values(), ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        )
        (outputs[0] * torch.arange(9.0)).sum().add(outputs[1].square().sum()).backward()
        assert [x.requires_grad for x in outputs] == [True, True, False, False, False]
        found.append((*outputs, hidden.grad, weight.grad, bias.grad))
    assert found[0][4].any() and not found[0][4].all()
    assert_values_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert log_probabilities(hidden, weight, None, targets, *more.values(), ("log_probs",))[1:] == (None,) * 4


def trained(
    rank: int, n: int, folder: Path, kind: str, tp: int | None = None, bf16: bool = False
) -> list[dict[str, float]]:
    from datasets import Dataset

    def model(seed: int) -> Any:
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(**LLAMA, bos_token_id=0, eos_token_id=1, pad_token_id=2)
        made = transformers.LlamaForCausalLM(config).to(torch.float32 if bf16 else torch.float64)
        return autotp.parallelize(made, tp or n) if (tp or n) > 1 else made

    rows = texts("text" if kind == "sft" else "chosen")
    kinds = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, {}),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, {"ref_model": model(1)}),
    }
    make, settings, more = kinds[kind]
    arguments = settings(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, logging_steps=1,
        report_to=[], use_cpu=on_cpu((tp or n) > 1), bf16=bf16, gradient_checkpointing=bf16, disable_tqdm=True,
        learning_rate=1e-2, adam_epsilon=1e-2, max_length=16, save_strategy="no",
    )  # fmt: skip
    trainer = make(
        model=model(0), args=arguments, train_dataset=Dataset.from_list(rows), processing_class=words(), **more
    )
    trainer.train()
    return [{key: row[key] for key in KEPT if key in row} for row in trainer.state.log_history]


def trained_in_chunks(rank: int, n: int, folder: Path, kind: str) -> list[dict[str, float]]:
    with (
        small(),
        patch.object(linear_cross_entropy, "write_reader", wraps=linear_cross_entropy.write_reader) as readers,
    ):
        log = trained(rank, n, folder, kind, bf16=True)
    assert {call.args[2].name for call in readers.call_args_list} >= ({"sum", "argmax"} if kind == "sft" else set())
    return log


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trl_trainers_are_one_devices(kind: str, tmp_path: Path) -> None:
    expected = trained(0, 1, tmp_path / "one", kind)
    assert expected[0].keys() >= {"loss", "grad_norm", "mean_token_accuracy"}
    for found in run_ranks(trained, 2, tmp_path / "two", kind, timeout=250, fresh=True):
        expect_close(found, expected)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_the_settings_that_are_trls_own(kind: str, tmp_path: Path) -> None:
    """In bfloat16, with checkpoints: TRL sets `model.forward`, and accelerate puts autocast around that.

    The vocabulary counts as a large one: the formula of the head is computed in chunks of rows.
    """
    expected = trained(0, 1, tmp_path / "one", kind, bf16=True)
    for found in run_ranks(trained_in_chunks, 2, tmp_path / "two", kind, timeout=250, fresh=True):
        assert len(found) == len(expected)
        for row, other in zip(found, expected, strict=True):
            assert row == pytest.approx(other, rel=0.02, abs=0.02)


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trl_trainers_with_replicas_are_two_processes(kind: str, tmp_path: Path) -> None:
    """Two replicas of two ranks beside two processes under DistributedDataParallel."""
    expected = run_ranks(trained, 2, tmp_path / "two", kind, 1, timeout=120, fresh=True)[0]
    for found in run_ranks(trained, 4, tmp_path / "four", kind, 2, timeout=250, fresh=True):
        expect_close(found, expected)
