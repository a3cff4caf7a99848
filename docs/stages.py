"""Writes docs/stages.md: an MLP and an attention on two ranks, stage by stage.

python docs/stages.py
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from textwrap import fill

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.compiler import CANONICALIZE, LOWER, PLAN
from autotp.options import OPTIONAL

PAGE = Path(__file__).with_suffix(".md")
STAGES = {
    "model": "What the user wrote.",
    "capture": "The graph of ATen operators that one call runs. Sizes that may change are letters; a value's type is "
    "its dtype and its shape.",
    "canonicalize": "The same function, with one way to write each thing: a bias is an addition of its own, no "
    "operator is computed twice, and no operator writes into its input.",
    "axes": "The rules of the operators name every dimension. A dimension that can be cut has a name before its size.",
    "plan": "What is cut, what it costs, and what stays whole and why.",
    "lower": "The graph of the first rank: local sizes, and a conjugate wherever the placement of a value changes. "
    "`async_linear` is a linear that reads a copy, whose all-reduce in backward runs beside other work.",
    "check": "The same graph, typed anew from the parameters' layouts alone. `@tp` is behind a size that is cut, "
    "`{tp}` behind a copy of which each rank uses a part (its gradient is summed), `{+tp}` behind a term of a sum.",
    "emit": "What runs: blocks as modules, sums in the memory of what nobody else reads.",
}


OPENING = """`print(autotp.stages(model, tp=2))` prints what a model becomes on its way, stage by stage, on any machine
and without processes; `autotp.stages(model, tp=2)["plan"]` is one stage. `autotp stages MODEL --tp 2` prints what each
pass did ([command_line.md](command_line.md#stages)). `python docs/stages.py` writes this page."""


BESIDE = """`capture` comes before these, `check` and `emit` behind them. A pass with * may be left out:
`without='cse'`. Options may add passes: see [performance.md](performance.md#overlapbatch) for those of
`overlap="batch"`."""


class MLP(nn.Module):
    """Two products around an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(768, 3072), nn.Linear(3072, 768)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Twelve heads that look back."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(768, 3 * 768), nn.Linear(768, 768)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (12, 64)).transpose(1, 2) for part in self.qkv(x).split(768, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def module_of(stage: str, name: str) -> str:
    """The module of a pass: in the folder of its stage, or in one below."""
    folder = importlib.import_module(f"autotp.passes.{stage}")
    below = pkgutil.walk_packages(folder.__path__, f"{folder.__name__}.")
    return next(found.name for found in below if found.name.endswith(f".{name}"))


def table() -> str:
    """The passes in the order in which the compiler runs them, each with the first line of its file."""
    rows = ["| folder of `passes/` | pass | |", "|---|---|---|"]
    for each in (*CANONICALIZE, *PLAN, *LOWER):
        module = importlib.import_module(module_of(each.stage, each.name))
        what = (module.__doc__ or "").splitlines()[0].removeprefix(f"{each.name}: ")
        rows.append(f"| {each.stage} | {each.name} | {what}{' *' * (each.name in OPTIONAL)} |")
    return "\n".join(rows)


def page() -> str:
    """The page as text."""
    parts = [
        "# From a model to what a rank runs",
        fill(OPENING, 120),
        "## The passes, in order",
        fill(BESIDE, 120),
        table(),
    ]
    for title, kind in (("An MLP", MLP), ("An attention", Attention)):
        with torch.device("meta"):
            model = kind()
        found = autotp.stages(model, 2, example_inputs=torch.empty(2, 5, 768, device="meta"))
        parts.append(f"## {title}")
        for stage, text in found.pages.items():
            parts.append(f"### {stage}\n\n{fill(STAGES[stage], 120) if title == 'An MLP' else ''}".rstrip())
            parts.append(f"```\n{text}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
