"""rest_of_loss: a balancing loss is that of one device with the whole batch, in all layouts, in float64.

Published mistakes: an auxiliary loss that depends on tensor or context parallelism, on replicas, on the size of a batch
or on accumulation (Megatron-LM#5047, #3768, #5798, Automodel#3359), that is counted again where backward computes again
(Automodel#3140, #3247), and an evaluation that changes training (torchtitan#4148).
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import Checks
from small_models import assert_values_close
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import AdamW

import autotp
from autotp.errors import Error
from autotp.training.pipeline.rest_of_loss import RestOfLoss

ROWS, SEQ, VOCAB, EXPERTS = 8, 6, 32, 4


class Mixture(nn.Module):
    """Two layers of attention and experts; the loss of Switch, a z loss, and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.coefficient = 0.3
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))

    def forward(self, tokens: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        """tokens, mask, labels: [batch seq]"""
        x, weights = self.embedding(tokens), mask.double()
        loss = torch.zeros(())
        for layer in self.layers:
            x, logits = layer(x)
            probabilities = logits.softmax(-1)
            counts = F.one_hot(probabilities.argmax(-1), EXPERTS) * weights.unsqueeze(-1)
            shares = (probabilities * weights.unsqueeze(-1)).sum((0, 1)) / weights.sum()
            loss = loss + self.coefficient * EXPERTS * (counts.sum((0, 1)) / weights.sum() * shares).sum()
            loss = loss + 0.1 * (logits.logsumexp(-1).square() * weights).sum() / weights.sum()
        return loss + F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention, self.router, self.dropout = nn.Linear(8, 24), nn.Linear(8, EXPERTS), dropout
        self.up, self.down = nn.Linear(8, EXPERTS * 12), nn.Linear(EXPERTS * 12, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch seq 8]"""
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.attention(x).split(8, -1))
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.router(x)
        weights = F.one_hot(logits.argmax(-1), EXPERTS) * logits.softmax(-1)
        hidden = self.up(x).relu().unflatten(-1, (EXPERTS, 12)) * weights.unsqueeze(-1)
        return x + F.dropout(self.down(hidden.flatten(-2)), self.dropout, self.training), logits


def mixture() -> nn.Module:
    torch.manual_seed(0)
    return Mixture().double()


def batch(step: int, rows: int = ROWS, names: tuple[str, str] = ("tokens", "mask")) -> dict[str, Tensor]:
    """Rows of all lengths, so that parts have other numbers of tokens."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, VOCAB, (rows, SEQ), generator=generator)
    mask = torch.arange(SEQ) < ((torch.arange(rows) + step) % (SEQ - 1) + 2).unsqueeze(1)
    return {names[0]: tokens * mask, names[1]: mask.long(), "labels": tokens.masked_fill(~mask, -100)}


hf_batch = functools.partial(batch, names=("input_ids", "attention_mask"))


class Wide:
    """torch, but that float32 is float64: transformers balances in float32."""

    float32, float = torch.float64, torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_float64(family: str) -> Iterator[None]:
    """A region in which a family of transformers computes all in float64."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with patch.object(module, "torch", Wide()), patch.object(Tensor, "float", Tensor.double):
        yield


SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.3, "use_cache": False,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS, "intermediate_size": 20}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": 20, "head_dim": 4}),
    "olmoe": ("Olmoe", {"num_experts": EXPERTS, "intermediate_size": 20}),
}


def transformer(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    name, sizes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes})
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")._from_config(
        config, experts_implementation="batched_mm"
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().train()


def loss_of(result: Any) -> Tensor:
    loss: Tensor = result if isinstance(result, Tensor) else result.loss
    return loss


def expect_one_device(
    whole: nn.Module, data: Callable[..., dict[str, Tensor]], *, dp: int = 1, microbatches: int = 1, steps: int = 3,
    **layout: Any,
) -> autotp.Trainer:  # fmt: skip
    """Three steps of AdamW with evaluations between them: losses, gradients and parameters."""
    example = data(0, ROWS // dp // microbatches)
    trainer = autotp.distribute(
        copy.deepcopy(whole), dp=dp, microbatches=microbatches, example_inputs=example, **layout
    )
    optimizers = AdamW(whole.parameters(), lr=0.01), AdamW(trainer.parameters(), lr=0.01)
    replica = trainer.mesh["dp"].get_local_rank()
    for step in range(steps):
        given = data(step)
        mine = {name: x.chunk(dp)[replica] for name, x in given.items()}
        expected = loss_of(whole(**given))
        expected.backward()
        if trainer._training.engine.evaluates:
            assert_values_close(trainer.evaluate(**mine), expected.detach(), rtol=0, atol=1e-10)
        assert_values_close(trainer.step(**mine), expected.detach(), rtol=0, atol=1e-10)
        expect_close(trainer, {name: p.grad for name, p in whole.named_parameters()}, lambda p: p.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expect_close(trainer, dict(whole.named_parameters()), lambda p: p)
    return trainer


def expect_close(trainer: autotp.Trainer, expected: dict[str, Any], of: Callable[[Any], Any]) -> None:
    for name, parameter in trainer.named_parameters():
        actual = of(parameter)
        assert (actual is None) == (expected[name] is None), name
        if actual is not None:
            actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
            assert_values_close(actual, expected[name].detach(), rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


checks = Checks()


@checks.on(2)
def replicas(rank: int, n: int) -> None:
    """They wait for the others' sums between forward and backward: no part runs twice."""
    expect_one_device(mixture(), batch, dp=2)


@checks.on(2)
def accumulation(rank: int, n: int) -> None:
    expect_one_device(mixture(), batch, dp=2, microbatches=2)


@checks.on(2)
def rows_by_themselves(rank: int, n: int) -> None:
    """Microbatches of one row, in which nothing shows where rows end."""
    expect_one_device(mixture(), batch, dp=2, microbatches=4, recompute="full")


@checks.on(2)
def sharded_parameters(rank: int, n: int) -> None:
    for zero in (1, 3):
        expect_one_device(mixture(), batch, dp=2, microbatches=2, zero=zero)
    expect_one_device(mixture(), batch, dp=2, zero=3)


@checks.on(2)
def width(rank: int, n: int) -> None:
    expect_one_device(mixture(), batch, tp=2, microbatches=2, recompute="selective")


@checks.on(2)
def sequence(rank: int, n: int) -> None:
    expect_one_device(mixture(), batch, cp=2, microbatches=2)


@checks.on(2)
def stages(rank: int, n: int) -> None:
    for schedule in ("1F1B", "GPipe"):
        expect_one_device(mixture(), batch, pp=2, microbatches=4, schedule=schedule)


@checks.on(4)
def width_and_replicas(rank: int, n: int) -> None:
    expect_one_device(mixture(), batch, tp=2, dp=2, microbatches=2)


@checks.on(4)
def stages_and_replicas(rank: int, n: int) -> None:
    expect_one_device(mixture(), batch, pp=2, dp=2, microbatches=2, zero=1)


def unpadded(step: int, rows: int = ROWS) -> dict[str, Tensor]:
    """Without a mask transformers counts in another way."""
    tokens = hf_batch(step + 9, rows)["input_ids"] + 1
    return {"input_ids": tokens % VOCAB, "labels": tokens % VOCAB}


@checks.on(4)
def mixtral_over_replicas(rank: int, n: int) -> None:
    with in_float64("mixtral"):
        expect_one_device(transformer("mixtral"), hf_batch, steps=2, tp=2, dp=2)


@checks.on(2)
def mixtral_over_stages(rank: int, n: int) -> None:
    with in_float64("mixtral"):
        expect_one_device(transformer("mixtral"), hf_batch, steps=2, pp=2, microbatches=2)


@checks.on(4, rare=True)
def families_of_transformers(rank: int, n: int) -> None:
    for family in FAMILIES:
        with in_float64(family):
            expect_one_device(transformer(family), hf_batch, tp=2, dp=2)


@checks.on(4, rare=True)
def families_in_microbatches(rank: int, n: int) -> None:
    for family in FAMILIES:
        with in_float64(family):
            expect_one_device(transformer(family), unpadded, tp=2, dp=2, microbatches=2, recompute="full")


@checks.on(2, rare=True)
def transformers_in_other_layouts(rank: int, n: int) -> None:
    for layout in ({"pp": 2, "microbatches": 2}, {"cp": 2}, {"dp": 2, "microbatches": 4}):
        for data in (hf_batch, unpadded):
            with in_float64("mixtral"):
                expect_one_device(transformer("mixtral"), data, steps=2, **layout)


@checks.on(2)
def balance_of_microbatches(rank: int, n: int) -> None:
    """The mean of each microbatch's own; all other terms are those of the whole batch."""
    whole, data = mixture(), batch(0)
    trainer = autotp.distribute(
        copy.deepcopy(whole), dp=2, microbatches=2, balance="microbatch", example_inputs=batch(0, 2)
    )
    loss = trainer.step(**{name: x.chunk(2)[rank] for name, x in data.items()})
    parts = [{name: x.chunk(4)[i] for name, x in data.items()} for i in range(4)]
    balanced = [whole(**part) for part in parts]
    whole.coefficient = 0.0
    expected = whole(**data) + sum((x - whole(**part)) / 4 for x, part in zip(balanced, parts, strict=True))
    expected.backward()
    assert_values_close(loss, expected.detach(), rtol=0, atol=1e-10)
    expect_close(trainer, {name: p.grad for name, p in whole.named_parameters()}, lambda p: p.grad)


@checks.on(2)
def evaluations(rank: int, n: int) -> None:
    """They leave nothing: not of random numbers, gradients or buffers."""
    torch.manual_seed(0)
    trainer = autotp.distribute(Mixture(0.5).double(), dp=2, microbatches=2, example_inputs=batch(0, 2))
    mine = {name: x.chunk(2)[rank] for name, x in batch(1).items()}
    state, results = torch.get_rng_state(), list[Any]()
    for evaluates in (False, True):
        torch.set_rng_state(state)
        trainer.zero_grad()
        if evaluates:
            trainer.evaluate(**mine)
            assert all(p.grad is None for p in trainer.parameters())
        results.append([trainer.step(**mine), *(p.grad for p in trainer.parameters())])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@checks.on(2)
def schedules_without_forward_alone(rank: int, n: int) -> None:
    with pytest.raises(Error, match="needs sums over the whole batch before backward") as raised:
        expect_one_device(mixture(), batch, pp=2, microbatches=4, schedule="zero-bubble-v")
    assert 'balance="microbatch"' in str(raised.value)


def test_the_first_pass_draws_the_numbers_of_the_step() -> None:
    """Dropout before the second router: both passes have the same sums. What follows draws other numbers."""
    torch.manual_seed(0)
    trainer = autotp.distribute(Mixture(0.5).double(), microbatches=2, example_inputs=batch(0, 4))
    sums, add = list[Any](), RestOfLoss.add

    def noted(self: RestOfLoss, loss: Tensor, parts: Any, at_once: bool) -> Tensor:
        sums.append(torch.cat([x.detach().double().reshape(-1) for x in parts]))
        return add(self, loss, parts, at_once)

    with patch.object(RestOfLoss, "add", noted):
        for _ in range(2):
            trainer.step(**batch(1))
    first, second = sums[:4], sums[4:]
    assert torch.equal(first[0], first[2]) and torch.equal(first[1], first[3])
    assert not torch.equal(first[0], second[0]) and torch.equal(second[0], second[2])


def test_balance_has_two_values() -> None:
    with pytest.raises(Error, match=r"balance='rows' is not one of its values"):
        autotp.distribute(mixture(), balance="rows", example_inputs=batch(0))  # type: ignore[arg-type]


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_balance_of_the_whole_batch(n: int, name: str) -> None:
    checks.expect(n, name)
