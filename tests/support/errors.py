"""What the tests of errors share: a message, its line, and that a failed `parallelize` has changed nothing."""

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Plain
from torch import Tensor, nn

import autotp


def message(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The text of the Error that the call raises."""
    with pytest.raises(autotp.Error) as raised:
        call(*args, **kwargs)
    return str(raised.value)


def line_of(file: str, text: str) -> str:
    """Where in a test's `__file__` `text` stands, as an error names it."""
    with open(file) as opened:
        at, code = next((i, row.strip()) for i, row in enumerate(opened, 1) if text in row)
    return f"{os.path.basename(file)}:{at}  {code}"


def with_sizes_by_order(text: str) -> str:
    """The text with its symbols of sizes named s0, s1, ... as they come: torch's names depend on the captured call."""
    names: dict[str, str] = {}
    return re.sub(r"\bs\d+\b", lambda found: names.setdefault(found[0], f"s{len(names)}"), text)


def refusal(model: nn.Module, n: int, **given: Any) -> str:
    """The message of a failed `parallelize`, which has left the parameters and buffers the very objects they were."""
    before = dict(model.state_dict(keep_vars=True))
    values = {name: tensor.clone() for name, tensor in before.items()}
    text = message(lambda: autotp.parallelize(model, n, **given))
    now = model.state_dict(keep_vars=True)
    assert list(now) == list(before)
    assert all(now[name] is before[name] and torch.equal(now[name], values[name]) for name in now)
    return text


OPERATOR = "autotp.opaque (every rank runs the code whole), or torch.library.custom_op and autotp.rule"
LOOPS = "the model has a loop whose length depends on the values of a tensor: torch.export has no such loop"
ROUNDS = f"do all rounds, and mask with torch.where; or one operator: {OPERATOR}"


class Branching(Plain):
    def __init__(self) -> None:
        super().__init__(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        if y.argmax(-1).unique().numel() > 1:  # a branch on data
            y = y + 1
        return y


class Odd(Branching):
    """A block's weight that an operator needs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.h = nn.ModuleList([nn.Linear(16, 16, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.mlp(x))
        return x @ torch.linalg.matrix_exp(self.h[0].weight)


BRANCHES = "the model branches on the values of a tensor, which one graph cannot do"
TRY_WHERE = f"\n  try      choose with torch.where, or branch on shapes and configuration only; or {OPERATOR}"


DATA_BRANCH = line_of(__file__, "unique().numel() > 1:  # a")
"""Where `Branching` branches, as an error names it."""
NO_RULE = line_of(__file__, "return x @ torch")
"""Where `Odd` has an operator without a rule."""
