"""Measures the seconds to analyse a GPT on `meta`, by stage and by depth: the work of `parallelize` before it cuts.

    OMP_NUM_THREADS=1 python benchmarks/capture.py
    OMP_NUM_THREADS=1 python benchmarks/capture.py --classes CvtModel MaskFormerModel   # small models of transformers

Each depth runs in a separate process, which times the stages one by one, in processor seconds: the work uses one
thread, so on a free core these equal the seconds of the clock. A stage that calls another stage counts only its own
time. "linear" is the exponent of a power law that is fitted to the totals from the second depth on: 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotp import compiler
from autotp.models.configs import GPT_SIZES
from autotp.models.gpt import GPT, GPTConfig
from autotp.ops.eager_mode import uncollected
from autotp.passes.capture.example_inputs import example_inputs
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.lower.local_sizes import Target

STAGES = ("capture", "canonicalize", "plan", "lower", "check")
"""Columns of the table: folders of `passes/`."""

TARGET = 0.1  # seconds a layer, of capture + canonicalize + plan + lower


class Clock:
    """Processor seconds by stage."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.since = time.process_time()

    def charge(self, stage: str) -> None:
        """Adds the time since the last call to a stage."""
        now = time.process_time()
        self.spent[stage] += now - self.since
        self.since = now


Make = Callable[[int], tuple[nn.Module, Any]]
"""Number of layers -> a model on `meta`, and example inputs."""


def gpt(config: GPTConfig) -> Make:
    """Returns a function that builds a GPT of this config's sizes."""

    def make(layers: int) -> tuple[nn.Module, Any]:
        with torch.device("meta"):
            return GPT(replace(config, n_layer=layers)).train(), None

    return make


def of_transformers(name: str) -> Make:
    """Returns a function that builds a small model of a class of transformers, as examples/hf_coverage.py does."""

    def make(layers: int) -> tuple[nn.Module, Any]:
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
        from support.hf_shrink import smallest

        model, call = smallest(name)
        return model.to("meta"), call

    return make


def llama_70b(use_cache: bool) -> Make:
    """Returns a function that builds Llama 3 70B, as in Grattafiori et al. 2024, arXiv 2407.21783, table 3."""

    def make(layers: int) -> tuple[nn.Module, Any]:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256}
        heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
        tokens = torch.zeros(2, 7, dtype=torch.int64)
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=layers)).train()
        return model, {"input_ids": tokens, "labels": tokens, "use_cache": use_cache}

    return make


def measure(make: Make, layers: int, tp: int) -> dict[str, float]:
    """Returns the processor seconds of each stage for one rank, and megabytes of memory; it changes this process."""
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for n in (1, layers):  # Once to warm up.
        model, given = make(n)
        before, clock, start = memory(), Clock(), time.perf_counter()
        args, kwargs = example_inputs(model, given)
        with uncollected():
            program = compiler.captured_program(skeleton_of(model), args, kwargs, tp)
            clock.charge("capture")
            for each, later in compiler.programs_after_passes(program):
                clock.charge(each.stage)
                program = later
        to, lowered = Target("tp", tp, 0, "fast", frozenset(program.local_outputs)), program.graph
        with uncollected():  # As `analyse` and `flat_graph` do.
            for _, graph in compiler.graphs_after_passes(program, to):
                lowered = graph
            clock.charge("lower")
            compiler.expect_typed(lowered, program, to)
            clock.charge("check")
        found = {stage: clock.spent[stage] for stage in STAGES}
        found |= {"wall": time.perf_counter() - start, "before": before, "peak": memory()}
        found["parameters"] = sum(p.numel() for p in model.parameters())
    return found


def in_a_process(model: GPTConfig | bool | str, layers: int, tp: int) -> dict[str, float]:
    """Runs `measure` in a separate process.

    Args:
        model: the GPT's config, for the Llama whether it makes a cache, or a class of transformers.
    """
    which = model if isinstance(model, bool | str) else asdict(model)
    command = [sys.executable, __file__, "--one", json.dumps([which, layers, tp])]
    found: dict[str, float] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]
    )
    return found


def maker(which: Any) -> Make:
    """Returns what builds the model that `in_a_process` names."""
    if isinstance(which, bool):
        return llama_70b(which)
    return of_transformers(which) if isinstance(which, str) else gpt(GPTConfig(**which))


def line(row: dict[str, float]) -> str:
    """Returns the seconds of all stages, and of each."""
    cells = ", ".join(f"{stage} {row[stage]:.2f}" for stage in STAGES)
    return f"{sum(row[stage] for stage in STAGES):.2f} s ({cells}), {row['peak']:.0f} MB"


def memory() -> float:
    """Returns the largest resident size of this process so far, in megabytes."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 1e3
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def exponent(layers: Sequence[int], seconds: Sequence[float]) -> float:
    """Returns the k of the power law `seconds = c * layers**k` that fits best."""
    if len(layers) < 2:
        return math.nan
    return statistics.linear_regression([math.log(n) for n in layers], [math.log(s) for s in seconds]).slope


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="*", type=int, default=[2, 12, 24, 48, 96])
    parser.add_argument("--size", default="1.2B", help="the published size that has the width, heads and vocabulary")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--llama", action="store_true", help="Llama 3 70B as well")
    parser.add_argument("--classes", nargs="+", help="small models of these classes of transformers instead, tp=2")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)  # measures in this process, prints JSON
    args = parser.parse_args()
    if args.one is not None:
        which, layers, tp = args.one
        print(json.dumps(measure(maker(which), layers, tp)))
        return
    for name in args.classes or ():
        print(f"{name:40} {line(in_a_process(name, 0, 2))}", flush=True)
    if args.classes:
        return
    print(f"{platform.processor() or platform.machine()}, GPT-2 {args.size} width, tp={args.tp}, processor seconds")
    print(f"{'layers':>6}" + "".join(f"{stage:>13}" for stage in (*STAGES, "total", "a layer", "wall", "MB", "+MB")))
    totals, rows = [], []
    for layers in args.layers:
        row = in_a_process(GPT_SIZES[args.size], layers, args.tp)
        total = sum(row[stage] for stage in STAGES)
        totals.append(total)
        rows.append((total - row["check"]) / layers)
        cells = [*(row[stage] for stage in STAGES), total, total / layers, row["wall"]]
        print(
            f"{layers:>6}"
            + "".join(f"{cell:>13.3f}" for cell in cells)
            + f"{row['peak']:>13.0f}{row['peak'] - row['before']:>13.0f}",
            flush=True,
        )
    k = exponent(args.layers[1:], totals[1:])
    print(f"linear {k:.2f}; without check {rows[-1]:.3f} s a layer at {args.layers[-1]} layers, target {TARGET}")
    for use_cache in (False, True) if args.llama else ():
        print(f"Llama 3 70B, 80 layers, tp=8, use_cache={use_cache}: {line(in_a_process(use_cache, 80, 8))}")


if __name__ == "__main__":
    main()
