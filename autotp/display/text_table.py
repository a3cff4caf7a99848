"""text_table: rows as a table of text; rows of layers that are alike become one row."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

WIDTH = 100
"""The largest width of a table, in characters."""


def bytes_text(count: float) -> str:
    """Returns a number of bytes as `1.2 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def gib_text(count: float) -> str:
    """Returns a number of bytes as `1.21 GiB`, rounded up: what has this much has enough. Small ones are in MiB or KiB.

    Without the space it is a value of `memory=`.
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{math.ceil(count / size * 100) / 100:.2f} {unit}"
    return f"{math.ceil(count)} B"


def folded(rows: Sequence[tuple[str, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Joins rows that differ in layer numbers only, with the numbers as a range; then `{weight,bias}` and `{q,k,v}`."""
    layers: dict[tuple[str, ...], list[list[int]]] = {}
    for name, rest in rows:
        # Only rows that are alike in all cells are joined: a layer that is cut otherwise keeps its row.
        layers.setdefault((re.sub(r"\d+", "#", name), *rest), []).append([int(n) for n in re.findall(r"\d+", name)])
    folded = [(_numbered(template, numbers), *cells) for (template, *cells), numbers in layers.items()]
    return _joined(_joined(folded, 1), 2)


def _joined(rows: list[tuple[str, ...]], place: int) -> list[tuple[str, ...]]:
    """Joins rows whose names differ only in the part at `place`, counted from the end."""
    parts_by_row: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        parts = name.split(".")
        part = ""
        if len(parts) >= place:
            part, parts[-place] = parts[-place], "{}"
        parts_by_row.setdefault((".".join(parts), *cells), []).append(part)
    return [(name.replace("{}", _either(names)), *cells) for (name, *cells), names in parts_by_row.items()]


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else "{" + ",".join(names) + "}"


def _numbered(template: str, numbers: list[list[int]]) -> str:
    """Returns the template with each number, or range of numbers, at its place."""
    for column in zip(*numbers, strict=True):
        template = template.replace("#", _range(sorted(set(column))), 1)
    return template


def _range(numbers: list[int]) -> str:
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return text if len(numbers) == 1 else "{" + text + "}"


BREAKS = re.compile(r" |[.,](?!\d)")
"""After these a text may be broken: no number is."""


def table_cells(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], width: int) -> Iterator[list[str]]:
    """Yields the cells of each line of a table, padded to the columns, with two spaces between columns.

    It breaks the text of the widest columns over lines, between words as long as that is enough; then one space stands
    between columns, and only what does not fit even then is broken inside of words.

    Args:
        width: the most characters of a line.
    """
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    # A longer word, such as the path of a module, may be broken.
    narrowest = [min(width // 3, max(len(piece) for cell in column for piece in _pieces(cell))) for column in columns]
    spaces = 2 if sum(narrowest) + 2 * (len(head) - 1) <= width else 1
    while sum(widths) + spaces * (len(widths) - 1) > width:
        # One character at a time, from the widest column: narrow ones keep their words in one piece.
        breakable = [i for i in range(len(widths)) if widths[i] > narrowest[i]] or range(len(widths))
        widest = max(breakable, key=lambda i: widths[i])
        widths[widest] -= 1
    for row in [head, *rows]:
        cells = [_broken(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in range(max(map(len, cells))):
            texts = [cell[line] if line < len(cell) else "" for cell in cells]
            yield [*(text.ljust(w + spaces) for text, w in zip(texts[:-1], widths, strict=False)), texts[-1]]


def _pieces(text: str) -> list[str]:
    """Returns the parts of a text that need not be broken."""
    ends = [match.end() for match in BREAKS.finditer(text)]
    return [text[start:end].strip() for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def _broken(text: str, width: int) -> list[str]:
    """Returns the text in lines of at most `width`, broken after spaces, dots or commas if there are any."""
    lines = []
    while len(text) > width:
        end = max((match.end() for match in BREAKS.finditer(text, 0, width)), default=width)
        lines.append(text[:end])
        text = text[end:].lstrip()
    return [*lines, text]
