"""extensions: a value of an option that is added is allowed, loaded when it is chosen, and adds its passes."""

from __future__ import annotations

import pytest
from errors import message

from autotp import extensions
from autotp.compiler import CANONICALIZE, EMIT, LOWER, PLAN, Pass, passes_of
from autotp.errors import Error
from autotp.extensions import Extension, chosen_extensions, register_value, values_of
from autotp.options import DEFAULTS, Options, expect_choices

TABLE = (*CANONICALIZE, *PLAN, *LOWER, *EMIT)
CHOSEN = Options(overlap="rows")  # type: ignore[arg-type]
loaded: list[str] = []


def rows() -> Extension:
    """Two passes, one of which may be left out, and a refusal."""
    loaded.append("rows")

    def expect(options: Options) -> None:
        if options.cp > 1:
            raise Error("rows with cp", fix="cp=1")

    first = Pass("plan", "first", lambda p: p)
    second = Pass("emit", "second", lambda p, site, graph: graph, lambda options: options.optional("second"))
    return Extension(passes={"decouple": (first,), "bind": (second,)}, expect=expect)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `overlap="rows"`, and no other value."""
    monkeypatch.setattr(extensions, "_REGISTERED", {})
    loaded.clear()
    register_value("overlap", "rows", rows, optional=("second",))


def test_a_value_is_loaded_when_it_is_first_chosen(registered: None) -> None:
    expect_choices(DEFAULTS)
    assert (values_of("overlap"), values_of("outputs"), chosen_extensions(DEFAULTS), loaded) == (("rows",), (), [], [])
    for _ in range(2):
        expect_choices(CHOSEN)
    assert loaded == ["rows"] and extensions.optional_passes() == ("second",)


def test_passes_of_a_value_run_behind_those_that_they_name(registered: None) -> None:
    """And nowhere else; a pass that is left out does not run."""
    own = [row.name for row in passes_of(TABLE, DEFAULTS)]
    names = [row.name for row in passes_of(TABLE, CHOSEN)]
    assert [name for name in names if name not in ("first", "second")] == own
    assert names[names.index("decouple") + 1] == "first" and names[names.index("bind") + 1] == "second"
    left = Options(overlap="rows", without="second")  # type: ignore[arg-type]
    assert [row.name for row in passes_of(TABLE, left)] == [name for name in names if name != "second"]


def test_a_value_refuses_other_options(registered: None) -> None:
    assert message(lambda: expect_choices(Options(overlap="rows", cp=2))) == "rows with cp\n  try      cp=1"  # type: ignore[arg-type]


def test_a_value_that_nobody_adds_is_refused(registered: None) -> None:
    """As in a copy of autotp without the folder of `overlap="batch"`."""
    text = "overlap='batch' is not one of its values\n  expected 'none', 'rows'"
    assert message(lambda: expect_choices(Options(overlap="batch"))) == text
