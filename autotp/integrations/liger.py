"""The functions of Liger-Kernel as formulas of torch's own operators, whose rules autotp knows.

    LigerSiLUMulFunction.apply(gate, up)     ->   F.silu(gate) * up

Liger's kernels are torch.autograd.Functions around Triton, which no graph can contain, and a CPU cannot run. So a model
with Liger's modules is cut as the same model without them, and `verify` runs. This module does not import Liger.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autotp.errors import Error
from autotp.integrations.attention_kernels.kernel_operator import parameters_of
from autotp.source_location import user_line

LLAMA, GEMMA = ("llama", 0), ("gemma", 1)
"""Modes of the normalization, and their numbers: what is computed in float32."""
LOSS_OUTPUTS = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")
"""Wishes for further outputs of a loss; a version that has the argument returns one more value."""
SAME_RESULT = ("in_place", "row_mode", "position_ids", "unsqueeze_dim", "accum_dtype")
"""Arguments that say how a kernel computes, or that it does not read."""
SETTINGS = ("weight", "ignore_index", "reduction", "label_smoothing")
UNKNOWN_TERMS = (*LOSS_OUTPUTS, "lse_square_scale", "use_token_scaling")
OF_LOSS = ("_input", "target", "bias", "ce_weight", "softcap", *SETTINGS, *UNKNOWN_TERMS)
"""The arguments of losses; `UNKNOWN_TERMS` are refused."""


def liger_formula(function: type) -> Callable[..., Any] | None:
    """Returns a formula for a function of Liger, None for others."""
    formula = FORMULAS.get(function.__name__) if function.__module__.partition(".")[0] == "liger_kernel" else None
    return None if formula is None else partial(_computed, formula, function)


def _computed(formula: Callable[..., Any], function: Any, *args: Any) -> Any:
    """Returns what a formula gives for a call.

    Raises:
        Error: the function gets an argument that the formula does not know, as those of later versions of Liger.
    """
    _, *parameters = inspect.signature(formula).parameters.values()
    positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    defaults = parameters_of(function)
    for (name, default), value in list(zip(defaults.items(), args, strict=False))[positional:]:
        unknown = name not in SAME_RESULT if positional else name not in (*SAME_RESULT, *OF_LOSS)
        if unknown and value is not default and value != default:
            raise _refused(function, name, "which autotp's formula for it does not have")
    return formula(function, *(args[:positional] if positional else args))


def _refused(function: Any, name: str, why: str) -> Error:
    return Error(
        f"{function.__name__} gets `{name}`, {why}",
        at=user_line(traceback.extract_stack()),
        fix="the same by operators of torch, in place of this function of Liger",
    )


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rms_norm(
    _: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, casting_mode: Any = "llama"
) -> Tensor:
    """x: [... hidden], weight: [hidden]"""
    wide = _wide(x) if casting_mode in LLAMA + GEMMA else x
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if casting_mode in LLAMA:
        normalized = normalized.to(x.dtype)
    if weight is not None:
        normalized = normalized * (offset + weight.to(normalized.dtype))
    return normalized.to(x.dtype)


def _layer_norm(_: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _silu_mul(_: Any, gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    scaled = gate if gate_multiplier == 1.0 else gate * gate_multiplier
    product = F.silu(scaled) * up
    return product if down_multiplier == 1.0 else product * down_multiplier


def _gelu_mul(_: Any, gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _rope(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """q: [batch heads seq width], k: [batch groups seq width], cos and sin: [1 or batch, seq, width]"""
    turned = tuple(x * cos.unsqueeze(1) + _half_turned(x) * sin.unsqueeze(1) for x in (q, k))
    # A version with `setup_context` returns what its backward reads, too.
    has_context = function.setup_context is not torch.autograd.Function.setup_context
    return (*turned, cos, sin) if has_context else turned


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _linear_cross_entropy(function: Any, *args: Any) -> Any:
    """As `_cross_entropy`, of the product of `_input: [tokens hidden]` and `weight: [words hidden]`."""
    arguments = _named(function, args)
    logits = F.linear(arguments.pop("_input"), arguments.pop("weight"), arguments.pop("bias", None))
    return _loss(function, logits, {**arguments, "weight": arguments.pop("ce_weight", None)})


def _cross_entropy(function: Any, *args: Any) -> Any:
    """The loss of `_input: [tokens words]` and `target: [tokens]`, in float32 at least."""
    arguments = _named(function, args)
    return _loss(function, arguments.pop("_input"), arguments)


def _named(function: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    parameters = parameters_of(function)
    return {**parameters, **dict(zip(parameters, args, strict=False))}


def _loss(function: Any, logits: Tensor, arguments: Mapping[str, Any]) -> Any:
    """Returns what a loss function returns: the loss alone, or with None for each output that is not wanted.

    Raises:
        Error: an output or a term is wanted that cross entropy does not have.
    """
    for name in UNKNOWN_TERMS:
        if arguments.get(name):
            raise _refused(function, name, "which F.cross_entropy does not have")
    logits, softcap = _wide(logits), arguments.get("softcap")
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    settings = {name: arguments[name] for name in SETTINGS if arguments.get(name) is not None}
    loss = F.cross_entropy(logits, arguments["target"], **settings)
    empty_outputs = [None for name in LOSS_OUTPUTS if name in arguments]
    return (loss, *empty_outputs) if empty_outputs else loss


FORMULAS: Mapping[str, Callable[..., Any]] = {
    "LigerRMSNormFunction": _rms_norm, "LigerLayerNormFunction": _layer_norm,
    "LigerSiLUMulFunction": _silu_mul, "LigerGELUMulFunction": _gelu_mul, "LigerRopeFunction": _rope,
    "LigerCrossEntropyFunction": _cross_entropy,
    "LigerFusedLinearCrossEntropyFunction": _linear_cross_entropy,
}  # fmt: skip
