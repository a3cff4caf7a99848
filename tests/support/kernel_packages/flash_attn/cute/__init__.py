"""Stands for flash-attn 4, which is in the package of flash-attn 2, and returns the log-sum-exp in any case."""

from __future__ import annotations

import torch
from dense_attention import attend, gradients


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None,
                softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, mask_mod=None, full_block_cnt=None,
                full_block_idx=None, mask_block_cnt=None, mask_block_idx=None, block_size=None,
                return_lse=False):  # fmt: skip
        assert -1 not in window_size
        ctx.save_for_backward(q, k, v)
        ctx.how = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
        ctx.sinks = learnable_sink
        return attend(q, k, v, sinks=learnable_sink, **ctx.how)

    @staticmethod
    def backward(ctx, dout, *args):
        dq, dk, dv, *sinks = gradients(dout, *ctx.saved_tensors, sinks=ctx.sinks, **ctx.how)
        return dq, dk, dv, None, None, None, sinks[0] if sinks else None, *[None] * 11


class FlashAttnVarlenFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q=None, seqused_k=None, max_seqlen_q=None,
                max_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, window_size=(None, None),
                learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
                aux_tensors=None, return_lse=False):  # fmt: skip
        assert -1 not in window_size
        ctx.save_for_backward(q, k, v, cu_seqlens_q, cu_seqlens_k)
        ctx.how = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
        ctx.sinks = learnable_sink
        return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks=learnable_sink, **ctx.how)

    @staticmethod
    def backward(ctx, dout, *args):
        dq, dk, dv, *sinks = gradients(dout, *ctx.saved_tensors, sinks=ctx.sinks, **ctx.how)
        return dq, dk, dv, *[None] * 10, sinks[0] if sinks else None, *[None] * 7


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None,
                    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, mask_mod=None, full_block_cnt=None,
                    full_block_idx=None, mask_block_cnt=None, mask_block_idx=None, block_size=None,
                    return_lse=False):  # fmt: skip
    return FlashAttnFunc.apply(
        q, k, v, softmax_scale, causal, window_size, learnable_sink, softcap, num_splits, pack_gqa, deterministic,
        mask_mod, full_block_cnt, full_block_idx, mask_block_cnt, mask_block_idx, block_size, return_lse,
    )  # fmt: skip


def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
                           seqused_q=None, seqused_k=None, page_table=None, softmax_scale=None, causal=False,
                           window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
                           deterministic=False, score_mod=None, aux_tensors=None, return_lse=False):  # fmt: skip
    return FlashAttnVarlenFunc.apply(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table,
        softmax_scale, causal, window_size, learnable_sink, softcap, num_splits, pack_gqa, deterministic, score_mod,
        aux_tensors, return_lse,
    )  # fmt: skip
