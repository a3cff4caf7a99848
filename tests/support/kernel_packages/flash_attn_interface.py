"""Stands for flash-attn 3."""

from __future__ import annotations

import torch
from dense_attention import attend, attend_with_cache, gradients


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, causal, qv=None, q_descale=None, k_descale=None, v_descale=None,
                window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                deterministic=False, sm_margin=0, return_softmax=False):  # fmt: skip
        ctx.save_for_backward(q, k, v)
        ctx.how = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
        ctx.how["attention_chunk"] = attention_chunk  # The real backward refuses one.
        out, lse = attend(q, k, v, **ctx.how)
        return (out, lse) if return_softmax else out

    @staticmethod
    def backward(ctx, dout, *args):
        return *gradients(dout, *ctx.saved_tensors, **ctx.how), *[None] * 14


class FlashAttnVarlenFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
                softmax_scale, causal, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
                attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
                return_softmax=False):  # fmt: skip
        assert seqused_q is None and seqused_k is None
        ctx.save_for_backward(q, k, v, cu_seqlens_q, cu_seqlens_k)
        ctx.how = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
        ctx.how["attention_chunk"] = attention_chunk  # The real backward refuses one.
        out, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, **ctx.how)
        return (out, lse) if return_softmax else out

    @staticmethod
    def backward(ctx, dout, *args):
        return *gradients(dout, *ctx.saved_tensors, **ctx.how), *[None] * 20


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                    deterministic=False, sm_margin=0, return_attn_probs=False):  # fmt: skip
    return FlashAttnFunc.apply(
        q, k, v, softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        num_splits, pack_gqa, deterministic, sm_margin, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
                           seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                           v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                           pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):  # fmt: skip
    return FlashAttnVarlenFunc.apply(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        qv, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, num_splits, pack_gqa,
        deterministic, sm_margin, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
                            cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                            q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                            scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
                            return_softmax_lse=False):  # fmt: skip
    assert qv is None and rotary_cos is None and cache_batch_idx is None and cu_seqlens_q is None
    return attend_with_cache(
        q, k_cache, v_cache, k, v, cache_seqlens, page_table, return_softmax_lse, softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap,
    )  # fmt: skip
