"""GPT-2: an ordinary, single-device model (Radford et al. 2019), with the names of the original's weights.

It has a LayerNorm before each branch, learned positions, tanh GELU, and a head tied to the token embedding. Weights are
initialised as in section 2.3 of the paper: projections into the residual stream start smaller, by 1/sqrt(2 n_layer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT; the defaults are those of GPT-2 small (124M).

    Raises:
        ValueError: `n_head` does not divide `n_embd`.
    """

    block_size: int = 1024  # the longest sequence
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.1
    bias: bool = True  # in linear layers and layer norms

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(f"GPTConfig: n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")


class ResidualProjection(nn.Linear):
    """The linear layer at the end of a branch: its output is added to the residual stream, so it starts smaller."""


class CausalSelfAttention(nn.Module):
    """Causal self-attention: each position attends to itself and to all earlier positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # q | k | v
        self.c_proj = ResidualProjection(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: [batch seq hidden]"""
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)  # [B T C] each
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # [B heads T head_dim]
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # [B heads T head_dim]
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # [B heads T head_dim]
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # [B heads T head_dim]
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two linear layers; the width between them is four times the width of the model."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = ResidualProjection(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: [batch seq hidden]"""
        x = F.gelu(self.c_fc(x), approximate="tanh")  # [batch seq 4*hidden]
        return self.dropout(self.c_proj(x))


class Block(nn.Module):
    """One layer: attention, then MLP; the output of each is added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: [batch seq hidden]"""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The language model: computes the logits of the next token, or the loss if labels are given."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # the head has the same weight
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialises the parameters of this module, not those of its submodules."""
        match module:
            case ResidualProjection():
                nn.init.normal_(module.weight, std=INIT_STD / math.sqrt(2 * self.config.n_layer))
            case nn.Linear() | nn.Embedding():
                nn.init.normal_(module.weight, std=INIT_STD)
            case nn.LayerNorm():
                module.reset_parameters()
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Returns small arguments for `forward`, on the parameters' device (the CPU for a model on meta)."""
        device = self.wte.weight.device
        shape = (2, min(7, self.config.block_size))
        tokens = torch.arange(math.prod(shape), device="cpu" if device.type == "meta" else device).view(shape)
        return {"tokens": tokens % self.config.vocab_size, "labels": (tokens + 1) % self.config.vocab_size}

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns the logits [batch seq vocab]; with labels the mean loss in nats for each token, a scalar.

        Args:
            tokens: [batch seq] int64
            labels: [batch seq] int64, the token that follows each token; -100 is left out of the mean.

        Raises:
            ValueError: the sequence is longer than `block_size`.
        """
        seq = tokens.shape[1]
        if seq > self.config.block_size:
            raise ValueError(f"GPT: a sequence of {seq} tokens is longer than block_size={self.config.block_size}")
        positions = torch.arange(seq, device=tokens.device)  # [seq]
        x = self.drop(self.wte(tokens) + self.wpe(positions))  # [batch seq hidden]
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # [batch seq vocab]
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    @torch.no_grad()
    def generate(self, tokens: Tensor, n: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """Returns the tokens and `n` more, which are drawn one by one; call `.eval()` before.

        Args:
            tokens: [batch seq] int64; the result is [batch seq+n].
            temperature: divides the logits; near 0, the most likely token is drawn.
            top_k: the number of most likely tokens to draw from; by default all tokens.
        """
        for _ in range(n):
            logits = self(tokens[:, -self.config.block_size :])[:, -1] / temperature  # [batch vocab]
            if top_k is not None:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # [batch 1]
                logits = logits.masked_fill(logits < least, -torch.inf)
            drawn = torch.multinomial(logits.softmax(-1), num_samples=1)  # [batch 1]
            tokens = torch.cat((tokens, drawn), dim=1)
        return tokens
