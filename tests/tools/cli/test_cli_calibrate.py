"""`autotp calibrate`: the table, JSON, the file for --gpu, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

FACTORY = """
from autotp.models.gpt import GPT, GPTConfig


def make():
    return GPT(GPTConfig(block_size=128, vocab_size=1024, n_layer=2, n_head=4, n_embd=64))
"""


def test_the_example_of_the_help_runs_and_its_file_is_a_device(  # type: ignore[no-untyped-def]
    autotp_command, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("factory.py").write_text(FACTORY)
    text = " ".join(autotp_command("calibrate", "--help").out.split())
    found = re.search(r"Example: autotp (calibrate .*?\.json)", text)
    assert found is not None
    words = found[1].replace("--seconds 4", "--seconds 1").split()
    done = autotp_command(*words)
    assert (done.status, done.err) == (0, "") and done.out.startswith("this device beside cpu-gloo")
    assert "numbers differ by more than 10%" in done.out and '--gpu "' in done.out
    line = re.search(r'--gpu "(.*)"', done.out)
    assert line is not None
    for gpu in ("device.json", line[1]):
        done = autotp_command("estimate", "factory.py:make", "--gpu", gpu, "--batch", 2, "--dtype", "float32")
        assert done.status == 0, done.err


def test_calibrate_json_has_a_version(autotp_command) -> None:  # type: ignore[no-untyped-def]
    done = autotp_command("calibrate", "--seconds", 1, "--json")
    assert done.status == 0 and done.json["version"] == 1 and done.json["known"]["name"] == "cpu-gloo"


def test_calibrate_page_has_the_table(autotp_command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = autotp_command("calibrate", "--seconds", 1, "--html", tmp_path / "device.html")
    text = (tmp_path / "device.html").read_text()
    assert done.status == 0 and "<title>this device beside cpu-gloo</title>" in text
    line = re.search(r'--gpu "(.*)"', done.out)
    assert line is not None and line[1] in text and ">products, bfloat16</td>" in text


def test_wrong_use_is_one_line_and_nothing_is_written(autotp_command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for words, problem in (
        (["--gpu", "a1000"], "gpu='a1000' is not known"),
        (["--gpu", "989TF 80GB"], "does not say"),
        (["--save", tmp_path / "device.txt"], "does not end in .json"),
        (["--save", tmp_path / "no" / "device.json"], "does not exist"),
        (["--html", tmp_path / "no" / "device.html"], "cannot be written"),
        (["--seconds", "0"], "seconds"),
    ):
        done = autotp_command("calibrate", *words)
        assert done.status == 2 and problem in done.err and done.out == "", words
    assert not list(tmp_path.iterdir())
