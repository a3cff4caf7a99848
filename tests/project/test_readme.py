"""What the README shows is what happens."""

import ast
import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import autotp
from autotp.models.gpt import GPT, GPTConfig

TEXT = (Path(__file__).resolve().parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]


def block(text: str) -> str:
    (found,) = (code for code in PYTHON if text in code)
    return found


def printed(code: str, **names: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {"torch": torch, "autotp": autotp, **names})
    return out.getvalue()


def test_the_printed_plan() -> None:
    code = block("autotp.explain(")
    shown = BLOCKS[BLOCKS.index(("python", code)) + 1]
    assert shown == ("", printed(code))


def test_checking_a_model() -> None:
    model = GPT(GPTConfig(block_size=8, vocab_size=31, n_layer=1, n_head=2, n_embd=8))
    assert printed(block("autotp.verify("), model=model).startswith("GPT on tp=4: equal to one device")


def test_adding_an_operator(registry: None) -> None:
    printed(block("autotp.rule("))
    op = torch.ops.mylib.scale_rows

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(4, 16), torch.nn.Linear(16, 4)
            self.scale = torch.nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(op(self.up(x), self.scale))

    plan = autotp.explain(Scaled(), 2, example_inputs=torch.randn(3, 4))
    assert "scale" in {cut.name for cut in plan.cuts}


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.strip().splitlines()[0][:30])
def test_names_of_the_library(code: str) -> None:
    """Each `autotp.name` in a block exists."""
    used = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    assert all(hasattr(autotp, n.attr) for n in used if n.value.id == "autotp")  # type: ignore[attr-defined]
