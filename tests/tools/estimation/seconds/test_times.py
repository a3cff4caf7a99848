"""times: pieces one after the other, whose last sums run beside the first turn of the next piece."""

import pytest

from autotp.tools.estimation.seconds.times import SUMS, Times, Turns


def piece(ahead: Turns, back: Turns) -> Times:
    return Times(forward=10.0, backward=20.0, spent={SUMS: ahead.last + back.last}, turns=(ahead, back))


def test_a_last_sum_runs_beside_the_first_turn_of_the_next_piece() -> None:
    """In backward the pieces come in reverse order."""
    a = piece(Turns(first=1.0, last=2.0), Turns(first=3.0, last=4.0))
    b = piece(Turns(first=0.5, last=7.0), Turns(first=6.0, last=8.0))
    both = Times() + a + b
    assert both.forward == 20 - 0.5 and both.backward == 40 - 3.0
    assert both.spent[SUMS] == pytest.approx(2 + 4 + 7 + 8 - 0.5 - 3.0)
    assert (both + a).forward == 30 - 0.5 - 1.0 and (both + a).backward == 60 - 3.0 - 4.0


def test_pieces_without_turns_add_up() -> None:
    one = Times(forward=1.0, backward=2.0, spent={"products": 3.0})
    both = one + one
    assert (both.forward, both.backward, both.spent) == (2.0, 4.0, {"products": 6.0})
