"""A GPT as Megatron-LM computed it in 2021 and 2022: attention keeps its scores, the sequence is the first dimension.

An ordinary model for one device; autotp cuts it as Megatron-LM did. Its operators and their order are those of
`megatron/model/transformer.py`, so that estimates of it can be compared with the papers' measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """The size of a GPT, as the papers' tables have it."""

    layers: int
    hidden: int
    heads: int
    seq: int = 2048
    vocab: int = 51200


class Attention(nn.Module):
    """Causal self-attention with dropout on its weights."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.width = size.heads, size.hidden // size.heads
        self.query_key_value = nn.Linear(size.hidden, 3 * size.hidden)
        self.dense = nn.Linear(size.hidden, size.hidden)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """x and the result: [seq batch hidden]; hidden: [seq seq], True where a position must not look"""
        seq, batch, _ = x.shape
        mixed = self.query_key_value(x).view(seq, batch, self.heads, 3 * self.width)
        query, key, value = (
            part.reshape(seq, batch * self.heads, self.width).transpose(0, 1) for part in mixed.split(self.width, -1)
        )  # [batch*heads seq width] each
        scores = torch.bmm(query, key.transpose(1, 2)) * (1 / math.sqrt(self.width))  # [batch*heads seq seq]
        weights = F.dropout(scores.masked_fill(hidden, -10000.0).softmax(-1), 0.1)
        found = torch.bmm(weights, value).transpose(0, 1).reshape(seq, batch, self.heads * self.width)
        return self.dense(found)


class Layer(nn.Module):
    """Attention, then the MLP; each adds to the residual stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm, self.attention = nn.LayerNorm(size.hidden), Attention(size)
        self.post_attention_layernorm = nn.LayerNorm(size.hidden)
        self.dense_h_to_4h = nn.Linear(size.hidden, 4 * size.hidden)
        self.dense_4h_to_h = nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """x and the result: [seq batch hidden]"""
        x = x + F.dropout(self.attention(self.input_layernorm(x), hidden), 0.1)
        wide = F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x)), approximate="tanh")
        return x + F.dropout(self.dense_4h_to_h(wide), 0.1)


class MegatronGPT(nn.Module):
    """The language model; its head is the token embedding, and its loss is in float32."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.word_embeddings = nn.Embedding(size.vocab, size.hidden)
        self.position_embeddings = nn.Embedding(size.seq, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.final_layernorm = nn.LayerNorm(size.hidden)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss. tokens, labels: [batch seq]"""
        seq = tokens.shape[1]
        positions = torch.arange(seq, device=tokens.device)
        embedded = self.word_embeddings(tokens) + self.position_embeddings(positions)
        x = F.dropout(embedded.transpose(0, 1), 0.1)  # [seq batch hidden]
        hidden = torch.ones(seq, seq, dtype=torch.bool, device=tokens.device).triu(1)
        for layer in self.layers:
            x = layer(x, hidden)
        logits = F.linear(self.final_layernorm(x), self.word_embeddings.weight).transpose(0, 1)  # [batch seq vocab]
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
