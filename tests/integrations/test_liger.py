"""liger: models with Liger's modules on ranks beside one device, where the stand-in computes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from errors import message
from kernel_packages import liger
from ranks import Checks
from torch import Tensor, nn

import autotp
from autotp.diagnostics.verify import compare_calls
from autotp.options import Options

checks = Checks()
WIDTH, HEAD, WORDS = 32, 8, 40
CONFIG = SimpleNamespace(hidden_size=WIDTH, intermediate_size=64)


class Block(nn.Module):
    """A layer of Liger's modules, and its loss: tokens [batch seq] -> [ ]."""

    def __init__(self, mlp: Any = liger.LigerSwiGLUMLP, norm: Any = None, **loss: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=bool(loss))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norms = nn.ModuleList([liger.LigerRMSNorm(WIDTH, **(norm or {})) for _ in range(2)])
        self.mlp, self.loss = mlp(CONFIG), liger.LigerFusedLinearCrossEntropyLoss(**loss)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.norms[0](x)
        q, k, v = (part(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        angles = torch.arange(tokens.shape[1], dtype=x.dtype)[:, None] * torch.linspace(0.1, 1, HEAD // 2).to(x.dtype)
        angles = torch.cat([angles, angles], -1).unsqueeze(0)
        q, k = liger.liger_rotary_pos_emb(q, k, angles.cos(), angles.sin())[:2]
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norms[1](x))
        targets = tokens.roll(-1, -1).masked_fill(tokens == 3, -100)
        return self.loss(self.head.weight, x.flatten(0, 1), targets.flatten(), self.head.bias)


def tokens_of(step: int, *shape: int) -> Tensor:
    return torch.randint(WORDS, shape or (2, 7), generator=torch.Generator().manual_seed(step))


MODELS = {
    "SwiGLU": Block(),
    "GEGLU": Block(liger.LigerGEGLUMLP),
    "gemma": Block(norm={"offset": 1.0, "casting_mode": "gemma", "init_fn": "zeros"}),
    "no casts": Block(norm={"casting_mode": "none"}),
    "smooth": Block(label_smoothing=0.1, softcap=5.0, reduction="sum"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_formula_computes_what_the_function_computes(name: str) -> None:
    """With its gradients; and Triton, which no CPU runs, is not called, neither forward nor backward."""
    plain = MODELS[name].double()
    parallel = autotp.parallelize(copy.deepcopy(plain), tp=1, example_inputs=tokens_of(0))
    plain.zero_grad()
    expected_loss = plain(tokens_of(1, 3, 5))
    expected_loss.backward()
    with patch.dict(sys.modules["liger_kernel.ops"].KERNELS, clear=True):
        loss = parallel(tokens_of(1, 3, 5))
        loss.backward()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-10)
    for expected, computed in zip(plain.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(computed.grad, expected.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("name", ["SwiGLU", "GEGLU"])
def test_the_modules_are_cut(name: str, tp: int, cp: int) -> None:
    report = compare_calls(MODELS[name].double(), ((tokens_of(0),), {}), tp, Options(cp=cp))
    assert report.ok, report
    text = str(report.plan)
    assert "no rule" not in text
    assert {"mlp.gate_proj.weight", "mlp.down_proj.weight", "q.weight", "head.weight"} <= set(report.plan.cut), text


@contextmanager
def patched_llama() -> Iterator[None]:
    """A region in which transformers' Llama is what Liger makes of it."""
    from transformers.models.llama import modeling_llama as llama

    names = ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")
    same = {name: getattr(llama, name) for name in names}
    with (
        patch.multiple(llama, **same),
        patch.object(llama.LlamaForCausalLM, "forward", llama.LlamaForCausalLM.forward),
    ):
        liger.apply_liger_kernel_to_llama()
        yield


@checks.on(2)
def a_patched_llama_trains_as_one_device(rank: int, n: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    for layout in ({}, {"sequence_parallel": True}):
        with patched_llama():
            torch.manual_seed(0)
            plain = LlamaForCausalLM(config).double()
            batch = lambda step: dict.fromkeys(("input_ids", "labels"), tokens_of(step, 2, 7 + step))  # noqa: E731
            parallel = autotp.parallelize(copy.deepcopy(plain), tp=n, example_inputs=batch(0), **layout)
            assert {"model.layers.*.mlp.up_proj.weight", "lm_head.weight"} <= set(parallel.plan.cut)
            optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain, parallel)]
            for step in range(3):
                losses = []
                for model, optimizer in zip((plain, parallel), optimizers, strict=True):
                    optimizer.zero_grad()
                    losses.append(model(**batch(step)).loss)
                    losses[-1].backward()
                    optimizer.step()
                torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=1e-10, atol=1e-10)
            whole = autotp.full_state_dict(parallel)
            for name, value in plain.state_dict().items() if whole else ():  # The first rank has it.
                torch.testing.assert_close(whole[name], value, rtol=1e-10, atol=1e-10)


def test_a_term_that_cross_entropy_does_not_have_is_refused() -> None:
    text = message(autotp.explain, Block(lse_square_scale=1e-4), tp=2, example_inputs=tokens_of(0))
    assert "LigerFusedLinearCrossEntropyFunction gets `lse_square_scale`" in text, text


class Later(nn.Module):
    """An activation of a later version of Liger, whose function has one more argument."""

    def __init__(self, limit: float | None) -> None:
        super().__init__()
        self.up, self.limit = nn.Linear(WIDTH, 64), limit

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return LaterFunctions.LigerGELUMulFunction.apply(x, x, self.limit).sum()


class LaterFunctions:
    class LigerGELUMulFunction(torch.autograd.Function):
        __module__ = "liger_kernel.ops.geglu"

        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor, limit: float | None = None) -> Tensor:
            return (a * b).clamp(max=limit)


def test_an_argument_that_a_formula_does_not_have_is_refused() -> None:
    x = torch.ones(2, WIDTH)
    text = message(autotp.explain, Later(7.0), tp=2, example_inputs=x)
    assert "LigerGELUMulFunction gets `limit`, which autotp's formula for it does not have" in text, text
    assert autotp.explain(Later(None), tp=2, example_inputs=x).cut


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_liger_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
