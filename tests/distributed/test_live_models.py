"""live_models: hooks are there from the first parallel model to the last; a tensor is found in its model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autotp.distributed import live_models
from autotp.distributed.live_models import models, sorted_by_model, watch_instead, watch_model


@pytest.fixture(autouse=True)
def nothing_else() -> Iterator[None]:
    """No models of other tests are watched."""
    gc.collect()
    before = live_models._models, live_models._undo
    live_models._models, live_models._undo = type(before[0])(), []
    yield
    live_models._models, live_models._undo = before


def test_hooks_live_as_long_as_any_model() -> None:
    said: list[str] = []

    def install() -> Callable[[], None]:
        said.append("in")
        return lambda: said.append("out")

    first = watch_model(nn.Linear(2, 2), [install])
    second = watch_model(nn.Linear(2, 2), [install])
    assert models() == [first, second]
    del first
    gc.collect()
    assert said == ["in"]
    del second
    gc.collect()
    assert said == ["in", "out"]
    third = watch_model(nn.Linear(2, 2), [install])
    assert models() == [third] and said == ["in", "out", "in"]


def test_a_model_of_a_destroyed_world_is_not_live(tmp_path: Path) -> None:
    """Python frees it with its next search for cycles, which may be in the middle of the next world."""
    alone = watch_model(nn.Linear(2, 2))
    for name in ("first", "second"):
        dist.init_process_group("gloo", init_method=(tmp_path / name).as_uri(), rank=0, world_size=1)
        model = watch_model(nn.Linear(2, 2))
        assert models() == [alone, model]
        dist.destroy_process_group()
        assert models() == [alone]


def test_a_model_around_another_takes_its_place() -> None:
    said: list[str] = []
    one, two = watch_model(nn.Linear(2, 2), [lambda: lambda: said.append("out")]), watch_model(nn.Linear(2, 2))
    around = watch_instead(nn.Sequential(one), one)
    assert models() == [around, two]
    assert list(sorted_by_model([one.weight])[0]) == [around]
    del two
    gc.collect()
    assert models() == [around] and not said
    del around
    gc.collect()
    assert said == ["out"]


def test_tensors_are_sorted_by_their_models() -> None:
    """In the order of the models, which is the same on all ranks; gradients count, and other tensors are left."""
    one, two, other = watch_model(nn.Linear(2, 3)), watch_model(nn.Linear(3, 2)), torch.ones(3)
    two(torch.ones(1, 3)).sum().backward()
    assert two.weight.grad is not None
    found, left = sorted_by_model([two.weight.grad, other, one.bias, two.bias])
    assert list(found) == [one, two]
    assert found[one] == {"bias": one.bias}
    assert {name: id(x) for name, x in found[two].items()} == {"weight": id(two.weight.grad), "bias": id(two.bias)}
    assert left == [other]


def test_a_shared_tensor_is_the_older_models() -> None:
    one, two = watch_model(nn.Linear(2, 2)), nn.Linear(2, 2)
    two.weight = one.weight
    watch_model(two)
    found, _ = sorted_by_model([one.weight, two.bias])
    assert {model: list(names) for model, names in found.items()} == {one: ["weight"], two: ["bias"]}


@dataclass
class Numbered(nn.Module):
    """A dataclass without a hash: torch cannot list the parameters of a model that holds it."""

    number: int

    def __post_init__(self) -> None:
        super().__init__()


def test_a_model_that_torch_cannot_list_stops_no_other() -> None:
    odd, other = (
        watch_model(nn.Sequential(nn.Linear(2, 2))),
        watch_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))),
    )
    odd.add_module("new", Numbered(1))
    with pytest.raises(TypeError):
        list(odd.named_parameters())
    found, left = sorted_by_model([*other.parameters(), odd[0].bias])
    assert {model: list(names) for model, names in found.items()} == {
        odd: ["0.bias"],
        other: [name for name, _ in other.named_parameters()],
    }
    assert not left
