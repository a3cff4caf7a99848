"""Windows on long contexts, answers from their scores, and the metrics, against values counted by hand."""

from __future__ import annotations

import pytest
import torch
from finetuning import metrics, windows
from finetuning.formats import Answer, Question
from text.tokens import word_pieces

CONTEXT = "a b c d e f g h i j"  # Ten tokens; token i is character 2 * i.


def asked(answer: str = "", name: str = "q", context: str = CONTEXT) -> Question:
    answers = (Answer(answer, context.index(answer)),) if answer else ()
    return Question(name, "k l", context, answers)


def seen(question: Question, seq: int = 10, query: int = 2, stride: int = 3) -> list[windows.Window]:
    tokenizer = word_pieces([f"{CONTEXT} k l"], 100)
    return windows.windows([question], tokenizer, seq, query, stride)


@pytest.mark.parametrize(
    ("count", "room", "stride", "expected"),
    [
        (10, 5, 3, [(0, 5), (3, 8), (6, 10)]),
        (11, 5, 3, [(0, 5), (3, 8), (6, 11)]),
        (12, 5, 3, [(0, 5), (3, 8), (6, 11), (9, 12)]),
        (5, 5, 3, [(0, 5)]),
        (6, 5, 5, [(0, 5), (5, 6)]),
        (2, 5, 3, [(0, 2)]),
    ],
)
def test_windows_overlap_and_end_with_the_last_token(count, room, stride, expected):
    assert windows.starts_and_ends(count, room, stride) == expected


def test_windows_have_the_answer_where_they_see_all_of_it():
    found = seen(asked("e f"))  # five tokens of context a window: a-e, d-h, g-j
    assert [window.target for window in found] == [(0, 0), (4 + 1, 4 + 2), (0, 0)]
    texts = [CONTEXT[int(w.characters[0, 0]) : int(w.characters[-1, 1])] for w in found]
    assert texts == ["a b c d e", "d e f g h", "g h i j"]
    assert [len(window.context) for window in found] == [5, 5, 4]


def test_longer_question_is_cut_off():
    found = seen(asked("a"), query=1, seq=14)
    assert [(len(window.query), window.first, window.target) for window in found] == [(1, 3, (3, 3))]


def test_no_answer_is_at_the_first_token():
    assert {window.target for window in seen(asked())} == {(0, 0)}


@pytest.mark.parametrize(
    ("answer", "start", "expected"), [("d", 4, (2, 2)), ("cde", 3, (2, 2)), ("ab", 0, (0, 0)), ("b,c", 1, (0, 2))]
)
def test_answer_is_the_tokens_that_it_touches(answer, start, expected):
    question = Question("q", "k", "ab,cde", (Answer(answer, start),))
    assert windows.tokens_of(question, [(0, 2), (2, 3), (3, 6)]) == expected


def test_empty_context():
    with pytest.raises(ValueError) as error:
        seen(asked(context=" "))
    assert str(error.value) == "question q: there is nothing in its context"


def test_best_span_starts_before_it_ends_and_is_not_too_long():
    scores = torch.tensor([[0.0, 6.0], [5.0, 0.0], [1.0, 1.0], [0.0, 2.0], [0.0, 4.0]])
    assert windows.best_span(scores, 4) == (9.0, 1, 4)  # from 1 to 0 were 11
    assert windows.best_span(scores, 3) == (7.0, 1, 3)
    assert windows.best_span(scores, 2) == (6.0, 0, 0)


def scores(window: windows.Window, cls: float, start: int, end: int, value: float) -> torch.Tensor:
    """Scores of a window whose best span is from `start` to `end` of its part of the context, each with `value`."""
    found = torch.zeros(12, 2)  # longer than the window: the rest is padding
    found[len(window.context) + window.first :] = float("-inf")
    found[0] = cls / 2
    found[window.first + start, 0] = found[window.first + end, 1] = value
    return found


def test_answer_is_the_best_of_all_windows():
    parts = seen(asked("e f"))
    rows = [scores(parts[0], 0, 0, 1, 1.0), scores(parts[1], 0, 1, 2, 3.0), scores(parts[2], 0, 0, 1, 2.0)]
    assert windows.answers(parts, rows, 5, threshold=None) == {"q": "e f"}
    rows[2] = scores(parts[2], 0, 2, 3, 4.0)
    assert windows.answers(parts, rows, 5, threshold=None) == {"q": "i j"}


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, ""), (0.9, ""), (1.1, "e f"), (None, "e f")])
def test_no_answer_where_every_window_says_so(threshold, expected):
    parts = seen(asked("e f"))
    rows = [scores(parts[0], 9, 0, 1, 1.0), scores(parts[1], 7, 1, 2, 3.0), scores(parts[2], 8, 0, 1, 2.0)]
    assert windows.answers(parts, rows, 5, threshold) == {"q": expected}  # 7 is 1 above 6


def test_one_window_that_does_not_say_so_is_enough():
    parts = seen(asked("e f"))
    rows = [scores(parts[0], 5, 0, 1, 1.0), scores(parts[1], 7, 1, 2, 3.0), scores(parts[2], 8, 0, 1, 2.0)]
    assert windows.answers(parts, rows, 5, 0.0) == {"q": "e f"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("The  Cat.", "cat"), ("an a-b, the", "ab"), ("theatre", "theatre"), ("U.S.A.", "usa"), ("The", "")],
)
def test_normalised_answers(answer, expected):
    assert metrics.normalised(answer) == expected


@pytest.mark.parametrize(
    ("predicted", "answer", "expected"),
    [
        ("the red cat", "red cat", 1.0),
        ("red cat sat", "the cat", 0.5),  # precision 1/3, recall 1
        ("cat cat", "cat", 2 / 3),  # a word counts as often as in both
        ("cat cat", "cat cat dog", 4 / 5),
        ("dog", "cat", 0.0),
        ("", "", 1.0),
        ("", "cat", 0.0),
        ("the", "", 1.0),
    ],
)
def test_f1_of_words(predicted, answer, expected):
    assert metrics.f1(predicted, answer) == pytest.approx(expected)


def test_exact_match():
    assert (metrics.exact("The Cat!", "cat"), metrics.exact("cats", "cat"), metrics.exact("", "the")) == (1, 0, 1)


def test_squad_takes_the_best_answer_of_each_question():
    answered = Question("a", "?", "", (Answer("the red cat", 0), Answer("cat", 0)))
    partly = Question("b", "?", "", (Answer("green dog", 0),))
    none = Question("c", "?", "", ())
    predicted = {"a": "Cat", "b": "dog", "c": "dog"}
    assert metrics.squad([answered, partly], predicted) == pytest.approx({"exact": 1 / 2, "F1": (1 + 2 / 3) / 2})
    assert metrics.squad([answered, partly, none], predicted) == pytest.approx({
        "exact": 1 / 3, "F1": (1 + 2 / 3) / 3, "answerable exact": 1 / 2, "answerable F1": (1 + 2 / 3) / 2,
        "unanswerable exact": 0, "unanswerable F1": 0,
    })  # fmt: skip
    assert metrics.squad([none], {"c": ""}) == {"exact": 1, "F1": 1}


def test_accuracy_and_f1_of_a_class():
    predicted, labels = [1, 1, 1, 0, 0], [1, 0, 1, 1, 0]
    assert metrics.accuracy(predicted, labels) == 3 / 5
    assert metrics.f1_of_class(predicted, labels) == pytest.approx(2 / 3)  # precision and recall are 2/3
    assert metrics.f1_of_class(predicted, labels, positive=0) == pytest.approx(1 / 2)
    assert metrics.f1_of_class([0, 0], [1, 0]) == 0
