"""causal_attention: a mask that says only "no later key" is left out; any other mask stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import canonical
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autotp.passes.canonicalize.causal_attention import causal_attention
from autotp.rules.call import arguments_of

aten = torch.ops.aten


def positions(x: Tensor, more: int = 0) -> Tensor:
    return torch.arange(x.shape[-2]) + more


def below(x: Tensor) -> Tensor:
    return positions(x)[None, :] <= positions(x)[:, None]


class Masked(nn.Module):
    """Attention of x to itself with a mask that `mask` makes."""

    def __init__(self, mask: Any, **given: Any) -> None:
        super().__init__()
        self.mask, self.given = mask, given

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch heads seq features]"""
        return F.scaled_dot_product_attention(x, x, x, self.mask(x), **self.given)


def attention_of(model: nn.Module, x: Tensor) -> tuple[Any, Any]:
    """The mask and `is_causal` of the attention, after the pass; with the numbers of before."""
    before = canonical(model, x)[1]
    after = causal_attention(before)
    (node,) = (n for n in after.nodes if n.target is aten.scaled_dot_product_attention.default)
    given = arguments_of(node)
    return given["attn_mask"], given["is_causal"]


def together(x: Tensor, more: int = 0, step: int = 1, before: int = 1) -> Tensor:
    """Whether two positions are of one sequence, where several are packed: each begins with another step."""
    counted = positions(x, more) if step == 1 else positions(x, more) * step
    at = counted[None].expand(x.shape[0], -1)
    sequence = (torch.diff(at, prepend=at[:, :1] - before, dim=-1) != 1).cumsum(-1)
    rows = torch.arange(x.shape[0])[:, None, None, None]
    queries, keys = positions(x)[None, None, :, None], positions(x)[None, None, None, :]
    return sequence[rows, queries] == sequence[rows, keys]


class Grouped(nn.Module):
    """Causal attention of two heads of keys, each repeated for two query heads. x: [batch seq (4 width)]"""

    def __init__(self, repeated: Any, width: int) -> None:
        super().__init__()
        self.repeated, self.width = repeated, width

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (4, self.width)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, *(self.repeated(y[:, :2]) for y in (x, x + 1)), below(x))


def in_rows(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, 2, s, d).reshape(b, 2 * h, s, d)


def in_turns(x: Tensor) -> Tensor:
    """Another order: the heads 0 1 0 1, which are not those of `enable_gqa`."""
    b, h, s, d = x.shape
    return x[:, None].expand(b, 2, h, s, d).reshape(b, 2 * h, s, d)


@pytest.mark.parametrize(
    ("repeated", "dtype", "width", "heads"),
    [
        (in_rows, torch.bfloat16, 8, 2),
        (in_rows, torch.float16, 256, 2),
        (in_rows, torch.float32, 8, 4),
        (in_rows, torch.bfloat16, 264, 4),
        (in_turns, torch.bfloat16, 8, 4),
    ],
    ids=["bfloat16", "float16", "float32", "too-wide", "in-turns"],
)
def test_keys_are_not_repeated_where_a_kernel_takes_them(repeated: Any, dtype: Any, width: int, heads: int) -> None:
    x = torch.randn(2, 6, 4 * width).to(dtype)
    before = canonical(Grouped(repeated, width), x)[1]
    (node,) = (n for n in causal_attention(before).nodes if n.target is aten.scaled_dot_product_attention.default)
    given = arguments_of(node)
    assert given["is_causal"] and given["enable_gqa"] is (heads == 2)
    assert [given[name].meta["val"].shape[1] for name in ("key", "value")] == [heads, heads]
    values = fx.GraphModule(nn.Module(), causal_attention(before))(x)[0]
    torch.testing.assert_close(values, Grouped(repeated, width)(x), rtol=2e-2, atol=2e-2)


CAUSAL = {
    "one-sequence": lambda x: below(x) & together(x),
    "one-sequence-from-5": lambda x: together(x, 5) & below(x),
    "le": below,
    "ge": lambda x: positions(x)[:, None] >= positions(x)[None],
    "lt": lambda x: positions(x)[None] < positions(x, 1)[:, None],
    "gt": lambda x: positions(x, 1)[:, None] > positions(x)[None],
    "offsets": lambda x: positions(x, 5)[None] <= positions(x, 5)[:, None],
    "expanded": lambda x: below(x)[None, None].expand(x.shape[0], -1, -1, -1),
    "and-true": lambda x: torch.ones((), dtype=torch.bool) & below(x),
    "and-itself": lambda x: below(x) & below(x),
    "tril": lambda x: torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril(),
}
OTHERS = {
    "positions-by-twos": lambda x: below(x) & together(x, step=2),
    "a-gap-before": lambda x: below(x) & together(x, before=2),
    "a-step-from-what-is-not-known": lambda x: (
        below(x) & (torch.diff(positions(x), prepend=torch.zeros(1, dtype=torch.int64)) == 1)[None]
    ),
    "positions-from-the-length-on": lambda x: (
        positions(x)[None] <= torch.arange(2 * x.shape[-2])[x.shape[-2] :][:, None]
    ),
    "packed": lambda x: below(x) & ((positions(x) >= 3)[None] == (positions(x) >= 3)[:, None]),
    "other-numbers": lambda x: below(x) & (positions(x)[None] == positions(x)[:, None]),
    "later-keys": lambda x: positions(x)[None] >= positions(x)[:, None],
    "one-more-key": lambda x: positions(x)[None] <= positions(x, 1)[:, None],
    "itself-not": lambda x: (positions(x)[None] < positions(x)[:, None]) | (positions(x)[None] == 0),
    "window": lambda x: below(x) & (positions(x)[None] > positions(x)[:, None] - 3),
    "padding": lambda x: below(x) & (x[:, :1, None, :, 0] > -9),
    "all": lambda x: torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool),
    "tril-of-another-diagonal": lambda x: torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril(1),
    "one-query-for-all": lambda x: (positions(x)[:1][:, None] <= positions(x)[:, None]).expand(-1, x.shape[-2]),
    "numbers": lambda x: torch.zeros(x.shape[-2], x.shape[-2], dtype=x.dtype).masked_fill(~below(x), -9.0),
    "by-twos": lambda x: (positions(x) * 2)[None] <= positions(x)[:, None],
    "bytes": lambda x: (
        torch.arange(x.shape[-2], dtype=torch.uint8)[None] <= torch.arange(x.shape[-2], dtype=torch.uint8)[:, None]
    ),
    "halves": lambda x: torch.arange(x.shape[-2])[None] // 2 <= torch.arange(x.shape[-2])[:, None] // 2,
}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_left_out(name: str, dropout: float) -> None:
    x = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    assert attention_of(Masked(CAUSAL[name], dropout_p=dropout), x) == (None, True)
    expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.testing.assert_close(Masked(CAUSAL[name])(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_mask_stays(name: str) -> None:
    x = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    mask, causal = attention_of(Masked(OTHERS[name]), x)
    assert mask is not None and causal is False


def test_more_keys_than_queries_keep_their_mask() -> None:
    """torch aligns such a causal attention at the first key, which is also what this mask says, at one length only."""

    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            mask = torch.arange(y.shape[-2])[None] <= torch.arange(x.shape[-2])[:, None]
            return F.scaled_dot_product_attention(x, y, y, mask)

    graph = causal_attention(canonical(Two(), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4))[1])
    (node,) = (n for n in graph.nodes if n.target is aten.scaled_dot_product_attention.default)
    assert node.args[3] is not None


@pytest.mark.parametrize("cache", [True, False])
def test_masks_of_transformers(cache: bool) -> None:
    """Without padding, as on one device; without a cache it asks whether sequences are packed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=24,
        use_cache=cache,
    )  # fmt: skip
    graph = causal_attention(canonical(LlamaForCausalLM(config), torch.randint(24, (2, 5)))[1])
    found = [n for n in graph.nodes if n.target is aten.scaled_dot_product_attention.default]
    assert len(found) == 2 and all(node.args[3:6] == (None, 0.0, True) for node in found)
