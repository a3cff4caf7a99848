"""tracebacks: an exception shows the user's lines, one line of autotp, and one more where it is no Error."""

from __future__ import annotations

import os
import sys
import traceback

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.errors import Error, full_tracebacks, within
from autotp.tracebacks import TRACEBACK, of_the_program, shorten_traceback


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRACEBACK)


class Model(nn.Module):
    """A model whose forward may raise an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.rows, self.up, self.down = nn.Embedding(4, 4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(self.widened(self.rows(rows)))

    def widened(self, x: Tensor) -> Tensor:
        if self.fails:
            raise KeyError("mine")
        return self.up(x)


ROWS = torch.ones(2, dtype=torch.long)


def lines_of(error: BaseException) -> list[tuple[str, str]]:
    """Package and function of each line of a traceback."""
    lines = list(traceback.walk_tb(error.__traceback__))
    return [(frame.f_globals["__name__"].partition(".")[0], frame.f_code.co_name) for frame, _ in lines]


def of_autotp(error: BaseException) -> list[str]:
    return [function for package, function in lines_of(error) if package == "autotp"]


def test_an_error_of_a_public_call_shows_one_line_of_autotp() -> None:
    with pytest.raises(Error) as raised:
        autotp.explain(Model(), tp=0, example_inputs=ROWS)
    assert of_autotp(raised.value) == (["explain"] if sys.version_info >= (3, 11) else ["explain", "within"])
    with full_tracebacks(), pytest.raises(Error) as raised:
        autotp.explain(Model(), tp=0, example_inputs=ROWS)
    assert len(of_autotp(raised.value)) > 4 and TRACEBACK not in os.environ


def test_an_error_of_a_capture_shows_the_line_of_the_model_that_raised() -> None:
    model = Model()
    model.fails = True
    with pytest.raises(Error, match="the model does not run on these inputs: KeyError: 'mine'") as raised:
        autotp.explain(model, tp=2, example_inputs=ROWS)
    cause = raised.value.__cause__
    assert isinstance(cause, KeyError) and [function for _, function in lines_of(cause)] == ["forward", "widened"]


def test_an_exception_in_a_call_shows_at_most_two_lines_of_autotp() -> None:
    model = autotp.parallelize(Model(), tp=1, example_inputs=ROWS)
    model(ROWS)
    with pytest.raises(IndexError) as raised:
        model(ROWS + 8)
    assert of_autotp(raised.value) == ["forward"] and len(lines_of(raised.value)) == 5
    model.fails = True
    with pytest.raises(Error, match="does not run on these inputs: KeyError") as refused:
        nn.Sequential(model)(ROWS)
    assert of_autotp(refused.value) == ["forward"]


def raises_itself() -> None:
    within("inner", lambda: shorten_traceback(3, False))  # type: ignore[arg-type]  # As a mistake of autotp would raise.


def test_a_mistake_of_autotp_shows_the_line_that_raised() -> None:
    with pytest.raises(AttributeError) as raised:
        within("outer", raises_itself)
    assert of_autotp(raised.value)[-1] == "shorten_traceback" and len(of_autotp(raised.value)) <= 3
    assert "raises_itself" in [function for _, function in lines_of(raised.value)]


def test_a_program_ends_with_the_user_s_lines_and_one_of_autotp() -> None:
    with full_tracebacks(), pytest.raises(Error) as raised:
        autotp.explain(Model(), tp=0, example_inputs=ROWS)
    assert len(of_autotp(raised.value)) > 4
    raised.value.__traceback__ = of_the_program(raised.value, raised.value.__traceback__)
    assert of_autotp(raised.value) == ["explain"]


def fails_in_torch() -> None:
    nn.Linear(4, 4)(torch.ones(3))


def test_a_cause_keeps_its_innermost_line() -> None:
    """Whoever wrote it, unless it is an Error."""

    def raises(cause: type[Exception]) -> None:
        try:
            fails_in_torch() if cause is RuntimeError else within("inner", lambda: shorten_traceback(3, False))  # type: ignore[arg-type]
        except Exception as error:
            raise Error("it fails") from error

    for cause, last in {RuntimeError: "torch", AttributeError: "autotp"}.items():
        with pytest.raises(Error) as raised:
            within("outer", lambda cause=cause: raises(cause))  # type: ignore[misc]
        shown = raised.value.__cause__
        assert shown is not None and type(shown) is cause
        packages = [package for package, _ in lines_of(shown)]
        assert packages[-1] == last and len(packages) <= 3 and packages[0] == "test_tracebacks"


def test_an_exception_that_is_handled_keeps_its_lines() -> None:
    """Until the program ends."""
    with pytest.raises(Error) as raised:
        try:
            fails_in_torch()
        except RuntimeError as handled:
            lines = lines_of(handled)
            with pytest.raises(Error):
                autotp.explain(Model(), tp=0, example_inputs=ROWS)
            assert lines_of(handled) == lines and len(lines) > 4
            autotp.explain(Model(), tp=0, example_inputs=ROWS)
    of_the_program(raised.value, raised.value.__traceback__)
    assert raised.value.__context__ is not None and len(lines_of(raised.value.__context__)) == 3


def test_a_circle_of_causes_ends() -> None:
    first, second = KeyError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    with pytest.raises(KeyError), full_tracebacks():
        within("outer", lambda: (_ for _ in ()).throw(first))
    with pytest.raises(KeyError):
        within("outer", lambda: (_ for _ in ()).throw(first))
