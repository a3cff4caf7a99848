"""only_loss: with outputs="loss" a training call computes its loss and numbers; what it left out is one Error."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from errors import message
from torch import Tensor, nn

import autotp
from autotp.compiler import analyse
from autotp.ops.losses.linear_cross_entropy import linear_class_terms, linear_loss_sum
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.lower.losses import linear_cross_entropy

CLASSES = 37
TOKENS = torch.arange(10).view(2, 5)
FUSED = linear_class_terms, linear_loss_sum


class Words(nn.Module):
    def __init__(self, accuracy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.down = nn.Embedding(CLASSES, 16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.head, self.accuracy = nn.Linear(16, CLASSES), accuracy

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        hidden = self.table(tokens)
        hidden = hidden + self.down(F.gelu(self.up(hidden)))
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        more = {"accuracy": (logits.argmax(-1) == labels).double().mean()} if self.accuracy else {}
        return {"loss": loss, "logits": logits, "hidden": [hidden], **more}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "LEAST", CLASSES)


def parallel(model: nn.Module) -> nn.Module:
    return autotp.parallelize(copy.deepcopy(model), 1, example_inputs=(TOKENS, TOKENS), outputs="loss")


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_logits_are_not_computed_and_gradients_stay(tp: int) -> None:
    model = Words().double()
    for outputs, count in (("auto", 0), ("loss", 1)):
        analysis = analyse(skeleton_of(model), (TOKENS, TOKENS), {}, tp, Options(outputs=outputs))  # type: ignore[arg-type]
        assert sum(node.target in FUSED for node in analysis.graph.nodes) == count
    report = autotp.verify(model, tp, example_inputs=(TOKENS, TOKENS), outputs="loss")
    assert report.ok and report.worst.error < 1e-12
    assert [difference.name for difference in report.outputs] == ["loss"]
    lines = str(report.plan).splitlines()
    assert 'outputs     2 not computed beside the loss (outputs="loss")' in lines
    assert "loss        with its head in chunks of rows: logits are never whole" in lines


def test_numbers_are_returned() -> None:
    whole = Words(accuracy=True).double()
    result, expected = parallel(whole)(TOKENS, TOKENS), whole(TOKENS, TOKENS)
    for name in ("loss", "accuracy"):
        torch.testing.assert_close(result[name], expected[name])


USES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda x: x.shape, "function": lambda x: torch.argmax(x, -1), "item": lambda x: x[0],
    "product": lambda x: x * 2, "other-side": lambda x: torch.ones(2) * x, "loop": list, "truth": bool,
    "write": lambda x: setattr(x, "data", 0), "list": lambda x: torch.stack([x, x]), "numpy": np.asarray,
    "element": lambda x: operator.setitem(x, 0, 1), "divided": lambda x: 1 / x, "power": lambda x: x**2,
}  # fmt: skip


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_reading_what_was_left_out_is_one_error(use: Callable[[Any], Any]) -> None:
    result = parallel(Words())(TOKENS, TOKENS)
    assert message(use, result["hidden"][0]) == (
        '`hidden.0` was not computed: with outputs="loss", as in a Trainer, a call in training returns its loss only\n'
        '  try      parallelize(..., outputs="full")\n'
        "  or       model.eval() before a call whose tensors are read"
    )


def test_what_was_left_out_can_be_passed_on() -> None:
    logits = parallel(Words())(TOKENS, TOKENS)["logits"]
    assert not hasattr(logits, "dtype")  # So accelerate's mixed precision passes it on.
    for copied in (copy.deepcopy(logits), pickle.loads(pickle.dumps(logits))):
        assert repr(copied) == """NotReturned('logits', outputs="loss")"""


def test_other_calls_return_all() -> None:
    whole = Words()
    model = parallel(whole)
    torch.testing.assert_close(model(TOKENS)["logits"], whole(TOKENS)["logits"])
    torch.testing.assert_close(model.eval()(TOKENS, TOKENS)["logits"], whole(TOKENS, TOKENS)["logits"])
