"""Reads files in the formats of four tasks: MNLI and QQP (the tables of GLUE), SQuAD 1.1 and 2.0, RACE.

If a line is broken, or an answer is not at the place that the file names, `broken` is called with a message. It raises
an error, or notes the line, which is then left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MNLI_LABELS = ("contradiction", "entailment", "neutral")
QQP_LABELS = ("0", "1")  # 1: a duplicate
OPTIONS = "ABCD"  # of RACE

Broken = Callable[[str], None]


@dataclass(frozen=True)
class Pair:
    """Two texts and their class."""

    first: str
    second: str
    label: int


@dataclass(frozen=True)
class Answer:
    """A part of a context, and the index of its first character there."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a context. It may have no answers: the context does not answer it (SQuAD 2.0)."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Choice:
    """A question about an article, its options, and the right option."""

    article: str
    question: str
    options: tuple[str, ...]
    label: int


Example = Pair | Question | Choice


def refuse(problem: str) -> None:
    """Raises an error that says what is wrong with a line.

    Raises:
        ValueError: always.
    """
    raise ValueError(problem)


def mnli(file: Path, broken: Broken = refuse) -> Iterator[Pair]:
    """Yields the pairs of an MNLI table that have a gold label (not "-"); the label is an index into MNLI_LABELS.

    Raises:
        ValueError: a column is missing.
    """
    for where, (first, second, label) in _table(file, ("sentence1", "sentence2", "gold_label"), broken):
        if label in MNLI_LABELS:
            yield Pair(first, second, MNLI_LABELS.index(label))
        elif label != "-":
            broken(f'{where}: gold_label is "{label}", none of {", ".join(MNLI_LABELS)}')


def qqp(file: Path, broken: Broken = refuse) -> Iterator[Pair]:
    """Yields the pairs of a QQP table; the label is 1 for a duplicate.

    Raises:
        ValueError: a column is missing.
    """
    for where, (first, second, label) in _table(file, ("question1", "question2", "is_duplicate"), broken):
        if label in QQP_LABELS:
            yield Pair(first, second, QQP_LABELS.index(label))
        else:
            broken(f'{where}: is_duplicate is "{label}", neither 0 nor 1')


def _table(file: Path, columns: Sequence[str], broken: Broken) -> Iterator[tuple[str, list[str]]]:
    """Yields the place of each line, and its values in these columns. Tabs separate columns; quotes mean nothing."""
    with file.open(encoding="utf-8", newline="\n") as lines:
        header = next(lines, "").rstrip("\r\n").split("\t")
        for name in columns:
            if name not in header:
                raise ValueError(f'{file}, line 1: no column "{name}". It has: {", ".join(header)}')
        places = [header.index(name) for name in columns]
        for number, line in enumerate(lines, 2):
            values, where = line.rstrip("\r\n").split("\t"), f"{file}, line {number}"
            if len(values) == len(header):
                yield where, [values[place] for place in places]
            else:
                broken(f"{where}: {len(values)} columns where line 1 has {len(header)}")


def squad(file: Path, broken: Broken = refuse) -> Iterator[Question]:
    """Yields the questions of a file of SQuAD, 1.1 or 2.0.

    Raises:
        ValueError: the file is not JSON, or has another structure than SQuAD.
    """
    text = file.read_text(encoding="utf-8")
    for i, article in enumerate(_field(_json(text, file, 1), "data", list, str(file))):
        at = f"{file}, article {i + 1}"
        for j, paragraph in enumerate(_field(article, "paragraphs", list, at)):
            context, asked = (_field(paragraph, *what, f"{at}, paragraph {j + 1}") for what in CONTEXT)
            for one in asked:
                try:
                    found = _question(one, context)
                except ValueError as error:
                    broken(f"{file}, line {_line(text, one)}, {error}")
                else:
                    yield found


CONTEXT: tuple[tuple[str, type], ...] = (("context", str), ("qas", list))


def _question(asked: Any, context: str) -> Question:
    name = _field(asked, "id", str, "a question")
    where = f"question {name}"
    impossible, answers = asked.get("is_impossible", False), []
    for given in [] if impossible else _field(asked, "answers", list, where):
        answer = Answer(_field(given, "text", str, where), _field(given, "answer_start", int, where))
        found = context[answer.start : answer.start + len(answer.text)] if answer.start >= 0 else ""
        if not found or found != answer.text:
            raise ValueError(f'{where}: the answer "{answer.text}" is not at character {answer.start}: "{found}" is')
        answers.append(answer)
    if not impossible and not answers:
        raise ValueError(f"{where}: no answer, and it is not marked with is_impossible")
    return Question(name, _field(asked, "question", str, where), context, tuple(answers))


def race(path: Path, broken: Broken = refuse) -> Iterator[Choice]:
    """Yields the questions of a RACE file, or of all .txt files in a folder; each line is an article with questions.

    Raises:
        ValueError: a line has another structure than RACE.
    """
    for file in sorted(path.rglob("*.txt")) if path.is_dir() else [path]:
        with file.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        found = list(_article(_json(line, file, number), f"{file}, line {number}"))
                    except ValueError as error:
                        broken(str(error))
                    else:
                        yield from found


def _article(record: Any, where: str) -> Iterator[Choice]:
    names = ("questions", "options", "answers")
    questions, options, answers = (_field(record, name, list, where) for name in names)
    if not len(questions) == len(options) == len(answers):
        raise ValueError(f"{where}: {len(questions)} questions, {len(options)} options and {len(answers)} answers")
    for question, some, letter in zip(questions, options, answers, strict=True):
        if len(some) != len(OPTIONS):
            raise ValueError(f"{where}: {len(some)} options where RACE has {len(OPTIONS)}: {question}")
        if letter not in tuple(OPTIONS):
            raise ValueError(f'{where}: the answer "{letter}" is none of {", ".join(OPTIONS)}: {question}')
        yield Choice(_field(record, "article", str, where), question, tuple(some), OPTIONS.index(letter))


def _json(text: str, file: Path, line: int) -> Any:
    """Returns the value of a JSON text; `line` is the number of its first line in the file, for errors."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{file}, line {line + error.lineno - 1}, column {error.colno}"
        raise ValueError(f"{where}: no JSON: {error.msg}") from None


def _field(record: Any, name: str, kind: type, where: str) -> Any:
    found = record.get(name) if isinstance(record, dict) else None
    if not isinstance(found, kind):
        raise ValueError(f'{where}: no "{name}" of type {kind.__name__}')
    return found


def _line(text: str, asked: Any) -> int:
    """Returns the number of the line of a JSON file that has a question's id; 1 if there is no id."""
    name = asked.get("id") if isinstance(asked, dict) else None
    return text.count("\n", 0, max(0, text.find(json.dumps(name)))) + 1 if name else 1
