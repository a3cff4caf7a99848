"""The error bars follow from the errors of the tables."""

from dataclasses import replace

import pytest

from autotp.costs.hardware import KINDS
from autotp.tools.estimation import error_bars
from autotp.tools.estimation.error_bars import ERRORS, TESTED, memory_bar, root_mean_square, row_bar, step_bar

A100, H100, CPU = KINDS["a100-80gb"], KINDS["h100-80gb"], KINDS["cpu-gloo"]


def test_a_bar_is_twice_the_root_mean_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_bars, "ERRORS", {**ERRORS, "step a100": (3.0, -4.0, 5.0, 0.0)})
    assert step_bar(A100) == pytest.approx(2 * (50 / 4) ** 0.5 / 100)
    assert row_bar(A100) == 2 * step_bar(A100)


@pytest.mark.parametrize("kind", sorted({*TESTED.values(), "step cpu-gloo"}))
def test_nearly_all_rows_lie_within_their_bar(kind: str) -> None:
    bar = 2 * root_mean_square(kind) * 100
    assert sum(abs(error) <= bar for error in ERRORS[kind]) >= 0.9 * len(ERRORS[kind])


def test_a_kind_that_no_table_tests_has_the_error_of_the_one_that_was_predicted_blindly() -> None:
    assert step_bar(H100) == step_bar(replace(A100, name="mine")) == step_bar(KINDS["v100-32gb"])
    assert step_bar(H100) == root_mean_square("step v100") > step_bar(A100)


def test_the_bar_of_a_row_is_at_most_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_bars, "ERRORS", {**ERRORS, "step zero 3": (60.0, -60.0)})
    assert row_bar(A100, zero=3) == 1.0


def test_published_steps_of_zero_3_lie_within_their_bar_and_on_both_sides() -> None:
    errors = ERRORS["step zero 3"]
    assert min(errors) < 0 < max(errors) and max(map(abs, errors)) < 100 * step_bar(A100, zero=3) < 20


def test_zero_3_has_its_own_rows_and_a_cpu_its_own_bars() -> None:
    assert step_bar(A100, zero=3) == 2 * root_mean_square("step zero 3") > step_bar(A100, zero=1) == step_bar(A100)
    assert step_bar(replace(CPU, name="mine")) == 2 * root_mean_square("step cpu-gloo")
    assert memory_bar("weights") < 0.01 < memory_bar("activations") == memory_bar("logits") == memory_bar("transients")
    assert memory_bar("weights", is_gpu=False) == memory_bar("activations", is_gpu=False) > memory_bar("activations")
    assert row_bar(A100, zero=3) == 2 * step_bar(A100, zero=3)
