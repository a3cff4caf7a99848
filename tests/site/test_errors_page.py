"""docs/errors.md is what its script writes of the source: every error and warning is there, and says what to write."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = spec_from_file_location("errors_page", ROOT / "docs" / "errors.py")
assert SPEC is not None and SPEC.loader is not None
page = module_from_spec(SPEC)
sys.modules["errors_page"] = page  # dataclasses look there.
SPEC.loader.exec_module(page)
HOLE = page.HOLE


def test_the_page_is_what_the_script_writes() -> None:
    assert page.PAGE.read_text() == page.page(), "python docs/errors.py"


@pytest.mark.each_time
def test_each_error_says_what_to_write() -> None:
    silent = [one for one in page.messages() if one.sort == "Error" and not page.advice(one.ways).strip(f"{HOLE}. ")]
    assert [f"{one.module}:{one.line}: {one.text}" for one in silent] == []


def test_mistakes_of_autotp_ask_for_a_report() -> None:
    assert len(page.rows(page.OWN)) > 10
    assert {one.sort for one in page.messages() if page.sort_of(one) == page.OWN} == {"Error", "AssertionError"}


@pytest.mark.each_time
def test_whatever_is_raised_or_warned_is_on_the_page_by_its_first_words() -> None:
    """Found here without the script: each literal text of a `raise`, of an Error and of a warning of the source."""
    written = plain(page.PAGE.read_text().replace("&lt;...>", "").replace("...", ""))
    folders = [ROOT / "passes", *(folder for folder in (ROOT / "autotp").iterdir() if folder.is_dir())]
    files = [*(ROOT / "autotp").glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    texts = [(file, words) for file in files if "models" not in file.parts for words in first_words_in(file)]
    assert len(texts) > 500
    assert sum(bool(words) for _, words in texts) > 400
    # A text that begins as another one stands on the page as one with it.
    assert [(str(file), words) for file, words in texts if " ".join(plain(words).split()[:3]) not in written] == []


def first_words_in(file: Path) -> list[str]:
    """The first literal words of what a module raises or warns; "" for a text that is made elsewhere."""
    tree = ast.parse(file.read_text())
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    told = [node for node in calls if node in raised and getattr(node.func, "id", "") in (*vars(builtins), "WrongUse")]
    told += [
        node for node in calls if ast.unparse(node.func) in (*page.errors(), "warnings.warn", "warnings.warn_explicit")
    ]
    return [words for node in told for words in literal(node.args[0])]


def literal(node: ast.expr) -> list[str]:
    """The first words of a text that stand in the source as they are; of a choice, those of both."""
    if isinstance(node, ast.IfExp):
        return [*literal(node.body), *literal(node.orelse)]
    if isinstance(node, ast.JoinedStr):
        parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
        return [next((part for part in map(str, parts) if sum(map(str.isalpha, part)) > 3), "")]
    return [str(node.value)] if isinstance(node, ast.Constant) else [""]


def plain(text: str) -> str:
    """Words only: without what markdown adds, and without the places that are filled in."""
    return " ".join(re.findall(r"\w+", text.replace("\\", "").replace("_", " ")))


def test_messages_are_found() -> None:
    """In an f-string, a variable, a sum, and through a parameter of a function; and so is what to write."""
    found = {one.text: one.ways for one in page.messages()}
    assert len(found) > 500
    assert found["a set holds tensors"] == ("a list or a dict",)
    assert f"`{HOLE}` is part of another parallel model" in found
    assert "the model asserts something about the values of a tensor, which are not known in a graph" in found
    assert f"{HOLE} rank {HOLE} of {HOLE}: `{HOLE}` is not what the model computes" in found
    assert found["torch.inference_mode would be lost: a graph of the model does not have it"] == ("torch.no_grad()",)
    fill = f"fill self.{HOLE} in {HOLE}.reset_parameters(self) and call that in the constructor,"
    assert found[f"nothing initialises the buffer `{HOLE}`, whose values are lost on meta"] == (fill,)
    assert found[f"{HOLE} has a GPU of another kind than rank 0"] == (
        "GPUs of one kind for the ranks of one model, or no dropout",
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
