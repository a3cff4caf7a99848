"""Makes pairs of segments for BERT: [CLS] one [SEP] another [SEP], with some tokens masked.

A document is divided into runs of sentences, each of which fills a sequence. A pair is a run that is split at a random
sentence. Half of the pairs are made wrong, and the model must find out which: the second segment is replaced by a
segment of another document ("next", Devlin et al. 2018, section 3.1), or the two segments change places ("order", Lan
et al. 2019, section 3.1, as in the Megatron paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from text.masking import masked
from text.tokens import CLS, MASK, PAD, SEP, SPECIAL, Tokens, id_of
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

MARKS = 3  # The special tokens of a pair: [CLS] and two [SEP].

Pairing = Literal["next", "order"]


@dataclass(frozen=True)
class Runs:
    """The runs of sentences of a text.

    Attributes:
        first: [runs] int64, the number of the first sentence.
        last: [runs] int64, the number of the last sentence, plus one.
        document: [runs] int64, the number of the document, in ascending order.
    """

    first: np.ndarray[Any, Any]
    last: np.ndarray[Any, Any]
    document: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, some: slice) -> Runs:
        return Runs(self.first[some], self.last[some], self.document[some])


def runs(text: Tokens, length: int) -> Runs:
    """Returns runs of at least two sentences, of `length` tokens or more if their documents are long enough.

    Raises:
        ValueError: no document has two sentences.
    """
    found: list[tuple[int, int, int]] = []
    for number, (first, end) in enumerate(zip(text.documents[:-1].tolist(), text.documents[1:].tolist(), strict=True)):
        while end - first >= 2:
            full = int(np.searchsorted(text.pieces, text.pieces[first] + length))
            last = min(max(full, first + 2), end)
            found.append((first, last, number))
            first = last
    if not found:
        raise ValueError("no document has two sentences. BERT's text has a sentence in each line")
    return Runs(*np.array(found, np.int64).T)


class Pairs(Dataset[dict[str, Tensor]]):
    """The arguments of BERT for each pair: tokens, types, mask and labels [block], next_sentence [], all int64.

    Where a run is split, which tokens are masked and which pairs are wrong: this depends on (seed, pair number) alone.

    Args:
        rounds: how often the text is used, each time split and masked in another way; 10 in the paper.
    """

    def __init__(
        self, text: Tokens, tokenizer: Tokenizer, among: Runs, block: int, *, pairing: Pairing = "next",
        rounds: int = 10, seed: int = 0,
    ) -> None:  # fmt: skip
        self.text, self.among, self.block, self.pairing = text, among, block, pairing
        self.rounds, self.seed, self.size = rounds, seed, tokenizer.get_vocab_size()
        self.pad, self.cls, self.sep, self.mask = (id_of(tokenizer, name) for name in (PAD, CLS, SEP, MASK))

    def __len__(self) -> int:
        return len(self.among) * self.rounds

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        one, other, wrong = self.segments(number % len(self.among), generator)
        whole = [self.cls, *one, self.sep, *other, self.sep]
        padding = self.block - len(whole)
        plain = torch.tensor(whole + [self.pad] * padding)
        fixed = (plain == self.pad) | (plain == self.cls) | (plain == self.sep)
        others = range(len(SPECIAL), self.size)
        tokens, labels = masked(plain, generator, mask=self.mask, others=others, fixed=fixed)
        types = [0] * (len(one) + 2) + [1] * (len(other) + 1) + [0] * padding
        return {
            "tokens": tokens,
            "types": torch.tensor(types),
            "mask": (plain != self.pad).long(),
            "labels": labels,
            "next_sentence": torch.tensor(int(wrong)),
        }

    def segments(self, run: int, generator: torch.Generator) -> tuple[list[int], list[int], bool]:
        """Returns the two segments of a run, and whether the pair is wrong, which half of all pairs are."""
        one, other = self._parted(run, generator)
        wrong = bool(torch.rand((), generator=generator) < 0.5)
        if wrong and self.pairing == "next":
            other = self._parted(self._another(run, generator), generator)[1]
        one, other = shortened(one, other, self.block - MARKS)
        return (other, one, wrong) if wrong and self.pairing == "order" else (one, other, wrong)

    def _parted(self, run: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
        first, last = int(self.among.first[run]), int(self.among.last[run])
        middle = int(torch.randint(first + 1, last, (), generator=generator))
        start, part, end = (int(self.text.pieces[at]) for at in (first, middle, last))
        return self.text.values[start:part].tolist(), self.text.values[part:end].tolist()

    def _another(self, run: int, generator: torch.Generator) -> int:
        """Returns the number of a run of another document; of the same document if there is only one."""
        here = self.among.document
        low, high = (int(np.searchsorted(here, here[run], side)) for side in cast(Any, ("left", "right")))
        if high - low == len(here):
            low, high = run, run + 1
        drawn = int(torch.randint(max(1, len(here) - (high - low)), (), generator=generator))
        return min(drawn if drawn < low else drawn + high - low, len(here) - 1)


def shortened(one: Sequence[int], other: Sequence[int], room: int) -> tuple[list[int], list[int]]:
    """Returns the two segments in `room` tokens: the longer is cut, at its outer end."""
    first = min(len(one), max(room - len(other), room // 2))
    return list(one[len(one) - first :]), list(other[: room - first])
