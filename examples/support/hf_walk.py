"""Verifies each class of transformers in a process of its own with a limit, and keeps what it found in a file.

The file has a line of JSON for each class. A walk that was stopped goes on where it was.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import resource
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from support.hf_shrink import smallest
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autotp
from autotp.diagnostics.double import all_double
from autotp.source_location import block_in

RIGHT, REFUSED, WRONG, CRASHED = "right", "refused", "wrong", "crashed"
SLOW, LARGE, UNBUILT = "too slow", "too large", "not built"
OUTCOMES = (RIGHT, REFUSED, WRONG, CRASHED, SLOW, LARGE, UNBUILT)
MEMORY = 8 * 2**30
"""The most bytes of a process that verifies a class: a machine of 16 GB has room for two."""
BUSY = 6
"""A class has this many times its limit on the clock: other programs may keep the processor busy."""
EVAL_ONLY = "in eval mode only: it does not run in training mode on one device"
TOO_LARGE = f"more than {MEMORY >> 30} GiB"
CHANGE, OWN = 1e-15, 30
"""A relative change of weights; and how many times as much as by this change a difference must be to count."""
NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "MemoryError")


@dataclass(frozen=True)
class Walked:
    """What was found of one class.

    Attributes:
        name: the class.
        outcome: one of `OUTCOMES`; "too large" ended at `MEMORY`.
        message: the first line of the error, or the largest difference; "" if the outcome is right in both modes.
        place: the line of the model that an error names, or the line of autotp that crashed.
        arguments: the names of the arguments of the call.
        share: the share of the parameters in numbered blocks that is cut, the smallest over all tp.
        seconds: the time of everything.
        version: the version of the library, where one is noted.
    """

    name: str
    outcome: str
    message: str = ""
    place: str = ""
    arguments: tuple[str, ...] = ()
    share: float = 0.0
    seconds: float = 0.0
    version: str = ""


Look = Callable[[str, Sequence[int], int], Walked]
Check = Callable[[str, Sequence[int]], Walked]


def sampled(names: Iterable[str]) -> list[str]:
    """Returns names in an order that is the same each time and says nothing of them: its start is a fair sample."""
    return sorted(names, key=lambda name: sha256(name.encode()).digest())


def walk(
    names: Sequence[str],
    sizes: Sequence[int],
    file: Path,
    *,
    jobs: int = 1,
    limit: int = 240,
    again: Collection[str] = (),
    look: Look | None = None,
) -> Iterator[Walked]:
    """Yields what was found of each class, in the order in which they end; those of the file first.

    Args:
        names: classes of transformers.
        sizes: the numbers of tensor-parallel ranks.
        file: has a line for each class; new lines are added.
        jobs: number of processes.
        limit: seconds of the processor for each class.
        again: outcomes; classes that the file has with one of these are verified once more.
        look: verifies a name for these sizes within the limit; None: `by_itself(verified)`.
    """
    look = look or by_itself(verified)
    known = {found.name: found for found in read(file) if found.outcome not in again}
    yield from (known[name] for name in names if name in known)
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda name: look(name, sizes, limit), [n for n in names if n not in known]):
            with file.open("a") as lines:
                lines.write(json.dumps(asdict(found)) + "\n")
            yield found


def read(file: Path) -> list[Walked]:
    """Returns what a file has; the last line of a class counts."""
    lines = file.read_text().splitlines() if file.exists() else []
    found = {line["name"]: Walked(**line | {"arguments": tuple(line["arguments"])}) for line in map(json.loads, lines)}
    return list(found.values())


def by_itself(check: Check) -> Look:
    """Returns a function that runs a check of a class in a process of its own."""

    def look(name: str, sizes: Sequence[int], limit: int) -> Walked:
        start, context = time.perf_counter(), get_context("fork")
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(there, check, name, sizes, limit))
        process.start()
        there.close()
        slow = Walked(name, SLOW, f"no end after {limit} s")
        try:
            found = Walked(**here.recv()) if here.poll(BUSY * limit) else slow
        except EOFError:
            process.join()
            ended = Walked(name, CRASHED, f"the process ended with status {process.exitcode}")
            found = slow if process.exitcode == -signal.SIGXCPU else ended
        _end(process)
        return replace(found, seconds=round(time.perf_counter() - start, 1))

    return look


def _end(process: Any) -> None:
    """Ends a process, and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _child(result: Connection, check: Check, name: str, sizes: Sequence[int], limit: int) -> None:
    os.setsid()  # Its ranks end with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends it.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    result.send(asdict(check(name, sizes)))


def verified(name: str, sizes: Sequence[int]) -> Walked:
    """Verifies a class in this process: each number of ranks, in train and in eval mode."""
    try:
        model, call = smallest(name)
    except LookupError as error:
        large = _is_out_of_memory(error)
        return Walked(name, LARGE, TOO_LARGE) if large else Walked(name, UNBUILT, str(error)[:200])
    said, arguments, shares, modes = "", tuple(call), [], (True, False) if model.training else (False,)
    try:
        for tp in sizes:
            for train in modes:
                report = autotp.verify(model.train(train), tp, example_inputs=call)
                if not report.ok:
                    own = sensitivity(model, call)
                    said = f"tp={tp}: {report.worst}; {own:.0e} on one device if weights change by {CHANGE:.0e}"
                    if not _largest(report) <= OWN * own:
                        return Walked(name, WRONG, said, arguments=arguments)
                shares.append(share(report.plan))
    except Exception as error:
        if _is_out_of_memory(error):
            return Walked(name, LARGE, TOO_LARGE, arguments=arguments)
        if isinstance(error, autotp.Error):
            return refused(name, str(error), arguments)
        first = (str(error).strip().splitlines() or [""])[0]
        return Walked(name, CRASHED, f"{type(error).__name__}: {first}"[:300], _ours(error), arguments)
    said = said or ("" if True in modes else EVAL_ONLY)
    return Walked(name, RIGHT, said, arguments=arguments, share=round(min(shares), 3))


def _largest(report: autotp.Report) -> float:
    """Returns the largest difference of a report; infinite for one that is no number."""
    found = [d.error for d in (*report.outputs, *report.gradients, *report.steps)]
    return max((math.inf if math.isnan(error) else error for error in found), default=0.0)


def sensitivity(model: nn.Module, call: Mapping[str, Any]) -> float:
    """Returns by how much gradients of one device change, by their scale, if each weight changes by `CHANGE` of itself.

    Batch norms of values that hardly differ, one after the other, make 1e-8 of a round-off. No order of sums is right
    there, so a difference that is not much larger says nothing.
    """
    torch.manual_seed(0)
    one = copy.deepcopy(model).double()
    with torch.no_grad():
        for p in one.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    other = copy.deepcopy(one)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1 + CHANGE * torch.randn_like(p))
    first, second = (_gradients(each, call) for each in (one, other))
    scale = max((float(x.abs().max()) for x in first), default=0.0) or 1.0
    return max((float((x - y).abs().max()) / scale for x, y in zip(first, second, strict=True)), default=0.0)


def _gradients(model: nn.Module, call: Mapping[str, Any]) -> list[Tensor]:
    """Returns the gradients of a weighted sum of all floating outputs."""
    torch.manual_seed(0)
    with all_double():
        given = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}
        found = [x for x in pytree.tree_leaves(model(**given)) if isinstance(x, Tensor) and x.requires_grad]
        sum((x * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).sum() for x in found).backward()  # type: ignore[union-attr]
    return [p.grad for p in model.parameters() if p.grad is not None]


def refused(name: str, error: str, arguments: tuple[str, ...] = ()) -> Walked:
    """Returns what was found of a class that autotp refuses, from the text of the error."""
    lines = error.splitlines()
    place = next((line.split(maxsplit=1)[1] for line in lines if line.split()[:1] == ["at"]), "")
    return Walked(name, REFUSED, lines[0].partition(": ")[2][:300], place[:160], arguments)


def share(plan: Any) -> float:
    """Returns the share of the parameters in numbered blocks that is cut; of all parameters, if there are no blocks."""
    cut = [entry.layout.shape for entry in plan.cuts]
    rest = [entry.shape for entry in plan.whole if " " not in entry.name]
    if any(block_in(entry.name) for entry in (*plan.cuts, *plan.whole)):
        cut = [entry.layout.shape for entry in plan.cuts if block_in(entry.name)]
        rest = [entry.shape for entry in plan.whole if block_in(entry.name) and " " not in entry.name]
    sizes = [sum(torch.Size(shape).numel() for shape in shapes) for shapes in (cut, rest)]
    return sizes[0] / (sum(sizes) or 1)


def _is_out_of_memory(error: Exception) -> bool:
    """True if there was no memory left, of which torch says so in an error of another kind."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in NO_MEMORY)


def _ours(error: Exception) -> str:
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "autotp" in f.filename or "/passes/" in f.filename
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


PAGE = """# All of transformers

`python examples/hf_coverage.py --all` wrote this page, with torch {torch} and transformers {transformers}. It takes
the classes of the `Auto` mappings in a random order, {tried} of {every} so far, and makes their default configurations
small by rules that know no model: two layers, narrow, a small vocabulary. It compares the outputs and every gradient
with those of one device, in train and in eval mode, in float64, for tp in {sizes}, on simulated ranks. Each class has a
limit of {limit} seconds of the processor and {memory} GiB. A model that magnifies round-off is right if its differences
are at most {own} times those that it makes on one device where each weight changes by {change:.0e} of itself.

**{right} of the {run} classes that could be built are right.** {counts}.

`examples/hf_coverage.jsonl` has a line for each class, with the share of the parameters that is cut.

- **refused**: `autotp.Error` says what cannot be made parallel, and what to write instead.
- **not built**: the small model does not run on one device with arguments that are made by rules, or it needs a
  package that is not installed. The cause is the first error.

## Classes that were built, and are not right

| class | outcome | what, where |
|---|---|---|
{rows}

## Why the others were not built

| classes | cause |
|---|---|
{causes}
"""


def page(found: Sequence[Walked], sizes: Sequence[int], limit: int, every: int) -> str:
    """Returns the page of the docs that shows what was found; `every` is the number of all classes."""
    import transformers

    counted = Counter(one.outcome for one in found)
    causes = Counter(_cause(one.message) for one in found if one.outcome == UNBUILT)
    shown = [f"| {n} | {cause} |" for cause, n in causes.most_common() if n > 1]
    shown += [f"| {len(causes) - len(shown)} | another cause each |"] * (len(causes) > len(shown))
    return PAGE.format(
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
        sizes=", ".join(map(str, sizes)),
        limit=limit,
        tried=f"{len(found):,}",
        every=f"{every:,}",
        memory=MEMORY >> 30,
        own=OWN,
        change=CHANGE,
        right=counted[RIGHT],
        run=len(found) - counted[UNBUILT],
        counts=counts(found),
        causes="\n".join(shown),
        rows=rows(found),
    )


def _cause(message: str) -> str:
    """Returns a message without names and numbers, so that equal causes have equal texts."""
    text = re.sub(r"`[^`]*`|'[^']*'|\w+(?=\.forward)|.*(?= requires the)", "...", message.partition(" but it")[0])
    return cell(re.sub(r"\d+", "N", text)[:100])


def counts(found: Sequence[Walked]) -> str:
    """Returns how many have each outcome."""
    counted = Counter(one.outcome for one in found)
    return ", ".join(f"{counted[outcome]} {outcome}" for outcome in OUTCOMES)


def rows(found: Iterable[Walked]) -> str:
    """Returns the rows of those that were built, and are not right: of those with one cause in one file, one row."""
    alike: dict[tuple[str, ...], tuple[list[str], str]] = {}
    for one in sorted(found, key=lambda one: one.name):
        cause = () if one.outcome in (SLOW, LARGE) else (one.message, one.place.partition(":")[0])
        if one.outcome not in (RIGHT, UNBUILT):
            what = cell("; ".join(filter(None, (one.message, one.place))))
            alike.setdefault((one.outcome, *cause), ([], what))[0].append(one.name)
    return "\n".join(f"| {', '.join(names)} | {kind} | {what} |" for (kind, *_), (names, what) in alike.items())


def cell(text: str) -> str:
    """Returns a text as a cell of a table. A call of an element, `f[i](x)`, is no link."""
    return text.replace("|", "/").replace("<", "&lt;").replace("\n", " ").replace("](", "]&#40;")
