"""The stamp of a page: what the checker and `verify` prove, what is open, and never a stamp on what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autotp
from autotp import compiler
from autotp.diagnostics.verify import Difference
from autotp.models.gpt import GPT
from autotp.tools.page import subject as subjects
from autotp.tools.page.stamp import stamp_data
from autotp.tools.page.subject import Subject, subject_of

SAME: dict[str, Any] = {
    "pp": 2, "dp": 2, "microbatches": 8, "schedule": "interleaved", "zero": 1, "sequence_parallel": True,
}  # fmt: skip


@pytest.fixture
def report(make_gpt: Callable[..., GPT]) -> autotp.Report:
    return autotp.verify(make_gpt(), 2, **SAME)


def test_the_checker_proves_tensor_parallel_ranks(subject: Subject, uneven: autotp.Plan) -> None:
    found = stamp_data(subject)
    assert found["error"] is None and "2 tensor-parallel ranks" in found["proved"][0]
    assert "4 of 6 blocks were captured" in found["proved"][2]
    told = " ".join(found["open"])
    assert all(text in told for text in ("autotp verify", "stages send each other", "ZeRO 1", "estimates"))
    plan = stamp_data(subject_of(uneven))
    assert len(plan["proved"]) == 2 and len(plan["open"]) == 1


def test_stamp_says_what_verify_proved(subject: Subject, report: autotp.Report) -> None:
    found = stamp_data(subject, report)
    rows = [line.partition(":")[0] for line in found["proved"]]
    assert rows == ["types", "stages", "parameters", "schedule", "loss", "ZeRO", "gathers"]
    assert found["by"] == "by autotp.verify"
    assert "MiB" not in found["proved"][1], "those are the bytes of the small example"
    told = " ".join(found["open"])
    assert "stages send" not in told and "sums of gradients" not in told
    assert "The numbers" in told and "ZeRO 1" in told and "estimates" in told


@pytest.mark.parametrize("other", [{"pp": 1}, {"microbatches": 4}, {"sequence_parallel": False}], ids=str)
def test_the_proof_of_another_layout_is_refused(
    subject: Subject, make_gpt: Callable[..., GPT], other: dict[str, Any]
) -> None:
    with pytest.raises(autotp.Error, match="the proof is of another layout"):
        stamp_data(subject, autotp.verify(make_gpt(), 2, **{**SAME, **other}))


def test_stamp_needs_the_types_of_each_rank(estimate: autotp.Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of the second rank is refused, and not only that of the first is looked at."""
    typed = compiler.expect_typed

    def refused(graph: Any, program: Any, to: Any, *rest: Any) -> Any:
        if to.rank == 1:
            raise autotp.Error("tp rank 1 of 2: `linear` reads `x`")
        return typed(graph, program, to, *rest)

    monkeypatch.setattr(compiler, "expect_typed", refused)
    monkeypatch.setattr(compiler, "_is_typed", lambda *given: False)
    found = stamp_data(subject_of(estimate))
    assert found["proved"] == [] and "tp rank 1 of 2" in found["error"]


def test_stamp_tells_what_is_open_of_cut_sequences(in_sequence: autotp.Estimate, make_gpt: Callable[..., GPT]) -> None:
    subject = subject_of(in_sequence)
    assert "The graphs of the other parts of a sequence" in " ".join(stamp_data(subject)["open"])
    given: dict[str, Any] = {"dp": 2, "microbatches": 2, "example_inputs": (torch.zeros(1, 32, dtype=torch.long),) * 2}
    assert stamp_data(subject, autotp.verify(make_gpt(2), 2, cp=2, **given))["proved"]
    with pytest.raises(autotp.Error, match="the proof is of another layout"):
        stamp_data(subject, autotp.verify(make_gpt(2), 2, **given))


def test_a_graph_that_is_not_proved_is_not_stamped(estimate: autotp.Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise autotp.Error("rank 1 of 2: `linear` reads `x`", expected="Copied", got="Replicate")

    monkeypatch.setattr(subjects, "flat_graphs", wrong)
    found = stamp_data(subject_of(estimate))
    assert found["proved"] == [] and "rank 1 of 2" in found["error"]


def test_stamp_is_not_on_a_difference(subject: Subject, report: autotp.Report) -> None:
    equal = replace(report, gradients=(Difference("wte.weight", 1e-16),))
    found = stamp_data(subject, equal)
    assert found["proved"][-1].startswith("numbers: 0 outputs, 1 gradients") and "The numbers" not in str(found["open"])
    wrong = replace(report, gradients=(Difference("wte.weight", 0.5),))
    found = stamp_data(subject, wrong)
    assert found["proved"] == [] and "DIFFERENT from one device" in found["error"]


def test_stamp_is_on_the_page(estimate: autotp.Estimate, report: autotp.Report, tmp_path: Path) -> None:
    autotp.save_page(estimate, tmp_path / "plan.html", proof=report)
    text = (tmp_path / "plan.html").read_text()
    assert "Proved by autotp.verify" in text and "add up to the whole batch" in text
