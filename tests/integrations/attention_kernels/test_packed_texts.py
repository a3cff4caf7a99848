"""Packed texts as libraries send them: documents in one row, told by positions that start again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_models import signatures_met
from torch import Tensor, nn

import autotp

transformers = pytest.importorskip("transformers")
DOCUMENTS = [[6, 3, 11], [5, 5, 4, 9], [1, 16], [7, 7, 7, 7], [30]]
VOCAB = 96


def llama(attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=64, attn_implementation=attention, pad_token_id=0,
        use_cache=False,  # With a cache transformers takes a row for one text.
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def flattened(lengths: list[int], seed: int, **options: Any) -> dict[str, Any]:
    """Documents of these lengths in one row, as transformers' collator makes it."""
    generator = torch.Generator().manual_seed(seed)
    texts = [{"input_ids": torch.randint(VOCAB, (n,), generator=generator).tolist()} for n in lengths]
    return dict(transformers.DataCollatorWithFlattening(**options)(texts))


def trained(rank: int, n: int, layout: dict[str, Any], attention: str) -> None:
    for options in ({}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}):
        plain = llama(attention)
        model = autotp.parallelize(copy.deepcopy(plain), **layout, example_inputs=flattened(DOCUMENTS[0], 0, **options))
        optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (plain, model)]
        for step, lengths in enumerate(DOCUMENTS * 2):
            batch = flattened(lengths, step, **options)
            losses = [m(**batch).loss for m in (plain, model)]
            torch.testing.assert_close(losses[1], losses[0])
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        # Where the longest document is an argument, the second graph has it as an input.
        assert signatures_met(model) == (2 if "return_flash_attn_kwargs" in options else 1)


@pytest.mark.parametrize(
    ("n", "layout", "attention"),
    [
        (2, {"tp": 2}, "sdpa"),
        (2, {"tp": 2, "sequence_parallel": True}, "eager"),
        (2, {"tp": 1, "cp": 2}, "sdpa"),  # Positions of packed rows that rotate over cp: Megatron-LM#5243.
        (4, {"tp": 2, "cp": 2}, "eager"),
    ],
    ids=str,
)
def test_flattened_documents_train_as_on_one_device(n: int, layout: dict[str, Any], attention: str) -> None:
    """Each step has another number of documents, other lengths, and another longest document."""
    run_ranks(trained, n, layout, attention)


ROWS = [
    ([6, 3, 11], [5, 5, 4, 6], [1, 19], [7, 7, 6]),
    ([20], [1, 1, 18], [10, 10], [2] * 10),
    ([10, 10], [19, 1], [4, 16], [20]),
]
"""A step has four rows, of these documents."""


def packed_rows(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(VOCAB, (4, 20), generator=torch.Generator().manual_seed(step))
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ROWS[step]])
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens.masked_fill(positions == 0, -100)}


def distributed(rank: int, n: int, layout: dict[str, Any]) -> None:
    plain = llama()
    trainer = autotp.distribute(copy.deepcopy(plain), example_inputs=packed_rows(0), **layout)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (plain, trainer)]
    replicas = layout.get("dp", 1)
    replica = trainer.mesh["dp"].get_local_rank()
    for step in range(3):
        batch = packed_rows(step)
        loss = plain(**batch).loss
        loss.backward()
        part = {name: x.chunk(replicas)[replica] for name, x in batch.items()}
        torch.testing.assert_close(trainer.step(**part).double(), loss.double(), rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "pp": 2, "microbatches": 2},  # Two rows a microbatch: Megatron-LM#5635.
        {"pp": 2, "cp": 2, "microbatches": 4},
        {"pp": 2, "dp": 2, "microbatches": 2, "zero": 1},
    ],
    ids=str,
)
def test_packed_rows_over_stages_train_as_on_one_device(layout: dict[str, Any]) -> None:
    run_ranks(distributed, 4, layout)


def logits_after_another_first_document(rank: int, n: int, layout: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns logits of the last two of three documents, with one text and another one as the first document."""
    model = autotp.parallelize(llama().eval(), **layout)
    batch = flattened([6, 5, 9], 0)
    del batch["labels"]
    other = dict(batch, input_ids=torch.cat([(batch["input_ids"][:, :6] + 7) % VOCAB, batch["input_ids"][:, 6:]], 1))
    with torch.no_grad():
        one, two = (autotp.gather(model(**inputs).logits) for inputs in (batch, other))
    assert not torch.equal(one[:, :6], two[:, :6])
    return one[:, 6:], two[:, 6:]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 1, "cp": 2}], ids=str)
def test_a_document_does_not_see_the_ones_before_it(layout: dict[str, Any]) -> None:
    """trl#6843 and accelerate#4177: masks that are dropped over cp."""
    for one, two in run_ranks(logits_after_another_first_document, 2, layout):
        assert torch.equal(one, two)


def stages_after_another_first_document(rank: int, n: int) -> tuple[Tensor, Tensor]:
    trainer = autotp.distribute(llama(), pp=n, microbatches=2, example_inputs=packed_rows(0))
    batch = packed_rows(0)
    second = (batch["position_ids"] == 0).cumsum(1) > 1
    batch["labels"] = batch["labels"].masked_fill(~second, -100)
    other = dict(batch, input_ids=batch["input_ids"].where(second, (batch["input_ids"] + 7) % VOCAB))
    return tuple(trainer.step(**inputs) for inputs in (batch, other))  # type: ignore[return-value]


def test_a_document_does_not_see_the_ones_before_it_in_a_pipeline() -> None:
    """KempnerForge#204: later stages did not know the documents."""
    for one, two in run_ranks(stages_after_another_first_document, 2):
        assert torch.equal(one, two)


def test_tokens_that_equal_the_padding_are_tokens() -> None:
    """Automodel#3223: a mask was made of token ids. Here there is none unless the caller gives it."""
    tokens = torch.tensor([[5, 0, 7, 0, 0, 9, 11, 3]])
    report = autotp.verify(llama(), 2, cp=2, example_inputs={"input_ids": tokens, "labels": tokens})
    assert report.ok, report
