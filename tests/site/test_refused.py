"""docs/refused.md is what its script writes of the source, and every message of the source says what to write."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SPEC = spec_from_file_location("refused_page", ROOT / "docs" / "refused.py")
assert SPEC is not None and SPEC.loader is not None
page = module_from_spec(SPEC)
sys.modules["refused_page"] = page  # dataclasses look there.
SPEC.loader.exec_module(page)
HOLE = page.HOLE


def test_the_page_is_what_the_script_writes() -> None:
    assert page.PAGE.read_text() == page.page(), "python docs/refused.py"


def test_each_message_says_what_to_write() -> None:
    assert {f"{one.module}:{one.line}: {one.text}" for one in page.messages() if not page.advice(one.ways)} == set()


def test_mistakes_of_autotp_ask_for_a_report() -> None:
    own = list(page.SECTIONS).index(page.OWN)
    found = {one.text: one.ways for one in page.messages() if page.place(one)[0] == own}
    assert len(found) > 10
    assert {text for text, ways in found.items() if not all("a report of it" in way for way in ways)} == set()


def test_messages_are_found() -> None:
    """In an f-string, a variable, a sum, and through a parameter of a function; and so is what to write."""
    found = {one.text: one.ways for one in page.messages()}
    assert len(found) > 250
    assert found["a set holds tensors"] == ("a list or a dict",)
    assert f"`{HOLE}` is part of another parallel model" in found
    assert "the model asserts something about the values of a tensor, which are not known in a graph" in found
    assert f"{HOLE} rank {HOLE} of {HOLE}: `{HOLE}` is not what the model computes" in found
    assert found["torch.inference_mode would be lost: a graph of the model does not have it"] == ("torch.no_grad()",)
    fill = f"fill self.{HOLE} in {HOLE}.reset_parameters(self) and call that in the constructor,"
    assert found[f"nothing initialises the buffer `{HOLE}`, whose values are lost on meta"] == (fill,)
    assert found[f"{HOLE} would draw other random numbers than rank 0"] == (
        "torch.manual_seed(seed) with one seed on all ranks",
    )
    assert found[f"{HOLE} processes are not a multiple of {HOLE}"] == (f"torchrun --nproc-per-node {HOLE}",)


def test_text_is_shown_as_it_is() -> None:
    """Markdown's own characters, but for those between backticks."""
    assert page.shown(f"a * b_{{}}: `x_*` {HOLE}, __slots__, x.{HOLE}") == (
        r"a \* b\_\{\}: `x_*` ..., \_\_slots\_\_, x.&lt;...>"
    )


def test_messages_that_differ_in_little_are_one_line() -> None:
    def one(text: str, *ways: str, line: int = 1) -> Any:
        return page.Message("a.py:f", line, text, ways)

    general, special = one(f"{HOLE}={HOLE} is no size", f"{HOLE}=2"), one(f"tp={HOLE} is no size", "tp=2", line=2)
    assert page.together(special, general) == page.together(general, special) == general
    assert page.together(one("no size", "a"), one("no size", "b")) == one("no size", "a", "b")
    reasons = one("the model cannot be cut: it is small", "a"), one("the model cannot be cut: there is none", "a")
    assert page.together(*reasons) == one(f"the model cannot be cut: {HOLE}", "a")
    assert page.together(one("a large model", "a"), one("a large model of two", "b")) is None
