"""The metrics of the tasks: accuracy, F1 of a class, and SQuAD's exact match and F1.

SQuAD's metrics are from Rajpurkar et al. (2016, section 6.1; 2018, section 5, for questions without an answer),
computed as in the official script of version 2.0: answers are compared in lower case, without punctuation, articles and
extra white space, and each prediction is compared with the answer that fits best.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from finetuning.formats import Question

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def accuracy(predicted: Sequence[object], labels: Sequence[object]) -> float:
    """Returns the share of predictions that are right."""
    return sum(p == label for p, label in zip(predicted, labels, strict=True)) / len(labels)


def f1_of_class(predicted: Sequence[object], labels: Sequence[object], positive: int = 1) -> float:
    """Returns the harmonic mean of precision and recall of one class; 0 if no prediction of this class was right."""
    right = sum(p == label == positive for p, label in zip(predicted, labels, strict=True))
    return _f1(right, list(predicted).count(positive), list(labels).count(positive))


def normalised(answer: str) -> str:
    """Returns the answer in the form in which answers are compared."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact(predicted: str, answer: str) -> float:
    """Returns 1 for the same answer, else 0."""
    return float(normalised(predicted) == normalised(answer))


def f1(predicted: str, answer: str) -> float:
    """Returns F1 over the words of both answers; if one has no words, 1 if the other has none either, else 0."""
    ours, theirs = normalised(predicted).split(), normalised(answer).split()
    if not ours or not theirs:
        return float(ours == theirs)
    return _f1((Counter(ours) & Counter(theirs)).total(), len(ours), len(theirs))


def squad(questions: Sequence[Question], predicted: Mapping[str, str]) -> dict[str, float]:
    """Returns exact match and F1, from 0 to 1: over all questions and, if some have no answer, over each kind too.

    Args:
        predicted: question id -> answer; an empty text means no answer.

    Raises:
        KeyError: a question has no prediction.
    """
    scores = {question.id: _scores(question, predicted[question.id]) for question in questions}
    found = _means("", list(scores.values()))
    for kind, wanted in (("answerable ", True), ("unanswerable ", False)):
        some = [scores[question.id] for question in questions if bool(question.answers) == wanted]
        found |= _means(kind, some) if 0 < len(some) < len(questions) else {}
    return found


def _scores(question: Question, predicted: str) -> tuple[float, float]:
    answers = [answer.text for answer in question.answers if normalised(answer.text)] or [""]
    return max(exact(predicted, answer) for answer in answers), max(f1(predicted, answer) for answer in answers)


def _means(kind: str, scores: Sequence[tuple[float, float]]) -> dict[str, float]:
    sums = [sum(column) for column in zip(*scores, strict=True)]
    return {f"{kind}{name}": value / len(scores) for name, value in zip(("exact", "F1"), sums, strict=True)}


def _f1(right: int, predicted: int, wanted: int) -> float:
    return 2 * right / (predicted + wanted) if right else 0.0
