"""skeleton: a copy for capture has memory of its own, so that a capture changes nothing of the user's model."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from errors import message
from torch import Tensor, nn

import autotp
from autotp.passes.capture.skeleton import copy_on


class Counting(nn.Module):
    """Writes into tensors that it holds in plain attributes."""

    def __init__(self, own: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.own = nn.Linear(8, 16), nn.Linear(16, 8), own
        self.calls, self.held = torch.zeros(()), {"rows": torch.zeros(3)}

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        self.calls += 1
        self.held["rows"][0] += 2
        y = self.down(self.up(x).relu())
        return self.own(self, y) if labels is None else (self.own(self, y).mean(), y)


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(lambda self, y: y, id="plain"),
        pytest.param(lambda self, y: y * 2 if y.sum() > 0 else y, id="branch"),
        pytest.param(lambda self, y: y if self.calls > 0 else -y, id="read"),
        pytest.param(lambda self, y: y[:, : int(y.sum())], id="refused"),
        pytest.param(lambda self, y: self.down(y), id="fails"),
    ],
)
@pytest.mark.parametrize("given", [torch.ones(3, 8), None], ids=["given", "found"])
def test_capture_leaves_the_user_s_tensors_unchanged(own: Callable[[Any, Tensor], Tensor], given: Any) -> None:
    """Whether it ends well or not: the first call finds what the user set."""
    model = Counting(own)
    calls, rows = model.calls, model.held["rows"]
    for look in (autotp.explain, autotp.verify):
        with suppress(autotp.Error), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`labels` is left out")
            look(model, 2, example_inputs=given)
        assert model.calls is calls
        assert model.held["rows"] is rows
        assert (float(calls), rows.tolist()) == (0.0, [0.0, 0.0, 0.0])
        assert (calls._version, rows._version) == (0, 0)


def test_copy_on_keeps_shared_memory_shared() -> None:
    model: Any = nn.Module()
    model.whole = torch.arange(6.0).view(2, 3)
    model.row = model.whole[1]
    originals: dict[int, Tensor] = {}
    copy: Any = copy_on(model, "meta", originals)
    copy.row.zero_()
    assert copy.whole.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert model.whole.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert originals[id(copy.row)] is model.row


class Slotted(nn.Linear):
    __slots__ = ("scale",)


@dataclass
class Unhashed(nn.Module):
    width: int

    def __post_init__(self) -> None:
        super().__init__()


class Number(int, nn.Module):
    """A module and a number."""


class Raised(nn.Module, ValueError):
    """A module that can be raised."""


REFUSED = {
    "slots": (
        Slotted(4, 4),
        "has `scale` in __slots__, which torch does not copy\n  try      a class without __slots__",
    ),
    "dataclass": (
        Unhashed(4),
        "cannot be hashed, so that torch does not list its parameters\n"
        "  try      `__hash__ = torch.nn.Module.__hash__` in its class, or `@dataclass(eq=False)`",
    ),
    "number": (
        Number(),
        "derives from int, too: it has contents that are no attributes\n"
        "  try      a module with an attribute that holds the int",
    ),
    "exception": (
        Raised(),
        "derives from BaseException, too: it has contents that are no attributes\n"
        "  try      a module with an attribute that holds the BaseException",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_modules_that_hold_more_than_attributes_are_refused(kind: str) -> None:
    """Before parallelize, and when it is put into a parallel model."""
    one, text = REFUSED[kind]
    whole = nn.Sequential(nn.Linear(4, 4), nn.Sequential(one))
    with pytest.raises(autotp.Error) as error:
        autotp.explain(whole, 2, example_inputs=torch.ones(2, 4))
    assert str(error.value) == f"explain(Sequential, tp=2): `1.0`, a {type(one).__name__}, {text}"
    with pytest.raises(autotp.Error) as error:
        autotp.verify(one, 2, example_inputs=torch.ones(2, 4))
    assert str(error.value) == f"verify({type(one).__name__}, tp=2): the {type(one).__name__} {text}"
    parallel = autotp.parallelize(nn.Sequential(nn.Linear(4, 4)), 1, example_inputs=torch.ones(2, 4))
    parallel.add_module("new", one)
    assert message(lambda: parallel(torch.ones(2, 4))).endswith(f"`new`, a {type(one).__name__}, {text}")


class Sparse(nn.Module):
    """Has a buffer that is not dense, and may read it. x: [rows, 4]"""

    def __init__(self, buffer: Tensor, reads: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down, self.reads = nn.Linear(4, 8), nn.Linear(8, 4), reads
        self.register_buffer("heads", buffer)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y if self.reads is None else y + self.reads(self.heads, x)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
@pytest.mark.parametrize("reads", [None, lambda heads, x: heads.to_dense()[:3]])
def test_sparse_buffers_stay_sparse(layout: torch.layout, reads: Any) -> None:
    blocks = {"blocksize": (2, 2)} if layout is torch.sparse_bsr else {}
    model = Sparse(torch.eye(4).to_sparse(layout=layout, **blocks), reads)
    x = torch.randn(3, 4)
    expected = model(x)
    assert autotp.verify(model, 2, example_inputs=x).ok
    parallel = autotp.parallelize(model, 1, example_inputs=x)
    torch.testing.assert_close(parallel(x), expected)
    assert parallel.heads.layout is layout and parallel.heads.to_dense().equal(torch.eye(4))
    with pytest.raises(autotp.Error, match=r"`heads` in the model's state_dict\(\) is not a dense parameter or buffer"):
        autotp.full_state_dict(parallel)


@pytest.mark.parametrize(
    "product", [lambda heads, x: torch.sparse.mm(heads, x.mT).mT, lambda heads, x: (heads @ x.mT).mT]
)
def test_products_of_sparse_buffers_are_refused(product: Any) -> None:
    model = Sparse(torch.eye(4).to_sparse(), product)
    with pytest.raises(autotp.Error, match="forward computes with a sparse tensor, as `heads` is one"):
        autotp.parallelize(model, 1, example_inputs=torch.randn(3, 4))


class SparseWeight(Sparse):
    def __init__(self) -> None:
        super().__init__(torch.ones(1))
        self.weight = nn.Parameter(torch.eye(4).to_sparse())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Sparse(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), "`heads` is a nested tensor"),
        (lambda: Sparse(torch.ones(4, 4).to_mkldnn()), "`heads` is a mkldnn tensor"),
        (SparseWeight, "`weight` is a sparse_coo tensor"),
    ],
)
def test_nested_mkldnn_and_sparse_parameters_are_refused(make: Callable[[], nn.Module], told: str) -> None:
    with pytest.raises(autotp.Error, match=told):
        autotp.parallelize(make(), 1, example_inputs=torch.randn(3, 4))


def with_default(layer: nn.Linear, low: nn.Module) -> Any:
    def forward(x: Tensor, old: Any = layer.forward, low: nn.Module = low) -> Tensor:
        return old(x) + low(x)

    return forward


def with_keyword(layer: nn.Linear, low: nn.Module) -> Any:
    def forward(x: Tensor, *, parts: Any = (layer.forward, {"low": low})) -> Tensor:
        return parts[0](x) + parts[1]["low"](x)  # type: ignore[no-any-return]

    return forward


def with_closure(layer: nn.Linear, low: nn.Module) -> Any:
    old = layer.forward
    return lambda x: old(x) + low(x)


def with_method(layer: nn.Linear, low: nn.Module) -> Any:
    old = layer.forward
    return types.MethodType(lambda self, x, low=low: old(x) + low(x), layer)


def with_partial(layer: nn.Linear, low: nn.Module) -> Any:
    return functools.partial(lambda old, low, x: old(x) + low(x), layer.forward, low)


@pytest.mark.parametrize("make", [with_default, with_keyword, with_closure, with_method, with_partial])
def test_a_replaced_forward_that_holds_a_submodule_learns(make: Callable[[nn.Linear, nn.Module], Any]) -> None:
    """LoRA that is put into a layer so. What it learns is the same as on one device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    layer: Any = model[0]
    layer.lora = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 8, bias=False))
    layer.forward = make(layer, layer.lora)
    report = autotp.verify(model, 2, example_inputs=torch.randn(3, 4))
    assert report.ok, report
    assert any("lora" in row.name for row in report.gradients)
