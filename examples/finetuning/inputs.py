"""Turns examples into the inputs of a BERT: [CLS] first [SEP] second [SEP], as token ids, padded to batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from finetuning.formats import Choice, Example, Pair
from finetuning.windows import Window
from text.tokens import CLS, PAD, SEP, id_of
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

BLANK = "_"  # The place of the option in a question of RACE.

Item = Pair | Choice | Window
Joined = tuple[list[int], int]  # tokens, and the number of tokens in the first segment


def texts(examples: Iterable[Example]) -> Iterable[str]:
    """Yields each text of the examples once, to train a tokenizer on."""
    found: dict[str, None] = {}
    for example in examples:
        match example:
            case Pair(first, second):
                found |= dict.fromkeys((first, second))
            case Choice(article, question, options):
                found |= dict.fromkeys((article, question, *options))
            case _:
                found |= dict.fromkeys((example.question, example.context))
    return found


@dataclass(frozen=True)
class Reader:
    """Makes batches of examples.

    Attributes:
        seq: the largest number of tokens in a sequence; longer sequences are cut off.
        query: of these, the largest number of tokens of a question with an option.

    Raises:
        ValueError: the tokenizer lacks BERT's special tokens.
    """

    tokenizer: Tokenizer
    seq: int
    query: int

    def __post_init__(self) -> None:
        for name in (PAD, CLS, SEP):
            id_of(self.tokenizer, name)

    def __call__(self, items: Sequence[Item]) -> dict[str, Tensor]:
        """Returns the model's arguments: tokens, types, mask [batch seq], for choices [batch options seq]; labels."""
        rows = [joined for item in items for joined in self.joined(item)]
        tokens = [torch.tensor(row) for row, _ in rows]
        types = [torch.arange(len(row)) >= first for row, first in rows]
        found = {
            "tokens": pad_sequence(tokens, batch_first=True, padding_value=id_of(self.tokenizer, PAD)),
            "types": pad_sequence(types, batch_first=True).long(),
            "mask": pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True),
        }
        if len(rows) > len(items):
            found = {name: value.view(len(items), -1, value.shape[-1]) for name, value in found.items()}
        return found | {"labels": torch.tensor([label(item) for item in items])}

    def joined(self, item: Item) -> list[Joined]:
        """Returns the sequences of an example: one, or for a choice one for each option."""
        match item:
            case Pair():
                first, second = self._ids(item.first), self._ids(item.second)
                return [self._join(*shortened(first, second, self.seq - 3))]
            case Choice():
                article, asked = self._ids(item.article), [self._ids(text) for text in with_options(item)]
                return [self._join(article[: self.seq - 3 - len(a)], a) for a in (a[: self.query] for a in asked)]
            case _:
                return [self._join(list(item.query), item.context.tolist())]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _join(self, first: list[int], second: list[int]) -> Joined:
        cls, sep = id_of(self.tokenizer, CLS), id_of(self.tokenizer, SEP)
        return [cls, *first, sep, *second, sep], len(first) + 2


def label(item: Item) -> int | tuple[int, int]:
    """Returns the right answer."""
    return item.target if isinstance(item, Window) else item.label


def shortened(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """Returns the starts of both, `room` tokens together; the longer is cut first, then both by the same number."""
    half = room // 2
    kept = max(half, room - len(second)), max(room - half, room - len(first))
    return first[: kept[0]], second[: kept[1]]


def with_options(choice: Choice) -> list[str]:
    """Returns the question with each option: in place of its blank, or after the question."""
    blank = BLANK in choice.question
    return [choice.question.replace(BLANK, o) if blank else f"{choice.question} {o}" for o in choice.options]
