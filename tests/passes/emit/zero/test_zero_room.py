"""room: who leaves for whom, and the gathers of a schedule, counted by hand."""

from __future__ import annotations

import pytest

from autotp.passes.emit.zero.room import Room, gathered


def test_the_block_used_longest_ago_leaves_unless_it_stays_beside() -> None:
    room = Room[str](2)
    assert room.let_in("a", ()) == [] and room.let_in("b", ("a",)) == []
    assert room.let_in("a", ()) == []  # It is there, and now the latest one.
    assert room.let_in("c", ()) == ["b"] and room.let_in("d", ("a", "c")) == []  # More than two, as all are needed.
    assert room.arrive("d", ()) == ["a", "c"] and room.members == ["d"]


def test_a_block_stays_behind_its_end_while_nobody_needs_its_place() -> None:
    room = Room[str](2)
    room.let_in("a", ())
    assert not room.end("a") and room.members == ["a"]
    room.let_in("b", ())
    assert room.end("a") and room.members == ["b"]


F, B = "0123", "3210"


@pytest.mark.parametrize(
    ("passes", "most", "expected"),
    [
        ([F, B, F, B], 2, "0123 210 123 210"),
        ([F, B, F, B], 3, "0123 10 23 10"),  # Two blocks are there still at each turn.
        ([F, F, B, B], 2, "0123 0123 210 3210"),  # In a pipeline two passes go the same way.
        ([F, F, B, B], 4, "0123 0 0 3"),
        ([F, F, B, B], 5, "0123   "),
        ([F, "4567", "7654", B], 2, "0123 4567 654 3210"),  # Two stages of one rank share the room.
    ],
)
def test_gathers_of_passes(passes: list[str], most: int, expected: str) -> None:
    assert " ".join("".join(starts) for starts in gathered(passes, most)) == expected
