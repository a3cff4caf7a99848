"""BERT's pairs of segments: their runs, marks, lengths and wrong halves, and masks that spare the marks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from text import masking
from text.segments import Pairs, Runs, runs, shortened
from text.tokens import SPECIAL, Tokens
from tokenizers import Tokenizer, models
from torch import Tensor

WORDS = 200
PAD, _, CLS, SEP, MASK = range(5)


def text(*documents: list[int]) -> Tokens:
    """Documents of sentences of these lengths; the tokens count up from 5, so each says where it stood."""
    pieces = [0, *(length for document in documents for length in document)]
    counts = [0, *map(len, documents)]
    return Tokens("", np.arange(5, 5 + sum(pieces)), np.cumsum(pieces), np.cumsum(counts))


def tokenizer() -> Tokenizer:
    names = [*SPECIAL, *map(str, range(5, WORDS))]
    return Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))


def pairs(found: Tokens, block: int = 16, length: int = 10, **options: Any) -> Pairs:
    return Pairs(found, tokenizer(), runs(found, length), block, **options)


def unmasked(pair: dict[str, Tensor]) -> list[int]:
    return torch.where(pair["labels"] == masking.IGNORED, pair["tokens"], pair["labels"]).tolist()


def parts(pair: dict[str, Tensor]) -> tuple[list[int], list[int]]:
    """The two segments, of a pair that is as it should be."""
    tokens, length = unmasked(pair), int(pair["mask"].sum())
    assert pair["mask"].tolist() == [1] * length + [0] * (len(tokens) - length)
    assert tokens[0] == CLS and tokens[length - 1] == SEP and tokens[length:] == [PAD] * (len(tokens) - length)
    middle = tokens.index(SEP)
    types = [0] * (middle + 1) + [1] * (length - middle - 1)
    assert pair["types"].tolist() == types + [0] * (len(tokens) - length)
    return tokens[1:middle], tokens[middle + 1 : length - 1]


def test_runs_fill_a_sequence_and_stay_in_their_document():
    found = runs(text([4, 4, 4, 4, 4, 4], [30, 1, 1], [9], [3, 3]), 10)
    assert found.first.tolist() == [0, 3, 6, 10]
    assert found.last.tolist() == [3, 6, 8, 12]
    assert found.document.tolist() == [0, 0, 1, 3]
    assert found[1:3].document.tolist() == [0, 1] and len(found[1:3]) == 2


def test_no_runs():
    with pytest.raises(ValueError) as error:
        runs(text([9], [8]), 10)
    assert str(error.value) == "no document has two sentences. BERT's text has a sentence in each line"


@pytest.mark.parametrize(
    ("lengths", "room", "left"),
    [((10, 3), 8, (5, 3)), ((3, 10), 8, (3, 5)), ((10, 10), 9, (4, 5)), ((2, 3), 9, (2, 3)), ((0, 9), 5, (0, 5))],
)
def test_shortened_where_they_do_not_touch(lengths, room, left):
    one, other = list(range(lengths[0])), list(range(lengths[1]))
    assert shortened(one, other, room) == (one[lengths[0] - left[0] :], other[: left[1]])


@pytest.mark.parametrize("pairing", ["next", "order"])
def test_pairs_that_are_right_and_wrong(pairing):
    made = pairs(text([4, 3, 4, 5, 3], [4, 4, 4], [6, 6]), pairing=pairing, rounds=100)
    wrong = 0
    for number in range(len(made)):
        pair = made[number]
        (one, other), run = parts(pair), number % len(made.among)
        assert one and other and all(torch.diff(torch.tensor(part)).eq(1).all() for part in (one, other))
        starts = made.text.pieces[[made.among.first[run], made.among.last[run]]] + 5
        inside = [starts[0] <= part[0] and part[-1] < starts[1] for part in (one, other)]
        follows = one[-1] + 1 == other[0]
        wrong += int(pair["next_sentence"])
        if not pair["next_sentence"]:
            assert follows and inside == [True, True]
        elif pairing == "order":
            assert other[-1] + 1 == one[0] and inside == [True, True]
        else:
            document = np.searchsorted(made.text.pieces[made.text.documents], np.array([one[0], other[0]]) - 5, "right")
            assert inside == [True, False] and document[0] != document[1]
    assert wrong / len(made) == pytest.approx(0.5, abs=0.08)


def test_of_one_document_another_run_is_taken():
    made = pairs(text([5, 5, 5, 5]), rounds=40)
    firsts = {(n % 2, parts(made[n])[1][0] < 15) for n in range(len(made)) if made[n]["next_sentence"]}
    assert firsts == {(0, False), (1, True)}


def test_of_one_run_it_is_taken_itself():
    made = pairs(text([5, 5]))
    assert {tuple(map(len, parts(made[n]))) for n in range(len(made))} == {(5, 5)}


def test_every_sentence_may_be_where_they_part():
    made = pairs(text([3, 3, 3, 3]), pairing="order", length=12, rounds=60)
    assert {min(map(len, parts(made[n]))) for n in range(60)} == {3, 6}


def test_rounds_differ_and_depend_on_the_seed_alone():
    documents = text([4, 3, 4, 5, 3], [4, 4, 4], [6, 6])
    one, again, other = (pairs(documents, rounds=9, seed=seed) for seed in (1, 1, 2))
    first = [one[n]["tokens"].tolist() for n in range(len(one))]
    torch.manual_seed(5)
    assert first == [again[n]["tokens"].tolist() for n in range(len(one))]
    assert first != [other[n]["tokens"].tolist() for n in range(len(one))]
    assert len({tuple(row) for row in first[:: len(one.among)]}) > 5


def test_behind_the_last_pair():
    with pytest.raises(IndexError):
        pairs(text([5, 5]), rounds=2)[2]


def test_marks_are_never_masked():
    made = pairs(text([6] * 15), block=64, length=50, rounds=1500)
    assert isinstance(made.among, Runs)
    rows = [made[n] for n in range(3000)]
    tokens, labels = (torch.stack([row[name] for row in rows]) for name in ("tokens", "labels"))
    chosen = labels != masking.IGNORED
    assert not torch.isin(labels[chosen], torch.tensor([PAD, CLS, SEP])).any()
    words = sum(int(row["mask"].sum()) - 3 for row in rows)
    seen, true = tokens[chosen], labels[chosen]
    shares = [len(seen) / words] + [
        float(mark.double().mean()) for mark in (seen == MASK, (seen != MASK) & (seen != true), seen == true)
    ]
    assert shares == pytest.approx([0.15, 0.8, 0.1, 0.1], abs=0.015)
    drawn = seen[(seen != MASK) & (seen != true)]
    assert drawn.min() >= len(SPECIAL) and drawn.max() < WORDS
