"""errors: the text of an Error, the call that it names, and who is told when a call ends."""

from __future__ import annotations

from threading import Barrier, Thread

import pytest

from autotp.errors import (
    Error,
    call_in_progress,
    calling,
    calls_in_progress,
    is_within_a_call,
    listen,
    within,
)


def test_error_text_has_facts_and_remedies() -> None:
    error = Error("cannot cut `w`", fix="one", then="two", alternative=("three", "four"), rule="i -> o", at="x.py:1")
    assert str(error) == (
        "cannot cut `w`\n  rule     i -> o\n  at       x.py:1\n  try      one\n  then     two\n  or       three\n"
        "  or else  four"
    )
    assert str(error.within("explain(M, tp=2)")).startswith("explain(M, tp=2): cannot cut `w`\n")
    assert error.problem == "cannot cut `w`"


def test_errors_name_the_innermost_call() -> None:
    def fails() -> None:
        within("inner(a)", lambda: (_ for _ in ()).throw(Error("wrong")))

    with pytest.raises(Error) as error:
        within("outer(b)", fails)
    assert error.value.call == "inner(a)"


def test_the_call_in_progress_is_the_outermost() -> None:
    assert call_in_progress() == ""
    with calling("step"):
        with calling("gather"):
            assert call_in_progress() == "step"
        assert call_in_progress() == "step"
    assert call_in_progress() == ""
    assert within("explain(M)", call_in_progress) == "explain"
    assert not within("step", is_within_a_call) and within("step", lambda: within("step", is_within_a_call))


def test_each_thread_has_its_own_call() -> None:
    both = Barrier(2, timeout=30)
    seen: list[str] = []

    def other() -> None:
        with calling("other"):
            both.wait()
            seen.append(call_in_progress())
            both.wait()

    thread = Thread(target=other)
    thread.start()
    both.wait()
    with calling("mine"):
        assert sorted(calls_in_progress()) == ["mine", "other"]
        assert call_in_progress() == "mine"
    both.wait()
    thread.join(30)
    assert seen == ["other"]
    assert calls_in_progress() == []


def test_listeners_hear_each_outermost_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotp.errors._listeners", [])
    heard: list[BaseException | None] = []
    listen(heard.append)
    with calling("a"), calling("b"):
        pass
    assert heard == [None]
    error = ValueError()
    with pytest.raises(ValueError), calling("a"), calling("b"):
        raise error
    assert heard == [None, error]
