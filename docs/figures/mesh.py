"""Draws which process holds what: `python docs/figures/mesh.py` writes docs/figures/mesh.png."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

LAYERS = ["embedding", "h.0", "h.1", "h.2", "h.3", "norm, head, loss"]
STAGES = [LAYERS[:3], LAYERS[3:]]
COLOURS = ["#4c78a8", "#f58518"]


def process(ax: Axes, x: float, y: float, rank: int, stage: int, tp: int) -> None:
    """One process: its rank, and its half of each layer of its stage."""
    ax.add_patch(Rectangle((x, y), 2.3, 2.0, fill=False, edgecolor="#333", linewidth=1.2))
    ax.text(x + 0.08, y + 1.78, f"rank {rank}", fontsize=9, weight="bold", va="center")
    for i, layer in enumerate(STAGES[stage]):
        at = y + 1.25 - i * 0.52
        ax.add_patch(Rectangle((x + 0.12, at), 2.06, 0.4, facecolor="#eee", edgecolor="#bbb", linewidth=0.6))
        ax.add_patch(Rectangle((x + 0.12 + 1.03 * tp, at), 1.03, 0.4, facecolor=COLOURS[tp], alpha=0.55))
        ax.text(x + 1.15, at + 0.2, layer, fontsize=8, ha="center", va="center")


def arrow(ax: Axes, start: tuple[float, float], stop: tuple[float, float], colour: str) -> None:
    """Draws an arrow with two heads."""
    ax.add_patch(FancyArrowPatch(start, stop, arrowstyle="<|-|>", mutation_scale=11, color=colour, linewidth=1.4))


def main() -> None:
    """The mesh of tp=2, pp=2, dp=2."""
    fig, ax = plt.subplots(figsize=(11, 5.2))
    for dp in range(2):
        x0 = dp * 6.6
        ax.add_patch(Rectangle((x0 - 0.25, -0.35), 5.7, 5.35, facecolor="#f7f7fb", edgecolor="#ccd", zorder=0))
        ax.text(
            x0 + 2.6, 5.15, f"replica {dp} (dp): rows {dp * 8} to {dp * 8 + 7} of the batch", ha="center", fontsize=10
        )
        for pp in range(2):
            y = 2.7 - pp * 2.9
            if dp == 0:
                ax.text(x0 - 0.42, y + 1.0, f"stage {pp} (pp)", rotation=90, fontsize=9, va="center", ha="center")
            for tp in range(2):
                process(ax, x0 + tp * 2.9, y, pp * 4 + dp * 2 + tp, pp, tp)
            arrow(ax, (x0 + 2.3, y + 1.0), (x0 + 2.9, y + 1.0), "#54a24b")
        for tp in range(2):
            arrow(ax, (x0 + tp * 2.9 + 1.15, 1.82), (x0 + tp * 2.9 + 1.15, 2.68), "#b279a2")
    for pp in range(2):
        arrow(ax, (5.25, 3.7 - pp * 2.9), (6.55, 3.7 - pp * 2.9), "#e45756")
    legend = [
        ("#54a24b", "tp: sums of activations, in every block"),
        ("#b279a2", "pp: the residual stream, once a microbatch"),
        ("#e45756", "dp: gradients, once a step"),
    ]
    for i, (colour, text) in enumerate(legend):
        ax.text(-0.2, -0.75 - 0.36 * i, f"\u2194 {text}", color=colour, fontsize=9.5)
    ax.set_xlim(-0.8, 12.5)
    ax.set_ylim(-1.7, 5.5)
    ax.axis("off")
    fig.savefig(Path(__file__).with_suffix(".png"), dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
