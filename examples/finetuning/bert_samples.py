"""Writes small files in the formats of MNLI, QQP, SQuAD 1.1 and 2.0 and RACE: made-up text that a tiny BERT can learn.

    python examples/finetuning/bert_samples.py out/samples

Each task asks the question of the original task, in few words: whether a sentence follows from another, whether two
questions are the same, where in a text an answer is, which option a text mentions. The same seed gives the same files.
"""

from __future__ import annotations

import json
import random
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HOW_MANY = {"All": "entailment", "Some": "neutral", "None": "contradiction"}  # MNLI's labels, if nothing is denied
THINGS = ("cars", "houses", "coats", "boats", "doors", "lamps", "chairs", "bicycles")
COLOURS = ("red", "blue", "green", "white")
PLACES = {"fiction": ("garden", "street"), "travel": ("harbour", "market")}
WISHES = ("learn", "teach")
SKILLS = ("french", "chess", "cooking", "painting", "swimming", "physics", "singing", "poker")
ASKED = ("How do I {} {}?", "What is the best way to {} {}?", "Is it hard to {} {}?")
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry")
FILLERS = ("Nobody knows why.", "It rains there a little in the morning.", "There is not much more to say about it.")
MAYORS = tuple(f"{name} {last}" for name in NAMES for last in ("Hill", "Wood"))

Told = tuple[tuple[str, str, tuple[str, ...]], ...]  # statement, question, possible answers
FACTS: Told = (  # of a town
    ("Its mayor is {}.", "Who is the mayor of the town?", MAYORS),
    ("It was founded in {}.", "When was the town founded?", tuple(str(year) for year in range(1610, 1900, 17))),
    ("The river {} flows through it.", "Which river flows through the town?", ("Elda", "Morne", "Tarn", "Isk", "Rhea")),
    ("About {} people live there.", "How many people live in the town?", tuple(f"{n},500" for n in range(3, 40, 3))),
    ("It is known for its {}.", "What is the town known for?", ("fresh bread", "cheese", "old stone bridges", "glass")),
)
DEEDS: Told = (  # of a person
    ("{} bought a {}.", "What did {} buy?", ("car", "house", "coat", "boat")),
    ("{} had {} for lunch.", "{} had _ for lunch.", ("soup", "rice", "fish", "cake")),
)
OFTEN = (5, 3, 1, 1)  # How often each option is right, relatively: if all are equally frequent, learning starts late.

Rows = Iterator[list[str]]


def mnli(draw: random.Random, count: int, genre: str) -> Rows:
    """Yields MNLI's table: a premise about many things, and a hypothesis about one of them."""
    opposite = {"entailment": "contradiction", "neutral": "neutral", "contradiction": "entailment"}
    yield ["index", "genre", "sentence1", "sentence2", "label1", "gold_label"]
    for index in range(count):
        many, thing, colour = draw.choice(list(HOW_MANY)), draw.choice(THINGS), draw.choice(COLOURS)
        denied = draw.random() < 0.3
        label = opposite[HOW_MANY[many]] if denied else HOW_MANY[many]
        premise = f"{many} of the {thing} in the {draw.choice(PLACES[genre])} are {colour}."
        yield [str(index), genre, premise, f"One of the {thing} is {'not ' * denied}{colour}.", label, label]


def qqp(draw: random.Random, count: int) -> Rows:
    """Yields QQP's table: two questions that ask the same, or one question about learning and one about teaching."""
    yield ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
    for index in range(count):
        wishes, skill = draw.choices(WISHES, weights=(2, 1), k=2), draw.choice(SKILLS)
        questions = [form.format(wish, skill) for form, wish in zip(draw.sample(ASKED, 2), wishes, strict=True)]
        yield [str(index), str(2 * index), str(2 * index + 1), *questions, str(int(wishes[0] == wishes[1]))]


def squad(draw: random.Random, count: int, version: str) -> dict[str, Any]:
    """Returns SQuAD's file: paragraphs about towns, with two questions each; in 2.0 a third of them has no answer."""
    paragraphs = [_paragraph(draw, index, version == "v2.0") for index in range(count)]
    return {"version": version, "data": [{"title": "Towns", "paragraphs": paragraphs}]}


def _paragraph(draw: random.Random, index: int, may_lack: bool) -> dict[str, Any]:
    facts = draw.sample(FACTS, len(FACTS))
    said = [(form, draw.choice(values)) for form, _, values in facts[1:]]
    sentences = [form.format(value) for form, value in said] + draw.choices(FILLERS, k=6)
    draw.shuffle(sentences)
    context = " ".join(sentences)
    asked = []
    for number in range(2):
        lacks = may_lack and draw.random() < 1 / 3
        place = 0 if lacks else draw.randrange(1, len(facts))
        question: dict[str, Any] = {"id": f"{index}-{number}", "question": facts[place][1], "answers": []}
        if not lacks:
            form, value = said[place - 1]
            start = context.index(form.format(value)) + form.index("{")
            question["answers"] = [{"text": value, "answer_start": start}]
        asked.append(question | ({"is_impossible": lacks} if may_lack else {}))
    return {"context": context, "qas": asked}


def race(draw: random.Random, fillers: int) -> dict[str, Any]:
    """Returns RACE's file: an article about a person, and questions with four options; the article has one of them."""
    name = draw.choice(NAMES)
    told = [(*deed, draw.choices(deed[2], OFTEN)[0]) for deed in draw.sample(DEEDS, len(DEEDS))]
    sentences = [form.format(name, right) for form, _, _, right in told] + draw.choices(FILLERS, k=fillers)
    draw.shuffle(sentences)
    record: dict[str, Any] = {"article": " ".join(sentences), "questions": [], "options": [], "answers": []}
    for _, asked, options, right in told:
        some = [right, *draw.sample([option for option in options if option != right], 3)]
        draw.shuffle(some)
        record["questions"].append(asked.format(name))
        record["options"].append(some)
        record["answers"].append("ABCD"[some.index(right)])
    return record


def write(folder: Path, seed: int = 0) -> None:
    """Writes the files of all five tasks; each task has a folder with its name."""
    draw = random.Random(seed)
    _table(folder / "mnli" / "train.tsv", mnli(draw, 3000, "fiction"))
    _table(folder / "mnli" / "dev_matched.tsv", mnli(draw, 200, "fiction"))
    _table(folder / "mnli" / "dev_mismatched.tsv", mnli(draw, 200, "travel"))
    _table(folder / "qqp" / "train.tsv", qqp(draw, 3000))
    _table(folder / "qqp" / "dev.tsv", qqp(draw, 300))
    for version, task in (("v1.1", "squad1"), ("v2.0", "squad2")):
        _file(folder / task / f"train-{version}.json", json.dumps(squad(draw, 500, version)))
        _file(folder / task / f"dev-{version}.json", json.dumps(squad(draw, 80, version)))
    for part, count in (("train", 800), ("dev", 60)):
        for level, fillers in (("middle", 1), ("high", 2)):
            for index in range(count):
                record = {"id": f"{level}{index}.txt"} | race(draw, fillers)
                _file(folder / "race" / part / level / f"{index}.txt", json.dumps(record))


def _table(file: Path, rows: Iterable[list[str]]) -> None:
    _file(file, "\n".join("\t".join(row) for row in rows))


def _file(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Writes the samples into the folder that the command line names."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder in which each task gets a folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of the text")
    args = parser.parse_args()
    write(args.folder, args.seed)
    print(f"Now: torchrun --nproc-per-node 2 examples/finetune_bert.py mnli --data {args.folder / 'mnli'}")


if __name__ == "__main__":
    main()
