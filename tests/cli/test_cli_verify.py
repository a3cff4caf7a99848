"""`autotp verify`: its reports and exit statuses, and what a difference comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotp.cli import verify as command
from autotp.diagnostics.bisect import Blame
from autotp.diagnostics.differences import Difference
from autotp.diagnostics.verify import Report


def test_several_numbers_of_ranks(autotp_command, models: Path) -> None:
    done = autotp_command("verify", f"{models}:mlp:inputs", "--tp", 2, 3)
    assert (done.status, done.err) == (0, "")
    heads = [line for line in done.out.splitlines() if not line.startswith(" ")]
    assert heads == [f"Sequential on tp={tp}: equal to one device (float64, tolerance 1e-09)" for tp in (2, 3)]


def test_a_configuration(autotp_command, llama: Path) -> None:
    done = autotp_command("verify", llama, "--tp", 4, "--layers", 1, "--json", "--recompute", "full")
    (report,) = done.json["reports"]
    assert done.status == 0 and done.json["ok"] and report["ok"] and report["computed"] and report["guilty"] is None
    assert report["tp"] == 4 and report["gradients"][0]["error"] < report["tolerance"] == 1e-9


def test_a_mesh(autotp_command, llama: Path) -> None:
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
def test_a_layout_that_cannot_be(autotp_command, llama: Path, given: tuple[object, ...], said: str) -> None:
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


def test_a_difference(autotp_command, models: Path, different: None) -> None:
    done = autotp_command("verify", f"{models}:mlp:inputs", "--tp", 2)
    assert done.status == 1
    assert done.out.splitlines()[0] == "Sequential on tp=2: DIFFERENT from one device (float64, tolerance 1e-09)"
    assert done.out.splitlines()[-5:] == [
        "  guilty weight   0.0.weight",
        "  cut with it     0.0.bias  (linear -> activation -> linear)",
        "  guilty pass     bucket (leave it out with --without)",
        "  guilty rule     none",
        "  found by        12 comparisons",
    ]


def test_a_difference_in_json(autotp_command, models: Path, different: None) -> None:
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


def test_what_verify_refuses(autotp_command, models: Path) -> None:
    done = autotp_command("verify", f"{models}:Branches:inputs", "--tp", 2)
    assert done.status == 1 and done.err.startswith("autotp: verify(Branches, tp=2): the model branches")
