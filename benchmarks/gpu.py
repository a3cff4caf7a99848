"""Runs a smoke test for CUDA on one card, within 8 minutes: prints a table; the exit status is 1 if a check fails.

Then one rank's share of a step at tp=8, as `share.py` has it, if there is time left.

    python benchmarks/gpu.py

Every check is a set of processes of its own, which are stopped when its time is up. Models are small and in float64
where nothing else is said, so that a bug shows above round-off. Without a GPU the same runs on the CPU, over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from step import full_gradients, gradients
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import autotp
from autotp.models.bert import BERT, BERTConfig
from autotp.models.gpt import GPT, GPTConfig

TOTAL = 480  # seconds, for everything
STEPS = 20

TINY = {"block_size": 32, "vocab_size": 97, "n_layer": 2, "n_head": 4, "n_embd": 32}
SMALL = {"block_size": 256, "vocab_size": 8209, "n_layer": 4, "n_head": 8, "n_embd": 512}


@dataclass(frozen=True)
class Found:
    """The largest relative difference of a check, its limit, and its place."""

    error: float
    limit: float
    where: str = ""


# ---- what the checks share


def build(device: str, dropout: float = 0.0, bert: bool = False) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in train mode and a batch, larger on a GPU; the same on every call."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = SMALL if device.startswith("cuda") else TINY
    model = BERT(BERTConfig(**sizes, dropout=dropout)) if bert else GPT(GPTConfig(**sizes, dropout=dropout))
    shape = (4, sizes["block_size"])
    inputs = {"tokens": torch.randint(sizes["vocab_size"], shape), "labels": torch.randint(sizes["vocab_size"], shape)}
    if bert:
        inputs["mask"] = (torch.rand(shape) > 0.1).long()
    return model.train().to(device), {name: value.to(device) for name, value in inputs.items()}


def stepped(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Runs forward with the seed 1, and backward; returns the loss."""
    torch.manual_seed(1)
    loss: Tensor = model(**inputs)
    loss.backward()
    return loss.detach()


def differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], limit: float) -> Found:
    """Returns the largest differences, relative to the largest element in `expected`; none if `found` is empty."""
    scale = max(float(value.abs().max()) for value in expected.values())
    apart = [(float((found[n].cpu() - value.cpu()).abs().max()) / scale, n) for n, value in expected.items() if found]
    error, where = max(apart, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0], default=(0.0, ""))
    return Found(error, limit, where)


def worst(*all_found: Found) -> Found:
    """Returns the difference with the largest ratio to its limit."""
    return max(all_found, key=lambda f: math.inf if math.isnan(f.error) else f.error / f.limit)


def of_losses(expected: Tensor, found: Tensor, limit: float) -> Found:
    """Returns the relative difference of two losses."""
    return Found(abs(float(found) - float(expected)) / abs(float(expected)), limit, "the loss")


def against_one_device(
    device: str,
    bert: bool,
    dropout: float,
    limit: float,
    dtype: torch.dtype,
    run: Callable[[nn.Module, Any], nn.Module] = lambda model, inputs: model,
) -> Found:
    """Compares the loss and every gradient of the parallel model with those of the model itself.

    Args:
        run: changes the parallel model before its step, for these inputs.
    """
    plain, inputs = build(device, dropout, bert)
    plain.to(dtype)
    parallel = autotp.parallelize(copy.deepcopy(plain), device=device, randomness="exact")
    # Fused attention draws dropout in another order; the math path draws the same for a cut and a whole model.
    with sdpa_kernel(SDPBackend.MATH):
        expected, found = stepped(plain, inputs), stepped(run(parallel, inputs), inputs)
    apart = differences(gradients(plain), full_gradients(parallel), limit)
    return worst(of_losses(expected, found, limit), apart)


# ---- the checks: (device) -> Found, on every rank


def trains(device: str) -> Found:
    """Compares 20 steps of AdamW: every loss, and the parameters afterwards."""
    plain, inputs = build(device)
    plain.double()
    parallel = autotp.parallelize(copy.deepcopy(plain), device=device)
    losses: list[list[Tensor]] = []
    for model in (plain, parallel):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(STEPS):
            optimizer.zero_grad()
            losses[-1].append(stepped(model, inputs))
            optimizer.step()
    whole = {name: p.detach() for name, p in plain.named_parameters()}
    apart = [of_losses(a, b, 1e-9) for a, b in zip(*losses, strict=True)]
    return worst(*apart, differences(whole, autotp.full_state_dict(parallel), 1e-6))


def gpt(device: str) -> Found:
    """Float64, no dropout."""
    return against_one_device(device, False, 0.0, 1e-9, torch.float64)


def bert(device: str) -> Found:
    """Float64, a padding mask."""
    return against_one_device(device, True, 0.0, 1e-9, torch.float64)


def gpt_dropout(device: str) -> Found:
    """Float64, dropout of 0.1 drawn exactly, on the math path of attention."""
    return against_one_device(device, False, 0.1, 1e-9, torch.float64)


def bert_dropout(device: str) -> Found:
    """Float64, dropout of 0.1 drawn exactly, on the math path of attention."""
    return against_one_device(device, True, 0.1, 1e-9, torch.float64)


def single(device: str) -> Found:
    """Float32, the usual dtype."""
    return against_one_device(device, False, 0.0, 1e-4, torch.float32)


def fast_dropout(device: str) -> Found:
    """Dropout as it is by default: ranks agree on the loss, and it is near the one without dropout."""
    model, inputs = build(device, 0.1)
    parallel = autotp.parallelize(copy.deepcopy(model), device=device)
    found = stepped(parallel, inputs)
    others = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(others, found)
    same = Found(max(abs(float(other - found)) for other in others), 1e-6, "between ranks")
    return worst(same, of_losses(stepped(model.eval(), inputs), found, 0.1))


def autocast(device: str) -> Found:
    """A step under bfloat16, against the model's own under it: loss, and gradients of their scale."""
    plain, inputs = build(device)
    parallel = autotp.parallelize(copy.deepcopy(plain), device=device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        expected, found = stepped(plain, inputs), stepped(parallel, inputs)
    apart = differences(gradients(plain), full_gradients(parallel), 0.1)
    return worst(of_losses(expected, found, 0.02), apart)


def compiled(device: str) -> Found:
    """A step of torch.compile(fullgraph=True), float32."""

    def whole(model: nn.Module, inputs: Any) -> nn.Module:
        stepped(model, inputs)  # autotp captures in the first call, which is no part of the compiled graph.
        model.zero_grad()
        found: nn.Module = torch.compile(model, fullgraph=True)  # type: ignore[assignment]
        return found

    return against_one_device(device, False, 0.0, 1e-4, torch.float32, whole)


def verified(device: str) -> Found:
    """Runs `autotp.verify` on the CPU, for a model on the device."""
    report = autotp.verify(build(device)[0], tp=4)
    return Found(max(d.error for d in (*report.outputs, *report.gradients, *report.steps)), report.tolerance)


@dataclass(frozen=True)
class Check:
    """A line of the table: a function, on how many ranks over what, all on one card; at most `limit_s` seconds."""

    name: str
    run: Callable[[str], Found]
    ranks: int = 2
    backend: str = "gloo"
    limit_s: int = 90


CHECKS = [
    Check(f"train {STEPS} steps, world 1", trains, 1, "nccl"),
    Check("gpt", gpt),
    Check("bert, padding mask", bert),
    Check("gpt, float32", single),
    Check("gpt, dropout exact", gpt_dropout),
    Check("bert, dropout exact", bert_dropout),
    Check("gpt, dropout fast", fast_dropout),
    Check("autocast bfloat16, world 1", autocast, 1, "nccl"),
    Check("autocast bfloat16", autocast),
    Check("compile fullgraph, world 1", compiled, 1, "nccl", 150),
    Check("compile fullgraph", compiled, 2, "gloo", 150),
    Check("verify on the CPU", verified, 1),
]


# ---- processes


def work(check: int, rank: int, device: str, folder: str) -> None:
    """Runs one rank of a check, and writes its result, or the traceback, into `folder`."""
    job = CHECKS[check]
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(job.ranks), LOCAL_WORLD_SIZE=str(job.ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    backend = job.backend if device.startswith("cuda") else "gloo"
    result: Any
    try:
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend, Path(folder, "rendezvous").as_uri(), timedelta(seconds=job.limit_s), job.ranks, rank
        )
        result = job.run(device)
    except BaseException:
        result = traceback.format_exc()
    Path(folder, f"part{rank}").write_bytes(pickle.dumps(result))
    Path(folder, f"part{rank}").rename(Path(folder, f"found{rank}"))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def outcome(check: int, device: str, seconds: float) -> tuple[str, str]:
    """Returns a check's verdict and figures, and its details if it failed."""
    job = CHECKS[check]
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[BaseProcess] = []
        for rank in range(job.ranks):
            ranks.append(context.Process(target=work, args=(check, rank, device, folder), daemon=True))
            ranks[-1].start()
        results = _wait(Path(folder), ranks, time.monotonic() + min(seconds, job.limit_s))
        for process in ranks:
            process.join(2)
            process.kill()
            process.join()
    failures = [r for r in results if not isinstance(r, Found)]
    if failures:
        return "FAILED", str(failures[0])
    found = worst(*results)
    return ("ok" if found.error <= found.limit else "DIFFERS"), f"{found.error:.1e} of {found.limit:.0e} {found.where}"


def _wait(folder: Path, ranks: Sequence[BaseProcess], deadline: float) -> list[Any]:
    """Waits for the ranks and returns their results; after a failed rank it does not wait for the others."""
    results: list[Any] = ["took too long"] * len(ranks)
    while time.monotonic() < deadline:
        for rank, process in enumerate(ranks):
            file, over = folder / f"found{rank}", not process.is_alive()
            if file.exists():
                results[rank] = pickle.loads(file.read_bytes())
            elif over:
                results[rank] = f"rank {rank} died with exit code {process.exitcode}"
        failed = any(isinstance(r, str) and r != "took too long" for r in results)
        if failed or all(isinstance(r, Found) for r in results):
            break
        time.sleep(0.05)
    return results


def main() -> int:
    """Prints the table; the exit status is 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="checks whose name contains this, or `share`")
    args = parser.parse_args()
    start, bad = time.monotonic(), []
    print(f"{_card(args.device)}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"{'check':<28}{'ranks':>6}  {'over':<6}{'':<9}{'seconds':>7}  largest difference, of what is allowed")
    for i, check in enumerate(CHECKS):
        if args.only not in check.name:
            continue
        began, left = time.monotonic(), TOTAL - (time.monotonic() - start)
        verdict, figures = outcome(i, args.device, left) if left > 0 else ("FAILED", "no time left")
        over = check.backend if args.device.startswith("cuda") else "gloo"
        line = figures.strip().splitlines()[-1][:200]
        print(
            f"{check.name:<28}{check.ranks:>6}  {over:<6}{verdict:<9}{time.monotonic() - began:>7.1f}  {line}",
            flush=True,
        )
        if verdict != "ok":
            tail = "\n".join(figures.strip().splitlines()[-12:])
            bad.append(f"---- {check.name}\n{tail}")
    if args.only in "share":
        bad += _shares(args.device, TOTAL - (time.monotonic() - start))
    print(*bad, f"{len(bad)} not ok, {time.monotonic() - start:.0f} s", sep="\n")
    return int(bool(bad))


def _shares(device: str, seconds: float) -> list[str]:
    """Runs `share.py`, which prints its own table; returns its errors."""
    command = [sys.executable, str(Path(__file__).with_name("share.py")), "--device", device]
    command += [] if device.startswith("cuda") else ["--no-compile"]
    try:
        return [] if subprocess.run(command, timeout=max(seconds, 1)).returncode == 0 else ["---- share.py failed"]
    except subprocess.TimeoutExpired:
        return ["---- share.py took too long"]


def _card(device: str) -> str:
    if not device.startswith("cuda"):
        return f"NO GPU: tiny models on the CPU ({platform.processor() or platform.machine()}), gloo"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB), CUDA {torch.version.cuda}"


if __name__ == "__main__":
    sys.exit(main())
