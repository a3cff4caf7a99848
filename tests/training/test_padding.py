"""Padded batches, which tokenizers give: the loss and every gradient of `distribute` are one device's, in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hugging_face import tiny
from ranks import run_ranks
from small_models import assert_values_close
from torch import Tensor, nn
from trainers import mine

from autotp.training.distribute import distribute

ROWS, SEQ, PADDING, VOCAB = 8, 6, 0, 99
FAMILIES = (
    "llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox", "opt", "bert", "roberta", "modernbert", "t5",
    "bart", "mixtral-batched", "bloom", "falcon-mqa", "falcon-new", "falcon-alibi", "phi3",
    "mixtral", "gpt_oss", "deepseek_v3",
)  # fmt: skip
LAYOUTS = [(1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 1)]
"""Ranks of tensor, pipeline and data parallelism."""
USUAL = [((1, 1, 2), ("llama",))]
SINGLE = ("bloom", "mixtral", "gpt_oss", "deepseek_v3")
"""In float32. transformers computes bloom's softmax so: what masks in float64 is infinite there, and the loss is
undefined. torch has no products of groups of rows in float64."""


def built(family: str, layers: int) -> nn.Module:
    """A model in float64 without dropout, and without the loss that balances experts over the whole batch."""
    torch.manual_seed(0)
    model, _ = tiny(family)
    config: Any = model.config
    config.num_hidden_layers = layers
    if family == "t5":
        config.num_decoder_layers = layers
    for name, value in vars(config).items():
        if ("drop" in name and isinstance(value, float)) or name == "output_router_logits":
            setattr(config, name, 0.0 if "drop" in name else False)
    how = {"experts_implementation": config._experts_implementation} if config._experts_implementation else {}
    model = type(model)._from_config(config, **how).train()  # type: ignore[attr-defined]
    return model if family in SINGLE else model.double()


def padded(family: str, step: int) -> dict[str, Tensor]:
    """Rows of all lengths, in turn padded on the right and on the left; padding is in no loss, nor is one row."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(5, VOCAB, (ROWS, SEQ), generator=generator)
    lengths = (torch.arange(ROWS) + step) % (SEQ - 1) + 2
    right = torch.arange(SEQ) < lengths.unsqueeze(1)
    mask = torch.where(torch.arange(ROWS).unsqueeze(1) % 2 == 0, right, right.flip(1))
    x = x.masked_fill(~mask, PADDING)
    labels = x.masked_fill(~mask, -100)
    labels[3] = -100
    if family in ("t5", "bart"):
        labels = labels[:, : SEQ - 2].clone()
    return {"input_ids": x, "attention_mask": mask.long(), "labels": labels}


def expect_one_device(family: str, layout: tuple[int, int, int], layers: int, schedule: Any) -> None:
    """Two steps, on batches padded otherwise."""
    tp, pp, dp = layout
    whole = built(family, layers)
    given = {name: x[: ROWS // (2 * dp)] for name, x in padded(family, 0).items()}
    trainer = distribute(
        copy.deepcopy(whole), tp=tp, pp=pp, dp=dp, microbatches=2, schedule=schedule, example_inputs=given
    )
    replica = trainer.mesh["dp"].get_local_rank()
    names = {id(p): name for name, p in whole.named_parameters()}
    for step in range(2):
        batch = padded(family, step)
        whole.zero_grad()
        trainer.zero_grad()
        expected = whole(**batch).loss
        expected.backward()
        assert_values_close(trainer.step(**mine(batch, replica, dp)), expected.detach(), rtol=0, atol=1e-5)
        grads = {names[id(p)]: p.grad for p in whole.parameters()}
        for name, parameter in trainer.named_parameters():
            found, grad = parameter.grad, grads[name]
            assert (found is None) == (grad is None), name
            if grad is not None:
                assert_values_close(found, grad, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def on_ranks(
    rank: int, n: int, families: Sequence[str], layout: tuple[int, int, int], layers: int = 2, schedule: str = "1F1B"
) -> None:
    for family in families:
        try:
            expect_one_device(family, layout, layers, schedule)
        except Exception as error:
            raise AssertionError(f"{family}: {error}") from error


@pytest.mark.system
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("layout", "families"),
    [
        *USUAL,
        *(pytest.param(layout, (family,), marks=pytest.mark.rare) for layout in LAYOUTS for family in FAMILIES),
    ],
    ids=lambda it: "tp{}-pp{}-dp{}".format(*it) if isinstance(it[0], int) else "-".join(it),
)
def test_distribute_of_padded_batches_equals_one_device(layout: tuple[int, int, int], families: Sequence[str]) -> None:
    tp, pp, dp = layout
    run_ranks(on_ranks, tp * pp * dp, families, layout, timeout=380)


@pytest.mark.rare
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.timeout(200)
def test_pipeline_stages_send_transposed_tensors() -> None:
    """T5's position bias, which is made in the first block."""
    run_ranks(on_ranks, 2, ("t5",), (1, 2, 1), 4, "interleaved", timeout=180)
