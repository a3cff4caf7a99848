"""Compares a parallel model with one device, on the cards: loss and every gradient, in float64 where it can be.

So a bug shows above round-off. Each feature is a row: a model, the options of `parallelize`, and a limit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from step import full_gradients, gradients
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import autotp
from autotp.models.bert import BERT, BERTConfig
from autotp.models.gpt import GPT, GPTConfig
from first_day.checks import Check, Differs, Place

Inputs = dict[str, Tensor]
Made = tuple[nn.Module, Inputs]

EXACT, SINGLE = 1e-9, 2e-4
"""The largest differences allowed: in float64, and where a part of the model computes in float32."""


def gpt(dropout: float = 0.0) -> Made:
    """Returns a GPT and a batch."""
    sizes: dict[str, Any] = {"block_size": 64, "vocab_size": 257, "n_layer": 2, "n_head": 8, "n_embd": 64}
    x = torch.randint(257, (4, 64))
    return GPT(GPTConfig(**sizes, dropout=dropout)), {"tokens": x, "labels": x.roll(-1, 1)}


def bert(dropout: float = 0.0) -> Made:
    """Returns a BERT and a padded batch."""
    sizes: dict[str, Any] = {"block_size": 64, "vocab_size": 257, "n_layer": 2, "n_head": 8, "n_embd": 64}
    x = torch.randint(257, (4, 64))
    return BERT(BERTConfig(**sizes, dropout=dropout)), {"tokens": x, "labels": x, "mask": padded(x)}


def padded(x: Tensor) -> Tensor:
    """Returns a mask of rows of other lengths, of the shape of `x`."""
    lengths = torch.linspace(x.shape[1] // 2, x.shape[1], x.shape[0]).long()
    return (torch.arange(x.shape[1]) < lengths[:, None]).long()


def llama(padding: bool = False, key_heads: int = 2) -> Made:
    """Returns a Llama of transformers with grouped key heads, and a batch with an attention mask."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=key_heads, max_position_embeddings=64,
    )  # fmt: skip
    x = torch.randint(257, (4, 64))
    mask = padded(x) if padding else torch.ones_like(x)
    return LlamaForCausalLM(config), {"input_ids": x, "labels": x.masked_fill(mask == 0, -100), "attention_mask": mask}


def mixtral() -> Made:
    """Returns a mixture of experts of transformers, and a batch."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, num_local_experts=8, max_position_embeddings=64,
    )  # fmt: skip
    x = torch.randint(257, (4, 64))
    return MixtralForCausalLM(config), {"input_ids": x, "labels": x}


def no_change(model: nn.Module) -> nn.Module:
    """Returns the model."""
    return model


@dataclass(frozen=True)
class Feature:
    """A feature that must equal one device.

    Attributes:
        make: returns a model and its inputs.
        options: of `parallelize`.
        limit: the largest difference, relative to the largest gradient.
        change: what is done to the parallel model before its second step, which is compared; the first captures it.
        math: whether attention runs in plain operators: fused attention draws dropout in another order.
        dtype: of the model.
    """

    make: Callable[[], Made]
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: float = EXACT
    change: Callable[[Any], Any] = no_change
    math: bool = False
    dtype: torch.dtype = torch.float64


def compiled(model: nn.Module) -> nn.Module:
    """Returns the model under torch.compile, as one graph."""
    return torch.compile(model, fullgraph=True, backend=_backend())  # type: ignore[return-value]


def compiled_blocks(**options: Any) -> Callable[[Any], Any]:
    """Returns a function that compiles the blocks of a parallel model."""

    def change(model: Any) -> Any:
        model.compile_blocks(**options, **({} if _backend() == "inductor" else {"backend": _backend()}))
        return model

    return change


def _backend() -> str:
    """Returns Inductor, but not on pretended cards, for which it makes no kernels."""
    pretended = torch.cuda.is_available() and torch.cuda.get_device_name().startswith("Pretended")
    return "aot_eager" if pretended else "inductor"


def with_dropout() -> Made:
    """Returns a GPT with dropout."""
    return gpt(0.1)


FEATURES: dict[str, Feature] = {
    "gpt": Feature(gpt),
    "gpt float32": Feature(gpt, limit=SINGLE, dtype=torch.float32),
    "gpt sequence_parallel": Feature(gpt, {"sequence_parallel": True}),
    "gpt recompute=full": Feature(gpt, {"recompute": "full"}),
    "gpt recompute=selective sequence_parallel": Feature(gpt, {"recompute": "selective", "sequence_parallel": True}),
    "gpt overlap=batch": Feature(gpt, {"overlap": "batch"}),
    "gpt dropout exact": Feature(with_dropout, {"randomness": "exact"}, math=True),
    "gpt dropout exact recompute=full": Feature(with_dropout, {"randomness": "exact", "recompute": "full"}, math=True),
    "bert padded": Feature(bert),
    "bert dropout exact": Feature(lambda: bert(0.1), {"randomness": "exact"}, math=True),
    "llama mask of ones": Feature(llama, limit=SINGLE),
    "llama padded": Feature(lambda: llama(True), limit=SINGLE),
    "llama one key head": Feature(lambda: llama(key_heads=1), limit=SINGLE),
    "llama sequence_parallel": Feature(llama, {"sequence_parallel": True}, limit=SINGLE),
    "llama recompute=full": Feature(llama, {"recompute": "full"}, limit=SINGLE),
    "llama cp=2": Feature(llama, {"cp": 2}, limit=SINGLE),
    "gpt cp=2": Feature(gpt, {"cp": 2}),
    "mixtral experts=width": Feature(mixtral, limit=SINGLE, dtype=torch.float32),  # Grouped products take no float64.
    "mixtral experts=expert": Feature(mixtral, {"experts": "expert"}, limit=SINGLE, dtype=torch.float32),
    "gpt compile fullgraph": Feature(gpt, change=compiled, limit=SINGLE, dtype=torch.float32),
    "llama compile_blocks": Feature(llama, change=compiled_blocks(), limit=SINGLE, dtype=torch.float32),
    "gpt compile_blocks sequence_parallel": Feature(
        gpt, {"sequence_parallel": True}, SINGLE, compiled_blocks(), dtype=torch.float32
    ),
}


def stepped(model: nn.Module, inputs: Inputs) -> Tensor:
    """Runs forward with the seed 1, and backward; returns the loss."""
    torch.manual_seed(1)
    outputs: Any = model(**inputs)
    loss: Tensor = outputs if isinstance(outputs, Tensor) else outputs.loss
    loss.backward()
    return loss.detach()


def expect_equal(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], limit: float) -> float:
    """Returns the largest difference, relative to the largest element of all; 0 if `actual` is empty (other ranks).

    Raises:
        Differs: it is above the limit, or no number.
    """
    scale = max(float(x.detach().abs().max()) for x in expected.values())
    differences = [(_difference(actual[name], x) / scale, name) for name, x in expected.items() if actual]
    largest, name = max(differences, default=(0.0, ""))
    if not largest <= limit:
        raise Differs(f"{largest:.1e}, allowed are {limit:.0e}: {name}")
    return largest


def _difference(x: Tensor, y: Tensor) -> float:
    largest = float((x.cpu().double() - y.cpu().double()).abs().max()) if y.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


def feature(row: Feature) -> Callable[[Place], str]:
    """Returns the check of a feature."""

    def check(place: Place) -> str:
        torch.manual_seed(0)
        plain, inputs = row.make()
        plain.to(place.device, row.dtype)
        on_device = {name: x.to(place.device) for name, x in inputs.items()}
        options = dict(row.options)
        tp = place.ranks // options.get("cp", 1)
        batch = on_device if row.change is compiled else inputs  # Batches of the CPU are moved, but not by a compiler.
        parallel = autotp.parallelize(copy.deepcopy(plain), tp=tp, device=place.device, **options)
        kernel: AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH) if row.math else nullcontext()
        with kernel:
            expected = stepped(plain, on_device)
            stepped(parallel, batch)
            parallel.zero_grad()
            changed = row.change(parallel)
            actual = stepped(changed, batch)
        losses = expect_equal({"the loss": expected}, {"the loss": actual}, row.limit)
        largest = expect_equal(gradients(plain), full_gradients(parallel), row.limit)
        return f"loss {losses:.1e}, gradients {largest:.1e} of {row.limit:.0e}"

    return check


CHECKS = [Check(name, feature(row), (2, 4, 8), 150 if "compile" in name else 60) for name, row in FEATURES.items()]
