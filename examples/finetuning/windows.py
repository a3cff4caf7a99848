"""Divides long contexts into overlapping windows, and finds answers from the scores of their tokens.

A context that is too long for the model is read in windows that start `stride` tokens apart (as in the code for SQuAD
of Devlin et al. 2018). The answer to a question is the answer with the best score in any of its windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from finetuning.formats import Question
from tokenizers import Tokenizer
from torch import Tensor

NOWHERE = (0, 0)
"""The first token, [CLS]: if a window does not have the answer, the answer starts and ends here."""


@dataclass(frozen=True)
class Window:
    """A question and a part of its context.

    Attributes:
        query: the question's tokens.
        context: [tokens] int32, the part's tokens.
        characters: [tokens 2] int32, for each token the index of its first character, and of its last plus one.
        target: the first and the last token of the answer, counted from [CLS].
    """

    question: Question
    query: tuple[int, ...]
    context: Tensor
    characters: Tensor
    target: tuple[int, int]

    @property
    def first(self) -> int:
        """Returns the index of the context's first token, counted from [CLS]: after the question and [SEP]."""
        return len(self.query) + 2


def windows(questions: Iterable[Question], tokenizer: Tokenizer, seq: int, query: int, stride: int) -> list[Window]:
    """Returns the windows of all questions, in order.

    Args:
        seq: the largest number of tokens that the model reads, with three special tokens.
        query: the largest number of tokens of a question; the rest is cut off.
        stride: tokens from the start of a window to the start of the next.

    Raises:
        ValueError: a context has no tokens.
    """
    found: list[Window] = []
    for question in questions:
        asked = tuple(tokenizer.encode(question.question, add_special_tokens=False).ids[:query])
        encoding = tokenizer.encode(question.context, add_special_tokens=False)
        if not encoding.ids:
            raise ValueError(f"question {question.id}: there is nothing in its context")
        tokens, characters = torch.tensor(encoding.ids).int(), torch.tensor(encoding.offsets).int()
        answer = tokens_of(question, encoding.offsets)
        for start, end in starts_and_ends(len(tokens), seq - len(asked) - 3, stride):
            inside = answer is not None and start <= answer[0] and answer[1] < end
            moved = len(asked) + 2 - start
            target = (answer[0] + moved, answer[1] + moved) if answer is not None and inside else NOWHERE
            found.append(Window(question, asked, tokens[start:end], characters[start:end], target))
    return found


def starts_and_ends(count: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Returns the first token of each window, and its last plus one; the last window ends at the end of the context.

    Args:
        count: the number of tokens in the context.
        room: the largest number of tokens in a window.
    """
    starts = range(0, max(1, count - room + stride), stride)
    return [(start, min(start + room, count)) for start in starts]


def tokens_of(question: Question, offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Returns the first and the last token that have characters of the first answer; None if no token has any."""
    if not question.answers:
        return None
    start = question.answers[0].start
    end = start + len(question.answers[0].text)
    touched = [i for i, (first, after) in enumerate(offsets) if first < end and after > start]
    return (touched[0], touched[-1]) if touched else None


def best_span(scores: Tensor, longest: int) -> tuple[float, int, int]:
    """Returns the best score of all spans, and the first and last token of this span.

    The score of a span is the sum of the scores of its start and its end.

    Args:
        scores: [tokens 2], the scores of each token as the start and as the end of an answer.
        longest: the largest number of tokens in a span.
    """
    both = scores[:, :1] + scores[:, 1]  # [start end]
    spans = torch.ones_like(both, dtype=torch.bool).triu().tril(longest - 1)
    best = int(both.masked_fill(~spans, float("-inf")).argmax())
    start, end = divmod(best, len(scores))
    return float(both[start, end]), start, end


def answers(parts: Sequence[Window], scores: Sequence[Tensor], longest: int, threshold: float | None) -> dict[str, str]:
    """Returns question id -> the answer with the best score in all windows of the question; empty for no answer.

    Args:
        scores: for each window [seq 2], the scores of each token as the start and as the end of an answer.
        longest: the largest number of tokens in an answer.
        threshold: a question has no answer if the score of [CLS] exceeds that of the best answer by more than this in
            every window; None: every question has an answer.
    """
    best: dict[str, tuple[float, str]] = {}
    none: dict[str, float] = {}
    for window, all_scores in zip(parts, scores, strict=True):
        name, characters = window.question.id, window.characters
        none[name] = min(none.get(name, float("inf")), float(all_scores[0].sum()))
        score, start, end = best_span(all_scores[window.first : window.first + len(characters)], longest)
        text = window.question.context[int(characters[start, 0]) : int(characters[end, 1])]
        best[name] = max(best.get(name, (float("-inf"), "")), (score, text))
    if threshold is None:
        return {name: text for name, (_, text) in best.items()}
    return {name: text if none[name] - score <= threshold else "" for name, (score, text) in best.items()}
