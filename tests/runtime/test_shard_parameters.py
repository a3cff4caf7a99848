"""shard_parameters: each rank keeps its part of the first rank's values, in the parameters that it has."""

from __future__ import annotations

import warnings

import pytest
import torch
from ranks import Checks
from small_models import cut
from torch import Tensor, nn

from autotp.distributed.mesh import Mesh, make_mesh
from autotp.runtime.shard_parameters import shard_parameters, was_taken
from autotp.sharding.layout import Layout

checks = Checks()


class Model(nn.Module):
    """A weight that is cut, one that is tied, a bias with a mark, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)
        self.tied = nn.Linear(3, 5)
        self.tied.weight = self.up.weight
        self.up.bias.no_decay = True
        self.register_buffer("scale", torch.rand(4))


def seeded(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def layouts(model: Model, n: int) -> dict[str, Layout]:
    whole = Layout((3,), None)
    return {"up.weight": cut(model.up.weight, 0, n), "down.weight": cut(model.down.weight, 1, n), "down.bias": whole}


def expected(n: int, rank: int) -> dict[str, Tensor]:
    """The parts of the first rank's model."""
    model = seeded(0)
    found = {name: x.detach() for name, x in [*model.named_parameters(), *model.named_buffers()]}
    return found | {
        name: layout.take(found[name], rank) for name, layout in layouts(model, n).items() if layout.dim is not None
    }


@checks.on(2)
@checks.on(3, rare=True)
def shard_parameters_takes_the_first_rank_s_values_in_place(rank: int, n: int) -> None:
    """Parameters stay the same objects, so that an optimizer that knows them stays right; the model is left empty."""
    model, place = seeded(rank), make_mesh()
    before = dict(model.named_parameters())
    found = shard_parameters(model, layouts(model, n), place.rank, place)
    wanted = expected(n, rank)
    assert found.keys() == wanted.keys()
    for name, part in wanted.items():
        assert found[name].equal(part), name
        assert name == "scale" or found[name] is before[name], name
    assert found["up.bias"].no_decay  # type: ignore[attr-defined]
    assert all(x.is_meta for x in [*model.parameters(), *model.buffers()])
    assert model.up.weight is model.tied.weight
    assert model.up.bias.no_decay
    assert was_taken(model) and not was_taken(seeded(0))


@checks.on(2)
def shard_parameters_takes_the_first_rank_s_gradients(rank: int, n: int) -> None:
    """A rank without a gradient gets its part; where the first rank has none, no rank has one."""
    model, place = seeded(rank), make_mesh()
    learns = model.up.weight if rank == 0 else model.down.weight
    learns.grad = torch.arange(15.0).view(learns.shape)
    found = shard_parameters(model, layouts(model, n), place.rank, place)
    whole = torch.arange(15.0).view(5, 3)
    assert found["up.weight"].grad is not None
    assert found["up.weight"].grad.equal(layouts(seeded(0), n)["up.weight"].take(whole, rank))
    assert found["down.weight"].grad is None


@checks.on(2)
def shard_parameters_forgets_graphs_from_before(rank: int, n: int) -> None:
    """A loss of before that is still alive keeps the node that sums the gradient, with the old shape."""
    model, place = seeded(rank), make_mesh()
    kept = (model.up.weight * 2).sum()
    part = shard_parameters(model, layouts(model, n), place.rank, place)["up.weight"]
    (part * 3).sum().backward()
    assert part.grad is not None and part.grad.equal(torch.full_like(part, 3))
    assert kept.requires_grad


@checks.on(2)
def shard_parameters_takes_read_parts_of_wanted_names_only(rank: int, n: int) -> None:
    model, place = seeded(rank), make_mesh()
    read = {"up.weight": torch.full((2 if rank else 3, 3), float(rank))}
    found = shard_parameters(model, layouts(model, n), place.rank, place, read, ["up.weight", "down.bias"])
    assert list(found) == ["up.weight", "down.bias"]
    assert found["up.weight"].equal(read["up.weight"])
    assert all(x.is_meta for x in model.parameters())


@checks.on(2)
def shard_parameters_initialises_models_on_meta_as_whole(rank: int, n: int) -> None:
    """If the first rank's is there, all are initialised as built whole; a later one may be there to save memory."""
    for first in (True, False):
        with torch.device("meta" if rank > 0 or first else "cpu"):
            torch.manual_seed(5)
            model = nn.Sequential(nn.Linear(3, 5))
        torch.manual_seed(5)
        cuts = {"0.weight": cut(model[0].weight, 0, n)}
        place = make_mesh()
        found = shard_parameters(model, cuts, place.rank, place)
        torch.manual_seed(5)
        whole = nn.Linear(3, 5)
        assert found["0.weight"].equal(cuts["0.weight"].take(whole.weight, rank))
        assert found["0.bias"].equal(whole.bias)


@checks.on(2)
def shard_parameters_gives_all_ranks_the_first_s_sparse_buffer(rank: int, n: int) -> None:
    """All have the first rank's, which may have more elements or fewer."""
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr):
        blocks = {"blocksize": (2, 2)} if layout is torch.sparse_bsr else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            made = [m.to_sparse(layout=layout, **blocks) for m in (torch.eye(4, 6).tril(), torch.ones(4, 6).triu())]
        for order in (made, made[::-1]):
            model = nn.Module()
            model.register_buffer("mask", order[rank])
            place = make_mesh()
            found = shard_parameters(model, {}, place.rank, place)["mask"]
            assert found.layout is layout and (layout is not torch.sparse_coo or found.is_coalesced())
            torch.testing.assert_close(found.to_dense(), order[0].to_dense())


def test_shard_parameters_of_one_process_copies() -> None:
    """It keeps copies: the model's own memory is free."""
    model = seeded(0)
    found = shard_parameters(model, {"up.weight": cut(model.up.weight, 0, 1)}, 0, Mesh())
    wanted = seeded(0)
    assert found["up.weight"].equal(wanted.up.weight) and found["scale"].equal(wanted.scale)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
