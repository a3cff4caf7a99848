"""Logs the measurements of each step: a CSV file, TensorBoard's events, and a plot of both.

A training that continues from a checkpoint has one log: rows of later steps are removed, and written again.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from support.training import smooth

FIELDS = ("step", "loss", "held_out", "rate", "norm", "tokens_per_second")
Row = dict[str, float]


class Log:
    """The log in a folder; of an earlier log, the first `done` steps are kept.

    Only one process may write it, in a `with` statement.
    """

    def __init__(self, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # This import takes a second.

        folder.mkdir(parents=True, exist_ok=True)
        file, partial = folder / "log.csv", folder / "log.csv.part"
        kept = [row | {"step": int(row["step"])} for row in read(file) if row["step"] <= done] if file.exists() else []
        with partial.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, FIELDS)
            writer.writeheader()
            writer.writerows(kept)
        os.replace(partial, file)
        self._file = file.open("a", newline="")
        self._rows = csv.DictWriter(self._file, FIELDS)
        self._events = SummaryWriter(str(folder), purge_step=done + 1)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        self._events.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of a step. The names are those of FIELDS; some may be missing."""
        self._rows.writerow({"step": step, **values})
        self._file.flush()
        for name, value in values.items():
            self._events.add_scalar(name, value, step)


def read(file: Path) -> list[Row]:
    """Returns the rows of a log, each with its values; an unfinished last line is left out."""
    with file.open(newline="") as opened:
        lines = [line for line in opened if line.endswith("\n")]
    rows = csv.DictReader(lines)
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def plot(file: Path, rows: Sequence[Row], title: str) -> None:
    """Draws the losses of a log into a file, and beside them the learning rate and the norm of the gradient."""
    import matplotlib

    matplotlib.use("Agg")  # No display is needed.
    from matplotlib import pyplot

    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    unseen = [(row["step"], row["held_out"]) for row in rows if "held_out" in row]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    left.plot(steps, losses, color="C0", alpha=0.25)
    left.plot(steps, smooth(losses), color="C0", label="training, mean of 25 steps")
    left.plot(*zip(*unseen, strict=True), color="C2", marker="o", label=f"held out, {unseen[-1][1]:.3f} at the end")
    left.set(title=title, xlabel="step", ylabel="loss, nats a token")
    left.legend()
    right.plot(steps, [row["norm"] for row in rows], color="C1", alpha=0.6)
    right.set(xlabel="step", yscale="log")
    right.set_ylabel("norm of the gradient", color="C1")
    rate = right.twinx()
    rate.plot(steps, [row["rate"] for row in rows], color="black")
    rate.set(ylabel="learning rate", ylim=(0, None))
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
