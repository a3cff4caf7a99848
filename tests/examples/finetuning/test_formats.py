"""The files of MNLI, QQP, SQuAD and RACE: hand-written ones are read; what is wrong is said with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from finetuning import bert_samples, formats, tasks
from finetuning.formats import Answer, Choice, Pair, Question

MNLI_TRAIN = ["index", "promptID", "genre", "sentence1_parse", "sentence1", "sentence2", "label1", "gold_label"]
MNLI_DEV = [*MNLI_TRAIN[:-2], *(f"label{n}" for n in range(1, 6)), "gold_label"]
QQP = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
CONTEXT = "Oslo is the capital of Norway. Oslo lies on a fjord."


def table(file: Path, *rows: list[str], end: str = "\n") -> Path:
    file.write_bytes("".join("\t".join(row) + end for row in rows).encode())
    return file


def mnli_row(header: list[str], **values: str) -> list[str]:
    return [values.get(name, "x") for name in header]


def squad(file: Path, *asked: dict[str, Any], context: str = CONTEXT, indent: int | None = None) -> Path:
    data = {"version": "v2.0", "data": [{"title": "Oslo", "paragraphs": [{"context": context, "qas": list(asked)}]}]}
    file.write_text(json.dumps(data, indent=indent))
    return file


def asked(name: str = "a1", answers: list[tuple[str, int]] | None = None, **more: Any) -> dict[str, Any]:
    found = [{"text": text, "answer_start": start} for text, start in answers or []]
    return {"id": name, "question": f"What is {name}?", "answers": found, **more}


def article(file: Path, **changed: Any) -> Path:
    record = {"answers": ["B"], "options": [["a", "b", "c", "d"]], "questions": ["Which?"], "article": "b.", "id": "1"}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record | changed) + "\n")
    return file


def problem(read: Any, *args: Any) -> str:
    """What reading says is wrong."""
    with pytest.raises(ValueError) as error:
        list(read(*args))
    return str(error.value)


@pytest.mark.parametrize("header", [MNLI_TRAIN, MNLI_DEV], ids=["train", "dev"])
def test_mnli_is_read_by_the_names_of_its_columns(tmp_path, header):
    rows = [
        mnli_row(header, sentence1='He said "no.', sentence2="He spoke.", gold_label="entailment"),
        mnli_row(header, sentence1="a", sentence2="b", gold_label="neutral"),
        mnli_row(header, sentence1="nobody", sentence2="agreed", gold_label="-"),
        mnli_row(header, sentence1="c\u2028c", sentence2="d", gold_label="contradiction"),
    ]
    found = list(formats.mnli(table(tmp_path / "t.tsv", header, *rows)))
    assert found == [Pair('He said "no.', "He spoke.", 1), Pair("a", "b", 2), Pair("c\u2028c", "d", 0)]


def test_qqp_with_the_line_ends_of_windows(tmp_path):
    file = table(
        tmp_path / "t.tsv", QQP, ["7", "1", "2", "Why?", "How?", "1"], ["8", "3", "4", "p", "q", "0"], end="\r\n"
    )
    assert list(formats.qqp(file)) == [Pair("Why?", "How?", 1), Pair("p", "q", 0)]


def test_missing_column(tmp_path):
    file = table(tmp_path / "t.tsv", ["id", "question1", "is_duplicate"])
    assert problem(formats.qqp, file) == f'{file}, line 1: no column "question2". It has: id, question1, is_duplicate'


def test_line_with_too_few_columns(tmp_path):
    file = table(tmp_path / "t.tsv", QQP, ["7", "1", "2", "Why?", "How?", "1"], ["8", "3", "4", "p"])
    assert problem(formats.qqp, file) == f"{file}, line 3: 4 columns where line 1 has 6"


@pytest.mark.parametrize(
    ("read", "header", "message"),
    [
        (formats.mnli, MNLI_TRAIN, 'gold_label is "x", none of contradiction, entailment, neutral'),
        (formats.qqp, QQP, 'is_duplicate is "x", neither 0 nor 1'),
    ],
)
def test_label_that_is_none(tmp_path, read, header, message):
    file = table(tmp_path / "t.tsv", header, ["x"] * len(header))
    assert problem(read, file) == f"{file}, line 2: {message}"


def test_broken_lines_can_be_left_out(tmp_path):
    file = table(
        tmp_path / "t.tsv", QQP, ["8", "3"], ["7", "1", "2", "Why?", "How?", "1"], ["8", "3", "4", "p", "q", "2"]
    )
    noted: list[str] = []
    assert list(formats.qqp(file, noted.append)) == [Pair("Why?", "How?", 1)]
    assert [note.split(": ")[0] for note in noted] == [f"{file}, line 2", f"{file}, line 4"]


def test_squad_1_and_2(tmp_path):
    old, several = asked("a1", [("Oslo", 0)]), asked("a2", [("a fjord", 44), ("fjord", 46)], is_impossible=False)
    none = asked("a3", is_impossible=True, plausible_answers=[{"text": "Norway", "answer_start": 23}])
    bare = {"id": "a4", "question": "?", "is_impossible": True}
    assert list(formats.squad(squad(tmp_path / "s.json", old, several, none, bare))) == [
        Question("a1", "What is a1?", CONTEXT, (Answer("Oslo", 0),)),
        Question("a2", "What is a2?", CONTEXT, (Answer("a fjord", 44), Answer("fjord", 46))),
        Question("a3", "What is a3?", CONTEXT, ()),
        Question("a4", "?", CONTEXT, ()),
    ]


@pytest.mark.parametrize(("start", "there"), [(31 + 1, "slo "), (-22, ""), (500, "")])
def test_answer_that_is_not_in_the_context(tmp_path, start, there):
    file = squad(tmp_path / "s.json", asked("good", [("Oslo", 0)]), asked("bad", [("Oslo", start)]), indent=1)
    line = file.read_text().split('"bad"')[0].count("\n") + 1
    expected = f'{file}, line {line}, question bad: the answer "Oslo" is not at character {start}: "{there}" is'
    assert problem(formats.squad, file) == expected


def test_question_without_answers(tmp_path):
    file = squad(tmp_path / "s.json", asked("a1"))
    message = "question a1: no answer, and it is not marked with is_impossible"
    assert problem(formats.squad, file) == f"{file}, line 1, {message}"


def test_bad_question_can_be_left_out(tmp_path):
    file = squad(tmp_path / "s.json", asked("bad", [("Rome", 0)]), asked("a1", [("Oslo", 0)]), {"question": "no id"})
    noted: list[str] = []
    assert [question.id for question in formats.squad(file, noted.append)] == ["a1"]
    assert noted[1] == f'{file}, line 1, a question: no "id" of type str'


def test_squad_without_what_it_should_have(tmp_path):
    file = tmp_path / "s.json"
    file.write_text('{"data": [{"paragraphs": [{"qas": []}]}]}')
    assert problem(formats.squad, file) == f'{file}, article 1, paragraph 1: no "context" of type str'
    file.write_text("[]")
    assert problem(formats.squad, file) == f'{file}: no "data" of type list'


def test_broken_json_of_squad(tmp_path):
    file = tmp_path / "s.json"
    file.write_text('{"data": [\n{"paragraphs": }]}')
    assert problem(formats.squad, file) == f"{file}, line 2, column 16: no JSON: Expecting value"


def test_race_is_read_from_a_folder_in_order(tmp_path):
    article(tmp_path / "middle" / "2.txt", answers=["D"], questions=["Who is _ ?"])
    article(tmp_path / "high" / "1.txt", answers=["A", "C"], questions=["p", "q"], options=[list("abcd"), list("efgh")])
    assert list(formats.race(tmp_path)) == [
        Choice("b.", "p", ("a", "b", "c", "d"), 0),
        Choice("b.", "q", ("e", "f", "g", "h"), 2),
        Choice("b.", "Who is _ ?", ("a", "b", "c", "d"), 3),
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"answers": ["E"]}, 'the answer "E" is none of A, B, C, D: Which?'),
        ({"answers": ["AB"]}, 'the answer "AB" is none of A, B, C, D: Which?'),
        ({"options": [["a", "b", "c"]]}, "3 options where RACE has 4: Which?"),
        ({"questions": []}, "0 questions, 1 options and 1 answers"),
        ({"article": None}, 'no "article" of type str'),
    ],
)
def test_wrong_article(tmp_path, changed, message):
    file = article(tmp_path / "1.txt", **changed)
    assert problem(formats.race, file) == f"{file}, line 1: {message}"


def test_broken_json_line_of_race(tmp_path):
    file = article(tmp_path / "1.txt")
    file.write_text(file.read_text() + "\n{'article': 1}\n" + file.read_text())
    where = f"{file}, line 3, column 2: no JSON"
    assert problem(formats.race, file).startswith(f"{where}: Expecting property name")
    noted: list[str] = []
    assert len(list(formats.race(file, noted.append))) == 2 and noted[0].startswith(where)


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    bert_samples.write(folder)
    return folder


@pytest.mark.parametrize("name", tasks.TASKS)
def test_samples_are_of_each_format(samples, name):
    train, dev = tasks.load(tasks.TASKS[name], samples / name)
    assert len(train) >= 1000 and dev.keys() == tasks.TASKS[name].dev.keys()
    assert all(len(examples) >= 100 for examples in dev.values())


def test_only_questions_of_squad_2_have_no_answer(samples):
    for name, share in (("squad1", 0), ("squad2", 1 / 3)):
        questions, _ = tasks.load(tasks.TASKS[name], samples / name)
        assert sum(not question.answers for question in questions) / len(questions) == pytest.approx(share, abs=0.05)


def test_missing_and_empty_files(tmp_path, samples):
    task = tasks.TASKS["mnli"]
    hint = "no such file. Try examples/finetuning/bert_samples.py, which writes small ones"
    assert problem(tasks.load, task, tmp_path) == f"{tmp_path / 'train.tsv'}: {hint}"
    table(tmp_path / "train.tsv", MNLI_TRAIN)
    assert problem(tasks.load, task, tmp_path) == f"{tmp_path / 'dev_matched.tsv'}: {hint}"
    table(tmp_path / "dev_mismatched.tsv", MNLI_DEV)
    assert problem(tasks.load, task, tmp_path) == f"{tmp_path / 'train.tsv'}: no examples in it"
