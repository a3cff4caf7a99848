"""BERT with the heads of its fine-tuned tasks (Devlin et al. 2018, section 4): ordinary single-device modules.

Each module contains a BERT, of whose own heads it uses only the pooler. It returns logits; with labels it returns the
loss in nats, a scalar.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotp.models.bert import BERT, INIT_STD

OPTIONS = 4  # The number of options in the example inputs.


class PairClassifier(nn.Module):
    """Computes the class of a pair of texts from the pooled state of the first token."""

    def __init__(self, bert: BERT, classes: int) -> None:
        super().__init__()
        self.bert = without_pretraining(bert)
        self.dropout = nn.Dropout(bert.config.dropout)
        self.output = linear(bert.config.n_embd, classes)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Returns small arguments for `forward`."""
        return _inputs(3, 7) | {"labels": torch.arange(3) % self.output.out_features}

    def forward(self, tokens: Tensor, types: Tensor, mask: Tensor, labels: Tensor | None = None) -> Tensor:
        """tokens, types and mask: [batch seq]; labels: [batch] int64; the logits: [batch classes]"""
        logits = self.output(self.dropout(pooled(self.bert, tokens, types, mask)))
        return logits if labels is None else F.cross_entropy(logits, labels)


class SpanExtractor(nn.Module):
    """Computes where an answer starts and ends; at the first token if there is no answer."""

    def __init__(self, bert: BERT) -> None:
        super().__init__()
        self.bert = without_pretraining(bert)
        del self.bert.pooler
        self.output = linear(bert.config.n_embd, 2)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Returns small arguments for `forward`."""
        return _inputs(3, 7) | {"labels": torch.arange(6).view(3, 2)}

    def forward(self, tokens: Tensor, types: Tensor, mask: Tensor, labels: Tensor | None = None) -> Tensor:
        """tokens, types and mask: [batch seq]; labels: [batch 2] int64, first and last token; the logits: [batch seq 2]

        The logits of padding are minus infinity.
        """
        logits = self.output(self.bert.encode(tokens, types, mask))  # [batch seq 2]
        logits = logits.masked_fill(mask.unsqueeze(-1) == 0, float("-inf"))
        return logits if labels is None else F.cross_entropy(logits, labels)  # the mean over starts and ends


class MultipleChoice(nn.Module):
    """Computes which option is right: BERT reads each option separately, and its pooled state gives a score."""

    def __init__(self, bert: BERT) -> None:
        super().__init__()
        self.bert = without_pretraining(bert)
        self.dropout = nn.Dropout(bert.config.dropout)
        self.output = linear(bert.config.n_embd, 1)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Returns small arguments for `forward`."""
        inputs = _inputs(3 * OPTIONS, 7)
        return {k: v.view(3, OPTIONS, -1) for k, v in inputs.items()} | {"labels": torch.arange(3)}

    def forward(self, tokens: Tensor, types: Tensor, mask: Tensor, labels: Tensor | None = None) -> Tensor:
        """tokens, types and mask: [batch options seq]; labels: [batch] int64; the logits: [batch options]"""
        batch, options = tokens.shape[:2]
        x = pooled(self.bert, tokens.flatten(0, 1), types.flatten(0, 1), mask.flatten(0, 1))  # [(batch options) hidden]
        logits = self.output(self.dropout(x)).view(batch, options)
        return logits if labels is None else F.cross_entropy(logits, labels)


def pooled(bert: BERT, tokens: Tensor, types: Tensor, mask: Tensor) -> Tensor:
    """Returns the state of the whole sequence, which BERT's pooler computes from the first token: [batch hidden]"""
    return torch.tanh(bert.pooler(bert.encode(tokens, types, mask)[:, 0]))


def without_pretraining(bert: BERT) -> BERT:
    """Returns the same BERT without the heads that only pre-training needs: their parameters would get no gradient."""
    del bert.mlm, bert.nsp
    return bert


def linear(width: int, outputs: int) -> nn.Linear:
    """Returns a linear layer with BERT's initial weights."""
    new = nn.Linear(width, outputs)
    nn.init.normal_(new.weight, std=INIT_STD)
    nn.init.zeros_(new.bias)
    return new


def _inputs(batch: int, seq: int) -> dict[str, Tensor]:
    tokens = torch.arange(batch * seq).view(batch, seq) % 5
    mask = (torch.arange(seq) < seq - torch.arange(batch).unsqueeze(-1) % 2).long()  # every second row has padding
    return {"tokens": tokens, "types": tokens % 2, "mask": mask}
