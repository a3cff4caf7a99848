"""schedule: the actions of each pipeline rank, as torch's schedules list them, and their times, action by action.

Before: 1F1B, 2 ranks, 2 microbatches; forward 1 s, backward 2 s
After:  rank 0: F0 0-1, F1 1-2, B0 4-6, B1 7-9        rank 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal

from autotp.errors import Error
from autotp.training.pipeline.schedules import Engine

Half = Literal["F", "B", "I", "W"]
"""Forward, backward, and its halves: the gradients of inputs, and of weights."""


@dataclass(frozen=True)
class Action:
    """One computation of a rank: a stage, for one microbatch."""

    stage: int
    half: Half
    microbatch: int


@lru_cache(maxsize=64)
def actions_of(engine: Engine, ranks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Returns the actions of each rank in order, from torch's own schedule.

    Raises:
        Error: the schedule cannot run this number of microbatches.
    """
    if ranks == 1:
        return (tuple(Action(0, half, i) for i in range(microbatches) for half in ("F", "B")),)
    # It takes a second to import, and most estimates have no pipeline.
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    made = getattr(pipelining, engine.kind, None) or getattr(schedules, engine.kind)
    total = ranks * engine.rounds
    stages = [_stage(i, total, ranks) for i in engine.stages(0, ranks)]
    try:
        listing = _listing(made)(stages[0] if engine.rounds == 1 else stages, microbatches, loss_fn=_no_loss)
    except ValueError as error:
        raise Error(
            f"this schedule on {ranks} ranks cannot run {microbatches} microbatches: {error}",
            fix=f"a batch of {-(-microbatches // ranks) * ranks} microbatches for each replica",
        ) from error
    order = listing.pipeline_order
    return tuple(
        _numbered([a for a in order[r] if a is not None and a.is_compute_op], microbatches) for r in range(ranks)
    )


def _stage(index: int, total: int, ranks: int) -> Any:
    """Returns what torch's schedules ask of a stage to list actions."""
    return SimpleNamespace(
        stage_index=index, num_stages=total, group_size=ranks, group_rank=0, is_first=index == 0,
        is_last=index == total - 1, submod=None, has_backward=True,
    )  # fmt: skip


def _no_loss(*_: Any) -> Any:
    raise AssertionError("a schedule that only lists actions was run")


def _listing(schedule_class: Any) -> Any:
    """Returns a schedule's class that does not add sends and receives, which take it minutes for 64 ranks."""
    return type(
        schedule_class.__name__, (schedule_class,), {"_prepare_schedule_with_comms": lambda self, actions, **_: None}
    )


def _numbered(actions: Sequence[Any], microbatches: int) -> tuple[Action, ...]:
    """Returns actions with their microbatches counted, each stage and half from 0.

    torch 2.13 lists 1F1B with forwards of microbatches that do not exist: from 1 on in the last rank, and more than
    there are where a pipeline has more ranks than microbatches. Its runs do not: they count, too.
    """
    counts, numbered = Counter[tuple[int, Half]](), []
    for action in actions:
        key = action.stage_index, action.computation_type.value
        if counts[key] < microbatches:
            numbered.append(Action(*key, counts[key]))
        counts[key] += 1
    return tuple(numbered)


@dataclass(frozen=True, kw_only=True)
class Played:
    """A schedule with times.

    Attributes:
        seconds: until the last action of all ranks ends.
        busy: of each rank, the seconds in which it computes.
        starts: of each rank, (start, action) in order.
    """

    seconds: float
    busy: tuple[float, ...]
    starts: tuple[tuple[tuple[float, Action], ...], ...]


def play(
    order: Sequence[Sequence[Action]],
    cost: Callable[[Action], float],
    sends: Callable[[int, int], float],
    waits: Callable[[Action, float], float] = lambda action, begin: 0.0,
) -> Played:
    """Returns when each action runs: after the rank's action before it, and once what it reads has arrived.

    Args:
        cost: the seconds of an action.
        sends: (from a stage, to a stage) -> seconds on the way.
        waits: (action, when it begins) -> seconds for which it waits, beside those that it computes.
    """
    stages = max(action.stage for row in order for action in row) + 1
    split = any(action.half == "I" for row in order for action in row)
    done: dict[Action, float] = {}
    positions, free, busy = [0] * len(order), [0.0] * len(order), [0.0] * len(order)
    starts: list[list[tuple[float, Action]]] = [[] for _ in order]
    ready = list(range(len(order)))
    waiting: dict[Action, int] = {}
    while ready:
        rank = ready.pop()
        row = order[rank]
        while positions[rank] < len(row):
            action = row[positions[rank]]
            begin, missing = free[rank], None
            for needed, delay in _needs(action, stages, sends, split):
                # Ranks are played in turn, each until it reads what is not there yet: its row goes on when that is
                # done.
                if needed is not None and (end := _end(done, needed)) is None:
                    missing = needed
                    break
                begin = max(begin, (end or 0.0) + delay) if needed is not None else begin
            if missing is not None:
                waiting[missing] = rank
                break
            spent = cost(action)
            starts[rank].append((begin, action))
            free[rank] = begin + spent + waits(action, begin)
            busy[rank] += spent
            done[action] = free[rank]
            positions[rank] += 1
            for key in _meets(action):
                if key in waiting:
                    ready.append(waiting.pop(key))
    if any(positions[rank] < len(row) for rank, row in enumerate(order)):
        raise AssertionError("a schedule waits for itself")
    return Played(seconds=max(free), busy=tuple(busy), starts=tuple(map(tuple, starts)))


def _needs(
    action: Action, stages: int, sends: Callable[[int, int], float], split: bool
) -> Iterator[tuple[Action | None, float]]:
    """Yields the actions that an action reads from, with the seconds on the way."""
    stage, half, i = action.stage, action.half, action.microbatch
    if half == "F" and stage:
        yield Action(stage - 1, "F", i), sends(stage - 1, stage)
    elif half in ("B", "I"):
        yield Action(stage, "F", i), 0.0
        if stage + 1 < stages:
            yield Action(stage + 1, "B", i), sends(stage + 1, stage)


def _end(done: Mapping[Action, float], needed: Action) -> float | None:
    """Returns when an action ended; the gradients of inputs count as a backward for the stage before."""
    end = done.get(needed)
    return done.get(Action(needed.stage, "I", needed.microbatch)) if end is None and needed.half == "B" else end


def _meets(action: Action) -> tuple[Action, ...]:
    """Returns the actions that others may wait for, which this one is."""
    return (Action(action.stage, "B", action.microbatch), action) if action.half == "I" else (action,)


def most_held(row: Sequence[Action], kept_bytes: Callable[[int], float], extra: Callable[[Action], float]) -> float:
    """Returns the most bytes that a rank keeps for backward, and needs beside for the running action.

    Args:
        kept_bytes: stage -> the bytes that it keeps for one microbatch.
        extra: action -> the bytes that it needs while it runs.
    """
    now = peak = 0.0
    for action in row:
        now += kept_bytes(action.stage) if action.half == "F" else 0.0
        peak = max(peak, now + extra(action))
        now -= kept_bytes(action.stage) if action.half in ("B", "W") else 0.0
    return peak
