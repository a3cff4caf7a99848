"""The functions of flash-attn 2.8: signatures, names of operators, and autograd Functions around these."""

from __future__ import annotations

from typing import Any

import torch
from dense_attention import attend, attend_with_cache, gradients
from torch import Tensor

SETTINGS = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes")


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    window = window_size_left, window_size_right
    return attend(
        q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window, softcap=softcap,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    for ends, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert ends.dtype == torch.int32 and longest >= int(ends.diff().max())
    window = window_size_left, window_size_right
    return attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=window, softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip


def _run(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: tuple[Any, ...], settings: tuple[Any, ...]) -> Any:
    ctx.save_for_backward(q, k, v, *ends[:2])
    ctx.how = dict(zip(SETTINGS, settings, strict=True))
    dropout_p, scale, causal, window, softcap, slopes = settings
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    name = "_flash_attn_varlen_forward" if ends else "_flash_attn_forward"
    arguments = (dropout_p, scale, causal, *window, softcap, slopes, False)
    return getattr(torch.ops.flash_attn, name)(q, k, v, *ends, *arguments)


def _grads(ctx: Any, dout: Tensor) -> list[Any]:
    return gradients(dout, *ctx.saved_tensors, **ctx.how)


def _result(out: Tensor, lse: Tensor, return_softmax: bool) -> Any:
    return (out, lse, None) if return_softmax else out


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                return_softmax, is_grad_enabled):  # fmt: skip
        settings = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        return _result(*_run(ctx, q, k, v, (), settings), return_softmax)

    @staticmethod
    def backward(ctx, dout, *args):
        return *_grads(ctx, dout), *[None] * 9


class FlashAttnVarlenFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                window_size, softcap, alibi_slopes, deterministic, return_softmax, block_table,
                is_grad_enabled):  # fmt: skip
        settings = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return _result(*_run(ctx, q, k, v, ends, settings), return_softmax)

    @staticmethod
    def backward(ctx, dout, *args):
        return *_grads(ctx, dout), *[None] * 14


class FlashAttnQKVPackedFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                return_softmax, is_grad_enabled):  # fmt: skip
        settings = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        return _result(*_run(ctx, *qkv.unbind(2), (), settings), return_softmax)

    @staticmethod
    def backward(ctx, dout, *args):
        return torch.stack(_grads(ctx, dout), 2), *[None] * 9


class FlashAttnVarlenQKVPackedFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                deterministic, return_softmax, is_grad_enabled):  # fmt: skip
        settings = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        ends = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
        return _result(*_run(ctx, *qkv.unbind(1), ends, settings), return_softmax)

    @staticmethod
    def backward(ctx, dout, *args):
        return torch.stack(_grads(ctx, dout), 1), *[None] * 11


class FlashAttnKVPackedFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                return_softmax, is_grad_enabled):  # fmt: skip
        settings = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        return _result(*_run(ctx, q, *kv.unbind(2), (), settings), return_softmax)

    @staticmethod
    def backward(ctx, dout, *args):
        dq, *dkv = _grads(ctx, dout)
        return dq, torch.stack(dkv, 2), *[None] * 9


class FlashAttnVarlenKVPackedFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                window_size, softcap, alibi_slopes, deterministic, return_softmax, is_grad_enabled):  # fmt: skip
        settings = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
        ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return _result(*_run(ctx, q, *kv.unbind(1), ends, settings), return_softmax)

    @staticmethod
    def backward(ctx, dout, *args):
        dq, *dkv = _grads(ctx, dout)
        return dq, torch.stack(dkv, 1), *[None] * 13


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    settings = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return FlashAttnFunc.apply(q, k, v, *settings, torch.is_grad_enabled())


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    settings = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return FlashAttnQKVPackedFunc.apply(qkv, *settings, torch.is_grad_enabled())


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    settings = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return FlashAttnKVPackedFunc.apply(q, kv, *settings, torch.is_grad_enabled())


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None):  # fmt: skip
    settings = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return FlashAttnVarlenFunc.apply(q, k, v, *ends, *settings, block_table, torch.is_grad_enabled())


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):  # fmt: skip
    settings = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return FlashAttnVarlenQKVPackedFunc.apply(qkv, cu_seqlens, max_seqlen, *settings, torch.is_grad_enabled())


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                                    alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    settings = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return FlashAttnVarlenKVPackedFunc.apply(q, kv, *ends, *settings, torch.is_grad_enabled())


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None,
                            causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True,
                            alibi_slopes=None, num_splits=0, return_softmax_lse=False):  # fmt: skip
    assert rotary_cos is None and cache_batch_idx is None and cache_leftpad is None
    return attend_with_cache(
        q, k_cache, v_cache, k, v, cache_seqlens, block_table, return_softmax_lse, softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
