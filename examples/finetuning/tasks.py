"""The five tasks to fine-tune BERT on: the files of each task, its model and its metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetuning import formats, metrics
from finetuning.formats import Broken, Example, Question, refuse
from finetuning.heads import MultipleChoice, PairClassifier, SpanExtractor
from finetuning.inputs import Item, label
from finetuning.windows import Window, answers
from torch import Tensor, nn

from autotp.models.bert import BERT


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        read: returns the examples of a file.
        head: makes the model from a BERT.
        train: the file to train on.
        dev: name -> file of each evaluation set; if there are several, some may be missing.
        metric: the name of the task's metric, among those that `measure` returns.
        learnt: the least value of this metric on the files of `bert_samples.py`.
    """

    read: Callable[[Path, Broken], Iterator[Example]]
    head: Callable[[BERT], nn.Module]
    train: str
    dev: Mapping[str, str]
    metric: str
    learnt: float


TASKS = {
    "mnli": Task(
        formats.mnli, lambda bert: PairClassifier(bert, len(formats.MNLI_LABELS)), "train.tsv",
        {"matched": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"}, "accuracy", 0.9,
    ),
    "qqp": Task(
        formats.qqp, lambda bert: PairClassifier(bert, len(formats.QQP_LABELS)), "train.tsv", {"dev": "dev.tsv"},
        "accuracy", 0.9,
    ),
    "squad1": Task(formats.squad, SpanExtractor, "train-v1.1.json", {"dev": "dev-v1.1.json"}, "F1", 0.9),
    "squad2": Task(formats.squad, SpanExtractor, "train-v2.0.json", {"dev": "dev-v2.0.json"}, "F1", 0.9),
    "race": Task(formats.race, MultipleChoice, "train", {"middle": "dev/middle", "high": "dev/high"}, "accuracy", 0.9),
}  # fmt: skip


def load(task: Task, folder: Path, broken: Broken = refuse) -> tuple[list[Example], dict[str, list[Example]]]:
    """Returns the training examples, and the evaluation sets: name -> examples.

    Raises:
        ValueError: a file is missing, has a wrong format, or has no examples.
    """
    dev = {name: folder / file for name, file in task.dev.items() if (folder / file).exists()}
    for file in (folder / task.train, *(dev.values() or [folder / next(iter(task.dev.values()))])):
        if not file.exists():
            raise ValueError(f"{file}: no such file. Try examples/finetuning/bert_samples.py, which writes small ones")
    found = {file: list(task.read(file, broken)) for file in (folder / task.train, *dev.values())}
    for file, examples in found.items():
        if not examples:
            raise ValueError(f"{file}: no examples in it")
    return found[folder / task.train], {name: found[file] for name, file in dev.items()}


def measure(
    examples: Sequence[Example], items: Sequence[Item], scores: Sequence[Tensor], longest: int, threshold: float | None
) -> dict[str, float]:
    """Returns the metrics of these scores: name -> value from 0 to 1.

    Args:
        items: the items that the model read: examples, or windows of questions.
        scores: the model's logits for each item.
        longest, threshold: arguments of `windows.answers`.
    """
    questions = [example for example in examples if isinstance(example, Question)]
    if questions:
        parts = [item for item in items if isinstance(item, Window)]
        return metrics.squad(questions, answers(parts, scores, longest, threshold))
    predicted, labels = [int(row.argmax()) for row in scores], [label(item) for item in items]
    found = {"accuracy": metrics.accuracy(predicted, labels)}
    return found | ({"F1": metrics.f1_of_class(predicted, labels)} if len(scores[0]) == 2 else {})
