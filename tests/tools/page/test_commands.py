"""The lines to copy: what they say is the layout, and Python reads them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from inspect import signature

import pytest

import autotp
from autotp.models.gpt import GPT
from autotp.tools.page.commands import python_line, torchrun_line
from autotp.tools.page.subject import Subject, subject_of


def test_python_line_of_an_estimate_calls_distribute(subject: Subject) -> None:
    line = python_line(subject)
    (assignment,) = ast.parse(line).body
    assert isinstance(assignment, ast.Assign) and isinstance(assignment.value, ast.Call)
    given = {k.arg: ast.unparse(k.value) for k in assignment.value.keywords}
    assert given == {
        "tp": "2", "pp": "2", "dp": "2", "microbatches": "8", "schedule": "'interleaved'",
        "sequence_parallel": "True", "zero": "1", "compute_dtype": "torch.bfloat16",
    }  # fmt: skip
    assert given.keys() <= signature(autotp.distribute).parameters.keys()


def test_python_line_of_a_plan_calls_parallelize(uneven: autotp.Plan) -> None:
    subject = subject_of(uneven)
    assert python_line(subject) == "model = autotp.parallelize(model, tp=2)"
    assert torchrun_line(subject) == "torchrun --nproc-per-node 2 train.py"


def test_python_line_says_how_sequences_are_cut(in_sequence: autotp.Estimate, make_gpt: Callable[..., GPT]) -> None:
    subject = subject_of(in_sequence)
    assert python_line(subject) == "trainer = autotp.distribute(model, tp=2, pp=1, dp=2, cp=2, microbatches=2)"
    assert torchrun_line(subject) == "torchrun --nproc-per-node 8 train.py"
    plan = subject_of(autotp.explain(make_gpt(2), tp=2, cp=2))
    assert python_line(plan) == "model = autotp.parallelize(model, tp=2, cp=2)"
    assert torchrun_line(plan) == "torchrun --nproc-per-node 4 train.py"


@pytest.mark.parametrize(("dp", "expected"), [(2, "--nproc-per-node 8"), (8, "--nnodes 4 --nproc-per-node 8 --rdzv")])
def test_torchrun_starts_all_nodes(subject: Subject, dp: int, expected: str) -> None:
    assert subject.estimate is not None
    layout = replace(subject.estimate.layout, dp=dp, batch=16)
    assert expected in torchrun_line(replace(subject, estimate=replace(subject.estimate, layout=layout)))


def test_python_line_has_the_number_of_stages_that_was_chosen(subject: Subject) -> None:
    assert subject.estimate is not None
    layout = replace(subject.estimate.layout, interleave=3)
    line = python_line(replace(subject, estimate=replace(subject.estimate, layout=layout)))
    assert 'schedule="interleaved", interleave=3,' in line
