"""xformers_functions: memory_efficient_attention on ranks beside one device, where the stand-in computes."""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from errors import message
from kernel_packages import xformers_ops
from ranks import Checks
from torch import Tensor, nn

import autotp
from autotp.diagnostics.verify import compare_calls
from autotp.integrations.attention_kernels import xformers_functions
from autotp.integrations.attention_kernels.kernel_operator import NAMES, _by_kernel
from autotp.options import Options

checks, on_cards = Checks(), Checks(cards=True)
WIDTH, HEAD = 32, 8
biases = xformers_ops.attn_bias
LENGTHS = [[6, 3, 11], [5, 5, 4, 9], [1, 16], [7, 7, 7, 7]]
memory_efficient_attention = xformers_ops.memory_efficient_attention
Bias = Callable[[Tensor], Any]


class Attention(nn.Module):
    """[batch seq width] -> the same. The bias is made in forward, is an argument, or there is none."""

    def __init__(self, bias: Bias | None = None, heads: int = 4, groups: int = 4, form: str = "heads", **rest: Any):
        super().__init__()
        self.bias, self.form, self.rest = bias, form, rest
        self.q, self.o = nn.Linear(WIDTH, heads * HEAD, bias=False), nn.Linear(heads * HEAD, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, groups * HEAD, bias=False) for _ in range(2))
        self.groups = groups

    def forward(self, x: Tensor, bias: Any = None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)) for part in (self.q, self.k, self.v))
        if self.form == "groups":
            q = q.unflatten(2, (self.groups, -1))
            k, v = (part.unsqueeze(3).expand(*part.shape[:3], q.shape[3], HEAD) for part in (k, v))
        elif self.form == "one head":
            q, k, v = (part.flatten(2) for part in (q, k, v))
        bias = self.bias(q) if self.bias else bias
        y = memory_efficient_attention(q, k, v, attn_bias=bias, **self.rest)
        return self.o(y.reshape(*x.shape[:2], -1))


class Biased(nn.Module):
    """Attention with a learned bias of each head, [heads seq seq], as a tensor for each row."""

    def __init__(self, form: str = "heads", seq: int = 7) -> None:
        super().__init__()
        heads = 1 if form == "one head" else 4
        self.table = nn.Parameter(torch.randn(heads, seq, seq, generator=torch.Generator().manual_seed(5)))
        self.attention = Attention(self.of_rows, form=form, groups=2 if form == "groups" else 4)

    def of_rows(self, q: Tensor) -> Tensor:
        bias = self.table.expand(q.shape[0], *self.table.shape)
        forms = {"groups": lambda: bias.unflatten(1, (2, 2)), "one head": lambda: bias.squeeze(1)}
        return forms.get(self.attention.form, lambda: bias)()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def rows(batch: int = 2, seq: int = 7, seed: int = 0) -> Tensor:
    return torch.randn(batch, seq, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def documents(lengths: list[int], mask: Any = biases.BlockDiagonalCausalMask) -> tuple[Tensor, Any]:
    return rows(1, sum(lengths)), mask.from_seqlens(lengths)


def causal(_: Tensor) -> Any:
    return xformers_ops.LowerTriangularMask()


def two_documents(_: Tensor) -> Any:
    return biases.BlockDiagonalMask.from_seqlens([4, 7])


CALLS: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "whole": (Attention(), (rows(),)),
    "causal": (Attention(causal, scale=0.3), (rows(),)),
    "causal from the last": (Attention(lambda _: biases.LowerTriangularFromBottomRightMask()), (rows(),)),
    "causal, handed in": (Attention(), (rows(), xformers_ops.LowerTriangularMask())),
    "groups": (Attention(causal, groups=2, form="groups"), (rows(),)),
    "one head": (Attention(causal, form="one head"), (rows(),)),
    "bias": (Biased(), (rows(),)),
    "bias of groups": (Biased("groups"), (rows(),)),
    "bias of one head": (Biased("one head"), (rows(),)),
    "packed": (Attention(), documents(LENGTHS[0], biases.BlockDiagonalMask)),
    "packed causal": (Attention(), documents(LENGTHS[0])),
    "packed causal from the last": (Attention(), documents(LENGTHS[0], biases.BlockDiagonalCausalFromBottomRightMask)),
    "packed groups": (Attention(groups=2, form="groups"), documents(LENGTHS[0])),
    "packed, made in forward": (Attention(two_documents), (rows(1, 11),)),
}


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (3, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("name", CALLS)
def test_each_bias_is_cut_by_heads_and_along_tokens(name: str, tp: int, cp: int) -> None:
    """Outputs, gradients and the graph of one device."""
    model, inputs = CALLS[name]
    report = compare_calls(model.double(), (inputs, {}), tp, Options(cp=cp))
    assert report.ok, report
    text = str(report.plan)
    assert "no rule" not in text and "it needs whole sequences" not in text
    assert tp == 1 or cp > 1 or "one head" in name or "@tp" in text


@pytest.mark.parametrize("name", CALLS)
def test_the_graph_computes_what_the_function_computes(name: str) -> None:
    """Beside the package's own function, with its gradients."""
    model, inputs = CALLS[name]
    parallel = autotp.parallelize(copy.deepcopy(model).double(), tp=1, example_inputs=inputs)
    model.double().zero_grad()
    first, second = (call(*inputs) for call in (model, parallel))
    torch.testing.assert_close(second, first)
    weights = torch.randn(first.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for output in (first, second):
        (output * weights).sum().backward()
    for expected, computed in zip(model.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(computed.grad, expected.grad)


class Decoder(nn.Module):
    """Two blocks and a head: the loss of tokens [batch seq]."""

    def __init__(self, bias: Bias | None = causal) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 40, bias=False)
        self.blocks = nn.ModuleList([Attention(bias, groups=2, form="groups") for _ in range(2)])

    def forward(self, tokens: Tensor, mask: Any = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, -2), tokens.roll(-1, -1).flatten())


def expect_equal_training(batch: Callable[[int], tuple[Any, ...]], bias: Bias | None, **layout: Any) -> None:
    """Four steps, each on another batch: losses, gradients of the last one, and all parameters."""
    torch.manual_seed(0)
    plain = Decoder(bias).double()
    model = autotp.parallelize(copy.deepcopy(plain), example_inputs=batch(0), **layout)
    optimizers = [torch.optim.SGD(x.parameters(), 0.1) for x in (plain, model)]
    for step in range(4):
        losses = []
        for of, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(of(*batch(step)))
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=1e-10, atol=1e-10)
    whole = autotp.full_state_dict(model)
    for name, value in plain.state_dict().items() if whole else ():  # The first rank has it.
        torch.testing.assert_close(whole[name], value, rtol=1e-10, atol=1e-10)


def tokens_of(step: int, *shape: int) -> Tensor:
    return torch.randint(40, shape, generator=torch.Generator().manual_seed(step))


def batch_of_rows(step: int) -> tuple[Any, ...]:
    return (tokens_of(step, *[(2, 9), (3, 5), (1, 12), (2, 7)][step]),)


def batch_of_documents(step: int) -> tuple[Any, ...]:
    mask = biases.BlockDiagonalCausalMask.from_seqlens(LENGTHS[step])
    return tokens_of(step, 1, sum(LENGTHS[step])), mask


@checks.on(2, 3)
def rows_train_as_one_device(rank: int, n: int) -> None:
    """With three ranks and two groups, one rank has no heads."""
    for layout in ({"tp": n}, {"tp": n, "sequence_parallel": True}, {"tp": 1, "cp": n}):
        expect_equal_training(batch_of_rows, causal, **layout)


@checks.on(2, 3)
def documents_of_the_loop_train_as_one_device(rank: int, n: int) -> None:
    for layout in ({"tp": n}, {"tp": 1, "cp": n}):
        expect_equal_training(batch_of_documents, None, **layout)


@pytest.mark.parametrize("name", ["packed", "packed causal", "packed groups", "causal", "groups", "whole"])
def test_the_kernel_of_a_rank_computes_what_the_reference_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: xformers' own function gets this rank's heads, and a mask from the ends."""
    model, inputs = CALLS[name]
    expected = model.double()(*inputs)
    calls = list[str]()

    def by_kernel(*arguments: Any) -> Any:
        *_, function, settings = arguments
        calls.append(function)
        return _by_kernel(function, dict(zip(NAMES, arguments, strict=False)), ast.literal_eval(settings))

    monkeypatch.setattr(xformers_functions, "KERNEL", by_kernel)
    monkeypatch.setitem(globals(), "memory_efficient_attention", xformers_functions.xformers_attention)
    torch.testing.assert_close(model(*inputs), expected)
    assert calls == [f"{xformers_functions.__name__}:MemoryEfficient"]


@on_cards.on(2)
def on_a_card_a_rank_calls_xformers_with_its_heads(rank: int, n: int) -> None:
    """In float32, which flash-attn refuses; and a mask of its documents."""
    fmha, calls = sys.modules["xformers.ops.fmha"], list[Any]()

    def noting(q: Tensor, k: Tensor, v: Tensor, bias: Any = None, *rest: Any) -> Tensor:
        calls.append((q.device.type, tuple(q.shape), k.shape == q.shape, type(bias).__name__))
        return memory_efficient_attention(q, k, v, bias, *rest)

    torch.manual_seed(0)
    plain = Attention(groups=2, form="groups").float()
    x, mask = documents(LENGTHS[0])
    parallel = autotp.parallelize(copy.deepcopy(plain), tp=n, example_inputs=(x.float(), mask))
    with patch.object(fmha, "memory_efficient_attention", noting):
        computed = parallel(x.float().cuda(), mask)
        computed.square().sum().backward()
    assert calls == [("cuda", (1, 20, 1, 2, HEAD), True, "BlockDiagonalCausalFromBottomRightMask")]
    expected = plain(x.float(), mask)
    expected.square().sum().backward()
    torch.testing.assert_close(computed.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
    whole = autotp.gather(parallel.q.weight.grad).cpu()
    torch.testing.assert_close(whole, plain.q.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("n", "name"), on_cards.cases())
def test_xformers_functions_on_cards(n: int, name: str) -> None:
    on_cards.expect(n, name)


REFUSED: dict[str, tuple[nn.Module, tuple[Any, ...], str]] = {
    "a window": (
        Attention(lambda _: biases.LocalAttentionFromBottomRightMask(2, 2)), (rows(),),
        "gets the bias LocalAttentionFromBottomRightMask, for which autotp has no rule",
    ),
    "documents of other queries": (
        Attention(), (rows(1, 9), biases.BlockDiagonalCausalMask.from_seqlens([4, 5], [5, 4])),
        "BlockDiagonalCausalMask for queries and keys of different lengths",
    ),
    "two rows": (
        Attention(), (rows(2, 9), biases.BlockDiagonalMask.from_seqlens([4, 5])), "gets BlockDiagonalMask for ",
    ),
    "a kernel by name": (Attention(op=(1, 2)), (rows(),), "gets op= or output_dtype="),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused(name: str) -> None:
    model, inputs, expected = REFUSED[name]
    text = message(autotp.explain, model.double(), tp=2, example_inputs=inputs)
    assert expected in text and "memory_efficient_attention" in text, text


def test_lengths_of_a_mask_from_outside_are_not_read_in_forward() -> None:
    class Splits(Attention):
        def forward(self, x: Tensor, bias: Any = None) -> Tensor:
            return super().forward(x, bias) * len(bias.q_seqinfo.seqstart_py)

    text = message(autotp.explain, Splits().double(), tp=2, example_inputs=documents(LENGTHS[0]))
    assert "`seqstart_py` of a mask that comes from outside is not known" in text, text


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_xformers_functions_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
