"""`autotp estimate` and `autotp search`: as text and as JSON; the examples of `--help` run; what is refused."""

from __future__ import annotations

import re

import pytest

FACTORY = """
from autotp.models.gpt import GPT, GPTConfig


def make(n_layer=4):
    return GPT(GPTConfig(block_size=128, vocab_size=1024, n_layer=n_layer, n_head=4, n_embd=64))
"""


@pytest.fixture
def factory(tmp_path) -> str:  # type: ignore[no-untyped-def]
    path = tmp_path / "factory.py"
    path.write_text(FACTORY)
    return f"{path}:make"


def test_estimate_prints_the_table(autotp_command, factory: str) -> None:
    done = autotp_command("estimate", factory, "--gpu", "a100-80gb", "--batch", 8, "--tp", 2, "--pp", 2)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("tp=2, pp=2, dp=1, micro_batch=1, 1F1B on 4 x a100-80gb") and "fits: at most" in done.out


def test_estimate_prints_json_with_a_version(autotp_command, factory: str) -> None:
    done = autotp_command("estimate", factory, "--gpu", "h100-80gb", "--batch", 8, "--layers", 2, "--json")
    assert done.json["version"] == 1 and done.json["stages"][0]["blocks"] == ["h.0", "h.1"]


def test_the_status_says_what_does_not_fit(autotp_command, factory: str) -> None:
    line = "312TF 2TB/s 0.001GB node=8x300GB/s net=25GB/s"
    done = autotp_command("estimate", factory, "--gpu", line, "--batch", 8)
    assert done.status == 1 and "does not fit" in done.out
    assert autotp_command("search", factory, "--gpus", 2, "--gpu", line, "--batch", 8).status == 1


def test_search_prints_the_best_and_why_others_lost(autotp_command, factory: str) -> None:
    done = autotp_command("search", factory, "--gpus", 2, "--gpu", "a100-80gb", "--batch", 8)
    assert done.status == 0 and done.out.startswith("the best of ") and "why it lost" in done.out


@pytest.mark.parametrize("command", ["estimate", "search"])
def test_the_example_of_the_help_runs(autotp_command, factory: str, command: str) -> None:
    text = " ".join(autotp_command(command, "--help").out.split())
    found = re.search(rf"Example: autotp ({command} .*?) The exit", text)
    assert found is not None
    assert "file.py:factory" in found[1]
    words = [factory if word == "file.py:factory" else word for word in found[1].split()]
    assert autotp_command(*words).status == 0


def test_wrong_use_is_one_line(autotp_command, factory: str) -> None:
    done = autotp_command("estimate", factory, "--gpu", "a1000", "--batch", 8)
    assert done.status == 1 and "gpu='a1000' is not known" in done.err and done.out == ""
    assert autotp_command("estimate", factory, "--batch", 8).status == 2
    assert autotp_command("estimate", "no.such:thing", "--gpu", "a100-80gb", "--batch", 8).status == 2
