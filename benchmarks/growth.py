"""Measures how the cost of the analysis grows with layers, ranks and parameters, up to a trillion parameters.

    OMP_NUM_THREADS=1 python benchmarks/growth.py benchmarks/growth.png

It prints a table and draws a log-log plot: processor seconds and megabytes of one rank's process, for GPTs on `meta`,
from the start of capture to the checked graph. The layers have the width of GPT-2 1.2B, at tp=8; the ranks are those of
12 such layers; the parameters are those of the models of Narayanan et al. 2021, whose number of layers grows too. "k"
is the exponent of a power law that is fitted to a row from its second point on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from capture import STAGES, exponent, in_a_process

from autotp.models.configs import GPT_SIZES, GPT_SIZES_2021
from autotp.models.gpt import GPTConfig

WIDE = GPT_SIZES["1.2B"]
SWEEPS: dict[str, Sequence[tuple[float, GPTConfig, int]]] = {
    "layers": [(n, replace(WIDE, n_layer=n), 8) for n in (2, 6, 12, 24, 48, 96)],
    "ranks": [(tp, replace(WIDE, n_layer=12, n_head=64), tp) for tp in (1, 2, 4, 8, 16, 32, 64)],
    "parameters, in billions": [
        (float(name.removesuffix("B")), config, 8)
        for name, config in GPT_SIZES_2021.items()
        if name in ("1.7B", "7.5B", "39.1B", "145.6B", "529.6B", "1008B")
    ],
}


@dataclass(frozen=True)
class Sweep:
    """The quantity that grows, its values, and the cost of each value."""

    name: str
    values: list[float]
    seconds: list[float]
    megabytes: list[float]

    def __str__(self) -> str:
        rows = (("seconds", self.seconds), ("megabytes", self.megabytes))
        lines = [f"{self.name:<26}" + "".join(f"{value:>9g}" for value in self.values) + f"{'k':>7}"]
        for unit, found in rows:
            k = exponent(self.values[1:], found[1:])  # type: ignore[arg-type]
            lines.append(f"  {unit:<24}" + "".join(f"{value:>9.2f}" for value in found) + f"{k:>7.2f}")
        return "\n".join(lines)


def measure(name: str, points: Sequence[tuple[float, GPTConfig, int]]) -> Sweep:
    """Measures a sweep, each point in a separate process."""
    found = [in_a_process(config, config.n_layer, tp) for _, config, tp in points]
    seconds = [sum(row[stage] for stage in STAGES) for row in found]
    grown = [row["peak"] - row["before"] for row in found]
    return Sweep(name, [value for value, _, _ in points], seconds, grown)


def plot(sweeps: Sequence[Sweep], path: str) -> None:
    """Draws seconds and megabytes of each sweep, on logarithmic axes, with a line of slope 1."""
    figure, places = plt.subplots(1, len(sweeps), figsize=(4 * len(sweeps), 3.6), layout="constrained")
    for place, sweep in zip(places, sweeps, strict=True):
        first = sweep.values[0]
        place.loglog(sweep.values, sweep.seconds, "o-", label="seconds")
        place.loglog(sweep.values, [n / 100 for n in sweep.megabytes], "s-", label="100 MB")
        place.loglog(sweep.values, [sweep.seconds[0] * n / first for n in sweep.values], "k:", label="linear")
        place.set_xlabel(sweep.name)
        place.grid(True, which="both", alpha=0.2)
        place.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Prints the table, and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", help="file for the plot, a PNG")
    args = parser.parse_args()
    sweeps = []
    for name, points in SWEEPS.items():
        sweeps.append(measure(name, points))
        print(sweeps[-1], flush=True)
    if args.path:
        plot(sweeps, args.path)


if __name__ == "__main__":
    main()
