"""placement_moves: parts that several ranks hold; put together, each element counts once, and so does its gradient."""

from __future__ import annotations

import torch
from cards.graph_lint import graph_lint
from graphs import some

from autotp.ops.placement_moves import apart, chosen, first, place, replaced, take

PIECES = (((0, 2), (4, 5)), ((2, 4), (4, 5)), ((4, 5),))
"""The positions of three ranks: all hold the last one."""
MINE = (((0, 3),), ((0, 2),), ())
"""The positions of each rank's part that no earlier rank holds."""
AT = (((0, 2), (4, 5)), ((2, 4),), ())
"""Where these stand in the whole."""


def test_take_and_place_add_up_to_the_whole() -> None:
    x = some(3, 5, 2)
    parts = [take(x, "tp", 1, PIECES, rank) for rank in range(3)]
    assert [part.shape[1] for part in parts] == [3, 3, 1]
    assert parts[1].equal(x[:, [2, 3, 4]])
    terms = [place(part, "tp", 1, MINE[rank], AT[rank], 5) for rank, part in enumerate(parts)]
    assert sum(terms).equal(x)
    assert not terms[2].any()


def test_chosen_and_replaced_use_no_index_tensor() -> None:
    """An index of Python numbers would be copied to the device, and the host would wait for it."""
    x, ranges = some(3, 5, 2), ((0, 1), (3, 5))
    with graph_lint() as findings:
        values = chosen(x, -2, ranges)
        written = replaced(torch.zeros_like(x), -2, ranges, values)
        placed = place(values, "tp", -2, ((0, 3),), ranges, 5)
    assert values.equal(x[:, [0, 3, 4]])
    expected = x.clone()
    expected[:, 1:3] = 0
    assert written.equal(expected) and placed.equal(expected)
    assert replaced(x, 1, (), values[:, :0]).equal(x)
    assert not findings


def test_first_gives_each_element_its_gradient_once() -> None:
    x = some(3, 5, 2)
    for rank in range(3):
        part = take(x, "tp", 1, PIECES, rank).requires_grad_()
        found = first(part, "tp", 1, MINE[rank])
        assert found.equal(part)
        found.sum().backward()
        expected = torch.zeros_like(part)
        for start, stop in MINE[rank]:
            expected[:, start:stop] = 1
        assert part.grad is not None, "without a gradient, a rank would miss collectives of backward"
        assert part.grad.equal(expected)


def test_first_passes_gradients_of_inner_positions() -> None:
    part = some(3, 6).requires_grad_()
    found = first(part, "tp", 1, ((1, 2), (4, 5)))
    assert found.equal(part)
    found.sum().backward()
    assert part.grad is not None and part.grad[0].tolist() == [0, 1, 0, 0, 1, 0]


def test_first_of_all_positions_is_the_value_itself() -> None:
    x, index = some(3, 5), torch.arange(4)
    assert first(x, "tp", 1, None) is x
    assert first(index, "tp", 0, ()) is index, "integers have no gradient"


def test_apart_is_a_view() -> None:
    x = some(3, 5)
    assert apart(x).equal(x)
    assert apart(x).data_ptr() == x.data_ptr()
