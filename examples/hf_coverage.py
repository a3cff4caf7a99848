"""Which Hugging Face families autotp cuts, and how well: every gradient against one device's, as a table.

    python examples/hf_coverage.py --tp 2          # some minutes; --families llama bert for a few

Tiny random models from configurations (`hf_families.py`): nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from dataclasses import dataclass

import torch
from hf_families import FAMILIES

import autotp


@dataclass(frozen=True)
class Row:
    """What was found of one family; `problem` is empty where all gradients are equal."""

    name: str
    share: float = 0.0  # of the parameters in blocks, cut
    forward: str = ""
    backward: str = ""
    error: float = math.nan
    seconds: float = 0.0
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"| {self.name} | | | | {self.problem} | |"
        cells = self.name, f"{self.share:.1%}", self.forward, self.backward, f"{self.error:.0e}", f"{self.seconds:.1f}"
        return f"| {' | '.join(cells)} |"


HEADER = """| family | cut in blocks | forward | backward | worst gradient | seconds |
|---|---|---|---|---|---|"""


def measure(name: str, tp: int, train: bool) -> Row:
    """One family, verified in this process."""
    start = time.perf_counter()
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    try:
        report = autotp.verify(model.train(train), tp, example_inputs=inputs)
    except (autotp.Error, RuntimeError) as error:
        return Row(name, problem=str(error).splitlines()[0][:160].replace("|", "/"))
    seconds, traffic = time.perf_counter() - start, report.plan.traffic
    forward, backward = (
        ", ".join(f"{n} {kind}" for kind, n in sorted(side.items())) for side in (traffic.forward, traffic.backward)
    )
    worst = max(difference.error for difference in report.gradients)
    problem = "" if report.ok else f"DIFFERENT: {report.worst}"
    return Row(name, share(report.plan), forward, backward, worst, seconds, problem)


def share(plan: autotp.Plan) -> float:
    """How much of the parameters inside numbered blocks is cut."""
    cut = sum(math.prod(entry.layout.shape) for entry in plan.cuts if in_block(entry.name))
    whole = [entry for entry in plan.whole if in_block(entry.name) and " " not in entry.name]
    return cut / ((cut + sum(math.prod(entry.shape) for entry in whole)) or 1)


def in_block(name: str) -> bool:
    """True for the name of a parameter inside a numbered block."""
    return bool(re.search(r"\.\d+\.", name))


def main() -> None:
    """Prints the table; ends with 1 where a family is different or refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="NAME")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--eval", action="store_true", help="in eval mode; else in train mode")
    args = parser.parse_args()
    print(HEADER)
    found = []
    for name in args.families:
        found.append(measure(name, args.tp, not args.eval))
        print(found[-1], flush=True)
    good = [row for row in found if not row.problem]
    print(f"\n{len(good)} of {len(found)} equal to one device, tp={args.tp}")
    assert len(good) == len(found), [row.name for row in found if row.problem]


if __name__ == "__main__":
    main()
