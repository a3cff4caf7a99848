"""The first day on GPUs, in at most 30 minutes: is it right, how fast is it, what happens if a rank is lost?

    python benchmarks/gpu.py                      # on 1, 2, 4, 8 cards, as many as the machine has
    python benchmarks/gpu.py --only "llama cp"    # the checks whose name contains this
    python benchmarks/gpu.py --pretend 4          # a rehearsal on pretended cards: figures mean nothing

It prints the machine, then a line for each check as it ends, and at the end one table and what failed. The exit status
is 1 if a check failed. Each result is kept in a file at once (--results): started again, the script goes on where it
was stopped, and tries again what failed. --again forgets them. Ranks are processes of their own, which are ended if a
check takes too long.

`first_day/` has the checks: equal.py (every feature beside one device), training.py (optimizers, precision, pipelines,
replicas, generate, files), speed.py (layers of a Llama-3-8B: tokens, memory, kernels, host waits), failures.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from first_day.checks import HEAD, Check, Differs, Place, Row, Skipped, line
from first_day.processes import run_checks
from first_day.table import CHECKS

TOTAL = 1800  # seconds, for everything
HERE = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks that have no result yet, and prints the table; returns 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the checks whose name contains this")
    parser.add_argument("--ranks", type=int, nargs="+", help="the numbers of ranks; by default 1, 2, 4, 8 of the cards")
    parser.add_argument("--results", type=Path, default=Path("out/gpu.jsonl"), help="the file of the results")
    parser.add_argument("--again", action="store_true", help="forget the results that are there")
    parser.add_argument("--pretend", type=int, metavar="CARDS", help="pretend so many cards (a rehearsal)")
    parser.add_argument("--seconds", type=float, default=TOTAL, help="the longest time, for everything")
    args = parser.parse_args(argv)
    if args.pretend:
        return _rehearse(args.pretend, [*sys.argv[1:]] if argv is None else [*argv])
    until = time.monotonic() + args.seconds
    rows = {} if args.again or not args.results.exists() else _kept(args.results)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    if args.again:
        args.results.unlink(missing_ok=True)
    print(HEAD, flush=True)
    with args.results.open("a") as results:
        done = {key for key, row in rows.items() if row.verdict in ("ok", "skipped")}
        for row in _rows(args.only, args.ranks, done, until):
            rows[row.key] = row
            print(json.dumps(row.to_dict()), file=results, flush=True)
            print(line(row), flush=True)
    return _finish(list(rows.values()))


def _rehearse(cards: int, argv: list[str]) -> int:
    """Runs this script again in an environment in which each process pretends to have so many cards."""
    at = argv.index("--pretend") if "--pretend" in argv else None
    rest = argv[:at] + argv[at + 2 :] if at is not None else [part for part in argv if not part.startswith("--pretend")]
    support = HERE.parent / "tests" / "support"
    paths = [str(support / "cards" / "site"), str(support), os.environ.get("PYTHONPATH", "")]
    pretended = {"AUTOTP_TESTS_CARDS": str(cards), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(HERE / "gpu.py"), *rest]
    return subprocess.run(command, env=os.environ | pretended | {"OMP_NUM_THREADS": "1"}).returncode


def _kept(path: Path) -> dict[tuple[str, int], Row]:
    rows = [Row(**json.loads(text)) for text in path.read_text().splitlines()]
    return {row.key: row for row in rows}


def _rows(only: str, ranks: Sequence[int] | None, done: set[tuple[str, int]], until: float):  # type: ignore[no-untyped-def]
    """Yields the rows of the checks that are not done yet: by numbers of ranks, so that ranks start once for each."""
    cards = torch.cuda.device_count()
    small = cards == 0 or torch.cuda.get_device_name(0).startswith("Pretended")
    sizes = ranks or [n for n in (1, 2, 4, 8) if n <= max(cards, 2 if cards == 0 else 1)]
    chosen = [check for check in CHECKS if only in check.name]
    for check in (check for check in chosen if check.alone and (check.name, 1) not in done):
        yield _alone(check, small)
    for n in sizes:
        rest = [check for check in chosen if not check.alone and n in check.ranks and (check.name, n) not in done]
        if time.monotonic() < until:
            yield from run_checks(rest, n, small, until)


def _alone(check: Check, small: bool) -> Row:
    began = time.monotonic()
    try:
        verdict, figures, detail = "ok", check.run(Place(0, 1, small)), ""
    except Skipped as reason:
        verdict, figures, detail = "skipped", str(reason), ""
    except Differs as difference:
        verdict, figures, detail = "DIFFERS", str(difference), ""
    except Exception as error:
        verdict, figures, detail = "FAILED", f"{type(error).__name__}: {error}", traceback.format_exc()[-2000:]
    return Row(check.name, 1, verdict, figures, round(time.monotonic() - began, 1), detail)  # type: ignore[arg-type]


def _finish(rows: Sequence[Row]) -> int:
    """Prints the table and what failed; returns the exit status."""
    bad = [row for row in rows if row.verdict in ("FAILED", "DIFFERS")]
    print("", HEAD, *map(line, rows), sep="\n")
    for row in bad:
        print(f"\n---- {row.name}, {row.ranks} ranks: {row.verdict}\n{row.figures}\n{row.detail}")
    seconds = sum(row.seconds for row in rows)
    print(f"\n{len(rows)} checks, {len(bad)} not ok, {seconds:.0f} s, torch {torch.__version__}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
