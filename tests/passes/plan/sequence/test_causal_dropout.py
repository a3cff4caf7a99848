"""Causal attention with dropout over cp: each rank drops weights of its own, by a kernel that takes no mask."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import Checks
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autotp
from autotp.compiler import analyse
from autotp.diagnostics.verify import compare_calls
from autotp.ops.attention.products import attention_weights
from autotp.ops.attention.zigzag import pieces, zigzag
from autotp.ops.dropout import exact_attention, fast_causal_rows, fast_zigzag_rows
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.program import sequences
from autotp.sharding.partition import chunk_bounds

checks = Checks()
NEVER = 1e-14
"""A probability of dropout that drops nothing, though the operators with dropout run."""


class Attends(nn.Module):
    """Causal attention with dropout of 4 heads, which read `groups` heads of keys. x: [batch seq 12]"""

    def __init__(self, dropout: float = NEVER, groups: int = 4) -> None:
        super().__init__()
        self.dropout, self.sizes = dropout, (12, 3 * groups, 3 * groups)
        self.qkv, self.out = nn.Linear(12, sum(self.sizes)), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 3)).transpose(1, 2) for part in self.qkv(x).split(self.sizes, -1))
        settings: dict[str, Any] = {"is_causal": True, "dropout_p": self.dropout, "enable_gqa": self.sizes[1] != 12}
        return x + self.out(F.scaled_dot_product_attention(q, k, v, **settings).transpose(1, 2).flatten(2))


def inputs(length: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, length, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(length))


@checks.on(2, 4)
def ranks_equal_one_device_where_nothing_is_dropped(rank: int, n: int) -> None:
    """Steps of several lengths, with parts that are empty: outputs and gradients. With and without equal work."""
    layouts = [{"tp": 1, "cp": n}, {"tp": 1, "cp": n, "without": ("balance",)}, {"tp": n // 2, "cp": 2}]
    for groups in (4, 2):
        torch.manual_seed(groups)
        plain = nn.Sequential(Attends(groups=groups), Attends(groups=groups)).double()
        for layout in layouts:
            parallel: Any = autotp.parallelize(
                copy.deepcopy(plain), cp_attention="gather", example_inputs=inputs(8), **layout
            )
            for length in (8, 13, 3):
                outputs = [model(inputs(length)) for model in (plain, parallel)]
                torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-10, atol=1e-10)
                for output in outputs:
                    output.square().sum().backward()
                for p, q in zip(plain.parameters(), parallel.parameters(), strict=True):
                    torch.testing.assert_close(autotp.gather(q.grad), p.grad, rtol=1e-10, atol=1e-10)
                plain.zero_grad()
                parallel.zero_grad()


@pytest.mark.parametrize("without", [(), ("balance",)], ids=["zigzag", "in order"])
@pytest.mark.parametrize(("tp", "cp"), [(1, 3), (2, 2)])
def test_exact_masks_are_those_of_one_device(tp: int, cp: int, without: tuple[str, ...]) -> None:
    """`verify` draws the masks of one device: a part of the queries knows its positions by its cuts."""
    options = Options(cp=cp, cp_attention="gather", without=without)
    report = compare_calls(Attends(0.4, 2).double(), ((inputs(7),), {}), tp, options)
    assert report.ok and report.worst.error < 1e-12, report


def graph_of(cp: int = 2, tp: int = 1, **settings: Any) -> fx.Graph:
    return analyse(skeleton_of(Attends(0.1).double()), (inputs(8),), {}, tp, Options(cp=cp, **settings)).graph


def test_no_mask_is_in_the_graph() -> None:
    """The random streams of ranks are counted over both axes by `lower`."""
    for settings, form in (({}, fast_zigzag_rows), ({"without": ("balance",)}, fast_causal_rows)):
        graph = graph_of(cp_attention="gather", **settings)
        assert len(list(graph.find_nodes(op="call_function", target=form))) == 1
        assert not [node for node in graph.nodes if getattr(node.meta.get("val"), "dtype", None) == torch.bool]
    exact = graph_of(cp_attention="gather", randomness="exact")
    assert list(exact.find_nodes(op="call_function", target=exact_attention))


def kept_weights(rank: int, form: Any, start: int, stop: int, *where: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The weights that a form keeps, what they would be without dropout, and the sums that its backward keeps."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    v = torch.eye(8, dtype=torch.float64).expand(2, 3, 8, 8).clone().requires_grad_()
    torch.manual_seed(5)
    queries = zigzag(q, 2, 2) if form is fast_zigzag_rows else q
    output = form(queries[:, :, start:stop], k, v, *where, None, False, 0.5, rank)
    (grad,) = torch.autograd.grad(output.sum(), v)
    whole = attention_weights(q, k, v, None, True, None, False)[0]
    expected = (zigzag(whole, 2, 2) if form is fast_zigzag_rows else whole)[:, :, start:stop]
    return output.detach(), expected, grad[..., 0]


@pytest.mark.parametrize("form", [fast_causal_rows, fast_zigzag_rows])
def test_a_rank_drops_weights_of_its_own(form: Any) -> None:
    """Those of no later key, the same in backward, others on each rank."""
    masks = []
    for rank in (0, 1):
        start, stop = chunk_bounds(8, 2, rank)
        where = (2, rank) if form is fast_zigzag_rows else (start,)
        kept, expected, sums = kept_weights(rank, form, start, stop, *where)
        left = kept != 0
        torch.testing.assert_close(kept[left], 2 * expected[left])
        assert 0.3 < float(left.sum() / (expected != 0).sum()) < 0.7 and not (left & (expected == 0)).any()
        torch.testing.assert_close(sums, kept.sum(-2))
        masks.append(left[..., -1, :4])
    assert not torch.equal(*masks)
    assert [sum(b - a for a, b in pieces(8, 2, rank)) for rank in (0, 1)] == [4, 4]


FAULTS = {"position": 3, "probability": 6, "stream": 7}


@pytest.mark.parametrize("name", FAULTS)
def test_check_refuses_another_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lower, changed = sequences.lower, list[bool]()

    def lowered(*arguments: Any) -> fx.Graph:
        graph = lower(*arguments)
        for node in graph.find_nodes(op="call_function", target=fast_causal_rows):
            node.update_arg(FAULTS[name], 1)
            changed.append(True)
        return graph

    monkeypatch.setattr(sequences, "lower", lowered)
    with pytest.raises(autotp.Error):
        graph_of(cp_attention="gather", without=("balance",))
    assert changed


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
