"""What `overlap="batch"` adds to the kernel: passes, operators, and the options that it cannot be combined with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autotp.compiler import PLAN, Pass
from autotp.diagnostics.lockstep import COLLECTIVES, conjugate
from autotp.errors import Error
from autotp.experimental.batch_halves.halves import ROWS
from autotp.experimental.batch_halves.interleave import interleave
from autotp.experimental.batch_halves.turns import finish, start_copy, start_reduce, wait_in_backward
from autotp.experimental.batch_halves.two_halves import two_halves
from autotp.experimental.batch_halves.weight_sums import weight_sums
from autotp.extensions import Extension
from autotp.options import Options
from autotp.rules.registry import add_rows
from autotp.training.pipeline.schedules import Training


def _also_here(*names: str) -> tuple[Pass, ...]:
    """Returns passes of the kernel that run with other options only, for calls without these."""
    return tuple(replace(row, wanted=_otherwise(row)) for row in PLAN if row.name in names)


def _otherwise(row: Pass) -> Callable[[Options], bool]:
    return lambda options: not row.wanted(options)


PASSES = {
    "cse": _also_here("equal_inputs", "unsort"),
    "row_independence": (Pass("plan", "two_halves", two_halves), *_also_here("experts")),
    "bind": (
        Pass("emit", "interleave", lambda p, site, graph: interleave(graph)),
        Pass(
            "emit", "weight_sums", lambda p, site, graph: weight_sums(graph),
            lambda options: options.optional("weight_sums"),
        ),
    ),
}  # fmt: skip


def extension() -> Extension:
    """Returns what `overlap="batch"` adds; notes its operators in the tables of the kernel."""
    add_rows(ROWS)
    COLLECTIVES.update({
        start_reduce: conjugate("reduce"),
        start_copy: conjugate("copy"),
        finish: lambda *xs, rest: xs,
        wait_in_backward: lambda *xs, rest: xs,
    })  # fmt: skip
    return Extension(passes=PASSES, expect=_expect)


def _expect(options: Options) -> None:
    """Raises Error for options under which no sum would run beside the other half."""
    if options.sequence_parallel:
        raise Error(
            'overlap="batch" with sequence_parallel=True: no sum would run beside the other half of the batch',
            fix='overlap="none"',
            alternative="sequence_parallel=False",
        )
    if isinstance(options, Training) and options.engine.halves:
        raise Error(
            f'overlap="batch" with schedule="{options.schedule}", which computes the gradients of weights later',
            fix='overlap="none", or schedule="1F1B"',
        )
