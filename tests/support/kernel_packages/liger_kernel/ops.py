"""Liger's torch.autograd.Functions. As Triton's kernels, what they compute is closed to a capture: an operator."""

from __future__ import annotations

import ast
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, casting_mode: str) -> list[Tensor]:
    wide = x.double() if x.dtype == torch.float64 else x.float()
    normalized = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    normalized = normalized if casting_mode == "gemma" else normalized.to(x.dtype)
    return [(normalized * (offset + weight)).to(x.dtype)]


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    half = q.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    halves = [(x[..., :half], x[..., half:]) for x in (q, k)]
    return [torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in halves]


def _head(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **settings: Any) -> list[Tensor]:
    return _cross_entropy(F.linear(x, weight, bias), target, **settings)


def _cross_entropy(logits: Tensor, target: Tensor, softcap: float | None = None, **settings: Any) -> list[Tensor]:
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return [F.cross_entropy(logits, target, **settings)]


KERNELS = {
    "rms_norm": _rms_norm, "rope": _rope, "head": _head, "cross_entropy": _cross_entropy,
    "layer_norm": lambda x, w, b, eps: [F.layer_norm(x, x.shape[-1:], w, b, eps)],
    "silu_mul": lambda a, b, gate, down: [F.silu(a * gate) * b * down],
    "gelu_mul": lambda a, b: [F.gelu(a, approximate="tanh") * b],
}  # fmt: skip


@torch.library.custom_op("liger_stand_in::kernel", mutates_args=())
def kernel(name: str, operands: list[Tensor], settings: str) -> list[Tensor]:
    return [x.clone() for x in KERNELS[name](*operands, **ast.literal_eval(settings))]


def _run(ctx: Any, name: str, *operands: Tensor, **settings: Any) -> list[Tensor]:
    ctx.save_for_backward(*operands)
    ctx.call = name, repr(settings)
    return kernel(name, list(operands), repr(settings))


def _grads(ctx: Any, *gradients: Tensor) -> list[Any]:
    name, settings = ctx.call
    with torch.enable_grad():
        inside = [x.detach().requires_grad_(x.is_floating_point()) for x in ctx.saved_tensors]
        results = KERNELS[name](*inside, **ast.literal_eval(settings))
        wanted = [x for x in inside if x.requires_grad]
        grads = dict(zip(map(id, wanted), torch.autograd.grad(results, wanted, gradients), strict=True))
    return [grads.get(id(x)) for x in inside]


class LigerRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        return _run(ctx, "rms_norm", X, W, eps=eps, offset=offset, casting_mode=casting_mode)[0]

    @staticmethod
    def backward(ctx, dY):
        return *_grads(ctx, dY), *[None] * 5


class LigerLayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, W, B, eps):
        return _run(ctx, "layer_norm", X, W, B, eps=eps)[0]

    @staticmethod
    def backward(ctx, dY):
        return *_grads(ctx, dY), None


class LigerSiLUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, gate_multiplier=1.0, down_multiplier=1.0):
        return _run(ctx, "silu_mul", a, b, gate=gate_multiplier, down=down_multiplier)[0]

    @staticmethod
    def backward(ctx, dc):
        return *_grads(ctx, dc), None, None


class LigerGELUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return _run(ctx, "gelu_mul", a, b)[0]

    @staticmethod
    def backward(ctx, dc):
        return tuple(_grads(ctx, dc))


class LigerRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        return tuple(_run(ctx, "rope", q, k, cos, sin))

    @staticmethod
    def backward(ctx, dq, dk):
        return *_grads(ctx, dq, dk)[:2], None, None, None, None


class LigerCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, _input, target, weight, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
                reduction="mean", softcap=None, return_z_loss=False, return_token_accuracy=False):  # fmt: skip
        settings = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
        return _run(ctx, "cross_entropy", _input, target, softcap=softcap, **settings)[0], None, None

    @staticmethod
    def backward(ctx, grad_output, *others):
        return *_grads(ctx, grad_output), *[None] * 8


class LigerFusedLinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, _input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0,
                label_smoothing=0.0, reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None,
                use_token_scaling=False, return_token_accuracy=False, return_predicted_tokens=False):  # fmt: skip
        settings = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
        operands = [x for x in (_input, weight, target, bias) if x is not None]
        return _run(ctx, "head", *operands, softcap=softcap, **settings)[0], None, None, None

    @staticmethod
    def backward(ctx, grad_output, *others):
        grads = _grads(ctx, grad_output)
        return *grads, *[None] * (15 - len(grads))
