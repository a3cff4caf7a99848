"""Draws the plan of GPT-2 on eight ranks: `python docs/figures/plan.py` writes docs/figures/plan.svg."""

from __future__ import annotations

import io
import re
from pathlib import Path

import torch
from rich.console import Console
from rich.terminal_theme import TerminalTheme

import autotp
from autotp.models.gpt import GPT, GPTConfig

PICTURE = Path(__file__).with_suffix(".svg")
COLOURS = [(13, 17, 23), (255, 123, 114), (86, 211, 100), (227, 179, 65), (121, 192, 255), (210, 168, 255)]
THEME = TerminalTheme((13, 17, 23), (230, 237, 243), [*COLOURS, (86, 212, 221), (177, 186, 196)])
"""Background, text, and the eight colours of a terminal: black, red, green, yellow, blue, magenta, cyan, white."""


def drawn() -> str:
    """Returns the picture: what `print(plan)` prints on a terminal."""
    with torch.device("meta"):
        plan = autotp.explain(GPT(GPTConfig()), tp=8)
    console = Console(record=True, width=116, file=io.StringIO(), force_terminal=True)
    console.print(plan)
    title = "print(autotp.explain(GPT(GPTConfig()), tp=8))"
    text = console.export_svg(title=title, theme=THEME, unique_id="plan")
    return re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)  # The fonts would come from the network.


if __name__ == "__main__":
    PICTURE.write_text(drawn())
