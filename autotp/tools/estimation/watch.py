"""watch: compares an estimate with the steps of a trainer: `estimate.watch(trainer)`.

It costs a clock's reading for each step that is watched, and nothing after that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from autotp.costs.hardware import GIB
from autotp.display.sheet import Sheet, Shown, Table
from autotp.errors import Error
from autotp.tools.estimation.result import Estimate, mfu, tokens_per_second
from autotp.training.trainer import Trainer

WARM_UP = 2
"""The first steps, which are not counted: they capture, compile and allocate."""


@dataclass(repr=False)
class Comparison(Shown):
    """An estimate, and the steps of a trainer beside it.

    Attributes:
        estimate: what was predicted.
        steps: the number of steps to watch.
        seconds: of each step that was watched: from its beginning to that of the next, so with the optimizer, and with
            all that a loop does between steps.
        bytes: the most that this rank's allocator gave out at once since the process began; None on a CPU.
        rank: this rank's place in the pipeline.
    """

    estimate: Estimate
    steps: int
    rank: int
    seconds: list[float] = field(default_factory=list)
    bytes: int | None = None

    @property
    def done(self) -> bool:
        """Whether all steps were watched."""
        return len(self.seconds) >= self.steps - WARM_UP

    @property
    def measured(self) -> float:
        """The median seconds of a step; nan before there is one."""
        return statistics.median(self.seconds) if self.seconds else float("nan")

    def summary(self) -> str:
        """Returns predicted and measured seconds in a line."""
        return f"predicted {self.estimate.seconds:.4g} s, measured {self.measured:.4g} s"

    def sheet(self) -> Sheet:
        """Returns the table of predicted and measured numbers."""
        est = self.estimate
        more = self.measured / est.seconds - 1
        rows = [("a step", f"{est.seconds:.4g} s", f"±{est.error:.0%}", f"{self.measured:.4g} s", f"{more:+.0%}")]
        # A step has the same operations and tokens whatever time it takes.
        faster, error = f"{1 / (1 + more) - 1:+.0%}", f"±{est.error:.0%}"
        rows.append(("TFLOP/s a device", f"{est.tflops:.4g}", error, f"{est.tflops / (1 + more):.4g}", faster))
        if est.device.is_gpu:
            share = mfu(est.flops, self.measured, est.layout.devices, est.peak)
            rows.append(("of peak", f"{est.mfu:.1%}", error, f"{share:.1%}", faster))
        if est.tokens_per_second is not None and (speed := tokens_per_second(est.tokens, self.measured)) is not None:
            rows.append(("tokens a second", f"{est.tokens_per_second:.4g}", error, f"{speed:.4g}", faster))
        if self.bytes is not None:
            total = est.memory[self.rank].total
            change = self.bytes / total - 1
            rows.append(("memory", f"{total / GIB:.4g} GiB", "", f"{self.bytes / GIB:.4g} GiB", f"{change:+.0%}"))
        head = ("", "predicted", "", "measured", "")
        title = f"{est.layout}: the median of {len(self.seconds)} steps"
        return Sheet(title, (Table(head, tuple(rows), ("", "note", "note", "cut", "note")),))


def watch(estimate: Estimate, trainer: Any, steps: int, show: Callable[[Comparison], Any]) -> Comparison:
    """Watches a trainer's next steps; as `Estimate.watch` says."""
    _expect_alike(estimate, trainer, steps)
    comparison = Comparison(estimate=estimate, steps=steps, rank=trainer.mesh["pp"].get_local_rank())
    device, first = trainer.place.device, trainer.everyone.rank == 0
    starts: list[float] = []

    def before_step() -> bool:
        starts.append(time.perf_counter())
        # The seconds of a step are known when the next one starts.
        if len(starts) > WARM_UP + 1:
            comparison.seconds.append(starts[-1] - starts[-2])
        if comparison.done:
            if device.type == "cuda":
                comparison.bytes = torch.cuda.max_memory_allocated(device)
            if first:
                show(comparison)
        # A trainer forgets what returns False: later steps cost nothing.
        return not comparison.done

    trainer.watch(before_step)
    return comparison


def _expect_alike(estimate: Estimate, trainer: Any, steps: int) -> None:
    """Raises Error if the trainer does not train in the estimate's layout."""
    if not isinstance(trainer, Trainer):
        raise Error(f"watch takes a Trainer, not a {type(trainer).__name__}", fix="autotp.distribute(...)")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps <= WARM_UP:
        raise Error(f"steps={steps!r}: the first {WARM_UP} are not counted", fix="steps=20")
    for name in ("tp", "pp", "dp"):
        predicted, trained = getattr(estimate.layout, name), trainer.mesh[name].size()
        if predicted != trained:
            raise Error(f"the estimate has {name}={predicted}, the trainer {name}={trained}", fix=f"{name}={trained}")
