"""everywhere: what stands for a function of torch does so by whatever name the model's file has imported it."""

from __future__ import annotations

import copy
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, default_generator, is_grad_enabled, is_inference_mode_enabled, nn
from torch.autograd.forward_ad import enter_dual_level, exit_dual_level, make_dual, unpack_dual

import autotp
from autotp.passes.capture.replacements.everywhere import everywhere


def test_everywhere_replaces_each_imported_name_in_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModuleType("a_file")
    file.asked = file.asked_too = is_grad_enabled  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_file", file)

    def no() -> bool:
        return False

    with everywhere([(is_grad_enabled, no)]):
        assert file.asked is file.asked_too is torch.is_grad_enabled is is_grad_enabled is no
        file.asked_too = print  # type: ignore[attr-defined]
    assert file.asked_too is print  # As it was set.
    assert file.asked is torch.is_grad_enabled is is_grad_enabled is not no


class Block(nn.Module):
    """x: [rows, 4]"""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y


class AsksForGradients(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if is_grad_enabled() else 2 * y


class AsksForInference(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return 3 * y if is_inference_mode_enabled() else y


class Holds(Block):
    """Holds the question itself."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = torch.is_grad_enabled

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.asked() else 2 * y


class Seeds(Block):
    def forward(self, x: Tensor) -> Tensor:
        default_generator.manual_seed(3)
        return super().forward(x) + torch.rand(4)


class Derives(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        enter_dual_level()
        tangent: Tensor = unpack_dual(make_dual(y, y) * y).tangent
        exit_dual_level()
        return tangent


@pytest.mark.parametrize("kind", [AsksForGradients, AsksForInference, Holds])
def test_questions_about_grad_modes_are_answered_each_call(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 4)
    parallel = autotp.parallelize(copy.deepcopy(model), 1)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(parallel(x), model(x))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [(Seeds, "forward sets torch's random state"), (Derives, "a derivative that forward takes would be lost")],
)
def test_parallelize_refuses_effects_a_graph_would_lose(kind: type[nn.Module], problem: str) -> None:
    with pytest.raises(autotp.Error, match=problem):
        autotp.parallelize(kind(), 1, example_inputs=torch.randn(3, 4))
