"""Compares models of libraries beside transformers on real ranks with one device, and writes a table of them."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from support.hf_walk import (
    CRASHED,
    LARGE,
    REFUSED,
    RIGHT,
    SLOW,
    WRONG,
    Look,
    Walked,
    cell,
    counts,
    read,
    refused,
    walk,
)
from support.library_models import LIBRARIES, MODELS, MODULES, built
from support.rank_checks import Compared, Died, Ranks
from tqdm import tqdm

SIZES = (2, 3)
PAGE = Path(__file__).parents[2] / "docs" / "coverage_libraries.md"
MOST = 0.9
RESULTS = Path(__file__).parents[1] / "libraries_coverage.jsonl"
TEXT = """# Models of other libraries

`python examples/hf_coverage.py --libraries` wrote this page, with torch {torch}. It builds tiny random models from
configurations, and trains and evaluates them on {sizes} real ranks (processes over gloo, each with a hash seed of its
own). It compares the loss, every output, every gradient and every buffer with those of one device, for three calls in
each mode: the example, other values, and another number of rows.

**{right} of {count} models are right.** {counts}.

{summary}
{reasons}
## Models that are right

At least {most:.0%} of the parameters in numbered blocks (or of all, without blocks) are cut, on both sizes; where it is
less, the share is in brackets.

{rows}
"""
FILES = "\n## Public files and loops\n"
"""The section of the page that is written by hand."""
SUMMARY = """| library | version | models | right | refused | wrong or crashed | too slow or too large |
|---|---|---|---|---|---|---|"""


def libraries(only: Sequence[str], results: Path, again: Sequence[str], limit: int) -> None:
    """Compares the models; writes the page if all libraries are there. The status is 1 if a result is not right.

    Args:
        only: libraries, or models: timm, timm/vit; all of them, if there are none.
        results: goes on from this file, and adds to it.
        again: the outcomes that are compared once more.
        limit: seconds for each model and number of ranks.
    """
    missing = [library for library in LIBRARIES if not _installed(library)]
    for library in missing:
        print(f"{library} is not installed: its {len(LIBRARIES[library])} models are skipped")
    chosen = [name for name in MODELS if name.split("/")[0] not in missing and name.startswith(tuple(only or [""]))]
    ranks, bad = Ranks(max(SIZES), built), []
    for one in tqdm(walk(chosen, SIZES, results, limit=limit, again=again, look=_look(ranks)), total=len(chosen)):
        if one.outcome != RIGHT:
            tqdm.write(f"{one.name}: {one.outcome}: {one.message}")
        if one.outcome in (WRONG, CRASHED):
            bad.append(one.name)
    ranks.end()
    known = {one.name: one for one in read(results)}
    if set(MODELS) <= set(known) and not missing:
        _, heading, of_files = PAGE.read_text().partition(FILES)
        PAGE.write_text(page([known[name] for name in MODELS]) + heading + of_files)
    assert not bad, bad


def _installed(library: str) -> bool:
    """True if a library, and what it imports, is installed."""
    try:
        importlib.import_module(MODULES[library])
    except (ImportError, RuntimeError):  # torchvision of another torch raises RuntimeError.
        return False
    return True


def _look(ranks: Ranks) -> Look:
    """Returns a function that compares a model on each number of ranks."""

    def look(name: str, sizes: Sequence[int], limit: int) -> Walked:
        answers: list[Compared] = []
        library = _version(name.split("/")[0])
        try:
            for tp in sizes:
                found = ranks.compare(name, tp, limit)
                answers += found
                outcome = _outcome(name, tp, found)
                if outcome.outcome != RIGHT:
                    return replace(outcome, version=library)
        except TimeoutError as error:
            return Walked(name, SLOW, str(error), version=library)
        except Died as error:
            return Walked(name, CRASHED, str(error), version=library)
        seconds = sum(one.seconds for one in answers[:: sizes[0]][:2])
        cut = round(min(one.share for one in answers), 3)
        return Walked(name, RIGHT, share=cut, seconds=round(seconds, 1), version=library)

    return look


def _outcome(name: str, tp: int, answers: Sequence[Compared]) -> Walked:
    """Returns what the answers of all ranks say together."""
    for one in answers:
        if one.crash:
            return Walked(name, CRASHED, f"tp={tp}: {one.crash}"[:300])
        if one.difference:
            return Walked(name, WRONG, f"tp={tp}, {one.difference}")
    if len({one.error for one in answers}) > 1:
        return Walked(name, CRASHED, f"tp={tp}: the ranks have different errors")
    return refused(name, answers[0].error) if answers[0].error else Walked(name, RIGHT)


def page(found: Sequence[Walked]) -> str:
    """Returns the page of the docs that shows what was found."""
    of_library = {library: [one for one in found if one.name.split("/")[0] == library] for library in LIBRARIES}
    reasons = [f"- {one.name} is {one.outcome}: {cell(one.message)}.\n" for one in found if one.outcome != RIGHT]
    return TEXT.format(
        torch=versions(of_library["torch"]),
        sizes=" and ".join(map(str, SIZES)),
        right=sum(one.outcome == RIGHT for one in found),
        count=len(found),
        counts=counts(found),
        summary="\n".join([SUMMARY, *(_summed(library, rows) for library, rows in of_library.items() if rows)]),
        reasons="".join(["\n", *reasons] if reasons else []),
        most=MOST,
        rows="\n".join(f"- {library}: {_cut(rows)}" for library, rows in of_library.items() if rows),
    )


def _cut(found: Sequence[Walked]) -> str:
    """Returns the names of the models that are right, with the share that is cut where it is small."""
    right = {one.name.partition("/")[2]: one.share for one in found if one.outcome == RIGHT}
    return ", ".join(name if round(share, 2) >= MOST else f"{name} ({share:.0%})" for name, share in right.items())


def _summed(library: str, found: Sequence[Walked]) -> str:
    """Returns the row of a library in the first table."""
    counted = Counter(one.outcome for one in found)
    groups = ((RIGHT,), (REFUSED,), (WRONG, CRASHED), (SLOW, LARGE))
    numbers = [str(sum(counted[outcome] for outcome in group)) for group in groups]
    return f"| {library} | {versions(found)} | {len(found)} | {' | '.join(numbers)} |"


def versions(found: Sequence[Walked]) -> str:
    """Returns the versions with which models were compared."""
    return ", ".join(sorted({one.version.partition("+")[0] for one in found}))


def _version(library: str) -> str:
    return version("open_clip_torch" if library == "open_clip" else library)
