"""The floor: a GPT whose tensor parallelism is written by hand, as in the Megatron-LM paper (Shoeybi et al. 2019).

Plain tensors, conjugate autograd functions, column- and row-parallel products, one copy for q, k and v, a
vocabulary-parallel embedding, head and loss. It computes what `autotp.models.gpt.GPT` computes, from its weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autotp.models.gpt import GPT


class Copy(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class VocabLoss(torch.autograd.Function):
    """Cross-entropy of logits cut by vocabulary: maxima, sums and target logits are exchanged, a number a token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, start: int) -> Tensor:
        most = logits.amax(-1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        logits = logits - most.unsqueeze(-1)
        local = target - start
        outside = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(outside, 0)
        picked = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
        dist.all_reduce(picked)
        exponentials = logits.exp_()
        total = exponentials.sum(-1)
        dist.all_reduce(total)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, outside)
        return (total.log() - picked).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, local, outside = ctx.saved_tensors
        rows = torch.arange(local.shape[0], device=local.device)
        softmax[rows, local] -= (~outside).to(softmax.dtype)
        return softmax.mul_(grad / local.shape[0]), None, None


class Block(nn.Module):
    """A block on this rank's heads and its part of the width."""

    def __init__(self, block: Any, rank: int, tp: int) -> None:
        super().__init__()
        attn, mlp = block.attn, block.mlp
        self.ln_1, self.ln_2, self.heads = block.ln_1, block.ln_2, attn.n_head // tp
        q, k, v = (part.chunk(tp)[rank] for part in attn.c_attn.weight.detach().chunk(3))
        self.qkv, self.qkv_bias = nn.Parameter(torch.cat((q, k, v))), _fused_bias(attn.c_attn.bias, rank, tp)
        self.proj, self.proj_bias = _columns(attn.c_proj.weight, rank, tp), attn.c_proj.bias
        self.up = nn.Parameter(mlp.c_fc.weight.detach().chunk(tp)[rank].clone())
        self.up_bias = nn.Parameter(mlp.c_fc.bias.detach().chunk(tp)[rank].clone())
        self.down, self.down_bias = _columns(mlp.c_proj.weight, rank, tp), mlp.c_proj.bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq hidden], whole on every rank, as is the result."""
        b, s, _ = x.shape
        q, k, v = F.linear(Copy.apply(self.ln_1(x)), self.qkv, self.qkv_bias).chunk(3, -1)
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        x = x + (Reduce.apply(F.linear(y, self.proj)) + self.proj_bias)
        h = F.gelu(F.linear(Copy.apply(self.ln_2(x)), self.up, self.up_bias), approximate="tanh")
        return x + (Reduce.apply(F.linear(h, self.down)) + self.down_bias)


class MegatronGPT(nn.Module):
    """`gpt`, cut by hand. Heads, width and vocabulary must divide."""

    def __init__(self, gpt: GPT, rank: int, tp: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(block, rank, tp) for block in gpt.h)
        self.table = nn.Parameter(gpt.wte.weight.detach().chunk(tp)[rank].clone())
        self.start = rank * self.table.shape[0]
        self.positions, self.norm = gpt.wpe, gpt.ln_f

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss. tokens, labels: [batch seq]"""
        local = tokens - self.start
        outside = (local < 0) | (local >= self.table.shape[0])
        rows = F.embedding(local.masked_fill(outside, 0), self.table).masked_fill(outside.unsqueeze(-1), 0)
        x = Reduce.apply(rows) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(Copy.apply(self.norm(x)), self.table)
        return VocabLoss.apply(logits.flatten(0, 1), labels.flatten(), self.start)


def _columns(weight: Tensor, rank: int, tp: int) -> nn.Parameter:
    return nn.Parameter(weight.detach().chunk(tp, 1)[rank].clone())


def _fused_bias(bias: Tensor, rank: int, tp: int) -> nn.Parameter:
    return nn.Parameter(torch.cat([part.chunk(tp)[rank] for part in bias.detach().chunk(3)]))
