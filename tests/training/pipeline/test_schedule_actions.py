"""Actions of torch's schedules, and their times."""

import pytest

import autotp
from autotp.training.pipeline.schedule_actions import Action, actions_of, most_held, play
from autotp.training.pipeline.schedules import ENGINES, engine_of

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def seconds(schedule: str, ranks: int, microbatches: int, interleave: int | None = None, send: float = 0.0) -> float:
    kind = engine_of(schedule, interleave)
    order = actions_of(kind, ranks, microbatches)
    return play(order, lambda a: SECONDS[a.half] / kind.rounds, lambda a, b: send).seconds


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8), (64, 128)])
def test_the_bubble_of_1f1b_is_that_of_the_paper(ranks: int, microbatches: int) -> None:
    """Narayanan et al. 2021, section 2.2: (ranks - 1) forwards and backwards."""
    assert seconds("1F1B", ranks, microbatches) == pytest.approx(3 * (microbatches + ranks - 1))


@pytest.mark.parametrize("interleave", [2, 3])
def test_interleaving_divides_the_bubble(interleave: int) -> None:
    assert seconds("interleaved", 4, 8, interleave) == pytest.approx(3 * (8 + 3 / interleave))


def test_zero_bubble_hides_part_of_the_bubble() -> None:
    assert seconds("zero-bubble", 4, 8) < seconds("interleaved", 4, 8)


def test_sends_are_in_the_cycle_of_forward_and_backward() -> None:
    """With as many microbatches in flight as ranks, each microbatch waits for the sends of its own round trip."""
    assert seconds("1F1B", 4, 64, send=0.1) > 64 * (3 + 2 * 0.1 * 3 / 4)


@pytest.mark.parametrize("schedule", ENGINES)
def test_each_stage_runs_each_microbatch_once(schedule: str) -> None:
    kind = engine_of(schedule)
    for rank, row in enumerate(actions_of(kind, 4, 8)):
        forwards = [a for a in row if a.half == "F"]
        assert sorted((a.stage, a.microbatch) for a in forwards) == [
            (stage, i) for stage in sorted(kind.stages(rank, 4)) for i in range(8)
        ]
        assert len({a for a in row if a.half in ("B", "I")}) == len(forwards)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_the_microbatches_in_flight_are_those_that_distribute_counts(schedule: str) -> None:
    kind = engine_of(schedule)
    for rank, row in enumerate(actions_of(kind, 4, 8)):
        assert most_held(row, lambda stage: 1.0, lambda action: 0.0) == kind.flight(rank, 4, 8)


def test_one_rank_runs_one_microbatch_after_the_other() -> None:
    assert actions_of(engine_of("1F1B"), 1, 2) == (
        (Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)),
    )


def test_what_a_schedule_cannot_run_is_one_error() -> None:
    with pytest.raises(autotp.Error, match="this schedule on 4 ranks cannot run 9 microbatches"):
        actions_of(engine_of("interleaved"), 4, 9)
    with pytest.raises(autotp.Error, match='interleave=3 is for schedule="interleaved"'):
        engine_of("1F1B", 3)
    with pytest.raises(autotp.Error, match="schedule='2F2B'"):
        engine_of("2F2B")
