"""quantized: a model with quantized weights is one error, which names the weight, the library and what to write."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from errors import message
from ranks import Checks
from torch import nn

import autotp
from autotp.integrations.transformers.quantized import quantized_weight

checks = Checks()


def of_library(package: str, name: str, base: type) -> Any:
    """A class as a library defines it, for the library is not installed here."""
    return type(name, (base,), {"__module__": package})


def with_parameter(package: str, name: str) -> nn.Module:
    """A layer of torch's whose weight is a library's, as torchao and bitsandbytes have them."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model[1].weight = of_library(package, name, nn.Parameter)(torch.zeros(4, 8))
    return model


def with_module(package: str, name: str, dtype: torch.dtype) -> nn.Module:
    """A layer of a library's with packed weights in torch's own tensors, as HQQ and GPTQ have them."""
    layer = of_library(package, name, nn.Module)()
    layer.register_buffer("packed", torch.zeros(4, 8, dtype=dtype))
    return nn.Sequential(nn.Linear(4, 8), layer)


def with_mixin() -> nn.Module:
    """As models of transformers have one, for adapters; this one has positions of its own, as GPT-1 and XLM do."""
    mixin = type("AdapterMixin", (), {"__module__": "transformers.integrations.peft"})
    model = type("Model", (nn.Module, mixin), {})()
    model.register_buffer("position_ids", torch.arange(4))
    return model


def of_torch() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 8)), {nn.Linear})
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (with_parameter("torchao.quantization", "Int8Tensor"), "`1.weight` is quantized by torchao (a Int8Tensor)"),
        (with_parameter("bitsandbytes.nn.x", "Params4bit"), "`1.weight` is quantized by bitsandbytes (a Params4bit)"),
        (with_module("hqq.core.quantize", "HQQLinear", torch.uint8), "`1` is quantized by HQQ (a HQQLinear)"),
        (with_module("transformers.integrations.x", "F8", torch.int8), "`1` is quantized by transformers (a F8)"),
        (of_torch(), "`0` is quantized by torch.ao (a Linear)"),
        (with_module("bitsandbytes.nn.modules", "StableEmbedding", torch.float32), ""),
        (with_module("hqqq", "Linear", torch.uint8), ""),
        (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), ""),
        (with_mixin(), ""),
    ],
    ids=["torchao", "bitsandbytes", "hqq", "fp8", "torch", "not-packed", "other-package", "plain", "mixin"],
)  # fmt: skip
def test_quantized_weight_names_the_weight_and_the_library(model: nn.Module, expected: str) -> None:
    assert quantized_weight(model) == expected


def test_each_call_refuses_quantized_weights() -> None:
    model = with_parameter("torchao.quantization", "Int8Tensor")
    for call in (autotp.explain, autotp.verify, autotp.stages):
        with pytest.raises(autotp.Error) as raised:
            call(model, 2, example_inputs=torch.ones(2, 4))  # type: ignore[operator]
        assert str(raised.value) == (
            f"{call.__name__}(Sequential, tp=2): `1.weight` is quantized by torchao (a Int8Tensor), and weights that "
            "are quantized cannot be cut\n  try      the model in its own dtype, without quantize_ or "
            "quantization_config: each rank holds 1/tp of it\n"
            "  or       dtype=torch.bfloat16, and LoRA: autotp.parallelize(get_peft_model(model, config))"
        )


def test_adapters_on_a_quantized_base_say_so() -> None:
    """QLoRA: the weights under the adapters stay quantized."""
    peft = pytest.importorskip("peft")
    base = with_parameter("bitsandbytes.nn.modules", "Params4bit")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0", "1"]))
    first, *others = message(lambda: autotp.parallelize(model, 1, example_inputs=torch.ones(2, 4))).splitlines()
    assert first == (
        "parallelize(PeftModel, tp=1): `base_model.model.1.base_layer.weight` is quantized by bitsandbytes (a "
        "Params4bit), and weights that are quantized cannot be cut"
    )
    assert others[1] == "  or       dtype=torch.bfloat16, and LoRA: autotp.parallelize(get_peft_model(model, config))"


@checks.on(2)
def every_rank_is_told(rank: int, n: int) -> None:
    """Also where one rank only has quantized weights."""
    model = (
        with_parameter("torchao.quantization", "Int8Tensor")
        if rank
        else nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    )
    with pytest.raises(autotp.Error) as raised:
        autotp.parallelize(model, n, example_inputs=torch.ones(2, 4))
    assert "`1.weight` is quantized by torchao" in str(raised.value)
    assert ("on       tp rank 1" in str(raised.value)) == (rank == 0)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
