"""The timeline: actions that do not overlap and end with the step, and the same as a trace."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch

import autotp
from autotp.models.gpt import GPT
from autotp.tools.page import timeline
from autotp.tools.page.timeline import TICKS, packed, timeline_data, trace_events

Make = Callable[..., GPT]


def test_each_rank_computes_each_microbatch_forward_and_backward(estimate: autotp.Estimate) -> None:
    found = timeline_data(estimate)
    assert (found["ranks"], found["stages"], found["microbatches"], found["split"]) == (2, 4, 8, False)
    for row in found["rows"]:
        assert len(row["actions"]) == 2 * 2 * 8
        ends = [start + found["lengths"][f"{stage}{half}"] for stage, half, _, start in row["actions"]]
        starts = [start for *_, start in row["actions"]]
        assert all(end <= start + 2 for end, start in zip(ends, starts[1:], strict=False)), "a rank does two things"
        assert max(ends) <= found["pipeline"] + 2 <= TICKS + 2
    assert 0 < found["bubble"] < 1 and set(found["behind"]) <= {"gradients dp", "optimizer", "tied weights pp"}


def test_a_packed_row_has_the_same_actions(estimate: autotp.Estimate) -> None:
    (row, *_) = timeline_data(estimate)["rows"]
    found, at = [], 0
    for word in packed(row["actions"]).split():
        what, microbatch, since = word.split(".")
        at += int(since, 36)
        found.append([int(what[:-1], 36), what[-1], int(microbatch, 36), at])
    assert found == row["actions"]


def test_the_trace_has_the_same_actions(estimate: autotp.Estimate) -> None:
    events = trace_events(estimate)["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert sum(event["cat"] in ("forward", "backward") for event in work) == 2 * 32
    assert max(event["ts"] + event["dur"] for event in work) == pytest.approx(estimate.seconds * 1e6, rel=1e-6)
    assert {event["tid"] for event in work} == {0, 1}


def test_of_many_ranks_some_are_shown(make_gpt: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "RANKS", 3)
    est = autotp.estimate(make_gpt(), gpu="a100-80gb", pp=6, batch=6, schedule="1F1B")
    assert [row["rank"] for row in timeline_data(est)["rows"]] == [0, 2, 5]


def test_halves_of_backward_are_told_apart(make_gpt: Make) -> None:
    est = autotp.estimate(make_gpt(8), gpu="a100-80gb", pp=2, batch=8, schedule="zero-bubble", dtype=torch.bfloat16)
    found = timeline_data(est)
    assert found["split"] and {half for row in found["rows"] for _, half, _, _ in row["actions"]} >= {"F", "I", "W"}


def test_an_estimate_of_another_process_has_no_schedule(estimate: autotp.Estimate) -> None:
    other = pickle.loads(pickle.dumps(estimate))
    assert other == estimate
    with pytest.raises(autotp.Error, match="this Estimate has no schedule with it"):
        trace_events(other)
