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


def test_of_the_blocks_of_a_pass_the_last_ones_leave_first() -> None:
    """Those that the pass does not need leave before them."""
    room = Room[str](4)
    room.members = ["1", "2", "3", "ended"]
    assert room.let_in("0", (), "123") == ["ended"] and room.arrive("0", "1", "123") == ["3"]
    assert room.members == ["1", "2", "0"]


@pytest.mark.parametrize(("most", "ahead"), [(2, 1), (3, 1), (4, 2), (6, 4)])
def test_a_larger_room_has_blocks_further_ahead_on_their_way(most: int, ahead: int) -> None:
    """One place is left for the block that arrives. Blocks that have ended make place."""
    room, following = Room[str](most), "34567"
    room.members = [*"012"][-most:]
    while (later := room.next_ahead("2", (), following)) is not None:
        room.let_in(later, "2", following)
    assert [block for block in following if block in room.members] == [*following][:ahead]
    assert len(room.members) <= most and "2" in room.members


@pytest.mark.parametrize("most", range(2, 11))
def test_forward_and_backward_in_turn_gather_as_few_as_any_order_can(most: int) -> None:
    """Of 8 blocks, all but those that were there when the pass before ended: one place is for what arrives."""
    first, *others = gathered(["01234567", "76543210"] * 3, most)
    assert "".join(first) == "01234567"
    assert [len(starts) for starts in others] == [max(0, 8 - (most - 1))] * 5


F, B = "0123", "3210"


@pytest.mark.parametrize(
    ("passes", "most", "expected"),
    [
        ([F, B, F, B], 2, "0123 210 123 210"),
        ([F, B, F, B], 3, "0123 10 23 10"),  # Two blocks are there still at each turn.
        ([F, F, B, B], 2, "0123 0123 210 3210"),  # In a pipeline two passes go the same way.
        ([F, F, B, B], 4, "0123 03 0 30"),  # What is on its way ahead takes a place.
        ([F, F, B, B], 5, "0123   "),
        ([F, "4567", "7654", B], 2, "0123 4567 654 3210"),  # Two stages of one rank share the room.
    ],
)
def test_gathers_of_passes(passes: list[str], most: int, expected: str) -> None:
    assert " ".join("".join(starts) for starts in gathered(passes, most)) == expected
