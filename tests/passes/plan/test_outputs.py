"""outputs: which outputs stay cut, and the layouts of outputs and parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotp.compiler import analyse
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.plan.outputs import makers
from autotp.passes.program.program import Program
from autotp.rules.call import is_loss, returned

TOKENS = torch.arange(6).view(2, 3)


class Language(nn.Module):
    """Logits, hidden states, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(48, 8), nn.Linear(8, 48, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.table(tokens)
        logits = self.head(hidden)
        return logits, hidden, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def program(*given: Tensor, training: bool = True, **options: Any) -> Program:
    return analyse(skeleton_of(Language().train(training)), given, {}, 2, Options(**options))


@pytest.mark.parametrize(
    ("training", "outputs", "stays"),
    [
        (True, "auto", [0]),
        (False, "auto", []),
        (True, "full", []),
        (True, "local", [0]),
        (False, "local", [0]),
    ],
)
def test_outputs_stay_cut_as_the_option_says(training: bool, outputs: Any, stays: list[int]) -> None:
    """With "auto" in training those that a returned loss is computed from."""
    found = program(TOKENS, TOKENS, training=training, outputs=outputs)
    assert sorted(found.local_outputs) == stays


def test_outputs_and_parameters_have_their_layouts() -> None:
    found = program(TOKENS, TOKENS, outputs="local")
    assert {at: str(layout).replace("-1", "?") for at, layout in found.local_outputs.items()} == {0: "[?, ?, 48@tp]"}
    assert {name: str(layout) for name, layout in found.layouts.items()} == {
        "table.weight": "[48@tp, 8]",
        "head.weight": "[48@tp, 8]",
    }


def test_is_loss_and_makers_find_the_loss() -> None:
    found = program(TOKENS, TOKENS)
    outputs = [node for node in returned(found.graph) if isinstance(node, torch.fx.Node)]
    assert [is_loss(node) for node in outputs[:3]] == [False, False, True]
    assert makers(found.graph, [2]) <= set(found.graph.nodes) and len(makers(found.graph, [2])) == 1
