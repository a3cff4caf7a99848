"""full_masks: batches without padding run a graph without masks, as on one device, in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from cards.spies import host_waits
from ranks import Checks
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import autotp
from autotp.sharding.boxes import is_sharded

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60}
FLASH, MASKED = "attention that a flash kernel computes", "attention with a mask"
checks = Checks(cards=True)


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).double()


def bert() -> Any:
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).double()


def batch(rows: int, seq: int, padded: bool) -> dict[str, Tensor]:
    ids = torch.arange(2, 2 + rows * seq).view(rows, seq) % 60
    mask = torch.ones_like(ids)
    if padded:
        mask[-1, -2:] = 0  # Only the last microbatch has padding.
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}


def part(given: dict[str, Tensor], rank: int, dp: int) -> dict[str, Tensor]:
    return {name: x.chunk(dp)[rank] for name, x in given.items()}


def expected(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    model.zero_grad()
    loss: Tensor = model(**given).loss
    loss.backward()
    return loss.detach()


def lengths() -> Iterator[tuple[int, bool]]:
    return cycle([(8, False), (8, True), (12, False), (8, False), (12, True)])


def expect_gradients(trainer: Any, model: nn.Module) -> None:
    """Those that this rank has whole are as on one device."""
    whole = {name: x for name, x in trainer.named_parameters() if x.grad is not None and not is_sharded(x)}
    for name, x in whole.items():
        if x.shape == model.get_parameter(name).shape:
            torch.testing.assert_close(x.grad.cpu(), model.get_parameter(name).grad, rtol=1e-6, atol=1e-9)


def expect_as_on_one_device(make: Any, rank: int, layout: dict[str, int]) -> None:
    """Ten steps: losses, gradients, kernels, and no wait of the host, whichever microbatches have padding."""
    model, dp = make(), layout.get("dp", 1)
    trainer = autotp.distribute(make(), microbatches=2, example_inputs=batch(2, 8, padded=False), **layout)
    of_mine = trainer.mesh["dp"].get_local_rank()
    for step, (seq, padded) in zip(range(10), lengths(), strict=False):
        given = batch(4 * dp, seq, padded)
        loss = expected(model, given)
        with host_waits() as traffic:
            found = trainer.step(**part(given, of_mine, dp))
        torch.testing.assert_close(found.cpu(), loss, rtol=2e-6, atol=0)
        expect_gradients(trainer, model)
        trainer.zero_grad()
        mine = bool((part(given, of_mine, dp)["attention_mask"] == 0).any())
        assert (traffic.count(MASKED) > 0) == mine and (traffic.count(FLASH) > 0) != mine, (step, traffic.events)
        if step > 5:
            assert not traffic.own_waits, traffic


@checks.on(2)
def unpadded_batches_skip_masks_beside_a_padded_replica(rank: int, n: int) -> None:
    for make in (llama, bert):
        expect_as_on_one_device(make, rank, {"dp": 2})


@checks.on(2)
def unpadded_batches_skip_masks_in_pipeline_stages(rank: int, n: int) -> None:
    expect_as_on_one_device(llama, rank, {"pp": 2})


@checks.on(2)
def unpadded_batches_skip_masks_on_tensor_ranks(rank: int, n: int) -> None:
    expect_as_on_one_device(bert, rank, {"tp": 2})


@checks.on(2)
def unpadded_batches_skip_masks_in_sharded_replicas(rank: int, n: int) -> None:
    expect_as_on_one_device(llama, rank, {"dp": 2, "zero": 3})


class Packing(nn.Module):
    """Looks at what is no mask: at positions, as transformers does for packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        out = self.model(input_ids=ids, position_ids=positions, labels=ids)
        loss: Tensor = out.loss
        return loss


@checks.on(1)
def packed_positions_keep_their_masks(rank: int, n: int) -> None:
    ids = torch.arange(2, 34).view(4, 8)
    packed = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(4, 8)
    plain = torch.arange(8).expand(4, 8)
    model = Packing()
    trainer = autotp.distribute(Packing(), microbatches=2, example_inputs=(ids[:2], plain[:2].clone()))
    for positions in (plain, packed, plain):
        found = trainer.step(ids, positions.clone())
        parts = [model(ids[i : i + 2], positions[i : i + 2].clone()) for i in (0, 2)]
        torch.testing.assert_close(found.cpu(), sum(parts) / 2, rtol=2e-6, atol=0)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_kernels_are_those_of_one_device(n: int, name: str) -> None:
    checks.expect(n, name)
