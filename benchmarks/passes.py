"""Measures what each pass saves: times steps with and without the pass, in turn in one run, and counts collectives.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/passes.py

For a pass that is on by default, "without" leaves out this pass alone (`parallelize(..., without=...)`); for other
options, "without" is the default. "time" is the time of a step without the pass, divided by that of the step with the
pass in the same round; the median over all rounds. Above 1 the pass saves time. Collectives and bytes are those of one
step, forward and backward; "kept" is the memory that a forward keeps for backward. Each pass has a model in which it
changes something; every gradient is first compared with that of the original model.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from activations import kept
from step import (
    SHAPES,
    WARM_UP,
    Collectives,
    apart,
    build,
    collectives,
    full_gradients,
    gradients,
    in_turn,
    stepper,
)
from torch import Tensor, nn

import autotp
from autotp.compiler import analyse, rank_graph
from autotp.models.configs import GPT_SIZES
from autotp.models.gpt import GPT
from autotp.options import Options
from autotp.passes.capture.example_inputs import example_inputs
from autotp.passes.capture.skeleton import skeleton_of

TOLERANCE = 1e-4
Made = Callable[[], tuple[nn.Module, dict[str, Tensor]]]


def ours(name: str) -> Made:
    """Returns a function that builds a model of a shape of `step.py`."""
    return lambda: build(SHAPES[name], 4, "cpu")


def parallel_blocks(kind: str) -> Made:
    """Returns a function that builds a GPT-J or GPT-NeoX: attention and MLP are parallel, after one norm or two."""

    def make() -> tuple[nn.Module, dict[str, Tensor]]:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        gptj: dict[str, Any] = {"n_embd": 256, "n_layer": 6, "n_head": 8, "rotary_dim": 32}
        gptj |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        neox = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1024}
        config = AutoConfig.for_model(kind, vocab_size=8192, use_cache=False, **(gptj if kind == "gptj" else neox))
        tokens = torch.randint(8192, (4, 256))
        return AutoModelForCausalLM.from_config(config).train(), {"input_ids": tokens, "labels": tokens}

    return make


@dataclass(frozen=True)
class Case:
    """A pass, a model for it, and the arguments of `parallelize` with the pass and without."""

    name: str
    model: str
    make: Made
    with_it: dict[str, Any]
    without: dict[str, Any]


def _default(name: str, model: str, make: Made, **both: Any) -> Case:
    return Case(name, model, make, both, both | {"without": name})


CASES = [
    _default("cse", "llama-small", ours("llama-small")),
    _default("defer_reductions", "gptj 6 layers", parallel_blocks("gptj")),
    _default("hoist", "gpt_neox 6 layers", parallel_blocks("gpt_neox")),
    _default("fuse_bias", "gpt-small", ours("gpt-small")),
    _default("bucket", "gpt-small, sequence", ours("gpt-small"), sequence_parallel=True),
    _default("overlap", "llama-small", ours("llama-small")),
    _default("overlap", "llama-small, sequence", ours("llama-small"), sequence_parallel=True),
    _default("late_sums", "gpt-small, sequence", ours("gpt-small"), sequence_parallel=True),
    _default("in_place", "gpt-small", ours("gpt-small")),
    _default("outline", "gpt-small", ours("gpt-small")),
    Case("sequence", "gpt-small", ours("gpt-small"), {"sequence_parallel": True}, {}),
    Case("recompute selective", "gpt-small", ours("gpt-small"), {"recompute": "selective"}, {}),
    Case("recompute full", "gpt-small", ours("gpt-small"), {"recompute": "full"}, {}),
]


@dataclass(frozen=True)
class Row:
    """The figures of a pass: on and off."""

    case: Case
    times: list[float]
    sent: tuple[Collectives, Collectives]
    kept: tuple[int, int]

    def __str__(self) -> str:
        low, ratio, high = statistics.quantiles(self.times, n=4) if len(self.times) > 1 else self.times * 3
        keeps = " ".join(f"{n / 1e6:>8.1f}" for n in reversed(self.kept))
        off, on = (str(sent) for sent in reversed(self.sent))
        return f"{self.case.name:<21}{self.case.model:<22}{off:>14}{on:>15}  {keeps}{ratio:>8.3f}  {low:.2f}-{high:.2f}"


HEADER = f"{'pass':<21}{'model':<22}{'sends without':>14}{'with':>15}  {'kept MB':>8} {'with':>8}{'time':>8}  quarters"


def measure(case: Case, rounds: int) -> Row:
    """Returns the row of a pass.

    Raises:
        RuntimeError: a gradient differs from that of the original model.
    """
    plain, inputs = case.make()
    stepper(plain, inputs)()
    models = [autotp.parallelize(case.make()[0], **given) for given in (case.with_it, case.without)]
    for model in models:
        stepper(model, inputs)()
        found = full_gradients(model)
        error, where = apart(gradients(plain), found) if found else (0.0, "")
        if not error <= TOLERANCE:
            raise RuntimeError(f"{case.name}: the gradient of {where} differs from one device's by {error:.1e}")
    steps = {name: stepper(model, inputs) for name, model in zip(("with", "without"), models, strict=True)}
    for _ in range(WARM_UP):
        for step in steps.values():
            step()
    sent = [collectives(step) for step in steps.values()]
    held = [kept(model, inputs) for model in models]
    times = in_turn(steps, rounds, "cpu")
    ratios = [b.wall / a.wall for a, b in zip(times["with"], times["without"], strict=True)]
    return Row(case, ratios, (sent[0], sent[1]), (held[0], held[1]))


def seconds_to_capture(layers: int, without: tuple[str, ...]) -> float:
    """Returns the processor seconds from a GPT on meta, of 1.2B's width, to the graph of one of eight ranks."""
    with torch.device("meta"):
        model = GPT(replace(GPT_SIZES["1.2B"], n_layer=layers)).train()
    start = time.process_time()
    choices = Options(without=without)
    rank_graph(analyse(skeleton_of(model), *example_inputs(model, None), 8, choices), 0, "fast")
    return time.process_time() - start


def main() -> None:
    """Prints the table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", nargs="*", default=[], help="names of the passes to measure; default: all")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    if first:
        print(f"tp={dist.get_world_size()}, torch {torch.__version__}, {args.rounds} rounds", HEADER, sep="\n")
    for case in CASES:
        if not args.only or case.name in args.only:
            row = measure(case, args.rounds)
            gc.collect()
            if first:
                print(row, flush=True)
    if first and (not args.only or "repeats" in args.only):
        seconds_to_capture(2, ())
        on, off = (
            statistics.median(seconds_to_capture(24, without) for _ in range(3)) for without in ((), ("repeats",))
        )
        print(f"{'repeats':<21}{'capture, 24 layers':<22}{off:>13.2f}s{on:>14.2f}s{'':>19}{off / on:>8.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
