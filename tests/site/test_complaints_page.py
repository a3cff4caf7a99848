"""docs/complaints.md is what its script writes, of every script in examples/complaints; each ends in an assertion."""

from __future__ import annotations

import ast
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = spec_from_file_location("complaints_page", ROOT / "docs" / "complaints.py")
assert SPEC is not None and SPEC.loader is not None
page = module_from_spec(SPEC)
sys.modules["complaints_page"] = page  # dataclasses look there.
SPEC.loader.exec_module(page)
COMPLAINTS = [one for section in page.complaints().values() for one in section]


def test_the_page_is_what_the_script_writes() -> None:
    assert page.PAGE.read_text() == page.page(), "python docs/complaints.py"


def test_each_script_is_shown_once() -> None:
    assert len(COMPLAINTS) >= 20
    assert sorted(one.path for one in COMPLAINTS) == sorted((ROOT / page.SCRIPTS).glob("*/[a-z]*.py"))


@pytest.mark.parametrize("one", COMPLAINTS, ids=lambda one: one.path.stem)
def test_a_script_has_a_source_and_an_assertion(one: page.Complaint) -> None:
    assert page.THREAD.search(one.elsewhere)
    assert ast.dump(ast.parse(one.end).body[-1]) == ast.dump(ast.parse(one.code).body[-1])
    last = ast.parse(one.code).body[-1]
    while isinstance(last, ast.For):
        last = last.body[-1]
    assert isinstance(last, ast.Assert) or ast.unparse(last).startswith("torch.testing.assert_close(")
