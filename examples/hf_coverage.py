"""Verifies every gradient of Hugging Face families, and writes a table that shows how well autotp cuts each family.

    python examples/hf_coverage.py --jobs 2                          # all, in a quarter of an hour: docs/coverage.md
    python examples/hf_coverage.py --families llama bert --tp 2 4    # some, on the screen
    python examples/hf_coverage.py --all --jobs 2                    # every class, in hours: docs/coverage_all.md
    python examples/hf_coverage.py --all --write                     # docs/coverage_all.md, of the classes so far
    python examples/hf_coverage.py --all --on-ranks                  # the same classes, on two real ranks
    python examples/hf_coverage.py --all --on-ranks --write          # the section of these, of the classes so far
    python examples/hf_coverage.py --sequences --jobs 2              # sequences cut over ranks: docs/coverage.md
    python examples/hf_coverage.py --sequences --families t5 --write # some rows of it
    python examples/hf_coverage.py --libraries                       # timm, diffusers and others, on real ranks

--all and --libraries can be stopped, and go on where they were. --libraries skips a library that is not installed, with
a message: `pip install --no-deps -c constraints.txt timm x-transformers` brings no other torch. The models are tiny and
random, built from configurations: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from support import hf_walk
from support.hf_families import FAMILIES
from support.hf_rank_walk import SECTION, on_ranks, section
from support.hf_shrink import classes
from support.hf_walk import CRASHED, OUTCOMES, RIGHT, WRONG, Walked, by_itself, page, read, sampled, walk
from support.library_walk import RESULTS as OF_LIBRARIES
from support.library_walk import libraries
from torch import nn
from tqdm import tqdm

import autotp
from autotp.source_location import block_in

SIZES = (2, 3, 4, 8)
ALL = Path(__file__).parent.parent / "docs" / "coverage_all.md"
RESULTS = Path(__file__).parent / "hf_coverage.jsonl"
ON_RANKS = Path(__file__).parent / "hf_ranks_coverage.jsonl"
TABLE = Path(__file__).parent.parent / "docs" / "coverage.md"
TEXT = """# Hugging Face families

`python examples/hf_coverage.py` wrote this page, with torch {torch} and transformers {transformers}. It builds tiny
random models of two layers (a vocabulary of 99, widths that three does not divide), and runs them in train and in eval
mode, for tp in {sizes}. It compares the outputs, every gradient and a step of an optimizer with those of one device, in
float64.

- **cut in blocks**: the share of the parameters in numbered blocks that is cut; the smallest over all tp.
- **a layer**: the collectives of a block, forward + backward; the most over all tp. A small collective sends the
  gradient of a parameter (of a norm that all heads share, or of key/value heads if there are fewer of these than
  ranks), or at most a quarter of what the other collectives send (the sums of a norm, a router's weights).
- **gradient**: the largest difference of any gradient, divided by the scale of the whole gradient. (For deberta_v2 it
  is larger: a scripted function of transformers computes a scale in float32, also in a float64 model.)
- **whole in blocks**: the weights in blocks that stay whole, where these are more than a twentieth. If no reason is
  behind them, every rank needs all of their results.

{header}
{rows}

{count} of {count} equal to one device.
"""
LAYOUTS = ((1, 2), (1, 3), (2, 2), (1, 4), (2, 3), (4, 2))
SEQUENCES = "\n## Sequences that are cut over ranks\n"
OF_SEQUENCES = """
`python examples/hf_coverage.py --sequences` wrote this table: the same models in training mode, on tp x cp ranks for
(tp, cp) in {layouts}, with an odd number of tokens.

- **whole there**: the operators that a gradient flows through, that read a sequence, and that every rank computes.
- **over cp**: the collectives over cp=2 of the whole model, forward and backward.

`pytest --all tests/system/test_families.py -k cut_sequences` runs them on real ranks for (1, 2), (2, 2), (1, 4) and
(4, 2), with sequences of 7, 11 and 5 tokens. Of 5 tokens the last of four ranks has none.

| family | whole there | over cp | gradient |
|---|---|---|---|
{rows}

{count} of {every} equal to one device in all these layouts.
"""
NEEDED = "every rank needs all of its result"
UNEQUAL = "| | |"
"""The middle of a row of a family that is not equal to one device."""
HEADER = """| family | heads | attention | cut in blocks | a layer | gradient | whole in blocks |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Found:
    """The result for one family, one number of ranks and one mode; `problem` is empty if all is equal."""

    report: autotp.Report | None
    problem: str = ""


@dataclass(frozen=True)
class Row:
    """The results for one family."""

    name: str
    heads: str
    attention: str
    found: tuple[Found, ...]

    @property
    def problems(self) -> list[str]:
        return [one.problem for one in self.found if one.problem]

    def __str__(self) -> str:
        if self.problems:
            return f"| {self.name} | {self.heads} | {self.attention} | | | | {self.problems[0]} |"
        reports = [one.report for one in self.found if one.report]
        plans = [report.plan for report in reports]
        least = min(plans, key=share)
        worst = max(difference.error for report in reports for difference in report.gradients)
        cells = f"{share(least):.1%}", layers(plans), f"{worst:.0e}", whole(least)
        return f"| {self.name} | {self.heads} | {self.attention} | {' | '.join(cells)} |"


def measure(name: str, sizes: Sequence[int]) -> Row:
    """Verifies one family in this process, and returns its row."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    found = tuple(verified(model.train(train), tp, inputs) for tp in sizes for train in (True, False))
    config: Any = model.config
    return Row(name, heads(config), config._attn_implementation, found)


def verified(model: nn.Module, tp: int, inputs: dict[str, Any], cp: int = 1) -> Found:
    """Returns the result of `autotp.verify` for the model in its present mode."""
    sizes = f"tp={tp}" + f", cp={cp}" * (cp > 1)
    try:
        report = autotp.verify(model, tp, cp=cp, example_inputs=inputs)
    except (autotp.Error, RuntimeError) as error:
        return Found(None, f"{sizes}: {str(error).splitlines()[0][:160]}".replace("|", "/"))
    return Found(report, "" if report.ok else f"{sizes}: DIFFERENT, {report.worst}")


def measure_sequences(name: str) -> tuple[str, str, bool]:
    """Verifies one family whose sequences are cut, in this process; returns name, row, and whether all is equal."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    found = [verified(model.train(), tp, inputs, cp) for tp, cp in LAYOUTS]
    problems = [one.problem for one in found if one.problem]
    if problems:
        return name, f"| {name} {UNEQUAL} {problems[0]} |", False
    plan = found[0].report.plan  # type: ignore[union-attr]
    kinds = Counter(row.name.rpartition(" ")[2] for row in plan.whole if row.reason.startswith("it needs whole"))
    stays = ", ".join(f"{n} x `{kind}`" if n > 1 else f"`{kind}`" for kind, n in kinds.items())
    over = plan.traffic.over("cp")
    sent = f"{sum(over.forward.values())} + {sum(over.backward.values())}"
    worst = max(difference.error for one in found for difference in one.report.gradients)  # type: ignore[union-attr]
    return name, f"| {name} | {stays} | {sent} | {worst:.0e} |", True


def heads(config: Any) -> str:
    """Returns the number of query heads, and of key/value heads if there are fewer of these."""
    config = getattr(config, "text_config", config)
    query = config.num_attention_heads
    fewer = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or query
    fewer = (
        1 if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False) else fewer
    )
    return f"{query}" if fewer == query else f"{query} on {fewer}"


def share(plan: autotp.Plan) -> float:
    """Returns the share of the parameters inside numbered blocks that is cut."""
    cut = sum(math.prod(entry.layout.shape) for entry in plan.cuts if block_in(entry.name))
    rest = sum(math.prod(entry.shape) for entry in plan.whole if block_in(entry.name) and " " not in entry.name)
    return cut / ((cut + rest) or 1)


def whole(plan: autotp.Plan) -> str:
    """Returns the matrices in blocks that stay whole, each kind once, if they are more than a twentieth."""
    if share(plan) >= 0.95:
        return ""
    kinds = {f"`{'.'.join(entry.name.split('.')[-2:])}`": entry.reason for entry in plan.whole if entry.in_block}
    named = {reason: ", ".join(name for name in kinds if kinds[name] == reason) for reason in kinds.values()}
    return f"tp={plan.tp}: " + "; ".join(n if why == NEEDED else f"{n}: {why}" for why, n in named.items())


def layers(plans: Sequence[autotp.Plan]) -> str:
    """Returns the collectives of a block, forward + backward, for each kind of block; the most over all plans."""
    most: dict[str, list[int]] = {}
    for plan in plans:
        for stack, counts in stacks(plan):
            most[stack] = [max(pair) for pair in zip(counts, most.get(stack, [0] * 4), strict=True)]
    texts = {}
    for stack, (forward, backward, small_forward, small_backward) in most.items():
        small = f", small {small_forward} + {small_backward}" if small_forward + small_backward else ""
        texts[stack] = f"{forward} + {backward}{small}"
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{stack.split('.')[-2] if '.' in stack else stack}: {text}" for stack, text in texts.items())


def stacks(plan: autotp.Plan) -> Iterator[tuple[str, list[int]]]:
    """Yields each stack of blocks, and the collectives of its last: forward, backward, small forward, small backward.

    (The first block also has the reduction of the embedding.)
    """
    sends = [(block_in(sent.module), sent) for sent in plan.traffic.sends]
    largest = max((sent.bytes for name, sent in sends if name and not sent.parameter), default=0)
    last = {name.rpartition(".")[0]: name for name, _ in sends if name}
    for stack, name in last.items():
        counts = [0] * 4
        for sent in (sent for module, sent in sends if module == name):
            small = sent.parameter or sent.bytes * 4 <= largest
            counts[2 * small + sent.backward] += 1
        yield stack, counts


def main() -> None:
    """Prints the table; writes it for all families, or with `--write`. The status is 1 if one is not equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="NAME")
    parser.add_argument("--tp", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--jobs", type=int, default=1, help="number of processes; each verifies one family at a time")
    parser.add_argument(
        "--write",
        action="store_true",
        help="with --families: write their rows; with --all: write the page of the results so far",
    )
    parser.add_argument("--sequences", action="store_true", help="the table of sequences that are cut over ranks")
    parser.add_argument("--all", nargs="*", metavar="CLASS", help="these classes of transformers, or every one of them")
    parser.add_argument("--on-ranks", action="store_true", help="--all trains on two real ranks, not in verify")
    parser.add_argument("--libraries", nargs="*", metavar="NAME", help="other libraries, or models: timm, timm/vit")
    parser.add_argument("--results", type=Path, help="--all and --libraries go on from this file, and add to it")
    parser.add_argument("--again", nargs="+", default=[], choices=OUTCOMES, help="what these two verify once more")
    parser.add_argument(
        "--limit",
        type=int,
        default=240,
        help="seconds: of the processor for each class of --all; for each model and size of --libraries",
    )
    args = parser.parse_args()
    if args.libraries is not None:
        return libraries(args.libraries, args.results or OF_LIBRARIES, args.again, args.limit)
    if args.all is not None and args.on_ranks and args.write:
        return write_on_ranks(read(args.results or ON_RANKS))
    if args.all is not None and args.on_ranks:
        return every_class_on_ranks(sampled(args.all or classes()), args)
    if args.all is not None and args.write:
        return write_all(read(args.results or RESULTS), walked_sizes(args.tp), args.limit)
    if args.all is not None:
        return every_class(sampled(args.all or classes()), args)
    if args.sequences:
        return sequences(args.families, args.jobs, args.write)
    if args.write and args.tp != list(SIZES):
        parser.error("the table has rows for all sizes: leave out --tp")
    print(HEADER)
    rows = []
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for row in pool.map(partial(measure, sizes=args.tp), args.families):
            rows.append(row)
            print(row, flush=True)
    bad = [row.name for row in rows if row.problems]
    print(f"\n{len(rows) - len(bad)} of {len(rows)} equal to one device, tp={args.tp}")
    assert not bad, bad
    if args.write or args.families == list(FAMILIES):
        write({row.name: str(row) for row in rows}, args.tp)


def sequences(families: Sequence[str], jobs: int, write_some: bool) -> None:
    """Prints the table of cut sequences; writes it as `main` does. The status is 1 if one is not equal."""
    rows, bad = dict[str, str](), list[str]()
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for name, row, ok in pool.map(measure_sequences, families):
            rows[name] = row
            bad += [] if ok else [name]
            print(row, flush=True)
    if write_some or list(families) == list(FAMILIES):
        write_sequences(rows)
    assert not bad, bad


def write_sequences(rows: dict[str, str]) -> None:
    """Writes the table of cut sequences with these rows, by family; it keeps the rows of other families."""
    before, heading, written = TABLE.read_text().partition(SEQUENCES)
    lines = [line for line in written.splitlines() if line.startswith("| ")][1:]
    known = {line.split("|")[1].strip(): line for line in lines} | rows
    every = [known[name] for name in FAMILIES if name in known]
    count = sum(UNEQUAL not in row for row in every)
    layouts = ", ".join(map(str, LAYOUTS))
    text = OF_SEQUENCES.format(layouts=layouts, rows="\n".join(every), count=count, every=len(every))
    TABLE.write_text(before + heading + text)


def every_class(names: Sequence[str], args: argparse.Namespace) -> None:
    """Verifies classes of transformers; the status is 1 if one is wrong or ended in an error that is not autotp's."""
    sizes, found = walked_sizes(args.tp), []
    for one in tqdm(
        walk(names, sizes, args.results or RESULTS, jobs=args.jobs, limit=args.limit, again=args.again),
        total=len(names),
    ):
        found.append(one)
        if one.outcome != RIGHT:
            tqdm.write(f"{one.name}: {one.outcome}: {one.message}")
    if len(names) == len(classes()):
        write_all(found, sizes, args.limit)
    bad = [one.name for one in found if one.outcome in (WRONG, CRASHED)]
    assert not bad, bad


def every_class_on_ranks(names: Sequence[str], args: argparse.Namespace) -> None:
    """Trains classes of transformers on two real ranks; the status is 1 if one is wrong or crashed."""
    look, found = by_itself(on_ranks), []
    results = args.results or ON_RANKS
    for one in tqdm(walk(names, [2], results, limit=args.limit, again=args.again, look=look), total=len(names)):
        found.append(one)
        if one.outcome != RIGHT:
            tqdm.write(f"{one.name}: {one.outcome}: {one.message}")
    print(f"{len(found)} classes: {hf_walk.counts(found)}")
    bad = [one.name for one in found if one.outcome in (WRONG, CRASHED)]
    assert not bad, bad


def walked_sizes(asked: list[int]) -> list[int]:
    """Returns the numbers of ranks of --all: those that were asked for, else 2 and 3."""
    return asked if asked != list(SIZES) else [2, 3]


def write_all(found: Sequence[Walked], sizes: Sequence[int], limit: int) -> None:
    """Writes the page of all classes, and keeps the section of those on real ranks."""
    known = classes()
    _, heading, on_real_ranks = ALL.read_text().partition(SECTION)
    text = page([one for one in found if one.name in known], sizes, limit, len(known))
    ALL.write_text(text + heading + on_real_ranks)


def write_on_ranks(walked: Sequence[Walked]) -> None:
    """Writes the section of classes on real ranks."""
    known = classes()
    before, _, _ = ALL.read_text().partition(SECTION)
    ALL.write_text(before + section([each for each in walked if each.name in known], len(known)))


def write(rows: dict[str, str], sizes: Sequence[int]) -> None:
    """Writes the table with these rows, by family; it keeps the rows of other families."""
    import transformers

    before, heading, of_sequences = TABLE.read_text().partition(SEQUENCES)
    written = [line for line in before.splitlines() if line.startswith("| ")][1:]
    known = {line.split("|")[1].strip(): line for line in written} | rows
    text = "\n".join(known[name] for name in FAMILIES if name in known)
    versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    shown = ", ".join(map(str, sizes))
    TABLE.write_text(
        TEXT.format(**versions, sizes=shown, header=HEADER, rows=text, count=text.count("\n") + 1)
        + heading
        + of_sequences
    )


if __name__ == "__main__":
    main()
