"""colour: whether a stream shows colours, and texts in the colours of a terminal."""

from __future__ import annotations

import os
from typing import Any

CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
"""A word of a style -> the code that a terminal has for it."""


def in_colour(to: Any) -> bool:
    """Returns whether a text for this stream has colours: only on a terminal, never in a file or a pipe.

    With NO_COLOR it has none. A terminal that shows none (TERM=dumb) gets some with FORCE_COLOR.
    """
    if os.environ.get("NO_COLOR") or not _is_terminal(to):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or os.environ.get("TERM") != "dumb"


def _is_terminal(to: Any) -> bool:
    try:
        return bool(to.isatty())
    except (AttributeError, ValueError):  # There is no stdout, or it is closed.
        return False


def painted(text: str, style: str) -> str:
    """Returns a text in a style, such as "bold red", for a terminal. A text without a style is the same."""
    codes = ";".join(CODES[word] for word in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if codes and text.strip() else text
