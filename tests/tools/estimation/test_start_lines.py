"""The lines that start a layout: Python reads them, and they say all of it."""

from __future__ import annotations

import ast
from inspect import signature

import pytest
import torch

import autotp
from autotp.tools.estimation.layout import StepLayout
from autotp.tools.estimation.start_lines import python_line, torchrun_line

PLAIN = StepLayout(batch=8, dp=2, micro_batch=2)
EVERYTHING = StepLayout(
    batch=64, tp=2, cp=2, pp=4, dp=2, micro_batch=2, schedule="zero-bubble", sequence_parallel=True, recompute="full",
    overlap="batch", zero=1, dtype=torch.bfloat16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (PLAIN, {"tp": "1", "pp": "1", "dp": "2", "microbatches": "2"}),
        (
            EVERYTHING,
            {
                "tp": "2", "pp": "4", "dp": "2", "cp": "2", "microbatches": "16", "schedule": "'zero-bubble'",
                "sequence_parallel": "True", "recompute": "'full'", "overlap": "'batch'", "zero": "1",
                "compute_dtype": "torch.bfloat16",
            },
        ),
    ],
    ids=["plain", "everything"],
)  # fmt: skip
def test_python_line_calls_distribute_with_all_of_the_layout(layout: StepLayout, expected: dict[str, str]) -> None:
    (assignment,) = ast.parse(python_line(layout)).body
    assert isinstance(assignment, ast.Assign) and isinstance(assignment.value, ast.Call)
    given = {k.arg: ast.unparse(k.value) for k in assignment.value.keywords}
    assert given == expected
    assert given.keys() <= signature(autotp.distribute).parameters.keys()


@pytest.mark.parametrize(
    ("devices", "expected"), [(8, "--nproc-per-node 8 train"), (20, "--nnodes 3 --nproc-per-node 8 --rdzv")]
)
def test_torchrun_starts_all_nodes(devices: int, expected: str) -> None:
    assert expected in torchrun_line(devices, node=8)


def test_python_line_has_the_number_of_stages_that_was_chosen() -> None:
    line = python_line(StepLayout(batch=8, pp=2, schedule="interleaved", interleave=3))
    assert 'schedule="interleaved", interleave=3)' in line
