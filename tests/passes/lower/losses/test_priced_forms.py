"""priced_forms: the form of a sum over rows is the one that takes fewer seconds, as both are counted and priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from graphs import CLASSES, LABELS, ONLY_MEMORY, ONLY_PRODUCTS, WIDTH, WORD_ROWS, first_graph, fused, small
from torch import Tensor, nn

import autotp
from autotp.costs.hardware import CPU_GLOO, H100_80GB, estimated_on
from autotp.ops.losses import chunks
from autotp.passes.lower.losses import priced_forms
from autotp.passes.lower.losses.priced_forms import forms_of, is_faster_in_forward


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small():
        yield


class Loss(nn.Module):
    """A head with its loss. teacher: a divergence from a second head in place of the loss"""

    def __init__(self, teacher: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.teacher = nn.Linear(WIDTH, CLASSES) if teacher else None

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        logits = self.head(x)
        if self.teacher is not None:
            pair = logits.log_softmax(-1), self.teacher(x).log_softmax(-1)
            return F.kl_div(*pair, log_target=True, reduction="none").sum(-1).mean()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


@pytest.mark.parametrize("teacher", [False, True], ids=["loss", "divergence"])
def test_the_faster_form_is_chosen_and_the_plan_has_both_prices(teacher: bool) -> None:
    model = Loss(teacher).double()
    chosen = {"linear_loss_sum": "gradients in forward (", "linear_class_terms": "again in backward for 0 GFLOP ("}
    names = dict(zip(chosen, ("with logits again in backward", "with gradients in forward"), strict=True))
    for device, operator in ((ONLY_PRODUCTS, "linear_loss_sum"), (ONLY_MEMORY, "linear_class_terms")):
        with estimated_on(device):
            assert fused(model, 1) == [operator]
            report = autotp.verify(model, tp=1, example_inputs=(WORD_ROWS, LABELS))
        assert report.ok and report.computed and report.worst.error < 1e-10, str(report)
        text = report.plan.notes["logits"]
        assert chosen[operator] in text and text.endswith(f" {names[operator]})")


def test_equal_seconds_are_gradients_in_forward_only_for_no_more_bytes() -> None:
    (node,) = first_graph(Loss(), 1).find_nodes(op="call_function", target=priced_forms.linear_loss_sum)
    form = forms_of(node)[1]
    for more, is_faster in ((0, True), (1, False)):
        with patch.object(priced_forms, "forms_of", lambda _: (replace(form, bytes=form.bytes + more), form)):  # noqa: B023
            assert is_faster_in_forward(node) is is_faster


def test_a_price_counts_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLOPs of products, and bytes that are kept, of as many rows as the price is of."""
    monkeypatch.setattr(priced_forms, "ROWS", 40)
    (node,) = first_graph(Loss(), 1).find_nodes(op="call_function", target=priced_forms.linear_loss_sum)
    product = 2 * 40 * WIDTH * CLASSES
    in_forward, again = forms_of(node)
    assert (in_forward.rows, again.rows) == (40, 40)
    assert in_forward.flops == 3 * product and again.flops == 4 * product
    gradients, factors = CLASSES * WIDTH + CLASSES + 40 * WIDTH, 3 * 40
    assert in_forward.bytes == 4 * (gradients + factors) and again.bytes == 4 * (3 * 40 + factors)


CLASSES_AND_DTYPES = {
    (16_384, torch.bfloat16): (True, True), (151_936, torch.float32): (True, False),
    (32_000, torch.float32): (True, True), (128_256, torch.bfloat16): (True, False),
}  # fmt: skip


@pytest.mark.parametrize(("classes", "dtype"), CLASSES_AND_DTYPES)
def test_vocabularies_of_models_on_a_cpu_and_on_a_gpu(classes: int, dtype: torch.dtype) -> None:
    """A GPU computes logits again faster than it adds to the gradient of a large weight with each chunk."""
    weight, x, of_rows = (False, (classes, 4096), dtype), (True, (4096,), dtype), (True, (), torch.int64)
    sizes = ("weight", weight), ("x", x), ("classes", of_rows)
    with patch.object(chunks, "CHUNK", 2**24):
        forms = [priced_forms._forms(sizes, device, 2**24, 4096) for device in (CPU_GLOO, H100_80GB)]
    assert tuple(form[0].seconds < form[1].seconds for form in forms) == CLASSES_AND_DTYPES[classes, dtype]
