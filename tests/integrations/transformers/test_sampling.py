"""sampling: choosing from scores that are cut by vocabulary: what one device chooses, without a whole row."""

from typing import Any

import pytest
import torch
from ranks import Checks, Collectives
from torch import Tensor

import autotp
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.distributed.mesh import Mesh, make_mesh
from autotp.integrations.transformers.sampling import CutScores, FewScores
from autotp.sharding.layout import Layout
from autotp.sharding.partition import chunk_bounds

checks = Checks()
NOTHING, NAN = float("-inf"), float("nan")
WIDTH = 5  # on four ranks 2, 2, 1 and none


def cut(whole: Tensor, mesh: Mesh) -> tuple[CutScores, Sharded]:
    """This rank's columns of whole: [batch vocab]"""
    bounds = [chunk_bounds(whole.shape[1], mesh.size, rank) for rank in range(mesh.size)]
    layout = Layout(tuple(whole.shape), 1, tuple(((a, b),) if b > a else () for a, b in bounds))
    logits = Sharded(layout.take(whole, mesh.rank), layout, mesh)
    return CutScores.of(logits), logits


def rows(batch: int = 400, width: int = WIDTH) -> Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(0))


@checks.on(2, 4)
def best(rank: int, n: int) -> None:
    """Of equals the first; one that is undefined is larger than all."""
    mesh = make_mesh(n)
    special = torch.tensor(
        [[1, 3, 3, 2, 3], [2, 2, 2, 2, 2], [0, 9, NAN, 3, 9], [NOTHING] * 5, [0, 1, 2, 3, 4]], dtype=torch.float32
    )
    for whole in (special, rows(), special.double(), special.bfloat16()):
        scores, _ = cut(whole, mesh)
        with Collectives() as sent:
            found = torch.argmax(scores, dim=-1)  # type: ignore[call-overload]
        assert torch.equal(found, whole.argmax(-1))
        assert sent.counts == {"all-gather-into-tensor": 1}


@checks.on(2, 4)
def drawn(rank: int, n: int) -> None:
    """The tokens that torch.multinomial draws from the same random state, which ends as it would have."""
    scores, _ = cut(rows(), make_mesh(n))
    torch.manual_seed(3)
    found = torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1)  # type: ignore[arg-type]
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(found, torch.multinomial(rows().softmax(-1), 1))
    assert torch.equal(state, torch.get_rng_state())


@checks.on(2, 4)
def top(rank: int, n: int) -> None:
    """Those no less than the k-th, equals of it too, whatever rank has them; else nobody says a thing."""
    mesh, whole = make_mesh(n), rows()
    scores, logits = cut(whole, mesh)
    assert torch.equal(scores.whole(logits), whole)
    for k in (1, 2, 4, 5, 9):
        with Collectives() as sent:
            few = scores.top(k)
        assert few is not None and sent.counts == {"all-gather-into-tensor": 1}
        kept = whole.masked_fill(whole < whole.topk(min(k, WIDTH)).values[:, -1:], NOTHING)
        assert torch.equal(few.whole(), kept)
        assert torch.equal(torch.argmax(few, dim=-1), whole.argmax(-1))  # type: ignore[call-overload]
        torch.manual_seed(5)
        found = few.drawn()
        torch.manual_seed(5)
        assert torch.equal(found, torch.multinomial(kept.softmax(-1), 1).squeeze(1))
    assert cut(torch.tensor([[1.0, 1, 1, 0, 0]]), mesh)[0].top(1) is None
    across = cut(torch.tensor([[2.0, 0, 0, 1, 1]]), mesh)[0].top(2)
    assert across is not None and across.whole().tolist() == [[2, NOTHING, NOTHING, 1, 1]]
    for_sure, _ = cut(torch.tensor([[NOTHING, NOTHING, 1, NOTHING, NOTHING]]), mesh)
    assert isinstance(for_sure.top(2), FewScores)


@checks.on(2)
def nothing_else(rank: int, n: int) -> None:
    scores, _ = cut(rows(), make_mesh(n))
    with pytest.raises(autotp.Error, match="sort of scores that are cut by vocabulary"):
        torch.sort(scores)  # type: ignore[call-overload]


def test_penalties_and_additions_find_their_columns() -> None:
    whole = rows(3)
    for rank in range(4):
        scores, logits = cut(whole, Mesh(size=4, rank=rank))
        which = whole > 0.5
        take: Any = lambda full, held=logits.held, rank=rank: held.take(full, rank)  # noqa: E731
        lower = torch.where(which, torch.where(whole < 0, whole * 2, whole / 2), whole)
        assert torch.equal(scores.scaled(which, 2.0).values, take(lower))
        assert torch.equal(scores.added(whole).values, take(whole + whole))
        assert torch.equal(scores.forced(lower).values, take(lower))
    few = FewScores(torch.tensor([[1.0, 2.0, NOTHING]]), torch.tensor([[1, 3, 5]]), 5)
    assert few.added(torch.arange(5.0)[None]).whole().tolist() == [[NOTHING, 2, NOTHING, 5, NOTHING]]
    assert few.forced(whole[:1]) is not None and torch.equal(few.forced(whole[:1]), whole[:1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
