"""`autotp verify`: its reports and exit statuses, and what a difference comes from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autotp.diagnostics.differences import Difference
from autotp.diagnostics.verify import Report
from autotp.tools.bisect import Blame
from autotp.tools.cli import verify as command


def test_verify_takes_several_numbers_of_ranks(autotp_command, models: Path) -> None:
    done = autotp_command("verify", f"{models}:mlp:inputs", "--tp", 2, 3)
    assert (done.status, done.err) == (0, "")
    heads = [line for line in done.out.splitlines() if not line.startswith(" ")]
    assert heads == [f"Sequential on tp={tp}: equal to one device (float64, tolerance 1e-09)" for tp in (2, 3)]


def test_verify_takes_a_configuration(autotp_command, llama: Path) -> None:
    done = autotp_command("verify", llama, "--tp", 4, "--layers", 1, "--json", "--recompute", "full")
    (report,) = done.json["reports"]
    assert done.status == 0 and done.json["ok"] and report["ok"] and report["computed"] and report["guilty"] is None
    assert report["tp"] == 4 and report["gradients"][0]["error"] < report["tolerance"] == 1e-9


def test_verify_takes_a_mesh(autotp_command, llama: Path) -> None:
    sizes = "--tp", 2, "--pp", 2, "--dp", 3, "--microbatches", 2, "--layers", 2
    done = autotp_command("verify", llama, *sizes, "--json", "--schedule", "GPipe")
    (report,) = done.json["reports"]
    assert done.status == 0 and report["ok"] and report["computed"] and report["guilty"] is None
    assert report["mesh"]["ranks"] == 12 and report["mesh"]["schedule"] == "GPipe"
    proved = autotp_command("verify", llama, *sizes, "--meta", "--zero", 1)
    assert proved.status == 0 and ": proved on 12 ranks; nothing computed, as the model is on meta" in proved.out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--pp", 2, "--microbatches", 1), "this schedule on 2 ranks cannot run 1 microbatches"),
        (("--pp", 3, "--microbatches", 3), "3 stages, and the model has 2 blocks"),
        (("--zero", 1), "schedule and zero are options of distribute, and this is one call of a model"),
        (("--dp", 2, "--outputs", "full"), "outputs and experts are options of parallelize"),
    ],
    ids=str,
)
def test_verify_refuses_a_layout_that_cannot_be(
    autotp_command, llama: Path, given: tuple[object, ...], said: str
) -> None:
    """It is a wrong argument, as for `autotp estimate`; a model that is refused is not."""
    done = autotp_command("verify", llama, "--tp", 2, "--layers", 2, *given)
    assert done.status == 2 and said in done.err


@pytest.fixture
def different(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every report has a gradient that is no number, and halving finds a weight."""
    compare = command.compare_calls

    def spoilt(*args: object, **given: object) -> Report:
        report = compare(*args, **given)
        return Report(report.plan, report.outputs, (Difference("0.0.weight", float("nan")),), report.steps)

    monkeypatch.setattr(command, "compare_calls", spoilt)
    blame = Blame(("0.0.weight", "0.0.bias"), "linear -> activation -> linear", ("bucket",), "", 12)
    monkeypatch.setattr(command, "bisect", lambda *args: blame)


def test_verify_prints_a_difference(autotp_command, models: Path, different: None) -> None:
    done = autotp_command("verify", f"{models}:mlp:inputs", "--tp", 2)
    assert done.status == 1
    assert done.out.splitlines()[0] == "Sequential on tp=2: DIFFERENT from one device (float64, tolerance 1e-09)"
    assert done.out.splitlines()[-5:] == [
        "what the difference comes from, found by 12 comparisons",
        "guilty weight  0.0.weight",
        "cut with it    0.0.bias  (linear -> activation -> linear)",
        "guilty pass    bucket (leave it out with --without)",
        "guilty rule    none",
    ]


def test_verify_json_has_a_difference(autotp_command, models: Path, different: None) -> None:
    done = autotp_command("verify", f"{models}:mlp:inputs", "--tp", 2, "--json")
    assert done.status == 1 and not done.json["ok"]
    (report,) = done.json["reports"]
    assert report["gradients"] == [{"name": "0.0.weight", "error": "nan"}]
    assert report["guilty"]["passes"] == ["bucket"] and report["guilty"]["weights"] == ["0.0.weight", "0.0.bias"]
    assert (
        autotp_command("verify", f"{models}:mlp:inputs", "--tp", 2, "--json", "--no-bisect").json["reports"][0][
            "guilty"
        ]
        is None
    )


def test_verify_writes_the_page_of_a_report(autotp_command, models: Path, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    done = autotp_command("verify", f"{models}:mlp:inputs", "--tp", 2, "--html", html)
    text = html.read_text()
    assert done.status == 0 and "Sequential on tp=2: equal to one device" in text and "Proved by autotp.verify" in text
    assert all(f">{name}<" in text for name in ("0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias", "input 0"))
    assert "guilty</b>" not in text and 'class="wrong"' not in text


def test_verify_writes_the_page_of_a_difference(autotp_command, models: Path, different: None, tmp_path: Path) -> None:
    """The file is there although the exit status is 1."""
    html = tmp_path / "report.html"
    done = autotp_command("verify", f"{models}:mlp:inputs", "--tp", 2, "--html", html)
    text = html.read_text()
    assert done.status == 1 and "Sequential on tp=2: DIFFERENT from one device" in text and "Not proved" in text
    (row,) = re.findall(r'<tr class="wrong">(.*?)</tr>', text, re.DOTALL)
    assert "0.0.weight" in row and "guilty</b>" in row and "<td>nan</td>" in row
    (table,) = re.findall(r'<table class="list guilty">(.*?)</table>', text)
    rows = dict(re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td></tr>", table))
    assert rows == {
        "guilty weight": "0.0.weight", "cut with it": "0.0.bias  (linear -&gt; activation -&gt; linear)",
        "guilty pass": "bucket (leave it out with --without)", "guilty rule": "none",
    }  # fmt: skip


def test_the_page_is_of_one_number_of_ranks(autotp_command, models: Path, tmp_path: Path) -> None:
    done = autotp_command("verify", f"{models}:mlp:inputs", "--tp", 2, 3, "--html", tmp_path / "report.html")
    assert (done.status, done.out) == (2, "") and "--html writes the page of one number of ranks" in done.err
    done = autotp_command("verify", f"{models}:mlp:inputs", "--tp", 2, "--html", tmp_path)
    assert (done.status, done.out) == (2, "") and "cannot be written" in done.err
    assert not (tmp_path / "report.html").exists()


def test_verify_prints_a_refusal_in_one_line(autotp_command, models: Path) -> None:
    done = autotp_command("verify", f"{models}:Branches:inputs", "--tp", 2)
    assert done.status == 1 and done.err.startswith("autotp: verify(Branches, tp=2): the model branches")


def test_verify_knows_experts_over_replicas(autotp_command, models: Path) -> None:
    """It says so of a model that cannot be trained, and of a layout that cannot be."""
    done = autotp_command("verify", f"{models}:mlp:inputs", "--tp", 1, "--dp", 2, "--ep", 2, "--meta")
    assert done.status == 1 and "dp=2, ep=2): the model returns no loss" in done.err
    done = autotp_command("verify", f"{models}:mlp:inputs", "--tp", 1, "--dp", 2, "--ep", 4)
    assert done.status == 2 and "ep=4 does not divide dp=2" in done.err
