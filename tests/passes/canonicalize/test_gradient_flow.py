"""gradient_flow: whether a gradient may flow from a value to a parameter or an input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import draft, ints, some
from torch._subclasses import FakeTensorMode

from autotp.passes.canonicalize.gradient_flow import _wants_gradient, carries_gradient, with_gradient

aten = torch.ops.aten


def flows(make: Any, plain: tuple[str, ...] = ()) -> bool:
    graph = draft(make, x=some(3, 4), mask=some(3, 4), index=ints(3, 2))
    (found,) = graph.output_node().args[0]  # type: ignore[misc]
    return carries_gradient(found, plain, FakeTensorMode())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda call, x, mask, index: call(aten.exp.default, x), True),
        (lambda call, x, mask, index: call(aten.embedding.default, x, index), True),
        (lambda call, x, mask, index: call(aten.detach.default, x), False),
        (lambda call, x, mask, index: call(aten.gt.Tensor, x, mask), False),
        (lambda call, x, mask, index: call(aten.argmax.default, x), False),
        (lambda call, x, mask, index: call(aten.mul.Tensor, index, 2), False),
        (lambda call, x, mask, index: call(aten.zeros_like.default, x), False),
        (lambda call, x, mask, index: call(aten.mul.Tensor, call(aten.detach.default, x), mask), True),
        (lambda call, x, mask, index: call(aten._to_copy.default, call(aten.gt.Tensor, x, mask)), False),
        (lambda call, x, mask, index: call(aten.cumsum.default, x, 0, dtype=torch.int32), False),
    ],
    ids=["exp", "table", "detach", "comparison", "argmax", "integers", "like", "beside-detach", "cast", "refused"],
)
def test_gradient_flow_follows_each_operator(make: Any, found: bool) -> None:
    assert flows(make) == found


def test_wants_gradient_tries_operands_one_by_one() -> None:
    def joined(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if scale.requires_grad:
            raise RuntimeError("scale has no derivative")
        return x * scale

    assert _wants_gradient(joined, (torch.ones(2), torch.ones(2)), {})
    assert not _wants_gradient(joined, (torch.ones(2), torch.ones(2, dtype=torch.int64)), {})
    with pytest.raises(RuntimeError, match="must match the size"):
        _wants_gradient(joined, (torch.ones(2), torch.ones(3)), {})


def test_gradient_flow_leaves_out_inputs_without_gradient() -> None:
    make = lambda call, x, mask, index: call(aten.mul.Tensor, call(aten.exp.default, x), mask)  # noqa: E731
    assert flows(make, ("x",)), "through the mask"
    assert not flows(make, ("x", "mask"))


def test_with_gradient_leaves_out_detached_and_index_operands() -> None:
    """What is detached, compared or chosen by has no gradient."""

    def make(call: Any, x: Any, y: Any, mask: Any, index: Any) -> Any:
        chosen = call(aten.where.self, call(aten.gt.Scalar, mask, 0), x, call(aten.detach.default, y))
        return call(aten.sum.default, call(aten.mul.Tensor, chosen, 2))

    graph = draft(make, x=some(3, 4), y=some(3, 4), mask=some(3, 4), index=ints(3, 2))
    (found,) = graph.output_node().args[0]  # type: ignore[misc]
    assert with_gradient(found, FakeTensorMode()) == {"x"}  # type: ignore[arg-type]
