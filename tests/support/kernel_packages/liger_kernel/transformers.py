"""Liger's modules, and how it puts them into transformers' Llama."""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel import ops
from torch import Tensor, nn


class LigerRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
                 init_fn: str = "ones", in_place: bool = True, row_mode: Any = None) -> None:  # fmt: skip
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size) if init_fn == "ones" else torch.zeros(hidden_size))
        self.how = eps, offset, casting_mode, in_place, row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.LigerRMSNormFunction.apply(hidden_states, self.weight, *self.how)


class LigerSwiGLUMLP(nn.Module):
    function = ops.LigerSiLUMulFunction

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.function.apply(self.gate_proj(x), self.up_proj(x)))


class LigerGEGLUMLP(LigerSwiGLUMLP):
    function = ops.LigerGELUMulFunction


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    def __init__(self, ce_weight: Any = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
                 label_smoothing: float = 0.0, reduction: str = "mean", softcap: Any = None) -> None:  # fmt: skip
        super().__init__()
        self.how = ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.LigerFusedLinearCrossEntropyFunction.apply(_input, lin_weight, target, bias, *self.how)[0]


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    return ops.LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim)


def lce_forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):  # type: ignore[no-untyped-def]
    from transformers.modeling_outputs import CausalLMOutputWithPast

    hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    if labels is None:
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))
    targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    loss = LigerFusedLinearCrossEntropyLoss()(self.lm_head.weight, hidden.view(-1, hidden.shape[-1]), targets)
    return CausalLMOutputWithPast(loss=loss)


def apply_liger_kernel_to_llama(rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True,
                                rms_norm: bool = True, swiglu: bool = True, model: Any = None) -> None:  # fmt: skip
    from transformers.models.llama import modeling_llama as llama

    assert not cross_entropy and model is None
    llama.apply_rotary_pos_emb = liger_rotary_pos_emb if rope else llama.apply_rotary_pos_emb
    llama.LlamaRMSNorm = LigerRMSNorm if rms_norm else llama.LlamaRMSNorm
    llama.LlamaMLP = LigerSwiGLUMLP if swiglu else llama.LlamaMLP
    if fused_linear_cross_entropy:
        llama.LlamaForCausalLM.forward = lce_forward
