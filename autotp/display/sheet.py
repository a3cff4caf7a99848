"""sheet: describes a result once; it is drawn as text, in the colours of a terminal, by rich, as HTML, and as JSON.

NOTE [str is in colour on a terminal]
`print(result)` gets its text from `str(result)`, and cannot say where it goes. So `str` has colours if the stdout of
the process is a terminal, and is plain if that is a file, a pipe or a notebook. What is not for stdout has to be plain
everywhere: autotp writes it as `f"{result}"`, which never has colours, and the docs tell users to do so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from autotp.display.colour import in_colour, painted
from autotp.display.plain_data import as_plain_data, compared_fields
from autotp.display.text_table import WIDTH, table_cells

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

Kind = Literal["", "head", "cut", "whole", "sent", "note", "good", "bad", "gone", "new"]
"""What a text is about: what follows, what is cut, what stays whole, what is sent between ranks, a note; good or bad
news; a line of code that is gone, or new."""

STYLES = {
    "": "", "head": "bold", "cut": "green", "whole": "yellow", "sent": "cyan", "note": "dim", "good": "green",
    "bad": "bold red", "gone": "yellow", "new": "green",
}  # fmt: skip
"""The style of each kind on a terminal, in the words of rich."""
CSS = {
    "": "", "head": "font-weight:bold", "cut": "color:#1f8a4c", "whole": "color:#a87800", "sent": "color:#0e8aa0",
    "note": "opacity:.7", "good": "color:#1f8a4c", "bad": "color:#d0342c;font-weight:bold", "gone": "color:#a87800",
    "new": "color:#1f8a4c",
}  # fmt: skip
"""The style of each kind in HTML: colours that are readable on white and on black."""
Line = list[tuple[str, str]]
"""A line as texts, each with its style."""
CELL = "text-align:left;vertical-align:top;padding:.1em 1em .1em 0;border:none;background:none;white-space:normal"


@dataclass(frozen=True)
class Table:
    """Rows below a head, with the kind of each column. A head of empty texts is not shown."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kinds: tuple[Kind, ...]


@dataclass(frozen=True)
class Code:
    """Lines of code, each with its kind. Spaces at their beginning stay."""

    lines: tuple[tuple[str, Kind], ...]


@dataclass(frozen=True)
class Sheet:
    """A title, then tables, code and lines of text.

    Attributes:
        parts: a table, code, or lines.
        kind: the kind of the title.
        apart: whether an empty line stands between title and parts.
    """

    title: str
    parts: tuple[Table | Code | tuple[str, ...], ...]
    kind: Kind = ""
    apart: bool = True


class Shown:
    """A result that a person reads: a dataclass of facts, whose `sheet` says how they are shown.

    `str` is a text, in colour if stdout is a terminal; in an f-string it is the plain text. `repr` is one line. rich
    prints it in colour, a notebook shows it as HTML, and `to_dict` is for JSON.

    Attributes:
        DATA: what `to_dict` returns: names of attributes, properties, and methods without arguments; empty for all
            attributes that are compared. The others are left out of pickles, too.
    """

    DATA: ClassVar[tuple[str, ...]] = ()

    def sheet(self) -> Sheet:
        """Returns what is shown."""
        raise NotImplementedError

    def summary(self) -> str:
        """Returns the result in a few words."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain data, for JSON: numbers, texts, and lists and dicts of these."""
        data: dict[str, Any] = as_plain_data(self)
        return data

    def __getstate__(self) -> dict[str, Any]:
        return compared_fields(self)

    def __str__(self) -> str:
        paint = painted if in_colour(sys.stdout) else lambda text, style: text
        return "\n".join("".join(paint(*part) for part in line) for line in lines_of(self.sheet()))

    def __format__(self, spec: str) -> str:
        return format("\n".join("".join(text for text, _ in line) for line in lines_of(self.sheet())), spec)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary()})"

    def _repr_html_(self) -> str:
        return html(self.sheet())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        return rich_lines(self.sheet(), options.max_width)


def lines_of(sheet: Sheet, width: int = WIDTH) -> Iterator[Line]:
    """Yields the lines of a sheet. width: the most characters of a line of a table"""
    yield [(sheet.title, STYLES[sheet.kind] or "bold")]
    for part in sheet.parts:
        if sheet.apart:
            yield []
        if isinstance(part, Table):
            yield from lines_of_table(part, width)
        elif isinstance(part, Code):
            yield from ([(text, STYLES[line_kind])] for text, line_kind in part.lines)
        else:
            yield from ([(text, "")] for text in part)


def lines_of_table(part: Table, width: int = WIDTH) -> Iterator[Line]:
    """Yields the lines of a table. width: the most characters of a line"""
    titles = len(list(table_cells(part.head, [], width)))
    for i, cells in enumerate(table_cells(part.head, part.rows, width)):
        if i < titles and not any(part.head):
            continue
        last = max((column for column, cell in enumerate(cells) if cell.strip()), default=-1)
        line: Line = []
        for column, (cell, column_kind) in enumerate(zip(cells[: last + 1], part.kinds, strict=False)):
            text = cell.rstrip()
            line.append((text, "bold" if i < titles else STYLES[column_kind]))
            line.append((" " * (len(cell) - len(text)) * (column < last), ""))
        yield line


def rich_lines(sheet: Sheet, width: int = WIDTH) -> Iterator[Text]:
    """Yields the lines of a sheet as texts of rich. width: the most characters of a line of a table"""
    from rich.text import Text

    return (Text.assemble(*line) for line in lines_of(sheet, width))


def html(sheet: Sheet) -> str:
    """Returns a sheet as HTML, without scripts; its styles are in its elements, and it takes the page's background."""
    title = f'<p style="{CSS[sheet.kind] or "font-weight:bold"}">{escape(sheet.title)}</p>'
    return f"<div>{title}{''.join(map(_html_part, sheet.parts))}</div>"


def _html_part(part: Table | Code | tuple[str, ...]) -> str:
    if isinstance(part, Code):
        spans = (f'<span style="{CSS[line_kind]}">{escape(text)}</span>' for text, line_kind in part.lines)
        return f'<pre style="background:none">{chr(10).join(spans)}</pre>'
    if not isinstance(part, Table):
        return f'<pre style="background:none;white-space:pre-wrap">{escape(chr(10).join(part))}</pre>'
    head = "".join(f'<th style="{CELL}">{escape(cell)}</th>' for cell in part.head if any(part.head))
    rows = "".join(f"<tr>{_html_cells(row, part.kinds)}</tr>" for row in part.rows)
    return f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _html_cells(row: tuple[str, ...], kinds: tuple[Kind, ...]) -> str:
    cells: Any = zip(row, kinds, strict=True)
    return "".join(f'<td style="{CELL};{CSS[column_kind]}">{escape(cell)}</td>' for cell, column_kind in cells)
