"""What docs/command_line.md, the other pages and the README show of the command line is so."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.main import get_command

from autotp.tools.cli.app import app, run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "command_line.md").read_text()
TEXT = PAGE + (ROOT / "README.md").read_text()
BLOCKS = [code for _, code in re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)]
PAGES = "\n".join(page.read_text() for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
LINES = {line for block in re.findall(r"(?ms)^```[^\n]*\n(.*?)^```$", PAGES) for line in block.splitlines()}
COMMANDS = sorted(line.partition("autotp ")[2] for line in LINES if re.match(r"(torchrun .*-m )?autotp ", line))
MODEL = """
from torch import nn, ones


class MLP(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


def build(layers=4, width=64):
    return nn.Sequential(*(MLP(width) for _ in range(layers)))


def inputs():
    return ones(2, 5, 16)
"""
UNTRUE = """
import torch
from torch import nn

from autotp.rules import common
from autotp.rules.registry import RULES


@torch.library.custom_op("own::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


centred.register_fake(lambda x: torch.empty_like(x))
centred.register_autograd(lambda ctx, grad: grad - grad.mean(-1, keepdim=True))
RULES[torch.ops.own.centred.default] = common.fixed("* h -> * h")  # The mean is of the whole width.


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.ops.own.centred(self.up(x)))


class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, x):
        return self.layers(x)


def inputs():
    return torch.ones(2, 5, 16)
"""


@pytest.mark.parametrize("line", COMMANDS)
def test_pages_show_commands_that_parse(line: str) -> None:
    """The program reads its arguments; what they name need not be there."""
    name, *rest = shlex.split(line, comments=True)
    get_command(app).commands[name].make_context(name, rest)  # type: ignore[attr-defined]


def shown(command: str) -> str:
    """The block behind the one with this command."""
    (at,) = (i for i, block in enumerate(BLOCKS) if block.strip() == command)
    return BLOCKS[at + 1]


def without_errors(text: str) -> str:
    """Which round-off there is depends on the machine."""
    return re.sub(r"\d\.\de[-+]\d\d  \S+.*", "ERROR", text)


def test_page_shows_the_printed_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "autotp verify model.py:build:inputs --tp 2 3 --layers 2"
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    assert run(command.split()[1:]) == 0
    assert without_errors(capsys.readouterr().out) == without_errors(shown(command))


def test_page_shows_the_printed_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], registry: None
) -> None:
    """The page has dots for the lines that it leaves out."""
    command = "autotp verify model.py:MyModel:inputs --tp 2"
    (tmp_path / "model.py").write_text(UNTRUE)
    monkeypatch.chdir(tmp_path)
    assert run(command.split()[1:]) == 1
    found = without_errors(capsys.readouterr().out)
    before, after = without_errors(shown(command)).split("  ...\n")
    assert found.startswith(before) and found.endswith(after)


def test_page_shows_the_printed_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    command = "autotp plan llama --tp 8 --layers 2"
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=8,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    assert run(command.split()[1:]) == 0
    found, page = capsys.readouterr().out, shown(command)
    assert re.sub(r"\.py:\d+", ".py", found) == re.sub(r"\.py:\d+", ".py", page)


def without_seconds(text: str) -> str:
    return re.sub(r"\d+\.\d{2,3}(?= s$|  |$)", "SECONDS", text, flags=re.MULTILINE)


def test_page_shows_the_printed_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part between two `...` is a part of what is printed, in this order."""
    command = "autotp stages model.py:build:inputs --tp 2 --layers 2 --pass fuse_bias"
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    assert run(command.split()[1:]) == 0
    found, at = without_seconds(capsys.readouterr().out), 0
    for part in without_seconds(shown(command)).split("...\n"):
        assert part in found[at:], part
        at = found.index(part, at) + len(part)
