"""`autotp stages`: a row for each pass, the code before and after one, JSON, and what is no pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import autotp
from autotp.compiler import CANONICALIZE, LOWER, PLAN


def test_stages_prints_a_row_for_each_pass(autotp_command, models: Path) -> None:
    done = autotp_command("stages", f"{models}:mlp:inputs", "--tp", 2)
    assert (done.status, done.err) == (0, "") and done.out.startswith("Sequential on tp=2: 28 passes, ")
    found = [line.split()[:2] for line in done.out.splitlines() if re.match(r"[a-z]+ +[a-z_]+ ", line)]
    passes = [[each.stage, each.name] for each in (*CANONICALIZE, *PLAN, *LOWER)]
    shown = [row for row in found if row in passes]
    assert [row for row in passes if row in shown] == shown and len(shown) == 25
    assert [found.index(row) for row in (["capture", "capture"], ["check", "check"], ["emit", "emit"])] == [1, 27, 28]


def test_stages_prints_the_code_around_a_pass(autotp_command, models: Path) -> None:
    done = autotp_command("stages", f"{models}:mlp:inputs", "--tp", 2, "--pass", "fuse_bias")
    _, before, after = re.split("\n(?:before|after) fuse_bias\n", done.out)
    assert done.status == 0 and "add(linear, bias)" in before and "add(linear, bias)" not in after
    assert "linear(copy, weight, bias): f32[b, 8]" in after
    done = autotp_command("stages", f"{models}:mlp:inputs", "--tp", 2, "--pass", "choose")
    assert done.out.count("before and after choose") == 1 and done.out.count("gelu(x)") == 1


def test_stages_colours_changed_lines(
    autotp_command, models: Path, in_colours: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = autotp_command("stages", f"{models}:mlp:inputs", "--tp", 2, "--pass", "fuse_bias").out
    assert "\x1b[33m  add = add(linear, bias): f32[b, 8]" in out
    assert "\x1b[32m  linear = linear(copy, weight, bias): f32[b, 8]" in out
    assert "\n  gelu = gelu(x): f32[b, 8]" in out


def test_the_page_has_the_table_and_the_code(autotp_command, models: Path, tmp_path: Path) -> None:
    given = f"{models}:mlp:inputs", "--tp", 2, "--pass", "fuse_bias", "--html", tmp_path / "stages.html"
    done = autotp_command("stages", *given)
    text = (tmp_path / "stages.html").read_text()
    assert done.status == 0 and "<title>Sequential on tp=2: 28 passes, " in text and "default-src 'none'" in text
    assert all(f">{each.name}</td>" in text for each in (*CANONICALIZE, *PLAN, *LOWER) if f" {each.name} " in done.out)
    before, after = text.index("before fuse_bias"), text.index("after fuse_bias")
    assert before < text.index("add(linear, bias)") < after < text.index("linear(copy, weight, bias)")
    changed = re.findall('<span style="color[^>]*>(.*)</span>', text)
    assert "  add = add(linear, bias): f32[b, 8]" in changed and "  gelu = gelu(x): f32[b, 8]" not in changed
    done = autotp_command("stages", *given[:-1], tmp_path / "no" / "stages.html")
    assert (done.status, done.out) == (2, "") and "cannot be written" in done.err
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".html"] == ["stages.html"]


def test_stages_json_has_the_table_and_the_code(autotp_command, models: Path) -> None:
    given = "--tp", 2, "--json", "--pass", "check", "--without", "bucket", "cse"
    data = autotp_command("stages", f"{models}:mlp:inputs", *given).json
    assert list(data)[:3] == ["version", "autotp", "model"] and data["autotp"] == autotp.__version__
    names = [row["name"] for row in data["passes"]]
    assert "bucket" not in names and "cse" not in names and names[0] == "capture" and names[-1] == "emit"
    assert "weight: f32[16@tp, 4]" in data["code"]["check"]["after"]
    assert autotp_command("stages", f"{models}:mlp:inputs", "--tp", 2, "--json").json["code"] == {}


@pytest.mark.parametrize(
    "given", [("--pass", "nothing"), ("--pass", "cse", "--without", "cse")], ids=["no", "left-out"]
)
def test_a_pass_that_does_not_run(autotp_command, models: Path, given: tuple[str, ...]) -> None:
    done = autotp_command("stages", f"{models}:mlp:inputs", "--tp", 2, *given)
    assert (done.status, done.out) == (2, "") and done.err.count("\n") == 1
    assert (
        f"--pass {given[1]}: no such pass runs with these options; they are capture, relocate, autocast, " in done.err
    )
