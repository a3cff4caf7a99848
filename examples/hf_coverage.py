"""Which Hugging Face families autotp cuts, and how well: every gradient against one device's, as a table.

    python examples/hf_coverage.py --jobs 2                          # all, in a quarter of an hour: docs/coverage.md
    python examples/hf_coverage.py --families llama bert --tp 2 4    # some, on the screen

Tiny random models from configurations (`hf_families.py`): nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from hf_families import FAMILIES
from torch import nn

import autotp
from autotp.source_location import block_in

SIZES = (2, 3, 4, 8)
TABLE = Path(__file__).parent.parent / "docs" / "coverage.md"
TEXT = """# Hugging Face families

`python examples/hf_coverage.py` with torch {torch} and transformers {transformers}: tiny random models of two layers
(six heads, a vocabulary of 99, widths that three does not divide), in train and in eval mode, tp in {sizes}; outputs,
every gradient and a step of an optimizer compared with one device's in float64.

- **cut in blocks**: the share of the parameters in numbered blocks that are divided, the least over all tp.
- **a layer**: collectives of a block, forward + backward, the most over all tp. Small ones carry the gradient of a
  parameter (of a norm that all heads share, of key/value heads of which there are fewer than ranks) or at most a
  quarter of what the others do (the sums of a norm, a router's weights).
- **gradient**: the largest difference of any, over the scale of the whole gradient. (deberta_v2's is a scale that a
  scripted function of transformers computes in float32, where float64 does not reach.) **seconds**: to capture, plan
  and lower once.

{header}
{rows}

{count} of {count} equal to one device.
"""
HEADER = """| family | heads | attention | cut in blocks | a layer | gradient | seconds | whole in blocks, and why |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Found:
    """One family on one number of ranks in one mode; `problem` is empty where all is equal."""

    report: autotp.Report | None
    problem: str = ""


@dataclass(frozen=True)
class Row:
    """What was found of one family."""

    name: str
    heads: str
    attention: str
    seconds: float
    found: tuple[Found, ...]

    @property
    def problems(self) -> list[str]:
        return [one.problem for one in self.found if one.problem]

    def __str__(self) -> str:
        if self.problems:
            return f"| {self.name} | {self.heads} | {self.attention} | | | | | {self.problems[0]} |"
        reports = [one.report for one in self.found if one.report]
        plans = [report.plan for report in reports]
        least = min(plans, key=share)
        worst = max(difference.error for report in reports for difference in report.gradients)
        cells = f"{share(least):.1%}", layers(plans), f"{worst:.0e}", f"{self.seconds:.1f}", whole(least)
        return f"| {self.name} | {self.heads} | {self.attention} | {' | '.join(cells)} |"


def measure(name: str, sizes: Sequence[int]) -> Row:
    """One family, verified in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    start = time.perf_counter()
    autotp.explain(model.train(), sizes[0], example_inputs=inputs)
    seconds = time.perf_counter() - start
    found = tuple(verified(model.train(train), tp, inputs) for tp in sizes for train in (True, False))
    config: Any = model.config
    return Row(name, heads(config), config._attn_implementation, seconds, found)


def verified(model: nn.Module, tp: int, inputs: dict[str, Any]) -> Found:
    """What `autotp.verify` says of the model in the mode that it is in."""
    try:
        report = autotp.verify(model, tp, example_inputs=inputs)
    except (autotp.Error, RuntimeError) as error:
        return Found(None, f"tp={tp}: {str(error).splitlines()[0][:160]}".replace("|", "/"))
    return Found(report, "" if report.ok else f"tp={tp}: DIFFERENT, {report.worst}")


def heads(config: Any) -> str:
    """Query heads, and key/value heads where these are fewer."""
    config = getattr(config, "text_config", config)
    query = config.num_attention_heads
    fewer = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or query
    fewer = (
        1 if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False) else fewer
    )
    return f"{query}" if fewer == query else f"{query} on {fewer}"


def share(plan: autotp.Plan) -> float:
    """How much of the parameters inside numbered blocks is cut."""
    cut = sum(math.prod(entry.layout.shape) for entry in plan.cuts if block_in(entry.name))
    rest = sum(math.prod(entry.shape) for entry in plan.whole if block_in(entry.name) and " " not in entry.name)
    return cut / ((cut + rest) or 1)


def whole(plan: autotp.Plan) -> str:
    """The matrices in blocks that stay whole, each kind once, where these are more than a twentieth."""
    if share(plan) >= 0.95:
        return ""
    kinds = {".".join(entry.name.split(".")[-2:]): entry.reason for entry in plan.whole if entry.in_block}
    return f"tp={plan.tp}: " + "; ".join(f"`{name}`: {reason}" for name, reason in kinds.items())


def layers(plans: Sequence[autotp.Plan]) -> str:
    """Collectives of a block, forward + backward, by kind of block; the most over all plans."""
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
    """Each stack of blocks, and the collectives of its last: forward, backward, small forward, small backward.

    (The first one waits for the embedding's reduction, too.)
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
    """Prints the table, and writes it where all families were measured; ends with 1 where one differs or is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="NAME")
    parser.add_argument("--tp", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a family of its own")
    args = parser.parse_args()
    print(HEADER)
    rows = []
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for row in pool.map(partial(measure, sizes=args.tp), args.families):
            rows.append(row)
            print(row, flush=True)
    bad = [row.name for row in rows if row.problems]
    print(f"\n{len(rows) - len(bad)} of {len(rows)} equal to one device, tp={args.tp}")
    assert not bad, bad
    if args.families == list(FAMILIES):
        import transformers

        versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
        sizes, text = ", ".join(map(str, args.tp)), "\n".join(map(str, rows))
        TABLE.write_text(TEXT.format(**versions, sizes=sizes, header=HEADER, rows=text, count=len(rows)))


if __name__ == "__main__":
    main()
