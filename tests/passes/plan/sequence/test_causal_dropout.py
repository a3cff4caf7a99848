"""Causal attention with dropout over cp: each rank drops weights of its own, by a kernel that takes no mask."""

from __future__ import annotations

import copy
from typing import Any

import kernel_packages  # noqa: F401
import pytest
import torch
from errors import message
from kernel_packages import flash_attn
from ranks import Checks
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autotp
from autotp.compiler import analyse
from autotp.diagnostics.verify import compare_calls
from autotp.integrations.attention_kernels import kernel_operator
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
    """Causal attention with dropout of 4 heads, which read `groups` heads of keys. x: [batch seq 12]

    With a `window` it is flash-attn's: -1 for all earlier keys.
    """

    def __init__(self, dropout: float = NEVER, groups: int = 4, window: int | None = None) -> None:
        super().__init__()
        self.dropout, self.sizes, self.window = dropout, (12, 3 * groups, 3 * groups), window
        self.qkv, self.out = nn.Linear(12, sum(self.sizes)), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 3)) for part in self.qkv(x).split(self.sizes, -1))
        if self.window is not None:
            attended = flash_attn.flash_attn_func(q, k, v, self.dropout, causal=True, window_size=(self.window, 0))
            return x + self.out(attended.flatten(2))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        settings: dict[str, Any] = {"is_causal": True, "dropout_p": self.dropout, "enable_gqa": self.sizes[1] != 12}
        return x + self.out(F.scaled_dot_product_attention(q, k, v, **settings).transpose(1, 2).flatten(2))


MODELS: dict[str, dict[str, Any]] = {
    "sdpa": {}, "groups": {"groups": 2}, "kernel": {"groups": 2, "window": -1}, "window": {"groups": 2, "window": 3},
}  # fmt: skip


def inputs(length: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, length, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(length))


@checks.on(2, 4)
def ranks_equal_one_device_where_nothing_is_dropped(rank: int, n: int) -> None:
    """Steps of several lengths, with parts that are empty: outputs and gradients. With and without equal work."""
    layouts = [{"tp": 1, "cp": n}, {"tp": 1, "cp": n, "without": ("balance",)}, {"tp": n // 2, "cp": 2}]
    for how in MODELS.values():
        torch.manual_seed(1)
        plain = nn.Sequential(Attends(**how), Attends(**how)).double()
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


def graph_of(cp: int = 2, tp: int = 1, window: int | None = None, **settings: Any) -> fx.Graph:
    model = Attends(0.1, window=window).double()
    return analyse(skeleton_of(model), (inputs(8),), {}, tp, Options(cp=cp, **settings)).graph


def test_no_mask_is_in_the_graph() -> None:
    """The random streams of ranks are counted over both axes by `lower`."""
    for settings, form in (({}, fast_zigzag_rows), ({"without": ("balance",)}, fast_causal_rows)):
        graph = graph_of(cp_attention="gather", **settings)
        assert len(list(graph.find_nodes(op="call_function", target=form))) == 1
        assert not [node for node in graph.nodes if getattr(node.meta.get("val"), "dtype", None) == torch.bool]
    exact = graph_of(cp_attention="gather", randomness="exact")
    assert list(exact.find_nodes(op="call_function", target=exact_attention))


KERNELS = {
    "in order": ({"window": -1, "without": ("balance",)}, kernel_operator.DROPPED_PART),
    "zigzag": ({"window": -1}, kernel_operator.DROPPED_ZIGZAG),
    "window": ({"window": 3}, kernel_operator.DROPPED_PART),
    "heads": ({"window": -1, "cp_attention": "heads"}, kernel_operator.DROPPED),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_computes_its_part_with_a_mask_of_its_own(name: str) -> None:
    settings, form = KERNELS[name]
    (node,) = graph_of(**{"cp_attention": "gather", **settings}).find_nodes(op="call_function", target=form)
    assert node.args[-1] == 0 and node.args[0].meta["val"].shape[2] == (2 if name == "heads" else 4)


def test_a_mask_of_one_device_is_the_kernels_own() -> None:
    """Each cp rank calls the kernel with all queries; the plan lists it. Heads are refused."""
    exact: dict[str, Any] = {"window": -1, "randomness": "exact"}
    (node,) = graph_of(cp_attention="auto", **exact).find_nodes(op="call_function", target=kernel_operator.KERNEL)
    assert node.args[0].meta["val"].shape == (2, 8, 4, 3)
    assert "a dropout mask that no part of it repeats" in message(graph_of, cp_attention="heads", **exact)


def kept_weights(rank: int, name: str, start: int, stop: int, *where: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The weights that a form keeps, what they would be without dropout, and the sums that its backward keeps."""
    form, in_zigzag = FORMS[name], "zigzag" in name
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    v = torch.eye(8, dtype=torch.float64).expand(2, 3, 8, 8).clone().requires_grad_()
    torch.manual_seed(5)
    queries = zigzag(q, 2, 2) if in_zigzag else q
    output = form(queries[:, :, start:stop], k, v, *where, None, False, 0.5, rank)
    (grad,) = torch.autograd.grad(output.sum(), v)
    whole = attention_weights(q, k, v, None, True, None, False)[0]
    expected = (zigzag(whole, 2, 2) if in_zigzag else whole)[:, :, start:stop]
    return output.detach(), expected, grad[..., 0]


def of_kernel(form: Any) -> Any:
    """A form of the operator of kernels, with the arguments of that for `F.scaled_dot_product_attention`."""

    def attended(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Tensor:
        *where, scale, _, dropout, rank = arguments
        settings = *[None] * 6, scale, -1, 0, 0.0, dropout, "", "{}"
        where = where if len(where) == 2 else [*where, None]  # The start, and not only near keys.
        operands = (x.transpose(1, 2) for x in (query, key, value))
        return form(*operands, *settings, *where, rank)[0].transpose(1, 2)  # type: ignore[no-any-return]

    return attended


FORMS = {
    "rows": fast_causal_rows, "zigzag": fast_zigzag_rows, "rows of a kernel": of_kernel(kernel_operator.DROPPED_PART),
    "zigzag of a kernel": of_kernel(kernel_operator.DROPPED_ZIGZAG),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_rank_drops_weights_of_its_own(name: str) -> None:
    """Those of no later key, the same in backward, others on each rank."""
    masks = []
    for rank in (0, 1):
        start, stop = chunk_bounds(8, 2, rank)
        where = (2, rank) if "zigzag" in name else (start,)
        kept, expected, sums = kept_weights(rank, name, start, stop, *where)
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
