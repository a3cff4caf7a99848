"""sheet: describes a result once; it is drawn as text, in colour by rich, and as HTML in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from autotp.display.text_table import WIDTH, table, table_cells

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

Kind = Literal["", "cut", "whole", "sent", "note", "good", "bad"]
"""What a text is about: what is cut, what stays whole, what is sent between ranks, a note; good or bad news."""

RICH = {"": "", "cut": "green", "whole": "yellow", "sent": "cyan", "note": "dim", "good": "green", "bad": "bold red"}
"""The style of each kind in rich."""
CSS = {
    "": "", "cut": "color:#1f8a4c", "whole": "color:#a87800", "sent": "color:#0e8aa0", "note": "opacity:.7",
    "good": "color:#1f8a4c", "bad": "color:#d0342c;font-weight:bold",
}  # fmt: skip
"""The style of each kind in HTML: colours that are readable on white and on black."""
CELL = "text-align:left;vertical-align:top;padding:.1em 1em .1em 0;border:none;background:none;white-space:normal"


@dataclass(frozen=True)
class Table:
    """Rows below a head, with the kind of each column."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kinds: tuple[Kind, ...]


@dataclass(frozen=True)
class Sheet:
    """A title, then tables and lines of text.

    Attributes:
        parts: a table, or lines.
        kind: the kind of the title.
        apart: whether an empty line stands between title and parts.
    """

    title: str
    parts: tuple[Table | tuple[str, ...], ...]
    kind: Kind = ""
    apart: bool = True


class Shown:
    """A result that a person reads: `str` is text, `repr` one line; rich prints it in colour, a notebook as HTML."""

    def sheet(self) -> Sheet:
        """Returns what is shown."""
        raise NotImplementedError

    def summary(self) -> str:
        """Returns the result in a few words."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(text_lines(self.sheet()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary()})"

    def _repr_html_(self) -> str:
        return html(self.sheet())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        return coloured(self.sheet(), options.max_width)


def text_lines(sheet: Sheet) -> Iterator[str]:
    """Yields the lines of a sheet as plain text."""
    yield sheet.title
    for part in sheet.parts:
        if sheet.apart:
            yield ""
        yield from table(part.head, list(part.rows)) if isinstance(part, Table) else part


def coloured(sheet: Sheet, width: int = WIDTH) -> Iterator[Text]:
    """Yields the lines of a sheet as texts of rich. width: the most characters of a line of a table"""
    from rich.text import Text

    yield Text(sheet.title, style=RICH[sheet.kind] or "bold")
    for part in sheet.parts:
        if sheet.apart:
            yield Text()
        yield from coloured_table(part, width) if isinstance(part, Table) else map(Text, part)


def coloured_table(part: Table, width: int = WIDTH) -> Iterator[Text]:
    """Yields the lines of a table as texts of rich. width: the most characters of a line"""
    from rich.text import Text

    titles = len(list(table_cells(part.head, [], width)))
    for i, cells in enumerate(table_cells(part.head, part.rows, width)):
        line = Text(no_wrap=True)
        for cell, kind in zip(cells, part.kinds, strict=True):
            line.append(cell, "bold" if i < titles else RICH[kind]).append("  ")
        line.rstrip()
        yield line


def html(sheet: Sheet) -> str:
    """Returns a sheet as HTML, without scripts; its styles are in its elements, and it takes the page's background."""
    title = f'<p style="{CSS[sheet.kind] or "font-weight:bold"}">{escape(sheet.title)}</p>'
    return f"<div>{title}{''.join(map(_html_part, sheet.parts))}</div>"


def _html_part(part: Table | tuple[str, ...]) -> str:
    if not isinstance(part, Table):
        return f'<pre style="background:none;white-space:pre-wrap">{escape(chr(10).join(part))}</pre>'
    head = "".join(f'<th style="{CELL}">{escape(cell)}</th>' for cell in part.head)
    rows = "".join(f"<tr>{_html_cells(row, part.kinds)}</tr>" for row in part.rows)
    return f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _html_cells(row: tuple[str, ...], kinds: tuple[Kind, ...]) -> str:
    cells: Any = zip(row, kinds, strict=True)
    return "".join(f'<td style="{CELL};{CSS[kind]}">{escape(cell)}</td>' for cell, kind in cells)
