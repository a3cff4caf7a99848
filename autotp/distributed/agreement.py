"""Agreement: ranks compare facts, and all raise one Error that names the ranks which differ.

Ranks that differ would silently compute different models, or wait for each other for ever.

NOTE [Who compares what, and when]
Now, by one sum: all ranks come to the same call.
    graph, options, order of collectives, cards  before a graph runs for the first time  `graph_entry.py`, `trainer.py`
    arguments, mode, random state                first calls of a graph, or each call    `call_consistency.py`
    what Python reads of values                  each call of a model that branches      `call_consistency.py`
    batch, mode, frozen, steps, random state     each step of a trainer                  `step_consistency.py`
    gradients, writes into parameters            each step of whole matrices             `matrices.py`
    arguments, files, names, steps               calls that save, load and generate      `checkpoint`, `integrations`
    which public call it is                      in each of these sums                   `mesh.py`
Now, through the store: a rank may not come, and a collective would pair with that rank's next one.
    parameters, gradients, optimizer's settings  first steps, then every 64th            `optimizer_guard.py`
    states that an optimizer has loaded          before the step that uses them          `optimizer_guard.py`
    number of collectives so far                 first collective after an exception     `interrupted.py`
Soon, by news between the threads of the heartbeats: nobody waits, and the next call or step raises the Error.
    number of collectives so far, batch          every 16th call and step                `in_step.py`
In a thread, in a process group of its own: another thread trains, and the default group may be gone.
    values that several ranks have               while a checkpoint is written           `checkpoint/write.py`
By other rules, as a difference is no Error:
    parts and states that ranks loaded           must differ, so twins are an Error      `call_consistency.py`
    files that a checkpoint is read from         ranks of one machine share the reading  `pretrained.py`
    tensors of a checkpoint of Lightning         a rank may lack what the first one has  `lightning.py`

NOTE [Now: one sum, and texts where it is not 0]
Each rank adds digests of its facts with weights by which the total is 0 if all agree: NOTE [Ranks agree if a sum is 0]
in `mesh.py`. So ranks that agree make one small collective, however many they are and whatever they compare. If the sum
is not 0, or if a rank has a problem of its own, all ranks gather the facts as texts, and find the same difference.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from operator import eq
from typing import Any, Literal, TypeVar

import torch

from autotp.distributed.mesh import Mesh, agreement_weight, gather_ints, sum_ints, weight_of_all
from autotp.errors import Error

T = TypeVar("T")
Exchange = Callable[[str], Sequence[str]]
"""Returns every rank's text, by rank."""
SHOWN = 60
"""The number of characters of a list of settings that an error shows."""
SOURCE = "\t"
"""Separates the compared part of a line from its source location, which may differ between ranks."""


# ---- what is compared


@dataclass(frozen=True)
class Among:
    """The groups of ranks in which a fact must be the same. An error compares with the first rank of a group.

    Attributes:
        groups: numbers of ranks.
        weight: this rank's weight in the sum; 0 if another sum tells whether the ranks agree.
    """

    groups: Sequence[Sequence[int]]
    weight: int = 0

    @staticmethod
    def of(rank: int, groups: Sequence[Sequence[int]]) -> Among:
        """Returns the groups with the weight of a rank, which is in one of them at most."""
        return Among(groups, sum(agreement_weight(rank, group) for group in groups))


@dataclass(frozen=True)
class Fact:
    """What ranks must have alike.

    Attributes:
        key: tells it from other facts.
        value: data of JSON; None: this rank has nothing to compare.
        problem: of a rank with another value, as "got other inputs"; a sentence for another `wording`. "": the caller
            looks at the values.
        fix: what to do on all ranks.
        among: the ranks; None means all.
        wording: "than": the ranks, the problem, and "than rank 0". "values": the problem, and the values that are
            expected and got. "alone": the problem.
        digested: what of the value is in the sum; None means all of it.
        alike: whether a value may stand beside that of the first rank.
        suffix: what follows "than rank 0", as ", in step 4".
        details: (another rank, its value, the first rank's) -> further facts of the Error. All ranks call it.
    """

    key: str
    value: Any
    problem: str = ""
    fix: str = ""
    among: Among | None = None
    wording: Literal["than", "values", "alone"] = "than"
    digested: Any = None
    alike: Callable[[Any, Any], bool] = eq
    suffix: str = ""
    details: Callable[[int, Any, Any], Mapping[str, str]] = lambda other, value, first: {}

    def weighted(self, mesh: Mesh) -> int:
        """Returns this rank's part of the sum that is 0 if all ranks agree."""
        weight = weight_of_all(mesh.rank, mesh.size) if self.among is None else self.among.weight
        return weight * _digest((self.key, self.value if self.digested is None else self.digested))

    def expect(self, values: Mapping[int, Any], mesh: Mesh) -> None:
        """Raises Error if some ranks differ. All ranks have the same `values`, by rank."""
        for group in self.among.groups if self.among else [range(mesh.everyone.size)]:
            by_rank = {rank: values[rank] for rank in group if values.get(rank) is not None}
            if by_rank:
                self._expect(by_rank, mesh)

    def _expect(self, by_rank: Mapping[int, Any], mesh: Mesh) -> None:
        first, *_ = by_rank
        differing_ranks = [rank for rank, value in by_rank.items() if not self.alike(value, by_rank[first])]
        if not differing_ranks or not self.problem:
            return
        names = mesh.named(differing_ranks), "rank 0" if self.among is None else mesh.named([first])
        facts = dict(self.details(differing_ranks[0], by_rank[differing_ranks[0]], by_rank[first]))
        if self.wording == "values":
            facts["expected"] = f"{by_rank[first]}, as on {mesh.named([first])}"
            facts["got"] = f"{by_rank[differing_ranks[0]]} on {names[0]}"
        than = f"{names[0]} {self.problem} than {names[1]}{self.suffix}"
        raise Error(than if self.wording == "than" else self.problem, **facts, fix=self.fix)


def _digest(value: Any) -> int:
    """Returns a number of 64 bits that other values have with a probability of 2**-64."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "little")


# ---- now


def compare(
    mesh: Mesh,
    facts: Sequence[Fact],
    problem: Exception | None = None,
    counts: Sequence[int] = (),
    differ: Callable[[Sequence[int]], bool] = lambda sums: False,
    exchange: Exchange | None = None,
) -> tuple[Sequence[int], Sequence[Mapping[str, Any]]]:
    """Returns the sums of the counts over the ranks of `mesh.everyone`, if they agree; and the gathered facts.

    These are, by rank, the value of each key; none if nobody looked at them.

    Args:
        facts: all ranks have the same keys, unless the facts before them differ.
        problem: why this rank cannot go on.
        counts: at most FRAME - 4 integers that are summed in the same collective.
        differ: tells by their sums whether facts are gathered all the same.
        exchange: exchanges texts where there can be no collective: twice if ranks differ. It sums nothing.

    Raises:
        Error: on every rank: its own problem, or that of the first rank with one, or the first fact that differs.
    """
    sums: Sequence[int] = ()
    if exchange is None:
        place = mesh.everyone
        weighted_digests = sum(fact.weighted(place) for fact in facts)
        total, failed, *sums = sum_ints([weighted_digests, problem is not None, *counts], place)
        looks = bool(total or failed) or differ(sums)
    else:
        digests = exchange(str([problem is not None, _digest([fact.value for fact in facts])]))
        looks = len(set(digests)) > 1 or problem is not None
    if not looks:
        return sums, ()
    text = json.dumps([problem_as_text(problem), {fact.key: fact.value for fact in facts}])
    every = list(map(json.loads, exchange(text) if exchange else gather_texts(text, mesh)))
    raise_problem(mesh, problem, [row[0] for row in every])
    # In order: where an early fact differs, the later ones often differ only for that reason.
    for fact in facts:
        fact.expect({rank: row.get(fact.key) for rank, (_, row) in enumerate(every)}, mesh)
    return sums, [row for _, row in every]


def agree(
    mesh: Mesh,
    make: Callable[[], T],
    facts: Callable[[T], Sequence[Fact]] = lambda made: (),
    exchange: Exchange | None = None,
) -> T:
    """Returns the result of `make()`, once it has returned on every rank.

    Args:
        facts: returns what must be the same of the results.
        exchange: as for `compare`.

    Raises:
        Error: on every rank: `make` failed on some rank, with its own exception or that of the first failed rank; or
            the facts differ.
    """
    made, problem = tried(make)
    compare(mesh, facts(made[0]) if made else (), problem, exchange=exchange)
    return made[0]


def expect_alike(value: Any, mesh: Mesh, problem: str, remedy: str) -> None:
    """Raises Error, on every rank, if the text of `value` differs on some rank."""
    compare(mesh, [Fact("", zlib.crc32(repr(value).encode()), problem, f"{remedy} on all ranks")])


def told(mesh: Mesh, make: Callable[[], Any], exchange: Exchange | None = None) -> list[Any]:
    """Returns what `make()` returned on every rank, by rank: data of JSON.

    What a rank computes between two exchanges belongs into `make`: an exception there reaches the other ranks, which
    would wait for this rank otherwise.

    Args:
        exchange: as for `compare`.

    Raises:
        Error: as `agree`.
    """
    made, problem = tried(lambda: json.dumps(make()))
    text = json.dumps([problem_as_text(problem), *made])
    answers = list(map(json.loads, exchange(text) if exchange else gather_texts(text, mesh)))
    raise_problem(mesh, problem, [failed for failed, *_ in answers])
    return [json.loads(answer) for _, answer in answers]


def on_first_replica(mesh: Mesh, run: Callable[[], None]) -> None:
    """Runs something on the first tensor-parallel ranks that have the model; others wait: a model is written once.

    Others are those of other replicas, and those that have other parts of sequences. So what runs may only communicate
    along the tensor-parallel axis (`mesh.alone()`).

    Raises:
        Error: on every rank, if `run` failed.
    """
    copies = [axis for axis in (mesh.sequence, mesh.replicas) if axis is not None]

    def on_first() -> None:
        if all(axis.rank == 0 for axis in copies):
            run()

    for axis in copies:
        on_first = partial(agree, axis, on_first)
    on_first()


def gather_texts(text: str, mesh: Mesh) -> list[str]:
    """Returns every rank's `text`, by rank."""
    encoded = text.encode()
    # Texts go as whole numbers: `gather_ints` has the frame by which ranks of different calls do not pair.
    words = [
        int.from_bytes(encoded[i : i + 8].ljust(8, b"\0"), "little", signed=True) for i in range(0, len(encoded), 8)
    ]
    rows = gather_ints([len(encoded), *words], mesh)
    packed = [b"".join(word.to_bytes(8, "little", signed=True) for word in row[1:]) for row in rows]
    return [data[: row[0]].decode() for data, row in zip(packed, rows, strict=True)]


# ---- the problem of one rank


def tried(make: Callable[[], T]) -> tuple[list[T], Exception | None]:
    """Returns the result of `make()` in a list, or its exception: other ranks must know before this rank goes on."""
    try:
        return [make()], None
    except Exception as error:
        return [], _no_memory(error) if _is_of_memory(error) else error


def _is_of_memory(error: Exception) -> bool:
    """True if Python or torch could not allocate memory. (On the CPU, torch raises a RuntimeError.)"""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _no_memory(error: Exception) -> Error:
    lines = str(error).strip().splitlines()
    result = Error(
        f"there is not enough memory{': ' + lines[0] if lines else ''}", fix="free memory, and call it again"
    )
    result.__cause__ = error
    return result


def problem_as_text(problem: Exception | None) -> str:
    """Returns a problem as text for other ranks; "" if there is none."""
    if problem is None:
        return ""
    if isinstance(problem, Error):
        return json.dumps([problem.problem, problem.facts])
    return json.dumps([f"{type(problem).__name__}: {problem}", {}])


def problem_from_text(text: str) -> Error:
    """Returns the problem of which `problem_as_text` made a text."""
    problem, facts = json.loads(text)
    return Error(problem, **facts)


def raise_problem(mesh: Mesh, problem: Exception | None, texts: Sequence[str]) -> None:
    """Raises this rank's problem, or an Error with that of the first rank that has one. texts: the problems by rank"""
    if problem is not None:
        raise problem
    failed = [rank for rank, text in enumerate(texts) if text]
    if failed:
        error = problem_from_text(texts[failed[0]])
        on = error.facts.get("on", mesh.named(failed))  # The error may be of an agreement of other ranks.
        raise Error(error.problem, **{**error.facts, "on": on})


# ---- texts of many lines


def text_fact(key: str, text: str, mesh: Mesh, problem: str, fix: str) -> Fact:
    """Returns a text as a fact, without what is behind SOURCE in its lines; the Error shows the first other line."""
    lines = text.split("\n")

    def first_difference(other: int, sums: Sequence[int], first_sums: Sequence[int]) -> dict[str, str]:
        pairs = itertools.zip_longest(sums, first_sums)
        index = next(i for i, (line_sum, first_sum) in enumerate(pairs) if line_sum != first_sum)
        texts = gather_texts(lines[index] if index < len(lines) else "nothing more", mesh)
        pair = texts[0], texts[other]
        if not any(line.startswith("%") for line in pair):  # The text is a list of settings, not of operators.
            pair = _around(*pair)
        return {f"rank {rank}": line.replace(SOURCE, "  at ") for rank, line in zip((0, other), pair, strict=True)}

    return Fact(key, line_sums(text), problem, fix, details=first_difference)


def line_sums(text: str) -> list[int]:
    """Returns a checksum of each line, without what is behind SOURCE in it."""
    return [zlib.crc32(line.partition(SOURCE)[0].encode()) for line in text.split("\n")]


def _around(first_line: str, second_line: str) -> tuple[str, str]:
    """Returns two lines from their last common word on."""
    common = next((i for i, (a, b) in enumerate(zip(first_line, second_line, strict=False)) if a != b), 0)
    start = first_line.rfind(" ", 0, max(first_line.rfind(" ", 0, common), 0)) + 1
    return tuple(f"... {line[start : start + SHOWN]} ..." for line in (first_line, second_line))  # type: ignore[return-value]
