"""flash_functions: flash-attn's functions on ranks beside one device, where the stand-ins compute."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from errors import message
from kernel_packages import flash_attn, flash_attn_interface
from ranks import Checks
from torch import Tensor, nn

import autotp
from autotp.compiler import analyse
from autotp.diagnostics.verify import compare_calls
from autotp.integrations.attention_kernels.kernel_operator import KERNEL, NAMES, _by_kernel, parameters_of
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.training.compute_dtype import expect_products_of_one_dtype

checks, on_cards = Checks(), Checks(cards=True)
WIDTH, HEAD = 32, 8
LENGTHS = [[6, 3, 11], [5, 5, 4, 9], [1, 16], [7, 7, 7, 7]]


class Attention(nn.Module):
    """Attention by one of flash-attn's functions: [batch seq width] -> the same, and the log-sum-exp if asked for."""

    package: Any = flash_attn

    def __init__(self, function: str = "flash_attn_func", heads: int = 4, groups: int = 2, **settings: Any) -> None:
        super().__init__()
        self.function, self.settings = function, settings
        self.q, self.o = nn.Linear(WIDTH, heads * HEAD, bias=False), nn.Linear(heads * HEAD, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, groups * HEAD, bias=False) for _ in range(2))

    def forward(self, x: Tensor, *ends: Any) -> Any:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)) for part in (self.q, self.k, self.v))
        together = "qkvpacked" in self.function
        operands = [q, k, v]
        if "packed" in self.function:
            operands = [torch.stack([q, k, v], -3)] if together else [q, torch.stack([k, v], -3)]
        lengths = [x for x in ends for _ in range(1 if together else 2)]  # Of queries, and of keys.
        result = getattr(self.package, self.function)(*operands, *lengths, **self.settings, **self.by_head())
        output, *others = result if isinstance(result, tuple) else (result,)
        return (self.o(output.flatten(-2)), others[0]) if others else self.o(output.flatten(-2))

    def by_head(self) -> dict[str, Tensor]:
        return {}


class WithSlopes(Attention):
    """ALiBi: a buffer of slopes, [heads] or [batch heads]."""

    def __init__(self, *args: Any, rows: int = 0, **settings: Any) -> None:
        super().__init__(*args, **settings)
        shape = [rows] * bool(rows) + [self.q.out_features // HEAD]
        self.register_buffer("alibi", torch.linspace(0.1, 0.9, math.prod(shape)).view(shape))

    def by_head(self) -> dict[str, Tensor]:
        return {"alibi_slopes": self.alibi}


class WithSinks(Attention):
    """flash-attn 4 with a learned sink for each head."""

    package = flash_attn.cute

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, self.q.out_features // HEAD))

    def by_head(self) -> dict[str, Tensor]:
        return {"learnable_sink": self.sinks}


def rows(batch: int = 2, seq: int = 7, seed: int = 0) -> tuple[Tensor, ...]:
    return (torch.randn(batch, seq, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),)


def documents(lengths: list[int], seed: int = 0) -> tuple[Any, ...]:
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    return (*(x[0] for x in rows(1, sum(lengths), seed)), ends, max(lengths))


CAUSAL = {"causal": True}
CALLS: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "whole": (Attention(), rows()),
    "causal": (Attention(**CAUSAL), rows()),
    "causal window": (Attention(**CAUSAL, window_size=(2, 2), softmax_scale=0.3), rows()),
    "softcap": (Attention(**CAUSAL, softcap=3.0), rows()),
    "uneven heads": (Attention(heads=6, groups=3, **CAUSAL), rows()),
    "one group": (Attention(groups=1), rows()),
    "no groups": (Attention(groups=4, **CAUSAL), rows()),
    "slopes": (WithSlopes(**CAUSAL), rows()),
    "slopes by row": (WithSlopes(rows=2, **CAUSAL), rows()),
    "sinks": (WithSinks(**CAUSAL, window_size=(3, 0)), rows()),
    "packed sinks": (WithSinks("flash_attn_varlen_func", **CAUSAL), documents(LENGTHS[0])),
    "log-sum-exp": (Attention(return_attn_probs=True), rows()),
    "joined": (Attention("flash_attn_qkvpacked_func", groups=4, **CAUSAL), rows()),
    "joined keys": (Attention("flash_attn_kvpacked_func"), rows()),
    "packed": (Attention("flash_attn_varlen_func"), documents(LENGTHS[0])),
    "packed causal": (Attention("flash_attn_varlen_func", **CAUSAL), documents(LENGTHS[0])),
    "packed window": (Attention("flash_attn_varlen_func", **CAUSAL, window_size=(3, 0)), documents(LENGTHS[0])),
    "window to both sides": (Attention(window_size=(2, 1)), rows()),
    "all before, some after": (Attention(window_size=(-1, 1)), rows()),
    "packed slopes": (WithSlopes("flash_attn_varlen_func", **CAUSAL), documents(LENGTHS[0])),
    "packed log-sum-exp": (Attention("flash_attn_varlen_func", return_attn_probs=True), documents(LENGTHS[0])),
    "packed joined": (Attention("flash_attn_varlen_qkvpacked_func", groups=4, **CAUSAL), documents(LENGTHS[0])),
    "packed joined keys": (Attention("flash_attn_varlen_kvpacked_func", **CAUSAL), documents(LENGTHS[0])),
    "slopes to both sides": (WithSlopes(), rows()),
    "window without an end": (Attention(window_size=(2, -1)), rows()),
    "packed slopes to both sides": (WithSlopes("flash_attn_varlen_func"), documents(LENGTHS[0])),
}


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (3, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("name", CALLS)
def test_each_function_is_cut_by_heads_and_along_tokens(name: str, tp: int, cp: int) -> None:
    """Outputs, gradients and the graph of one device; with tp=3 and two groups a rank has no heads."""
    model, inputs = CALLS[name]
    model = model.double()
    report = compare_calls(model, (inputs, {}), tp, Options(cp=cp))
    assert report.ok, report
    text = str(report.plan)
    assert "no rule" not in text and "it needs whole sequences" not in text
    assert tp == 1 or cp > 1 or "@tp" in text


def test_what_a_part_cannot_compute_is_whole_over_cp_and_listed() -> None:
    """Only the kernel knows the mask of its dropout, and no part repeats it."""
    options = Options(cp=2, randomness="exact")
    program = analyse(skeleton_of(Attention(dropout_p=0.5).double()), rows(), {}, 1, options)
    assert [why for _, why in program.undivided] == ["it needs whole sequences: on every cp rank"]


@pytest.mark.parametrize("name", CALLS)
def test_the_operator_computes_what_the_function_computes(name: str) -> None:
    """The operator of the graph beside the package's own function, with its gradients."""
    model, inputs = CALLS[name]
    parallel = autotp.parallelize(copy.deepcopy(model).double(), tp=1, example_inputs=inputs)
    model.double().zero_grad()
    outputs = [call(*inputs) for call in (model, parallel)]
    first, second = (x if isinstance(x, tuple) else (x,) for x in outputs)
    assert len(first) == len(second)
    for expected, computed in zip(first, second, strict=True):
        torch.testing.assert_close(computed, expected)
    weights = torch.randn(first[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for output in (first[0], second[0]):
        (output * weights).sum().backward()
    for expected, computed in zip(model.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(computed.grad, expected.grad)


class Block(nn.Module):
    def __init__(self, function: str, **settings: Any) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(WIDTH), Attention(function, **CAUSAL, **settings)

    def forward(self, x: Tensor, *ends: Any) -> Tensor:
        return x + self.attention(self.norm(x), *ends)


class Decoder(nn.Module):
    """Two blocks with flash-attn, and a head: the loss of tokens [batch seq], or [tokens] of packed rows."""

    def __init__(self, function: str = "flash_attn_func", **settings: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 40, bias=False)
        self.blocks = nn.ModuleList([Block(function, **settings) for _ in range(2)])

    def forward(self, tokens: Tensor, labels: Tensor, *ends: Any) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, *ends)
        return F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


def pair(function: str = "flash_attn_func", **settings: Any) -> tuple[Decoder, Decoder]:
    """Two decoders with the same numbers."""
    torch.manual_seed(0)
    models = Decoder(function, **settings).double(), Decoder(function, **settings).double()
    models[1].load_state_dict(models[0].state_dict())
    return models


def tokens_of(step: int, shape: tuple[int, ...] = (2, 9)) -> Tensor:
    return torch.randint(40, shape, generator=torch.Generator().manual_seed(step))


def expect_equal_training(plain: nn.Module, parallel: nn.Module, batch: Callable[[int], tuple[Any, ...]]) -> None:
    """Trains both for four steps, each on another batch, and compares losses and all parameters."""
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain, parallel)]
    for step in range(4):
        losses = []
        for model, optimizer in zip((plain, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(model(*batch(step)))
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=1e-10, atol=1e-10)
    whole = autotp.full_state_dict(parallel)
    for name, value in plain.state_dict().items() if whole else ():  # The first rank has it.
        torch.testing.assert_close(whole[name], value, rtol=1e-9, atol=1e-9)


def batch_of_rows(step: int) -> tuple[Any, ...]:
    tokens = tokens_of(step, [(2, 9), (3, 5), (1, 12), (2, 7)][step])
    return tokens, tokens.roll(-1, -1)


def batch_of_documents(step: int) -> tuple[Any, ...]:
    tokens, lengths = tokens_of(step, (sum(LENGTHS[step]),)), LENGTHS[step]
    return tokens, tokens.roll(-1), *documents(lengths)[1:]


LAYOUTS: list[dict[str, Any]] = [{}, {"sequence_parallel": True}, {"recompute": "full"}, {"overlap": "batch"}]


@checks.on(2, 3)
def layouts_train_as_one_device(rank: int, n: int) -> None:
    """With three ranks one has no heads."""
    for layout in LAYOUTS:
        plain, model = pair(window_size=(4, 0))
        parallel = autotp.parallelize(model, tp=n, example_inputs=batch_of_rows(0), **layout)
        expect_equal_training(plain, parallel, batch_of_rows)


@checks.on(2)
def packed_rows_train_as_one_device(rank: int, n: int) -> None:
    for layout in ({"tp": n}, {"tp": 1, "cp": n}):
        plain, model = pair("flash_attn_varlen_func")
        parallel = autotp.parallelize(model, example_inputs=batch_of_documents(0), **layout)
        expect_equal_training(plain, parallel, batch_of_documents)


@checks.on(2, 3, 4)
def context_parallel_training_equals_one_device(rank: int, n: int) -> None:
    """With two rows of five tokens the last of three ranks has one token; on four ranks heads are cut, too."""
    plain, model = pair()
    tp = 2 if n == 4 else 1
    parallel = autotp.parallelize(model, tp=tp, cp=n // tp, example_inputs=batch_of_rows(0))
    expect_equal_training(plain, parallel, batch_of_rows)


@checks.on(2)
def a_pipeline_of_rows_trains_as_one_device(rank: int, n: int) -> None:
    """Rows do not depend on each other, so microbatches are right."""
    plain, model = pair()
    batch = {"tokens": tokens_of(0, (4, 9)), "labels": tokens_of(1, (4, 9))}
    trainer = autotp.distribute(
        model, pp=n, microbatches=2, example_inputs={k: x[:2] for k, x in batch.items()}
    )  # fmt: skip
    optimizers = [torch.optim.SGD(x.parameters(), 0.1) for x in (plain, trainer)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = plain(**batch)
        expected.backward()
        torch.testing.assert_close(trainer.step(**batch), expected.detach(), rtol=1e-10, atol=1e-10)
        for optimizer in optimizers:
            optimizer.step()


def dropped(n: int, seed: int, **layout: Any) -> tuple[Tensor, Tensor]:
    """The output of attention with dropout in which all heads have the same weights and values of one; its gradient."""
    model = Attention(groups=4, dropout_p=0.5).double()
    with torch.no_grad():
        for part in (model.q, model.k):
            part.weight.copy_(torch.randn(HEAD, WIDTH, generator=torch.Generator().manual_seed(0)).repeat(4, 1))
        model.v.weight.fill_(1 / WIDTH)
        model.o.weight.copy_(torch.eye(WIDTH))
    parallel = autotp.parallelize(model, tp=n, example_inputs=rows(), **layout)
    torch.manual_seed(seed)
    x = torch.ones(2, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    output = parallel(x)
    output.square().sum().backward()
    assert x.grad is not None
    return autotp.gather(output).detach(), x.grad


@checks.on(2)
def dropout_has_a_mask_of_its_own_on_each_rank(rank: int, n: int) -> None:
    """And the same one when backward computes a block again."""
    output, gradient = dropped(n, 1)
    first, second = output.unflatten(-1, (2, -1)).unbind(-2)  # The heads of each rank.
    assert not torch.equal(first, second)
    # Each weight is dropped, or doubled: the mean over many is one.
    assert abs(output.mean() - 1) < 0.3
    again, its_gradient = dropped(n, 1, recompute="full")
    torch.testing.assert_close(again, output)
    torch.testing.assert_close(its_gradient, gradient)
    assert not torch.equal(dropped(n, 2)[0], output)


def test_a_mask_of_one_device_is_refused() -> None:
    model, exactly = Attention(dropout_p=0.5).double(), Options(randomness="exact")
    text = message(compare_calls, model, (rows(), {}), 2, exactly)
    assert 'randomness="fast"' in text and "cannot repeat" in text and "by_head" in text


def test_slopes_may_have_another_dtype_than_products() -> None:
    """Buffers are not cast by `compute_dtype`, and the kernels take slopes in float32."""
    model = WithSlopes(**CAUSAL).bfloat16()
    model.alibi = model.alibi.float()
    program = analyse(skeleton_of(model), (rows()[0].bfloat16(),), {}, 2, Options())
    assert any(node.target is KERNEL for node in program.graph.nodes)
    expect_products_of_one_dtype(program)


@pytest.mark.parametrize("argument", ["qv", "q_descale"])
def test_an_argument_without_a_rule_is_refused(argument: str) -> None:
    class Descaled(Attention):
        package = flash_attn_interface

        def by_head(self) -> dict[str, Any]:
            return {argument: torch.ones(1)}

    text = message(autotp.explain, Descaled().double(), tp=2, example_inputs=rows())
    assert f"FlashAttnFunc gets `{argument}`, for which autotp has no rule" in text
    assert "F.scaled_dot_product_attention, or a call without it" in text


def test_dropped_weights_are_not_returned() -> None:
    model = Attention(dropout_p=0.5, return_attn_probs=True).double()
    text = message(autotp.explain, model, tp=2, example_inputs=rows())
    assert "return_attn_probs=True with dropout" in text and "dropout_p=0.0" in text


def test_tensors_in_a_list_are_refused() -> None:
    """As those that a score function of flash-attn 4 reads."""

    class Auxiliary(Attention):
        package = flash_attn.cute

        def by_head(self) -> dict[str, Any]:
            return {"aux_tensors": [torch.ones(4)]}

    model, inputs = Auxiliary("flash_attn_varlen_func"), documents(LENGTHS[0])
    text = message(autotp.explain, model.double(), tp=2, example_inputs=inputs)
    assert "FlashAttnVarlenFunc gets `aux_tensors`, for which autotp has no rule" in text


def test_a_kernel_gets_the_defaults_of_what_the_call_left_out() -> None:
    """The functions of joined operands have fewer arguments than the one of three tensors."""
    function, got = flash_attn_interface.FlashAttnFunc, list[Any]()

    @wraps(function.forward)
    def noting(ctx: Any, *arguments: Any) -> Any:
        got.extend(arguments)
        return arguments[0], arguments[0]

    query = torch.ones(1, 2, 1, HEAD)
    tensors = dict.fromkeys(NAMES) | dict.fromkeys(("query", "key", "value"), query)
    with patch.object(function, "forward", staticmethod(noting)):
        _by_kernel(f"{function.__module__}:FlashAttnFunc", tensors, {"causal": True})
    given = dict(zip(parameters_of(function), got, strict=True))
    assert (given["causal"], given["num_splits"], given["window_size"]) == (True, 1, (-1, -1))


@on_cards.on(2)
def on_a_card_a_rank_calls_the_kernel_with_its_heads(rank: int, n: int) -> None:
    called, forward = list[tuple[int, ...]](), flash_attn.flash_attn_interface.FlashAttnFunc.forward

    @wraps(forward)
    def noting(ctx: Any, q: Tensor, k: Tensor, *others: Any) -> Any:
        called.append((q.device.type == "cuda", q.shape[2], k.shape[2]))
        return forward(ctx, q, k, *others)

    plain, model = (x.bfloat16() for x in pair())
    with patch.object(flash_attn.flash_attn_interface.FlashAttnFunc, "forward", staticmethod(noting)):
        parallel = autotp.parallelize(model, tp=n, example_inputs=batch_of_rows(0))
        loss = parallel(*(x.cuda() for x in batch_of_rows(1)))
        loss.backward()
    assert called == [(True, 2, 1)] * 2
    expected = plain(*batch_of_rows(1))
    expected.backward()
    torch.testing.assert_close(loss.detach().cpu().float(), expected.detach().float(), rtol=0.01, atol=0.01)
    whole = autotp.gather(parallel.blocks[0].attention.q.weight.grad).cpu().float()
    torch.testing.assert_close(whole, plain.blocks[0].attention.q.weight.grad.float(), rtol=0.05, atol=0.005)


@on_cards.on(2)
def on_a_card_what_the_kernel_refuses_is_told_on_each_rank(rank: int, n: int) -> None:
    _, model = pair()
    parallel = autotp.parallelize(model.float(), tp=n, example_inputs=batch_of_rows(0))
    text = message(parallel, *(x.cuda() for x in batch_of_rows(1)))
    assert "FlashAttnFunc gets float32, and computes in float16 and bfloat16" in text
    assert 'attn_implementation="sdpa"' in text


@on_cards.on(2)
def on_a_card_wide_heads_are_refused_when_the_model_is_captured(rank: int, n: int) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(WIDTH, 4 * 264)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (4, -1))
            return flash_attn.flash_attn_func(q, q, q)

    text = message(autotp.parallelize, Wide().bfloat16(), tp=n, example_inputs=rows()[0].bfloat16().cuda())
    assert "FlashAttnFunc gets heads of width 264, and computes with at most 256" in text, text


@pytest.mark.parametrize(("n", "name"), on_cards.cases())
def test_flash_functions_on_cards(n: int, name: str) -> None:
    on_cards.expect(n, name)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_flash_functions_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
