"""BERT: an ordinary, single-device model (Devlin et al. 2018) that fills in masked tokens.

With `norm="post"`, a LayerNorm follows each residual addition, as in the original. With `norm="pre"`, a LayerNorm is
before each branch and one is at the end, as in Megatron: BERT then improves as it grows (Shoeybi et al. 2019, fig. 7).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02


@dataclass(frozen=True)
class BERTConfig:
    """The sizes of a BERT; the defaults are those of BERT-base, uncased (110M).

    Raises:
        ValueError: `n_head` does not divide `n_embd`, or `norm` has another value.
    """

    block_size: int = 512  # the longest sequence
    vocab_size: int = 30522
    type_size: int = 2  # number of segments: first and second sentence
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.1
    norm: Literal["post", "pre"] = "post"
    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(f"BERTConfig: n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")
        if self.norm not in ("post", "pre"):
            raise ValueError(f'BERTConfig: norm={self.norm!r} is neither "post" nor "pre"')


class ResidualProjection(nn.Linear):
    """The linear layer at the end of a branch: its output is added to the residual stream."""


class SelfAttention(nn.Module):
    """Self-attention: each position attends to all positions except padding."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.query = nn.Linear(config.n_embd, config.n_embd)
        self.key = nn.Linear(config.n_embd, config.n_embd)
        self.value = nn.Linear(config.n_embd, config.n_embd)
        self.output = ResidualProjection(config.n_embd, config.n_embd)
        self.output_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x and the result: [batch seq hidden]; mask: [batch 1 1 seq] bool, false is padding."""
        B, T, C = x.shape
        q = self.query(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # [B heads T head_dim]
        k = self.key(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # [B heads T head_dim]
        v = self.value(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # [B heads T head_dim]
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)  # [B heads T head_dim]
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side
        return self.output_dropout(self.output(y))


class MLP(nn.Module):
    """Two linear layers; the width between them is four times the width of the model."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.intermediate = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.output = ResidualProjection(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: [batch seq hidden]"""
        x = F.gelu(self.intermediate(x))  # [batch seq 4*hidden]
        return self.dropout(self.output(x))


class Block(nn.Module):
    """One layer: attention, then MLP; `config.norm` says where the LayerNorms are."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.norm = config.norm
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.mlp_norm = nn.LayerNorm(config.n_embd, config.norm_eps)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x and the result: [batch seq hidden]; mask: [batch 1 1 seq] bool, false is padding."""
        if self.norm == "pre":
            x = x + self.attention(self.attention_norm(x), mask)
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attention(x, mask))
        return self.mlp_norm(x + self.mlp(x))


class Embeddings(nn.Module):
    """The sum of the word, position and segment embeddings; normalised only for `norm="post"`."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.n_embd)
        self.position = nn.Embedding(config.block_size, config.n_embd)
        self.segment = nn.Embedding(config.type_size, config.n_embd)
        self.norm = nn.LayerNorm(config.n_embd, config.norm_eps) if config.norm == "post" else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        """tokens and types: [batch seq] int64; the result: [batch seq hidden]"""
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # [seq]
        x = self.word(tokens) + self.segment(types) + self.position(positions)  # [batch seq hidden]
        return self.dropout(self.norm(x))


class MLMHead(nn.Module):
    """Logits over the vocabulary. The decoder uses the weight of the token embedding, and has a bias of its own."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.n_embd, config.n_embd)
        self.norm = nn.LayerNorm(config.n_embd, config.norm_eps)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the bias to zero."""
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """x: [batch seq hidden]; embedding: [vocab hidden]; the result: [batch seq vocab]"""
        x = self.norm(F.gelu(self.transform(x)))
        return F.linear(x, embedding, self.bias)


class BERT(nn.Module):
    """The encoder with its two heads: masked tokens (MLM) and next-sentence prediction (NSP)."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layer = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, config.norm_eps) if config.norm == "pre" else nn.Identity()
        self.mlm = MLMHead(config)
        self.pooler = nn.Linear(config.n_embd, config.n_embd)
        self.nsp = nn.Linear(config.n_embd, 2)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialises the parameters of this module, not those of its submodules."""
        match module:
            case ResidualProjection() if self.config.norm == "pre":
                nn.init.normal_(module.weight, std=INIT_STD / math.sqrt(2 * self.config.n_layer))
            case nn.Linear() | nn.Embedding():
                nn.init.normal_(module.weight, std=INIT_STD)
            case nn.LayerNorm() | MLMHead():
                module.reset_parameters()
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Returns small arguments for `forward`, on the parameters' device (the CPU for a model on meta)."""
        device = self.pooler.weight.device
        batch, seq = 2, min(7, self.config.block_size)
        count = torch.arange(batch * seq, device="cpu" if device.type == "meta" else device).view(batch, seq)
        tokens = count % self.config.vocab_size
        return {
            "tokens": tokens,
            "types": count % self.config.type_size,
            "mask": (count < batch * seq - 1).long(),  # the last token of the last sequence is padding
            "labels": tokens.masked_fill(count % 3 == 0, -100),
            "next_sentence": count[:, 0] % 2,
        }

    def forward(
        self,
        tokens: Tensor,
        types: Tensor | None = None,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the logits of both heads, [batch seq vocab] and [batch 2]; with labels the loss in nats, a scalar.

        Args:
            tokens: [batch seq] int64
            types: [batch seq] int64, the segment of each token; by default all tokens are in the first segment.
            mask: [batch seq], 1 for tokens and 0 for padding.
            labels: [batch seq] int64, the original tokens; positions with -100 are left out of the mean.
            next_sentence: [batch] int64, 0 if the second sentence follows the first; the NSP loss is added.

        Raises:
            ValueError: the sequence is longer than `block_size`.
        """
        x = self.encode(tokens, types, mask)
        mlm = self.mlm(x, self.embeddings.word.weight)  # [batch seq vocab]
        nsp = self.nsp(torch.tanh(self.pooler(x[:, 0])))  # [batch 2]
        if labels is None:
            return mlm, nsp
        loss = F.cross_entropy(mlm.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return loss if next_sentence is None else loss + F.cross_entropy(nsp, next_sentence)

    def encode(self, tokens: Tensor, types: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Returns the last hidden states, [batch seq hidden]; the arguments are those of `forward`."""
        seq = tokens.shape[1]
        if seq > self.config.block_size:
            raise ValueError(f"BERT: a sequence of {seq} tokens is longer than block_size={self.config.block_size}")
        x = self.embeddings(tokens, torch.zeros_like(tokens) if types is None else types)
        attended = None if mask is None else mask.bool()[:, None, None, :]  # [batch 1 1 seq]
        for block in self.layer:
            x = block(x, attended)
        return self.norm(x)
