"""eager_mode: what is plain eager mode, and what is not; regions without the modes around them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import some
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.ops.eager_mode import (
    alone,
    apply_plain,
    is_bare,
    is_kept,
    is_last_backward,
    is_observed,
    is_plain,
    uncollected,
)


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        LAST.append(is_last_backward())
        return gradient * 2


LAST: list[bool] = []


def asked(call: Callable[[Callable[[Tensor], Tensor]], Any]) -> bool:
    """What `is_plain` says within a call of a function."""
    said: list[bool] = []

    def ask(x: Tensor) -> Tensor:
        said.append(is_plain(x))
        return x.sum()

    call(ask)
    return said[0]


def test_is_plain_only_outside_transforms() -> None:
    x = some(3)
    assert asked(lambda ask: ask(x))
    assert not asked(lambda ask: vmap(ask)(x))
    assert not asked(lambda ask: grad(ask)(x))
    with forward_ad.dual_level():
        assert not is_plain(x)


def test_is_bare_only_where_plain_and_unobserved() -> None:
    x, seen = some(2), list[bool]()

    def noted(y: Tensor) -> Tensor:
        seen.append(is_bare(y))
        return y * 2

    assert is_bare(x) and not is_bare(torch.nn.Parameter(x))
    for run in (grad(lambda y: noted(y).sum()), vmap(noted)):
        run(x)
    with forward_ad.dual_level():
        noted(x)
    for mode in (TorchDispatchMode(), TorchFunctionMode()):
        with mode:
            seen.append(is_bare(x))
    assert seen == [False] * 5
    with torch.device("cpu"):  # A mode that keeps no tensor.
        assert is_bare(x)


def test_is_kept_where_a_mode_may_keep_tensors() -> None:
    """A mode may keep what it sees; torch's default device, and modes that say so, keep nothing."""

    class Keeps(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Forgets(Keeps):
        keeps_no_tensor = True

    class Follows(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    x = some(3)
    assert not is_kept(x) and not is_observed(x)
    for mode, observed, kept in (
        (Keeps(), True, True), (Forgets(), True, False), (Follows(), True, True), (torch.device("cpu"), False, False),
    ):  # fmt: skip
        with mode:
            assert (is_observed(x), is_kept(x)) == (observed, kept)


@pytest.mark.parametrize("transformed", [False, True])
def test_apply_plain_has_the_gradient_with_and_without_transforms(transformed: bool) -> None:
    x = some(3).requires_grad_()
    call = lambda x: apply_plain(Doubled, x).sum()  # noqa: E731
    found = grad(call)(x) if transformed else torch.autograd.grad(call(x), x)[0]
    assert found.equal(torch.full_like(x, 2))


@pytest.mark.parametrize(
    ("more", "last"), [({}, True), ({"retain_graph": True}, False), ({"create_graph": True}, False)]
)
def test_last_backward_is_false_where_backward_may_repeat(more: dict[str, bool], last: bool) -> None:
    """Memory may be overwritten only if nobody runs backward again, or differentiates it."""
    LAST.clear()
    x = some(3).requires_grad_()
    torch.autograd.grad(Doubled.apply(x).sum(), x, **more)
    assert [last] == LAST


def test_alone_suspends_saved_tensor_hooks_and_no_grad() -> None:
    packed: list[Tensor] = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        with alone():
            x = some(3).requires_grad_()
            x.exp()
            assert torch.is_grad_enabled()
            assert not packed
        assert not torch.is_grad_enabled()
        with torch.enable_grad():
            some(3).requires_grad_().exp()
        assert packed, "the hooks are back"


def test_uncollected_restores_garbage_collection_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), uncollected():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
