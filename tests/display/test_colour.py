"""colour: on a terminal (a pseudo-terminal here), and not in a file, a pipe or a text that goes elsewhere."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import nn

import autotp
from autotp.display.colour import CODES, in_colour, painted
from autotp.display.sheet import STYLES

GREEN, YELLOW, CYAN, END = "\x1b[32m", "\x1b[33m", "\x1b[36m", "\x1b[0m"


pytestmark = pytest.mark.usefixtures("in_colours")


def on_a_terminal(run: Callable[[], object]) -> str:
    """Runs with a stdout that is a terminal; returns what the terminal got."""
    master, slave = os.openpty()
    with open(master, "rb", buffering=0) as screen, open(slave, "w") as terminal, redirect_stdout(terminal):
        run()
        terminal.write("\0")
        terminal.flush()
        got = b""
        while not got.endswith(b"\0"):
            got += screen.read(65536)
    return got[:-1].decode().replace("\r\n", "\n")


def uncoloured(text: str) -> str:
    return re.sub("\x1b\\[[0-9;]*m", "", text)


@pytest.fixture(scope="module")
def plan() -> autotp.Plan:
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    return autotp.explain(model, 2, example_inputs=torch.ones(2, 4))


def test_a_plan_printed_on_a_terminal_is_coloured(plan: autotp.Plan) -> None:
    """What is cut, what is sent and what stays whole have a colour each; the text is the same."""
    text = on_a_terminal(lambda: print(plan))
    assert f"{GREEN}2.weight{END}" in text and f"{CYAN}all-reduce{END}" in text and f"{YELLOW}2.bias{END}" in text
    assert uncoloured(text) == f"{plan}\n"


def test_a_report_printed_on_a_terminal_is_coloured() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    report = autotp.verify(model, 2, example_inputs=torch.ones(2, 4))
    text = on_a_terminal(lambda: print(report))
    assert text.startswith(f"{GREEN}Sequential on tp=2: equal to one device") and uncoloured(text) == f"{report}\n"


def test_text_for_files_pipes_and_formats_is_plain(plan: autotp.Plan, tmp_path: Path) -> None:
    """An f-string is plain, also while stdout is a terminal; and so is a file or a pipe that is stdout."""
    found: list[str] = []
    on_a_terminal(lambda: found.extend((f"{plan}", format(plan), f"{plan:<3}")))
    file = tmp_path / "plan.txt"
    with open(file, "w") as out, redirect_stdout(out):
        print(plan)
    read, write = os.pipe()
    with open(read) as pipe:
        with open(write, "w") as out, redirect_stdout(out):
            print(plan)
        found += [file.read_text().rstrip("\n"), pipe.read().rstrip("\n")]
    assert len(set(found)) == 1 and "\x1b" not in found[0] and found[0].startswith("Sequential on tp=2\n\ncut ")


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ],
    ids=str,
)
def test_colour_follows_environment_variables(
    plan: autotp.Plan, variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b" in on_a_terminal(lambda: print(plan))) is coloured


def test_force_color_does_not_colour_files(plan: autotp.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with redirect_stdout(io.StringIO()) as out:
        print(plan)
    assert "\x1b" not in out.getvalue()


def test_a_closed_or_missing_stdout_is_not_coloured(plan: autotp.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stdout in (closed, None):
        monkeypatch.setattr(sys, "stdout", stdout)
        assert str(plan) == f"{plan}" and not in_colour(stdout)


def test_each_style_has_codes() -> None:
    assert {word for style in STYLES.values() for word in style.split()} <= CODES.keys()
    assert painted("x", "bold red") == "\x1b[1;31mx\x1b[0m" and painted("x", "") == "x" and painted("  ", "dim") == "  "
