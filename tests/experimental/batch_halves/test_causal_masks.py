"""causal_masks: causal attention with dropout reads a mask that has the positions of its queries and keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import canonical, draft, expect_same, lines, ops, some
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autotp.experimental.batch_halves.causal_masks import causal_masks

aten = torch.ops.aten


def causal(call: Any, *given: fx.Node) -> fx.Node:
    return call(aten.scaled_dot_product_attention.default, *given, None, 0.5, True, scale=0.5)  # type: ignore[no-any-return]


def test_causal_masks_compare_positions() -> None:
    given = {"q": some(2, 2, 5, 4), "k": some(2, 2, 5, 4) / 2, "v": some(2, 2, 5, 4) / 3}
    before = draft(lambda call, q, k, v: causal(call, q, k, v), **given)
    after = causal_masks(before)
    expect_same(before, after, list(given.values()))
    assert lines(after)[-3:] == [
        "le(arange_1, unsqueeze)",
        "scaled_dot_product_attention(q, k, v, le, 0.5, False, scale=0.5, enable_gqa=False)",
        "return scaled_dot_product_attention",
    ]


def test_causal_masks_of_more_keys_begin_at_one_position() -> None:
    """torch aligns a causal mask that is not square at the first query and the first key."""
    given = {"q": some(1, 2, 3, 4), "k": some(1, 2, 7, 4) / 2, "v": some(1, 2, 7, 4) / 3}
    before = draft(lambda call, q, k, v: causal(call, q, k, v), **given)
    expect_same(before, causal_masks(before), list(given.values()))


def test_causal_masks_are_shared_by_attentions_of_equal_lengths() -> None:
    def three(call: Any, q: fx.Node, k: fx.Node, v: fx.Node, short: fx.Node) -> tuple[fx.Node, ...]:
        return causal(call, q, k, v), causal(call, q, v, k), causal(call, short, k, v)

    given = {"q": some(1, 2, 5, 4), "k": some(1, 2, 5, 4) / 2, "v": some(1, 2, 5, 4) / 3, "short": some(1, 2, 2, 4)}
    before = draft(three, **given)
    after = causal_masks(before)
    expect_same(before, after, list(given.values()))
    assert ops(after).count("le") == 2


class Attends(nn.Module):
    """Causal attention of a sequence of any length."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch heads seq features]"""
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_causal_masks_take_the_length_of_the_call(length: int) -> None:
    _, graph = canonical(Attends(), some(2, 2, 5, 4))
    after = causal_masks(graph)
    x = some(2, 2, length, 4)
    sizes = [x if isinstance(n.meta["val"], Tensor) else length for n in after.nodes if n.op == "placeholder"]
    torch.manual_seed(0)
    (found,) = fx.Interpreter(nn.Module(), graph=after).run(*sizes)
    torch.manual_seed(0)
    torch.testing.assert_close(found, Attends()(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", [(None, 0.0, False), (None, 0.0, True), (None, 0.5, False)], ids=str)
def test_causal_masks_leave_other_attention(how: tuple[Any, ...]) -> None:
    """Without dropout a part of the queries has a parallel form."""
    given = {"q": some(1, 2, 5, 4)}
    before = draft(lambda call, q: call(aten.scaled_dot_product_attention.default, q, q, q, *how), **given)
    assert lines(causal_masks(before)) == lines(before)
