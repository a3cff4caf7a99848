"""source_lines: the functions of the model as they are written, each line with the shapes that it makes and sends.

Before: linear_default_9: bf16[b, s, 8192@tp], at modeling_llama.py:254
After:  {"number": 254, "text": "query_states = self.q_proj(hidden_states)...", "values": [...], "weights": [...]}
"""

from __future__ import annotations

import ast
import linecache
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from autotp.source_location import source_place
from autotp.tools.page.axes import PageAxes
from autotp.tools.page.blocks import is_conjugate, is_quiet, regions_of, sent_row, weights_of
from autotp.tools.page.subject import Subject

VALUES = 3
"""The values of a line that are shown."""
LONGEST = 120
"""A function with more lines is shown around the lines that make values."""
Line = dict[str, Any]


def source_data(subject: Subject, axes: PageAxes, blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the functions in which the drawn operators stand: files with most lines that compute come first.

    Args:
        blocks: what `block_data` returned: of alike blocks, one is shown.
    """
    drawn = {data["block"] for data in blocks} | {""}
    lines: dict[tuple[str, int], Line] = {}
    for block, nodes in regions_of(subject):
        if block in drawn:
            axes.block = block
            for node in nodes:
                _note(node, lines, subject, axes, block)
    axes.block = ""
    functions: dict[tuple[str, int], dict[str, Any]] = {}
    for path, number in lines:
        function = _function(path, number)
        key = path, function["first"]
        functions.setdefault(key, {"file": os.path.basename(path), **function})
    made = Counter(path for path, _ in lines)
    order = sorted(functions.items(), key=lambda item: (-made[item[0][0]], item[0]))
    return [_with_lines(path, details, lines) for (path, _), details in order]


def _note(node: fx.Node, lines: dict[tuple[str, int], Line], subject: Subject, axes: PageAxes, block: str) -> None:
    """Adds what an operator makes, reads and sends to its line."""
    place = source_place(node)
    # `<stdin>` and the like have no file to read lines from.
    if place is None or not os.path.isabs(place[0]):
        return
    line = lines.setdefault(place[:2], {"values": [], "weights": [], "sent": []})
    if is_conjugate(node):
        sent = sent_row(node, subject, axes)
        if sent["forward"] or sent["backward"]:
            _add(line["sent"], sent)
        return
    for weight in weights_of(node, subject, axes, block):
        _add(line["weights"], weight)
    # A value that only its own line reads is a step on the way: of these the last is shown.
    leaves = not node.users or any(source_place(user) != place for user in _readers(node))
    if leaves or not is_quiet(node):
        values = [axes.shape(typed) for typed in subject.types[node]]
        if not leaves:
            line["inner"] = values[:1]
        for value in values if leaves else []:
            _add(line["values"], value)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the operators that read a value, also through a conjugate."""
    for user in node.users:
        yield from _readers(user) if is_conjugate(user) else (user,)


def _add(rows: list[Any], row: Any) -> None:
    if row not in rows:
        rows.append(row)


def _function(path: str, number: int) -> dict[str, Any]:
    """Returns the innermost function around a line: its name with its class, and its lines without a docstring."""
    text = "".join(linecache.getlines(path))
    best: dict[str, Any] = {"name": "", "first": number, "last": number, "hidden": (0, 0)}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return best
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        node, name = stack.pop()
        for child in ast.iter_child_nodes(node):
            name_of_child = getattr(child, "name", "")
            inside = f"{name}.{name_of_child}".strip(".") if isinstance(name_of_child, str) and name_of_child else name
            stack.append((child, inside))
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first, last = child.lineno, child.end_lineno or 0
                # Of functions around the line, the innermost begins last.
                if first <= number <= last and first >= _start(best):
                    best = {"name": inside, "first": first, "last": last, "hidden": _docstring(child)}
    return best


def _start(best: dict[str, Any]) -> int:
    """Returns the first line of the function that was found; 0 for none."""
    return int(best["first"]) if best["name"] else 0


def _docstring(node: Any) -> tuple[int, int]:
    """Returns the first and the last line of a function's docstring; (0, 0) if it has none."""
    first = node.body[0]
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return (first.lineno, first.end_lineno or first.lineno) if is_text else (0, 0)


def _with_lines(path: str, function: dict[str, Any], lines: dict[tuple[str, int], Line]) -> dict[str, Any]:
    """Returns a function with its lines: those that make values, and those around them."""
    first, last = function["first"], function["last"]
    start, stop = function["hidden"]
    numbers = [n for n in range(first, last + 1) if not start <= n <= stop]
    made = [n for n in numbers if (path, n) in lines]
    if len(numbers) > LONGEST:
        numbers = [n for n in numbers if n == first or any(abs(n - computing) <= 2 for computing in made)]
    rows = [_row(path, n, lines.get((path, n))) for n in numbers]
    while rows and not rows[-1]["text"].strip():
        rows.pop()
    margin = min((len(r["text"]) - len(r["text"].lstrip()) for r in rows if r["text"].strip()), default=0)
    for row in rows:
        row["text"] = row["text"][margin:]
    return {"file": function["file"], "name": function["name"], "lines": rows}


def _row(path: str, number: int, line: Line | None) -> dict[str, Any]:
    """Returns a line with what it makes; a line whose values stay on it shows the last."""
    line = line or {"values": [], "weights": [], "sent": []}
    values = line["values"] or line.get("inner", [])
    touched = {n for value in (*values, *(w["value"] for w in line["weights"]), *line["sent"]) for n in value["axes"]}
    return {
        "number": number, "text": linecache.getline(path, number).rstrip("\n"), "values": values[:VALUES],
        "weights": line["weights"], "sent": line["sent"], "axes": sorted(touched),
    }  # fmt: skip
