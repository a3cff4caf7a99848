"""Models of transformers with their head and loss in chunks: calls with labels, kept logits, packed rows, ten steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import small
from hugging_face import Rows, expect_close, llama_in_float64, on_cpu
from ranks import Checks, run_ranks
from torch import Tensor, nn

import autotp

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
checks = Checks()
IN_CHUNKS = "at a time"


def ids_of(rows: int, length: int) -> Tensor:
    return torch.arange(rows * length).view(rows, length) * 5 % 97


def labelled(rows: int, length: int) -> dict[str, Tensor]:
    ids = ids_of(rows, length)
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 7 == 0, -100)}


def packed(rows: int, length: int) -> dict[str, Tensor]:
    """Rows of two texts each: the second begins at position 0, and its first word is no label."""
    positions = torch.arange(length).repeat(rows, 1) % (length // 2)
    given = labelled(rows, length)
    return {**given, "position_ids": positions, "labels": given["labels"].masked_fill(positions == 0, -100)}


def expect_one_devices(model: Any, whole: Any, calls: list[dict[str, Any]]) -> None:
    """Losses and gradients of both models are the same; the plan says that logits are in chunks."""
    for given in calls:
        losses = [each(**given)[0].mean() for each in (model, whole)]
        expect_close(*(loss.detach() for loss in losses))
        for loss in losses:
            loss.backward()
    with torch.no_grad():
        for each in (model, whole):  # The gradients themselves; Adam would hide a factor.
            for parameter in each.parameters():
                parameter -= parameter.grad
    expected = whole.state_dict()
    for name, tensor in autotp.full_state_dict(model).items():  # On the first rank.
        expect_close(tensor, expected[name])
    assert IN_CHUNKS in model.plan.notes["logits"]


@checks.on(1, 2)
def calls_with_labels_are_one_devices(rank: int, n: int) -> None:
    """At other shapes, with the number of labels of a batch in several calls, of packed rows; and without labels."""
    for tied in (False, True):
        whole = llama_in_float64(tie_word_embeddings=tied)
        with small():
            model = autotp.parallelize(
                llama_in_float64(tie_word_embeddings=tied), n, example_inputs=labelled(2, 8), outputs="loss"
            )
            calls = [
                labelled(2, 8),
                labelled(3, 6),
                {**labelled(2, 8), "num_items_in_batch": torch.tensor(40)},
                packed(2, 8),
            ]
            expect_one_devices(model, whole, calls)
            expect_close(model(ids_of(2, 5)).logits, whole(ids_of(2, 5)).logits)
            model, whole = model.eval(), whole.eval()
            expect_close(model(**labelled(2, 5)).logits, whole(**labelled(2, 5)).logits)


class LastWords(nn.Module):
    """The log-probabilities of the last words of a row, as of a completion."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama_in_float64()

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        logits = self.model(input_ids, logits_to_keep=4).logits[:, :-1] / 0.7
        return (logits.log_softmax(-1).gather(-1, input_ids[:, -3:, None]).squeeze(-1),)


@checks.on(2)
def kept_logits_are_in_chunks(rank: int, n: int) -> None:
    with small():
        model = autotp.parallelize(LastWords(), n, example_inputs={"input_ids": ids_of(2, 8)})
        expect_one_devices(
            model, LastWords(), [{"input_ids": ids_of(rows, length)} for rows, length in ((2, 8), (3, 9))]
        )


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


def trained(rank: int, n: int, folder: Path) -> list[dict[str, float]]:
    """Ten steps under Trainer in bfloat16, with two batches a step."""
    torch.manual_seed(0)
    model: Any = llama_in_float64().float()
    with small():
        model = autotp.parallelize(model, n) if n > 1 else model
        arguments = transformers.TrainingArguments(
            str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=10, logging_steps=1,
            bf16=True, learning_rate=1e-3, report_to=[], use_cpu=on_cpu(n > 1), disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows(8))
        trainer.train()
    assert n == 1 or IN_CHUNKS in trainer.model.plan.notes["logits"]
    return [{key: row[key] for key in ("loss", "grad_norm") if key in row} for row in trainer.state.log_history]


@pytest.mark.timeout(300)
def test_ten_steps_of_trainer_in_bfloat16_are_one_devices(tmp_path: Path) -> None:
    expected = trained(0, 1, tmp_path / "one")
    for rows in run_ranks(trained, 2, tmp_path / "two", timeout=250, fresh=True):
        assert len(rows) == len(expected) == 11
        for row, other in zip(rows, expected, strict=True):
            assert row == pytest.approx(other, rel=0.02, abs=0.02)
