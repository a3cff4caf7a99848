"""source_location: which frame of a traceback an error names as the user's."""

from __future__ import annotations

import os
from traceback import FrameSummary

import pytest
import torch

import autotp
from autotp import source_location
from autotp.models import gpt
from autotp.passes.capture import capture

PACKAGE, TORCH = os.path.dirname(autotp.__file__), os.path.dirname(torch.__file__)


def line(*files: str) -> str:
    return source_location.user_line([FrameSummary(file, 7, "forward", line="y = x + 1") for file in files])


@pytest.mark.parametrize(
    "file",
    ["/home/me/model.py", "/home/me/passes/model.py", "/home/me/torch/model.py", f"{PACKAGE}2/model.py",
     f"{TORCH}x/a.py", f"{PACKAGE}/models/gpt.py", gpt.__file__],
)  # fmt: skip
def test_a_users_file(file: str) -> None:
    """Whatever its folder is called: what matters is that it is neither torch's nor autotp's."""
    below = (f"{TORCH}/nn/module.py", f"{PACKAGE}/errors.py", capture.__file__, "<string>")
    assert line("/home/me/train.py", file, *below) == f"{os.path.basename(file)}:7  y = x + 1"


def test_no_users_file() -> None:
    assert line(f"{TORCH}/nn/module.py", f"{PACKAGE}/errors.py", capture.__file__, "<string>") == "?"
