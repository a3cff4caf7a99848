"""head_grids: attention with fewer key/value heads than ranks is cut as evenly as it can be, and is right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Grouped
from torch import Tensor, nn

import autotp


@settings(deadline=None, max_examples=6 if settings.get_current_profile_name() == "default" else 24)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(["separate", "q|k|v", "per-group"]),
    st.sampled_from([2, 3, 4, 8]),
    st.booleans(),
)
def test_grouped_attention_of_any_heads_is_verified(kv: int, group: int, layout: str, tp: int, repeated: bool) -> None:
    model = Grouped(kv, group, layout, repeated=repeated)
    report = autotp.verify(model, tp, example_inputs=torch.randn(2, 5, 12))
    assert report.ok, report


@pytest.mark.parametrize("repeated", [True, False], ids=["repeated", "enable-gqa"])
@pytest.mark.parametrize("layout", ["separate", "q|k|v"])
def test_grouped_attention_has_equal_query_heads_a_rank(layout: str, repeated: bool) -> None:
    """Two key/value heads on eight ranks: each has one of the eight query heads, and shares a key with three others."""
    plan = autotp.explain(Grouped(2, 4, layout, repeated=repeated), 8, example_inputs=torch.randn(2, 5, 12))
    held = {cut.name: cut.layout for cut in plan.cuts}
    assert plan.traffic.forward == {"all-reduce": 1}
    if layout == "separate":
        assert held["q.weight"].lengths() == [4] * 8 and held["k.weight"].lengths() == [4] * 8
        assert held["k.weight"].pieces[:4] == (((0, 4),),) * 4
    else:
        assert held["fused.weight"].lengths() == [12] * 8


def test_dropped_keys_are_never_held_by_several_ranks() -> None:
    """Each holder would draw a mask of its own for what they hold the same of."""
    model = Grouped(2, 4, "separate", dropout=0.5).train()
    plan = autotp.explain(model, 8, example_inputs=torch.randn(2, 5, 12))
    assert not any(cut.layout.repeated for cut in plan.cuts)
    report = autotp.verify(model, 8, example_inputs=torch.randn(2, 5, 12))
    assert report.ok, report


class SharedQueries(nn.Module):
    """The same eight query heads look at two sets of keys and values, of as many heads each as `kv` says."""

    def __init__(self, kv: tuple[int, int], repeated: str) -> None:
        super().__init__()
        self.kv, self.repeated = kv, repeated
        self.q, self.out = nn.Linear(16, 32), nn.Linear(32, 16)
        self.keys = nn.ModuleList([nn.Linear(16, 8 * heads) for heads in kv])

    def forward(self, x: Tensor) -> Tensor:
        q, found = self.q(x).unflatten(-1, (8, 4)).transpose(1, 2), torch.zeros(())
        for heads, keys in zip(self.kv, self.keys, strict=True):
            k, v = self.grown(keys(x).unflatten(-1, (heads, 8)).transpose(1, 2)).split(4, -1)
            found = found + F.scaled_dot_product_attention(q, k, v)
        return self.out(found.transpose(1, 2).flatten(2))

    def grown(self, x: Tensor) -> Tensor:
        """[batch heads seq 8] -> [batch 8 seq 8]"""
        if self.repeated == "interleaved":
            return x.repeat_interleave(8 // x.shape[1], 1)
        return x[:, :, None].expand(-1, -1, 8 // x.shape[1], -1, -1).flatten(1, 2)


@pytest.mark.parametrize("tp", [4, 8])
@pytest.mark.parametrize("kv", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("repeated", ["interleaved", "expanded"])
def test_queries_of_two_attentions_share_one_grid(repeated: str, kv: tuple[int, int], tp: int) -> None:
    """One key/value head, expanded, is cut as the queries are, on both factors of the grid."""
    model = SharedQueries(kv, repeated)
    report = autotp.verify(model, tp, example_inputs=torch.linspace(-1, 1, 160).view(2, 5, 16))
    assert report.ok, report
    held = {cut.name: cut.layout for cut in report.plan.cuts}
    assert held["q.weight"].lengths() == [32 // tp] * tp
