"""The program: exit statuses, errors of one line, tracebacks only on request, what is missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autotp
from autotp.tools.cli import doctor
from autotp.tools.cli.app import app
from autotp.tools.cli.main import main


def test_program_without_arguments_helps(autotp_command) -> None:
    done = autotp_command()
    assert done.status == 2 and "plan" in done.out and "verify" in done.out and done.err == ""
    assert autotp_command("--help").status == 0


def test_program_prints_its_version(autotp_command) -> None:
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
def test_program_tells_wrong_use_in_one_line(autotp_command, args: tuple[str, ...], told: str) -> None:
    done = autotp_command(*args)
    assert done.status == 2 and done.out == "" and done.err.startswith(told) and done.err.count("\n") == 1


COMMANDS = ("plan", "verify", "estimate", "search", "stages", "doctor", "convert", "calibrate", "init")
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
    words = found[1].replace("--seconds 4", "--seconds 1").split()
    done = autotp_command(*words, *["--json"] * ("--json" not in words))
    assert done.status == 0 or command == "doctor", done.err
    expect_versions(done.json)


def expect_versions(data: dict[str, Any]) -> None:
    """They are its first keys."""
    assert list(data)[:2] == ["version", "autotp"]
    assert (data["version"], data["autotp"]) == (1, autotp.__version__)


def test_every_command_is_tried(autotp_command) -> None:
    assert {command.name for command in app.registered_commands} == {*COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_option_is_an_error_in_json(autotp_command, command: str) -> None:
    done = autotp_command(command, "--json", "--no-such-option")
    assert done.status == 2 and list(done.json) == ["version", "autotp", "ok", "error"] and not done.json["ok"]
    assert "No such option: --no-such-option" in done.json["error"]["problem"]
    expect_versions(done.json)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()], ids=["bug", "interrupted"])
@pytest.mark.parametrize("json_", [True, False], ids=["json", "text"])
def test_program_prints_tracebacks_of_bugs_only(
    autotp_command, monkeypatch: pytest.MonkeyPatch, error: BaseException, json_: bool
) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr(doctor, "examine", fails)
    done = autotp_command("doctor", *["--json"] * json_)
    bug = isinstance(error, RuntimeError)
    assert done.status == (1 if bug else 130) and ("Traceback" in done.err) is bug
    assert bool(done.out) is json_ and (bug or done.err == "autotp: interrupted\n")
    if json_:
        problem = "RuntimeError: a bug" if bug else "interrupted"
        assert done.json["error"] == {"call": "", "problem": problem, "facts": {}}
        expect_versions(done.json)


def test_an_error_says_what_to_write_and_has_no_traceback(autotp_command, models: Path) -> None:
    done = autotp_command("plan", f"{models}:Branches:inputs", "--tp", 2)
    first, *facts = done.err.splitlines()
    assert (done.status, done.out) == (1, "")
    assert first.startswith("autotp: explain(Branches, tp=2): the model branches") and "Traceback" not in done.err
    assert [line.split()[0] for line in facts] == ["at", "try"]


def test_program_with_debug_shows_the_traceback(autotp_command, models: Path) -> None:
    done = autotp_command("plan", f"{models}:Branches:inputs", "--tp", 2, "--debug")
    assert done.status == 1 and "Traceback (most recent call last)" in done.err


def test_program_prints_an_error_as_json(autotp_command, models: Path) -> None:
    done = autotp_command("plan", f"{models}:Branches:inputs", "--tp", 2, "--json")
    assert done.status == 1 and not done.json["ok"]
    assert done.json["error"]["call"] == "explain(Branches, tp=2)" and "try" in done.json["error"]["facts"]
    expect_versions(done.json)
    wrong = autotp_command("plan", "nothing", "--tp", 2, "--json")
    assert wrong.status == 2 and "nothing is fetched" in wrong.json["error"]["problem"]
    expect_versions(wrong.json)


@pytest.mark.parametrize("json_", [True, False], ids=["json", "text"])
def test_program_says_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], json_: bool
) -> None:
    for name in [name for name in sys.modules if name.startswith(("typer", "autotp.tools.cli."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["autotp", "doctor", *["--json"] * json_])
    assert main() == 2
    done, problem = capsys.readouterr(), "the command line needs typer: pip install 'autotp[cli]'"
    assert done.err == f"autotp: {problem}\n" and bool(done.out) is json_
    if json_:
        assert json.loads(done.out)["error"]["problem"] == problem
        expect_versions(json.loads(done.out))


@pytest.mark.system
def test_program_prints_results_alone_on_stdout(models: Path) -> None:
    """As `python -m autotp`: results alone on stdout, plain where it is no terminal."""
    command = [sys.executable, "-m", "autotp", "verify", f"{models}:mlp:inputs", "--tp", "2", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [report["tp"] for report in json.loads(done.stdout)["reports"]] == [2, 3] and done.stderr == ""
