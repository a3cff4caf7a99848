"""causal_rows: parts of the queries of causal attention, each with the keys that it reads, and no mask kept."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from ranks import Checks
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.ops.attention.causal_rows import causal_rows, lower_right_pieces

checks = Checks(cards=True)


def inputs(seq: int, kv_heads: int = 4, width: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, h, seq, width, dtype=dtype, requires_grad=True) for h in (4, kv_heads, kv_heads)]


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=q.shape[1] != k.shape[1])


def parts(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    found, start = [], 0
    for rows in q.split(lengths, -2):
        found.append(causal_rows(rows, k, v, start, 0.3, q.shape[1] != k.shape[1]))
        start += rows.shape[-2]
    return torch.cat(found, -2)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [[7], [4, 3], [3, 3, 1], [1, 0, 6]], ids=str)
def test_causal_rows_of_parts_are_those_of_the_whole(lengths: list[int], kv_heads: int) -> None:
    given = inputs(7, kv_heads)
    expected, found = whole(*given), parts(*given, lengths)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    for mine, one in zip(
        torch.autograd.grad((found * weights).sum(), given),
        torch.autograd.grad((expected * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(mine, one, rtol=1e-12, atol=1e-12)


def test_causal_rows_take_values_of_another_width() -> None:
    """As in latent attention: torch's fused attention does not take them."""
    q, k, v = inputs(6)
    v = v[..., :5]
    torch.testing.assert_close(parts(q, k, v, [2, 4]), whole(q, k, v), rtol=1e-12, atol=1e-12)


def test_causal_rows_take_more_queries_than_keys() -> None:
    q, k, v = inputs(6)
    k, v = k[..., :3, :], v[..., :3, :]
    torch.testing.assert_close(parts(q, k, v, [2, 4]), whole(q, k, v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_rows_keep_the_dtype(dtype: torch.dtype) -> None:
    given = inputs(9, dtype=dtype)
    found = parts(*given, [5, 4])
    assert found.dtype == dtype
    torch.testing.assert_close(found, whole(*given), rtol=2e-2, atol=2e-2)


def test_causal_rows_keep_no_mask_for_backward() -> None:
    q, k, v = inputs(128)
    sizes = list[int]()

    def note(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        causal_rows(q[..., 64:, :], k, v, 64, None, False)
    logarithms = q[..., 64:, 0].numel()
    assert sum(sizes) == 2 * q[..., 64:, :].numel() + k.numel() + v.numel() + logarithms


def test_causal_rows_do_not_keep_a_fused_projection_alive() -> None:
    """A product of queries, keys and values is one memory."""
    _, k, v = inputs(16)
    product = torch.randn(2, 4, 16, 24, dtype=torch.float64, requires_grad=True) * 1.0
    kept = set[int]()

    def note(x: Tensor) -> Tensor:
        kept.add(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        causal_rows(product[..., 8:, :8], k, v, 8, None, False)
    assert product.untyped_storage().data_ptr() not in kept


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("lengths", [[4, 3], [1, 0, 6]], ids=str)
def test_causal_rows_have_second_derivatives(lengths: list[int], kv_heads: int) -> None:
    """Of a loss that is linear in the result, and of another; torch has them for its math kernel."""
    given = inputs(7, kv_heads)
    weights = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    for power in (1, 2):
        found = list[tuple[Tensor, ...]]()
        for results in (lambda: whole(*given), lambda: parts(*given, lengths)):
            with sdpa_kernel(SDPBackend.MATH):
                first = torch.autograd.grad((results() ** power * weights).sum(), given, create_graph=True)
            found.append(torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), given))
        torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_causal_rows_have_batched_gradients(kv_heads: int) -> None:
    given = inputs(7, kv_heads)
    weights = torch.randn(3, *given[0].shape, dtype=torch.float64)
    found = torch.autograd.grad(parts(*given, [4, 3]), given, weights, is_grads_batched=True)
    for i, one in enumerate(weights):
        for mine, theirs in zip(found, torch.autograd.grad(whole(*given), given, one), strict=True):
            torch.testing.assert_close(mine[i], theirs, rtol=1e-12, atol=1e-12)


def test_causal_rows_under_torch_func_grad() -> None:
    q, k, v = (x.detach() for x in inputs(5))

    def loss(x: Tensor) -> Tensor:
        return causal_rows(x[..., 2:, :], k, v, 2, 0.3, False).square().sum()

    expected = torch.autograd.functional.jacobian(loss, q)
    torch.testing.assert_close(torch.func.grad(loss)(q), expected)


def test_causal_rows_of_a_rank_without_heads_are_empty() -> None:
    q, k, v = (x[:, :0] for x in inputs(6))
    assert causal_rows(q[..., 2:, :], k, v, 2, None, False).shape == (2, 0, 4, 8)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("pieces", [[(0, 3)], [(4, 7)], [(1, 2), (5, 7)], [(0, 0), (3, 6)]], ids=str)
def test_lower_right_pieces_equal_the_rows_of_the_whole(
    heads: int, kv_heads: int, pieces: list[tuple[int, int]]
) -> None:
    """As a graph calls it: where tensors of other classes are not asked what they mean."""
    q, k, v = inputs(7, kv_heads)
    q = q[:, :heads]
    rows = torch.cat([torch.arange(*piece) for piece in pieces])
    expected = whole(q, k, v)[..., rows, :]
    with torch._C.DisableTorchFunctionSubclass():
        found = lower_right_pieces(q[..., rows, :], k, v, pieces, 0.3, heads != kv_heads)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_lower_right_pieces_under_a_dispatch_mode_are_the_same() -> None:
    """Selective checkpointing is one: it sees the operators, each with a tensor that it may keep."""

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    q, k, v = inputs(6)
    expected = lower_right_pieces(q[:, :, 2:], k, v, [(2, 6)], 0.3, False)
    with Sees():
        found = lower_right_pieces(q[:, :, 2:], k, v, [(2, 6)], 0.3, False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_compiled_graph_of_a_gpu_calls_the_flash_kernel_without_a_mask() -> None:
    """torch says what a GPU can: there is none here, so the graph is recorded and not run."""
    operators = list[str]()

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return lambda *inputs: (inputs[0],)

    def rows(q: Tensor, k: Tensor) -> Tensor:
        return causal_rows(q, k, k, 2, None, True)

    with FakeTensorMode(), patch.object(torch._C, "_can_use_flash_attention", lambda params, debug: True):
        q, k = (torch.empty(2, *shape, dtype=torch.bfloat16, device="cuda") for shape in ((4, 3, 8), (2, 7, 8)))
        torch.compile(rows, backend=note, fullgraph=True)(q, k)
    assert "aten._scaled_dot_product_flash_attention" in operators
    assert not [name for name in operators if "scaled_dot_product_attention" in name or "arange" in name]


class Decoder(nn.Module):
    """Two causal attentions. tokens: [rows, seq] -> loss []"""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.table, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        width = 8 * (heads + 2 * kv_heads)
        self.ins, self.outs = (
            nn.ModuleList(nn.Linear(a, b) for _ in range(2)) for a, b in ((16, width), (8 * heads, 16))
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for into, out in zip(self.ins, self.outs, strict=True):
            parts = into(x).unflatten(-1, (-1, 8)).transpose(1, 2).split([self.heads, self.kv_heads, self.kv_heads], 1)
            grouped = self.heads != self.kv_heads
            read = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=grouped)
            x = x + out(read.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@checks.on(2, 3)
def zigzag_rows_of_any_length_equal_one_device(rank: int, n: int) -> None:
    """Each length with pieces of equal work and, where the last rank has fewer positions, of other lengths."""
    for heads, kv_heads in ((2, 2), (4, 4), (4, 2)):
        torch.manual_seed(0)
        one: Any = Decoder(heads, kv_heads).double()
        torch.manual_seed(0)
        tokens = (torch.arange(2 * 12) * 7 % 20).view(2, 12)
        model = Decoder(heads, kv_heads).double()
        cut: Any = autotp.parallelize(model, 1, cp=n, device="cuda", example_inputs=tokens)
        assert "zigzag_rows" in cut.code
        for length in (12, 11, 5):
            given = tokens[:, :length]
            one.zero_grad()
            cut.zero_grad()
            expected, found = one(given), cut(given.cuda())
            assert found.is_cuda
            expected.backward()
            found.backward()
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12)
            for (name, whole_one), part in zip(one.named_parameters(), cut.parameters(), strict=True):
                torch.testing.assert_close(part.grad.cpu(), whole_one.grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_cards(n: int, name: str) -> None:
    checks.expect(n, name)
