"""The program: exit statuses, errors of one line, tracebacks only on request, what is missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autotp
from autotp.cli.main import main


def test_without_arguments_it_helps(autotp_command) -> None:
    done = autotp_command()
    assert done.status == 2 and "plan" in done.out and "verify" in done.out and done.err == ""
    assert autotp_command("--help").status == 0


def test_version(autotp_command) -> None:
    assert autotp_command("--version").out == f"autotp {autotp.__version__}\n"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("plan", "gpt2"), "autotp: Missing option '--tp'; see autotp plan --help\n"),
        (("nothing",), "autotp: No such command 'nothing'; see autotp nothing --help\n"),
        (("plan", "x.py:f", "--tp", "0"), "autotp: Invalid value for '--tp'"),
        (("plan", "x.py:f", "--tp", "2", "--experts", "some"), "autotp: Invalid value for '--experts'"),
    ],
    ids=["missing", "command", "range", "choice"],
)
def test_wrong_use_is_one_line(autotp_command, args: tuple[str, ...], told: str) -> None:
    done = autotp_command(*args)
    assert done.status == 2 and done.out == "" and done.err.startswith(told) and done.err.count("\n") == 1


COMMANDS = ("plan", "verify", "estimate", "search", "doctor", "convert")
GPT = """
from autotp.models.gpt import GPT, GPTConfig


def factory(n_layer=2):
    return GPT(GPTConfig(block_size=32, vocab_size=64, n_layer=n_layer, n_head=4, n_embd=32))
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_of_the_help_runs(
    autotp_command, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(autotp_command(command, "--help").out.split())
    found = re.search(rf"Example: autotp ({command} .*?) (?:The exit|Arguments|Options)", text)
    assert found is not None
    (tmp_path / "file.py").write_text(GPT)
    torch.save({"up.weight": torch.ones(2, 3)}, tmp_path / "model.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "file", raising=False)
    done = autotp_command(*found[1].split())
    assert done.status == 0 or command == "doctor", done.err


def test_an_error_says_what_to_write_and_has_no_traceback(autotp_command, models: Path) -> None:
    done = autotp_command("plan", f"{models}:Branches:inputs", "--tp", 2)
    first, *facts = done.err.splitlines()
    assert (done.status, done.out) == (1, "")
    assert first.startswith("autotp: explain(Branches, tp=2): the model branches") and "Traceback" not in done.err
    assert [line.split()[0] for line in facts] == ["at", "try"]


def test_debug_shows_the_traceback(autotp_command, models: Path) -> None:
    done = autotp_command("plan", f"{models}:Branches:inputs", "--tp", 2, "--debug")
    assert done.status == 1 and "Traceback (most recent call last)" in done.err


def test_an_error_in_json(autotp_command, models: Path) -> None:
    done = autotp_command("plan", f"{models}:Branches:inputs", "--tp", 2, "--json")
    assert done.status == 1 and not done.json["ok"]
    assert done.json["error"]["call"] == "explain(Branches, tp=2)" and "try" in done.json["error"]["facts"]
    wrong = autotp_command("plan", "nothing", "--tp", 2, "--json")
    assert wrong.status == 2 and "nothing is fetched" in wrong.json["error"]["problem"]


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith(("typer", "autotp.cli."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main() == 2
    assert capsys.readouterr().err == "autotp: the command line needs typer: pip install 'autotp[cli]'\n"


@pytest.mark.system
def test_a_process_of_its_own(models: Path) -> None:
    """As `python -m autotp`: results alone on stdout, plain where it is no terminal."""
    command = [sys.executable, "-m", "autotp", "verify", f"{models}:mlp:inputs", "--tp", "2", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [report["tp"] for report in json.loads(done.stdout)["reports"]] == [2, 3] and done.stderr == ""
