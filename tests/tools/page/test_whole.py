"""What stayed whole: each reason that the plan can give has an answer to what would change it."""

from __future__ import annotations

import ast
import inspect
import textwrap

import autotp
from autotp.diagnostics import reasons, report
from autotp.tools.page.subject import Subject, subject_of
from autotp.tools.page.whole import CHANGES, change_of, whole_data


def test_alike_layers_are_one_row_of_the_whole_model(subject: Subject) -> None:
    names = {row["name"]: row for row in whole_data(subject)}
    row = names["h.{0-5}.ln_1.{weight,bias}"]
    assert row["shape"] == "[64]" and row["at"].startswith("gpt.py:") and row["why"] and row["change"]


def test_the_operators_without_a_rule_are_told(uneven: autotp.Plan) -> None:
    assert all(row["change"] for row in whole_data(subject_of(uneven)))


def test_every_reason_has_an_answer() -> None:
    functions = (reasons.Reasons.of, report._whole, report._unknown)
    trees = [ast.parse(textwrap.dedent(inspect.getsource(function))) for function in functions]
    texts = [
        n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    words = [text for text in texts if " " in text.strip() and "\n" not in text and not text.endswith((".", " "))]
    said = list(dict.fromkeys([*(text for text in words if text != "is not cut"), *reasons.WHY.values()]))
    assert len(said) == 20, "the texts of the reasons, and what stands behind those of operators"
    assert [text for text in said if not change_of(f"{text}: replicated", False)] == [": replicated"]
    assert all(any(part in f"{text}: replicated" for text in said) for part in CHANGES)


def test_what_the_sequence_divides_already_is_not_proposed() -> None:
    reason = reasons.WHY["taken"]
    assert "sequence_parallel=True" in change_of(reason, False)
    assert "sequence_parallel" not in change_of(reason, True)
