"""source_location: which frame of a traceback an error names as the user's."""

from __future__ import annotations

import os
from traceback import FrameSummary

import pytest
import torch
from errors import line_of
from torch import Tensor, nn

import autotp
from autotp import source_location
from autotp.models import gpt
from autotp.passes.capture import capture
from autotp.passes.capture.skeleton import skeleton_of

PACKAGE, TORCH = os.path.dirname(autotp.__file__), os.path.dirname(torch.__file__)


def line(*files: str) -> str:
    return source_location.user_line([FrameSummary(file, 7, "forward", line="y = x + 1") for file in files])


@pytest.mark.parametrize(
    "file",
    ["/home/me/model.py", "/home/me/passes/model.py", "/home/me/torch/model.py", f"{PACKAGE}2/model.py",
     f"{TORCH}x/a.py", f"{PACKAGE}/models/gpt.py", gpt.__file__],
)  # fmt: skip
def test_source_line_is_the_user_s_in_any_folder(file: str) -> None:
    """Whatever its folder is called: what matters is that it is neither torch's nor autotp's."""
    below = (f"{TORCH}/nn/module.py", f"{PACKAGE}/errors.py", capture.__file__, "<string>")
    assert line("/home/me/train.py", file, *below) == f"{os.path.basename(file)}:7  y = x + 1"


def test_source_line_without_a_user_s_file_is_unknown() -> None:
    assert line(f"{TORCH}/nn/module.py", f"{PACKAGE}/errors.py", capture.__file__, "<string>") == "?"


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.layers(x))

    def twice(self, x: Tensor) -> Tensor:
        return x * 2


def lines(model: nn.Module) -> dict[str, str]:
    """Name of an operator -> the line that an error would name."""
    graph = capture.capture(skeleton_of(model), (torch.empty(3, 4, device="meta"),), {}).graph
    return {node.name: source_location.line_of(node) for node in graph.nodes if node.op == "call_function"}


def test_operator_line_is_the_deepest_in_the_model_s_code() -> None:
    """The deepest line in a `forward` of the model's own code, however torch's layers call each other."""
    call = line_of(__file__, "return self.twice(self.layers(x))")
    assert lines(Doubled()) == {"linear": call, "tanh": call, "mul": call}


def test_operator_line_falls_back_to_torch_s_code() -> None:
    found = lines(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    assert found["linear"].startswith("linear.py:") and found["tanh"].startswith("activation.py:")
