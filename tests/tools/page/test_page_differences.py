"""differences: the rows of a report, the largest first; what is guilty; and results without numbers."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import autotp
from autotp.diagnostics.differences import Difference
from autotp.models.gpt import GPT
from autotp.tools.bisect import Blame
from autotp.tools.page.differences import difference_data
from autotp.tools.page.page_data import page_data

BLAME = Blame(("0.2.weight", "0.0.bias", "0.0.weight"), "linear -> activation -> linear", ("bucket",), "", 9)


def test_each_weight_has_its_differences(report: autotp.Report) -> None:
    data = difference_data(report, None)
    assert data["ok"] and data["computed"] and data["guilty"] is None and data["tolerance"] == "1e-09"
    assert data["title"] == "Sequential on tp=2: equal to one device (float64, tolerance 1e-09)"
    rows = {row["name"]: row for row in data["weights"]}
    assert rows.keys() == {row.name for row in report.gradients} and len(rows) == 9
    steps = {row.name: row.error for row in report.steps}
    for row in report.gradients:
        its = rows[row.name]
        assert its["gradient"] == f"{row.error:.1e}" and its["ok"] and its["role"] == ""
        assert its["step"] == ("" if row.name == "input 0" else f"{steps[row.name]:.1e}")
    assert rows["0.2.weight"]["cut"] == "[4, 16@tp]" and rows["0.2.bias"]["cut"] == "[4]"
    assert [row["name"] for row in data["outputs"]] == ["output"]


def test_what_is_different_comes_first(report: autotp.Report) -> None:
    """The bar is as long as the power of ten; a difference that is no number has a whole one."""
    steps = (Difference("0.0.weight", 1e-3), *(row for row in report.steps if row.name != "0.0.weight"))
    rest = tuple(row for row in report.gradients if row.name not in ("0.2.weight", "1.0.bias", "0.0.weight"))
    given = Difference("0.0.weight", 0.0), Difference("1.0.bias", 1e-17), Difference("0.2.weight", float("nan"))
    data = difference_data(replace(report, gradients=(*rest, *given), steps=steps), BLAME)
    assert not data["ok"] and "DIFFERENT" in data["title"]
    first, *_ = data["weights"]
    assert (first["name"], first["gradient"], first["bar"], first["role"]) == ("0.2.weight", "nan", 1.0, "guilty")
    rows = {row["name"]: row for row in data["weights"]}
    assert rows["0.0.weight"]["bar"] == pytest.approx(1 - 3 / 17) and rows["0.0.weight"]["role"] == "cut with it"
    assert rows["0.0.weight"]["gradient"] == "0.0e+00" and not rows["0.0.weight"]["ok"]
    assert rows["1.0.bias"]["ok"] and rows["1.0.bias"]["role"] == ""
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_difference_data_names_what_is_guilty(report: autotp.Report) -> None:
    data = difference_data(report, BLAME)
    assert data["guilty"]["rows"] == [
        ["guilty weight", "0.2.weight"],
        ["cut with it", "0.0.bias, 0.0.weight  (linear -> activation -> linear)"],
        ["guilty pass", "bucket (leave it out with --without)"],
        ["guilty rule", "none"],
    ]
    data = difference_data(report, Blame((), "", (), "own.op.default", 3))
    assert [name for _, name in data["guilty"]["rows"]] == [
        "none: the difference stays when nothing is cut",
        "none that can be left out",
        "own.op.default",
    ]


def test_the_page_is_that_of_the_report(report: autotp.Report) -> None:
    """With the sections of a plan's page, and a stamp of what was compared."""
    data = page_data(report)
    assert data["title"] == "Sequential on tp=2" and data["report"] == difference_data(report, None)
    assert data["proof"]["by"] == "by autotp.verify" and "9 gradients" in data["proof"]["proved"][-1]
    assert data["proof"]["open"] == [] and {row["name"] for row in data["whole"]} == {"{0-1}.2.bias"}
    assert page_data(report.plan)["report"] is None


def test_difference_data_of_a_mesh_has_no_numbers(make_gpt: Callable[..., GPT]) -> None:
    report = autotp.verify(make_gpt(2), 2, pp=2, dp=3, zero=1, schedule="GPipe")
    data = page_data(report)
    assert data["title"] == "GPT on tp=2, pp=2, dp=3" and not data["report"]["computed"] and data["report"]["ok"]
    assert data["python"] == (
        'trainer = autotp.distribute(model, tp=2, pp=2, dp=3, microbatches=2, schedule="GPipe", zero=1)'
    )
    assert data["torchrun"] == "torchrun --nproc-per-node 12 train.py"
    assert [line.partition(":")[0] for line in data["proof"]["proved"]][:2] == ["types", "stages"]
    assert any(line.startswith("ZeRO 1: ") for line in data["proof"]["open"])


def test_page_of_a_report_of_another_process_is_refused(report: autotp.Report) -> None:
    with pytest.raises(autotp.Error, match="this Report has no model with it"):
        page_data(pickle.loads(pickle.dumps(report)))


def test_a_size_that_is_a_number_is_no_length_of_a_sequence(report: autotp.Report) -> None:
    """The width of the input is a symbol in the capture, until the first layer says that it is 4."""
    assert page_data(report)["sizes"] == {"b": 3}


def test_what_is_not_sent_is_on_no_line() -> None:
    """The input of the first layer has no gradient, so its copy sends nothing."""
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    lines = [line for part in page_data(autotp.explain(model, 2, example_inputs=torch.ones(3, 4)))["source"]
             for line in part["lines"]]  # fmt: skip
    sent = [one for line in lines for one in line["sent"]]
    assert [one["name"] for one in sent] == ["reduce"]
