"""call_consistency: what ranks compare of an argument: the values of a tensor, and of what is cut its shape alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import Checks
from small_models import Plain
from torch import Tensor

import autotp
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.distributed.mesh import Mesh
from autotp.runtime.calls.call_consistency import _printed, agree_on_call, compared_part
from autotp.sharding.layout import Layout

checks = Checks()
X = torch.arange(6.0).view(2, 3)
ROWS = torch.linspace(-1, 1, 16).view(2, 8)


def test_call_print_compares_tensors_by_value() -> None:
    assert _printed([X]) == _printed([X.clone()]) == _printed([X.t().contiguous().t()])
    assert len({_printed([x]) for x in (X, X + 1, X.double(), X.view(3, 2), X.t(), X.view(torch.int32))}) == 6
    assert compared_part(X) == ((2, 3), "torch.float32") and _printed([torch.ones(0)]) != _printed([torch.ones(0, 2)])


def test_call_print_takes_zeros_of_either_sign_as_equal() -> None:
    """A key of a padded token is 0 times a cosine: its sign depends on where the kernel found the operands."""
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        zeros = torch.zeros(3, dtype=dtype)
        assert _printed([zeros]) == _printed([-zeros]) != _printed([zeros + 1])
    assert _printed([torch.zeros(3, dtype=torch.float8_e4m3fn)]) != _printed([torch.ones(3, dtype=torch.float8_e4m3fn)])
    assert _printed([torch.zeros(3, dtype=torch.bool)]) != _printed([torch.ones(3, dtype=torch.bool)])


def test_call_print_compares_cut_tensors_by_shape() -> None:
    layout = Layout((4, 3), 0, (((0, 2),), ((2, 4),)))
    first, second = (Sharded(local, layout, Mesh("tp", 2, rank)) for rank, local in enumerate((X, X + 1)))
    assert _printed([first]) == _printed([second]) != _printed([X])


def test_call_print_compares_objects_by_class() -> None:
    """Plain values by value, an object by its class: it has another address on each rank."""
    assert _printed([1]) != _printed([True]) and _printed(["1"]) != _printed([1])
    assert _printed([object()]) == _printed([object()]) != _printed([{}])
    assert _printed([numpy.ones(2)]) == _printed([numpy.ones(2)]) != _printed([numpy.zeros(2)])
    assert _printed([X, None]) != _printed([None, X])


def test_agree_on_call_of_one_rank_needs_no_group() -> None:
    """There is no group to ask."""
    agree_on_call(Mesh(), [X], "train", random=True)


def told(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught if "the same rows" in str(warning.message)]


def trained(rows: Sequence[Tensor]) -> Callable[[], object]:
    """Returns a training of one call for each batch, of a new model on ranks of which two and two are a replica."""
    model = autotp.parallelize(Plain(), 2, example_inputs=ROWS)
    return lambda: [model(x).sum().backward() for x in rows]


@checks.on(4)
def replicas_with_equal_rows_are_told_in_the_second_training_call(rank: int, n: int) -> None:
    """The rank that writes last knows all inputs, so one rank at least is told."""
    warned: list[Any] = [None] * n
    dist.all_gather_object(warned, told(trained([ROWS, ROWS + 1, ROWS, ROWS])))
    text = "all 2 replicas were given the same rows, and each learns from them"
    assert sum(map(len, warned)) in (1, 2) and all(x.startswith(text) for row in warned for x in row), warned
    assert warned[1] == warned[3] == [], "the first ranks of replicas compare"


@checks.on(4)
def replicas_with_other_rows_are_not_told(rank: int, n: int) -> None:
    assert told(trained([ROWS + rank // 2, ROWS])) == told(trained([ROWS, ROWS + rank // 2])) == []
    assert told(trained([ROWS])) == []
    everyone = autotp.parallelize(Plain(), n, example_inputs=ROWS)
    assert told(lambda: [everyone(ROWS).sum().backward() for _ in range(3)]) == []
    model = autotp.parallelize(Plain(), 2, example_inputs=ROWS)
    with torch.no_grad():
        assert told(lambda: [model(ROWS) for _ in range(3)]) == []
    assert told(lambda: [model.eval()(ROWS).sum() for _ in range(3)]) == []


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
