"""Trains small models of transformers through `parallelize` on two real ranks, and compares with one device.

Each class has a process of its own with limits, as in `hf_walk`. It builds the model once, and forks two ranks, which
compute together over gloo. A class is trained in float64; every fifth in bfloat16 or under autocast as well.
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.hf_shrink import smallest
from support.hf_walk import (
    CHANGE,
    CRASHED,
    EVAL_ONLY,
    LARGE,
    NO_MEMORY,
    OWN,
    RIGHT,
    SLOW,
    TOO_LARGE,
    UNBUILT,
    WRONG,
    Walked,
    counts,
    refused,
    rows,
    sensitivity,
    share,
)
from support.rank_checks import TOLERANCE, Compared, casts, differences, in_double, mapped, trained
from torch import Tensor, nn

import autotp

RANKS = 2
WAIT = 120
"""The seconds that a rank waits for the other one."""
SINGLE = 1e-4
"""As `TOLERANCE`, of models that do not run in float64."""
ALONE = "it does not train on one device as the walk does it: "
SECTION = "\n## On real ranks\n"
TEXT = """
`python examples/hf_coverage.py --all --on-ranks` trains the same classes through `parallelize` on two processes over
gloo, with labels where a class takes them, and compares the loss and all buffers, too. A class that does not run in
float64 is compared in float32; a tenth of the classes in bfloat16, and a tenth under autocast as well. A value that is
no number on one device must be none on the ranks. It has walked {tried} of {every} classes so far.

**{right} of the {run} classes that could be built are right**, {low} of them in bfloat16 or under autocast, too.
{counts}.

| class | outcome | what, where |
|---|---|---|
{rows}
"""
LOW_OWN, LOW_LEAST = 4, 0.05
"""A difference in bfloat16 counts if it is larger than both: so many times one device's round-off, and the second."""


def precision_of(name: str) -> str:
    """Returns in what a class is trained beside float64: "bfloat16" or "autocast" for a fifth of all, else ""."""
    number = int.from_bytes(sha256(name.encode()).digest()[-4:], "big")
    return ("bfloat16", "autocast", *[""] * 8)[number % 10]


def section(walked: Sequence[Walked], every: int) -> str:
    """Returns the section of the docs that shows what was walked; `every` is the number of all classes."""
    right = [each for each in walked if each.outcome == RIGHT]
    text = TEXT.format(
        tried=f"{len(walked):,}",
        every=f"{every:,}",
        right=len(right),
        run=sum(each.outcome != UNBUILT for each in walked),
        low=sum(each.message.startswith(("bfloat16", "autocast")) for each in right),
        counts=counts(walked),
        rows=rows(walked),
    )
    return SECTION + text


def on_ranks(name: str, sizes: Sequence[int]) -> Walked:
    """Compares a class in this process and two ranks: a call forward and backward in each mode, labels included.

    Args:
        name: a class of transformers.
        sizes: not used: there are two ranks.
    """
    try:
        model, call = smallest(name)
    except LookupError as error:
        return Walked(name, UNBUILT, str(error)[:200])
    low, arguments = precision_of(name), tuple(call)
    answers = _forked(model, call, low)
    if isinstance(answers, Walked):
        return replace(answers, name=name, arguments=arguments)
    for one in answers:
        if one.crash.startswith(ALONE):
            return Walked(name, UNBUILT, one.crash[:300], arguments=arguments)
        if any(text in one.crash for text in NO_MEMORY):
            return Walked(name, LARGE, TOO_LARGE, arguments=arguments)
        if one.crash:
            return Walked(name, CRASHED, one.crash[:300], arguments=arguments)
    if len({one.error for one in answers}) > 1:
        return Walked(name, CRASHED, "the ranks have different errors", arguments=arguments)
    if answers[0].error:
        return refused(name, answers[0].error, arguments)
    if different := next((one.difference for one in answers if one.difference), ""):
        return Walked(name, WRONG, different, arguments=arguments)
    said = ", ".join(filter(None, (answers[0].low, "" if model.training else EVAL_ONLY)))
    return Walked(name, RIGHT, said, arguments=arguments, share=round(min(one.share for one in answers), 3))


def _forked(model: nn.Module, call: Mapping[str, Any], low: str) -> list[Compared] | Walked:
    """Returns what each rank found, or the outcome if a rank ended before."""
    context, folder = get_context("fork"), tempfile.mkdtemp()
    pipes, processes = [], []
    for rank in range(RANKS):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(there, rank, Path(folder, "store").as_uri(), model, call, low))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        return [pipe.recv() for pipe in pipes]
    except EOFError:
        for process in processes:
            process.join(1)
        ended = [process.exitcode for process in processes]
        outcome = SLOW if -signal.SIGXCPU in ended else CRASHED
        return Walked("", outcome, f"ranks ended: {ended}")
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _rank(pipe: Connection, rank: int, store: str, model: nn.Module, call: Mapping[str, Any], low: str) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ.update({key: str(value) for key, value in place.items()})
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=WAIT))
    start = time.process_time()
    torch.set_num_threads(1)  # A fork has no threads of the process before.
    warnings.simplefilter("ignore")
    try:
        found = _compared(model, call, rank, low)
    except autotp.Error as error:
        found = Compared(error=str(error))
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        found = Compared(crash=f"{type(error).__name__}: {first}")
    pipe.send(replace(found, seconds=round(time.process_time() - start, 1)))


def _compared(model: nn.Module, call: Mapping[str, Any], rank: int, low: str) -> Compared:
    """Returns what a rank finds: as exactly as the model trains on one device, in each mode, and then in `low`."""
    way = _way(model, call)
    if isinstance(way, Exception):
        return Compared(crash=f"{ALONE}{type(way).__name__}: {str(way).strip().splitlines()[:1]}")
    whole, given = way.model_and_inputs(model, call)
    with casts(whole, given) if way.dtype == torch.float64 else nullcontext():
        parallel = _parallel(whole, given)
        for train in (True, False) if model.training else (False,):
            worst, what = _worst(whole.train(train), parallel.train(train), given, rank, way.of_inputs)
            if not worst <= way.tolerance and not worst <= OWN * (own := _round_off(model, call)):
                mode = "train" if train else "eval"
                return Compared(f"{mode}: {worst:.1e} of {what}; {own:.0e} on one device for {CHANGE:.0e} of weights")
    problem = _in_low_precision(whole, call, rank, low) if low else ""
    if problem is None:
        low, problem = f"does not train in {low} on one device", ""
    return Compared(problem, share=share(parallel.plan), low=low)


@dataclass(frozen=True)
class Way:
    """How a model is trained: in which dtype, and whether inputs get gradients, too."""

    dtype: torch.dtype
    of_inputs: bool

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self.dtype == torch.float64 else SINGLE

    def model_and_inputs(self, model: nn.Module, call: Mapping[str, Any]) -> tuple[nn.Module, Any]:
        whole, dtype = in_double(copy.deepcopy(model)).to(self.dtype), self.dtype
        return whole, mapped(dict(call), lambda x: x.to(dtype) if _floats(x) else x)


WAYS = [Way(dtype, of_inputs) for dtype in (torch.float64, torch.float32) for of_inputs in (True, False)]


def _way(model: nn.Module, call: Mapping[str, Any]) -> Way | Exception:
    """Returns the first way in which the model trains on one device; the first error if there is none."""
    errors = []
    for way in WAYS:
        whole, given = way.model_and_inputs(model, call)
        try:
            with casts(whole, given) if way.dtype == torch.float64 else nullcontext():
                trained(whole, given, way.of_inputs)
            return way
        except Exception as error:
            errors.append(error)
    return errors[0]


def _round_off(model: nn.Module, call: Mapping[str, Any]) -> float:
    """Returns by how much the gradients of one device change with their weights; 0 if it does not run in float64."""
    try:
        return sensitivity(model, call)
    except Exception:
        return 0.0


def _in_low_precision(double: nn.Module, call: Mapping[str, Any], rank: int, low: str) -> str | None:
    """Returns what differs in bfloat16, or under autocast, by more than one device's own round-off; "" if nothing.

    None if the model does not train so on one device.
    """
    double.eval()
    dtype, region = (torch.bfloat16, nullcontext()) if low == "bfloat16" else (torch.float32, _autocast())
    whole, given = copy.deepcopy(double).to(dtype), mapped(dict(call), lambda x: x.to(dtype) if _floats(x) else x)
    exact = copy.deepcopy(double).float()
    try:
        with region:
            expected = trained(whole, given, of_inputs=False)
        reference = trained(exact, mapped(given, lambda x: x.float() if _floats(x) else x), of_inputs=False)
    except Exception:
        return None
    own = max((error for error, _ in differences(reference, expected, None, rank, dtypes=False)), default=0.0)
    with region:
        worst, what = _worst(whole, _parallel(whole, given), given, rank, of_inputs=False)
    right = worst <= max(LOW_LEAST, LOW_OWN * own)
    return "" if right else f"{low}: {worst:.1e} of {what}; round-off of one device {own:.1e}"


def _autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def _parallel(model: nn.Module, given: Any) -> Any:
    copied = copy.deepcopy(model)
    return autotp.parallelize(copied, RANKS, example_inputs=given, outputs="full", randomness="exact")


def _worst(whole: nn.Module, parallel: Any, given: Any, rank: int, of_inputs: bool) -> tuple[float, str]:
    found = differences(trained(whole, given, of_inputs), trained(parallel, given, of_inputs), parallel, rank)
    return max(found, default=(0.0, ""))


def _floats(x: Tensor) -> bool:
    return x.is_floating_point()
