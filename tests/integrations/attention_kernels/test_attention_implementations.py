"""Each `attn_implementation` of transformers on ranks, beside one device: trained, and in generate."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import kernel_packages
import pytest
import torch
from kernel_packages import flash_attn, flash_attn_interface
from ranks import run_ranks
from torch import Tensor, nn

import autotp

transformers: Any = pytest.importorskip("transformers")
VERSIONS = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
HUB = "kernels-community/vllm-flash-attn3"
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def around_flash(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any) -> Any:
    """A user's function around a kernel."""
    operands = (x.transpose(1, 2) for x in (query, key, value))
    return flash_attn.flash_attn_func(*operands, causal=True, softmax_scale=settings["scaling"]), None


def written_out(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any) -> Any:
    """A user's function of plain torch."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * settings["scaling"]
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, float("-inf")).softmax(-1) @ value).transpose(1, 2), None


def built(implementation: str, family: str = "Llama", dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """A model of transformers with this implementation; the functions above have the names "mine" and "plain"."""
    transformers.AttentionInterface.register("mine", around_flash)
    transformers.AttentionInterface.register("plain", written_out)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **more})
    hub = patch("transformers.integrations.hub_kernels.get_kernel", lambda name, **which: flash_attn_interface)
    available = patch("transformers.integrations.hub_kernels.is_kernels_available", lambda: True)
    with hub, available, kernel_packages.usable_in_transformers():
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)
    return model


def tokens(batch: int, seq: int) -> Tensor:
    return torch.randint(96, (batch, seq), generator=torch.Generator().manual_seed(seq))


def expect_equal_training(model: Any, close: float = 1e-5, **layout: Any) -> None:
    """Three steps, the later ones on rows of another length with padding.

    Norms and losses of transformers compute in float32.
    """
    parallel = autotp.parallelize(copy.deepcopy(model), example_inputs={"input_ids": tokens(2, 9)}, **layout)
    optimizers = [torch.optim.SGD(x.parameters(), 0.1) for x in (model, parallel)]
    for step, (batch, seq) in enumerate([(2, 9), (3, 7), (2, 12)]):
        inputs: dict[str, Any] = {"input_ids": tokens(batch, seq), "labels": tokens(batch, seq)}
        if step:
            inputs["attention_mask"] = (torch.arange(seq) >= step).expand(batch, seq).long()
        losses = []
        for x, optimizer in zip((model, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(x(**inputs).loss)
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=close, atol=close)


LAYOUTS: dict[str, dict[str, Any]] = {
    "heads": {"tp": 2},
    "sequence": {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    "context": {"tp": 1, "cp": 2},
}


def trained(rank: int, n: int, layout: dict[str, Any], family: str, more: dict[str, Any]) -> None:
    close = 0.02 if "dtype" in more else 1e-5
    with kernel_packages.usable_in_transformers():
        expect_equal_training(built(VERSIONS[0], family, **more), close, **layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_trains_as_one_device(layout: str) -> None:
    run_ranks(trained, 2, LAYOUTS[layout], "Llama", {})


@pytest.mark.parametrize("layout", ["heads", "context"])
def test_windows_train_as_one_device(layout: str) -> None:
    run_ranks(trained, 2, LAYOUTS[layout], "Mistral", {"sliding_window": 4})


def test_local_attention_to_both_sides_reads_halos() -> None:
    """ModernBERT: two layers with a window to both sides and one without; rows, and packed documents that are whole."""
    sizes = {**SIZES, "num_hidden_layers": 3} | {"local_attention": 8, "pad_token_id": 0}
    sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    del sizes["num_key_value_heads"]
    config = transformers.ModernBertConfig(**sizes, dtype=torch.float64)
    texts = [{"input_ids": [i + 3] * i, "labels": [i + 3] * i} for i in (6, 3, 11)]
    packed = dict(transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(texts))
    rows = {"input_ids": tokens(2, 18), "labels": tokens(2, 18)}
    with kernel_packages.usable_in_transformers():
        model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation=VERSIONS[0])
        for batch, count in ((rows, 2), (packed, 3)):
            report = autotp.verify(model.double(), 1, cp=2, cp_attention="gather", example_inputs=batch)
            assert report.ok, report
            assert f"{count} read the keys and values that queries see" in str(report.plan), str(report.plan)
            assert "it needs whole sequences" not in str(report.plan)


def test_bfloat16_trains_as_one_device() -> None:
    run_ranks(trained, 2, LAYOUTS["heads"], "Llama", {"dtype": torch.bfloat16})


def microbatches(rank: int, n: int) -> None:
    """In a pipeline; a step looks once whether there is padding."""
    batch = {"input_ids": tokens(4, 9), "labels": tokens(4, 9), "attention_mask": torch.ones(4, 9, dtype=torch.int64)}
    with kernel_packages.usable_in_transformers():
        model = built(VERSIONS[0], use_cache=False)
        trainer = autotp.distribute(
            copy.deepcopy(model), pp=n, microbatches=2, example_inputs={name: x[:2] for name, x in batch.items()}
        )
        optimizers = [torch.optim.SGD(x.parameters(), 0.1) for x in (model, trainer)]
        for step in range(3):
            batch["attention_mask"][1:, :step] = 0
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            torch.testing.assert_close(trainer.step(**batch), loss.detach(), rtol=1e-5, atol=1e-5)
            for optimizer in optimizers:
                optimizer.step()


def test_microbatches_with_padding_train_as_one_device() -> None:
    run_ranks(microbatches, 2)


def generated(rank: int, n: int) -> None:
    with kernel_packages.usable_in_transformers():
        model = built(VERSIONS[0])
        parallel = autotp.parallelize(copy.deepcopy(model), tp=n, example_inputs={"input_ids": tokens(2, 9)})
        padded = torch.ones(2, 6, dtype=torch.int64)
        padded[0, :3] = 0
        for mask in (None, padded):
            given = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
            first, second = (x.generate(tokens(2, 6), **given) for x in (model, parallel))
            assert torch.equal(first, second)


def test_generate_equals_one_device() -> None:
    """With padding on the left, too."""
    run_ranks(generated, 2)


@pytest.mark.parametrize("implementation", [*VERSIONS, HUB, "mine", "plain"])
def test_each_implementation_is_cut_by_heads(implementation: str) -> None:
    with kernel_packages.usable_in_transformers():
        mask = (torch.arange(9) > 2).expand(2, -1).long()
        batch = {"input_ids": tokens(2, 9), "labels": tokens(2, 9), "attention_mask": mask}
        if implementation in ("mine", "plain"):  # These do not take masks.
            del batch["attention_mask"]
        report = autotp.verify(built(implementation), tp=2, example_inputs=batch)
    assert report.ok, report
    assert "QKV -> attention" in str(report.plan) and "no rule" not in str(report.plan)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_with_padding_are_cut_along_queries(side: str) -> None:
    """Of three ranks one has nothing but padding of the first row."""
    with kernel_packages.usable_in_transformers():
        mask = torch.ones(2, 9, dtype=torch.int64)
        mask[0, :4] = 0
        mask = mask if side == "left" else mask.flip(1)
        batch = {"input_ids": tokens(2, 9), "labels": tokens(2, 9), "attention_mask": mask}
        model = built(VERSIONS[0], num_hidden_layers=1, use_cache=False)
        report = autotp.verify(model, 1, cp=3, cp_attention="gather", example_inputs=batch)
    assert report.ok, report
    assert "it needs whole sequences" not in str(report.plan), str(report.plan)


def test_halves_of_a_batch_equal_one_device() -> None:
    with kernel_packages.usable_in_transformers():
        batch = {"input_ids": tokens(4, 9), "labels": tokens(4, 9)}
        report = autotp.verify(built(VERSIONS[0]), tp=2, example_inputs=batch, overlap="batch")
    assert report.ok and "compute in halves" in str(report.plan), report
