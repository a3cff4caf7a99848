"""sheet: one description of a result, as text, in colour, as HTML, and in a line."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console
from torch import nn

import autotp
from autotp.display.sheet import CSS, STYLES, Code, Kind, Sheet, Shown, Table, html, lines_of, rich_lines
from autotp.passes.pipeline.stages import Division

MODEL = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
X = torch.ones(2, 4)
SHEET = Sheet("a <b>", (Table(("k", "v"), (("x&y", "1"), ("z", "22")), ("cut", "note")), ("two", "lines")))


class Drawn(Shown):
    """SHEET, as a result."""

    def sheet(self) -> Sheet:
        return SHEET

    def summary(self) -> str:
        return "small"


class Reader(HTMLParser):
    """Reads HTML: the texts, and whether each element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.texts = list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(text: str) -> list[str]:
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    return reader.texts


def test_sheet_prints_as_aligned_text() -> None:
    assert str(Drawn()) == "a <b>\n\nk    v\nx&y  1\nz    22\n\ntwo\nlines"
    assert repr(Drawn()) == "Drawn(small)"


def test_sheet_prints_as_escaped_html() -> None:
    assert read(Drawn()._repr_html_()) == ["a <b>", "k", "v", "x&y", "1", "z", "22", "two\nlines"]
    assert CSS["cut"] in Drawn()._repr_html_()


def test_sheet_code_keeps_spaces_and_marks_differences() -> None:
    sheet = Sheet("after", (Code((("x = 1 < 2", ""), ("  y = x", "new"))),), apart=False)
    assert ["".join(text for text, _ in line) for line in lines_of(sheet)] == ["after", "x = 1 < 2", "  y = x"]
    assert [line[0][1] for line in lines_of(sheet)] == ["bold", "", STYLES["new"]]
    assert "".join(read(html(sheet))) == "afterx = 1 < 2\n  y = x" and html(sheet).count(CSS["new"]) == 1


def test_table_with_an_empty_head_has_rows_only() -> None:
    sheet = Sheet("title", (Table(("", ""), (("k", "v"),), ("note", "")),), apart=False)
    assert ["".join(text for text, _ in line) for line in lines_of(sheet)] == ["title", "k  v"]
    assert read(html(sheet)) == ["title", "k", "v"]


def test_sheet_prints_the_same_text_in_rich() -> None:
    """With the same text, so without the markup that rich would read in "[...]"."""
    out = io.StringIO()
    Console(file=out, width=60).print(Drawn())
    assert [line.rstrip() for line in out.getvalue().splitlines()] == str(Drawn()).splitlines()
    assert STYLES.keys() == CSS.keys()


def test_results_have_one_line_repr_and_complete_html() -> None:
    plan = autotp.explain(MODEL, 2, example_inputs=X)
    report = autotp.verify(MODEL, 2, example_inputs=X)
    division = Division((("h.0", "h.1"), ("h.2",)), (3.0, 1.0), (1.0, 1.0), (0, 1))
    assert repr(plan) == "Plan(Sequential on tp=2: 3 of 4 parameters are cut, the fullest rank holds 51.4%)"
    assert repr(report).startswith("Report(Sequential on tp=2: equal to one device, worst gradient ")
    assert repr(division) == "Division(3 blocks in 2 stages on 2 pipeline ranks)"
    for shown in (plan, report, division):
        assert json.loads(json.dumps(shown.to_dict(), allow_nan=False)) == shown.to_dict() != {}
        assert len(repr(shown).splitlines()) == 1
        words = " ".join(read(shown._repr_html_()))
        assert all(word in words for word in str(shown).replace("...", "").split())


def test_plan_repr_counts_operators_without_a_rule() -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.linalg.matrix_exp(self.w)

    assert repr(autotp.explain(Unknown(), 2, example_inputs=torch.ones(2, 3))).endswith("1 operators have no rule)")


@pytest.mark.parametrize(("kind", "colour"), [("good", "\x1b[32m"), ("bad", "\x1b[1;31m")])
def test_sheet_title_has_the_verdict_s_colour(in_colours: None, kind: Kind, colour: str) -> None:
    out = io.StringIO()
    text = rich_lines(Sheet("title", (), kind))
    Console(file=out, force_terminal=True, color_system="standard").print(*text)
    assert colour in out.getvalue()
