"""skeleton: a copy for capture has memory of its own, so that a capture changes nothing of the user's model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.passes.capture.skeleton import copy_on


class Counting(nn.Module):
    """Writes into tensors that it holds in plain attributes."""

    def __init__(self, own: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.own = nn.Linear(8, 16), nn.Linear(16, 8), own
        self.calls, self.held = torch.zeros(()), {"rows": torch.zeros(3)}

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        self.calls += 1
        self.held["rows"][0] += 2
        y = self.down(self.up(x).relu())
        return self.own(self, y) if labels is None else (self.own(self, y).mean(), y)


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(lambda self, y: y, id="plain"),
        pytest.param(lambda self, y: y * 2 if y.sum() > 0 else y, id="branch"),
        pytest.param(lambda self, y: y if self.calls > 0 else -y, id="read"),
        pytest.param(lambda self, y: y[:, : int(y.sum())], id="refused"),
        pytest.param(lambda self, y: self.down(y), id="fails"),
    ],
)
@pytest.mark.parametrize("given", [torch.ones(3, 8), None], ids=["given", "found"])
def test_a_capture_leaves_the_users_tensors_as_they_are(own: Callable[[Any, Tensor], Tensor], given: Any) -> None:
    """Whether it ends well or not: the first call finds what the user set."""
    model = Counting(own)
    calls, rows = model.calls, model.held["rows"]
    for look in (autotp.explain, autotp.verify):
        with suppress(autotp.Error), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`labels` is left out")
            look(model, 2, example_inputs=given)
        assert model.calls is calls
        assert model.held["rows"] is rows
        assert (float(calls), rows.tolist()) == (0.0, [0.0, 0.0, 0.0])
        assert (calls._version, rows._version) == (0, 0)


def test_copies_share_what_their_originals_share() -> None:
    model: Any = nn.Module()
    model.whole = torch.arange(6.0).view(2, 3)
    model.row = model.whole[1]
    originals: dict[int, Tensor] = {}
    copy: Any = copy_on(model, "meta", originals)
    copy.row.zero_()
    assert copy.whole.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert model.whole.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert originals[id(copy.row)] is model.row
