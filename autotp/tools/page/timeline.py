"""timeline: the schedule of a step, as compact plain data for the page, and as a trace for Perfetto."""

from __future__ import annotations

from typing import Any

from autotp.errors import Error
from autotp.tools.estimation.price import Prices, Simulated, behind_pipeline, timed_schedule
from autotp.tools.estimation.result import Estimate
from autotp.training.pipeline.schedule_actions import Action

RANKS, ACTIONS = 16, 24000
"""The most pipeline ranks, and the most actions of them, that a page shows."""
TICKS = 100_000
"""The parts of a step in which starts are counted."""
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def timeline_data(estimate: Estimate) -> dict[str, Any]:
    """Returns the rows of the timeline: of each shown rank [stage, half, microbatch, start in ticks] in order.

    What follows the pipeline (sums over replicas, the optimizer) is one part behind it, on all ranks.
    """
    step = timed_schedule(_prices(estimate), estimate.layout)
    tick = estimate.seconds / TICKS
    ranks = _shown_ranks(step)
    rows = []
    for rank in ranks:
        starts = step.played.starts[rank]
        # Whole numbers: there may be thousands of actions, and the page is one file.
        flat = [[a.stage, a.half, a.microbatch, round(start / tick)] for start, a in starts]
        rows.append({"rank": rank, "actions": flat, "busy": step.played.busy[rank] / step.played.seconds})
    halves = sorted({(a.stage, a.half) for row in step.order for a in row})
    last = estimate.layout.microbatches - 1  # The first forward also casts parameters.
    lengths = {f"{stage}{half}": step.seconds(Action(stage, half, last)) / tick for stage, half in halves}
    tail = _behind(estimate, step)
    slowest = max(step.played.busy)
    return {
        "ticks": TICKS, "seconds": estimate.seconds, "pipeline": round(step.played.seconds / tick), "rows": rows,
        "lengths": {key: round(value) for key, value in lengths.items()}, "ranks": len(step.order),
        "bubble": 1 - slowest / step.played.seconds, "behind": tail, "stages": len(estimate.stages),
        "microbatches": estimate.layout.microbatches, "schedule": estimate.layout.schedule,
        "split": any(half == "I" for _, half in halves),
    }  # fmt: skip


def _behind(estimate: Estimate, step: Simulated) -> dict[str, float]:
    """Returns the seconds of what follows the pipeline, in order."""
    behind = behind_pipeline(_prices(estimate), estimate.layout, step)
    return {name: seconds for name, seconds in behind.items() if seconds > 1e-9}


def packed(actions: list[list[Any]]) -> str:
    """Returns the actions of a row as text, a fifth as long: `stage+half.microbatch.ticks since the start before`.

    Numbers are of base 36: `0F.0.0 0F.1.63 0B.0.7ps`.
    """
    words, before = [], 0
    for stage, half, microbatch, start in actions:
        words.append(f"{_base_36(stage)}{half}.{_base_36(microbatch)}.{_base_36(start - before)}")
        before = start
    return " ".join(words)


def _base_36(number: int) -> str:
    digits = ""
    while number or not digits:
        number, rest = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[rest] + digits
    return digits


def _prices(estimate: Estimate) -> Prices:
    prices: Prices | None = estimate.source
    if prices is None:
        raise Error("this Estimate has no schedule with it: it was not made in this process", fix="autotp.estimate")
    return prices


def _shown_ranks(step: Simulated) -> list[int]:
    """Returns the ranks that are shown: all, or the first, the last and some between."""
    ranks = len(step.order)
    count = max(2, min(RANKS, ACTIONS // max(map(len, step.order))))
    if ranks <= count:
        return list(range(ranks))
    return sorted({round(i * (ranks - 1) / (count - 1)) for i in range(count)})


def trace_events(estimate: Estimate) -> dict[str, Any]:
    """Returns the schedule in the format of Chrome's traces, which Perfetto opens: a row for each pipeline rank."""
    step = timed_schedule(_prices(estimate), estimate.layout)
    title = f"{estimate.layout} on {estimate.device.name}"
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title}}]
    for rank, starts in enumerate(step.played.starts):
        events.append(
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}}
        )
        for start, action in starts:
            events.append(_event(action, start, step.seconds(action), rank))
        now = step.played.seconds
        for name, seconds in _behind(estimate, step).items():
            events.append(_complete(name, "update", now, seconds, rank, {}))
            now += seconds
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(action: Action, start: float, seconds: float, rank: int) -> dict[str, Any]:
    facts = {"stage": action.stage, "microbatch": action.microbatch}
    name = f"{action.half}{action.microbatch} stage {action.stage}"
    return _complete(name, NAMES[action.half], start, seconds, rank, facts)


def _complete(name: str, cat: str, start: float, seconds: float, rank: int, facts: dict[str, int]) -> dict[str, Any]:
    return {
        "name": name, "cat": cat, "ph": "X", "ts": round(start * 1e6, 3), "dur": round(seconds * 1e6, 3), "pid": 0,
        "tid": rank, "args": facts,
    }  # fmt: skip
