"""moves: boxes of several dtypes reach their places, in one collective for each dtype."""

from __future__ import annotations

import pytest
import torch
from ranks import Checks, Collectives

from autotp.distributed.mesh import make_mesh
from autotp.runtime.optim.moves import exchange
from autotp.runtime.optim.owners import Move

checks = Checks()
DTYPES = {"a": torch.float64, "b": torch.bfloat16, "c": torch.float64}


@checks.on(2, 3)
def boxes_reach_their_places(rank: int, n: int) -> None:
    """Each rank gives the next one a row and a column, itself a row, and nothing to others."""
    mesh = make_mesh(n)
    sources = {name: (torch.arange(20.0).view(4, 5) + 100 * rank).to(dtype) for name, dtype in DTYPES.items()}
    targets = {name: torch.full((4, 5), -1.0).to(dtype) for name, dtype in DTYPES.items()}
    moves = []
    for source in range(n):
        after = (source + 1) % n
        moves += [
            Move("a", source, after, (1, 0), (1, 5)), Move("b", source, after, (0, 2), (4, 1)),
            Move("c", source, source, (3, 0), (1, 5)), Move("a", source, after, (3, 3), (1, 1)),
        ]  # fmt: skip
    mine = [move for move in moves if rank in (move.source, move.target)]

    def of(tensors: dict[str, torch.Tensor]):  # type: ignore[no-untyped-def]
        return lambda move: tensors[move.name][
            tuple(slice(at, at + size) for at, size in zip(move.start, move.sizes, strict=True))
        ]

    with Collectives() as seen:
        exchange(mine, [torch.bfloat16, torch.float64], mesh, of(sources), of(targets))
    assert seen.counts == {"all-to-all-single": 2}
    before = 100 * ((rank - 1) % n)
    expected = {name: torch.full((4, 5), -1.0).to(dtype) for name, dtype in DTYPES.items()}
    theirs = {name: (torch.arange(20.0).view(4, 5) + before).to(dtype) for name, dtype in DTYPES.items()}
    expected["a"][1], expected["a"][3, 3], expected["b"][:, 2] = theirs["a"][1], theirs["a"][3, 3], theirs["b"][:, 2]
    expected["c"][3] = sources["c"][3]
    assert all(torch.equal(targets[name], x) for name, x in expected.items())


@checks.on(2)
def without_boxes_all_ranks_communicate(rank: int, n: int) -> None:
    mesh = make_mesh(n)
    with Collectives() as seen:
        exchange([], [torch.float32], mesh, lambda _: torch.ones(()), lambda _: torch.ones(()))
    assert seen.counts == {"all-to-all-single": 1}


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
