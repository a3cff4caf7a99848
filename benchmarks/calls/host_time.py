"""Compares the host's time a layer in a parallel model with that of the same model on one device, in plain eager.

    OMP_NUM_THREADS=1 python benchmarks/calls/host_time.py

The models are those of transformers, so narrow that computing takes no time. Collectives are those of torch's `fake`
backend, which sends nothing: what is left is what Python and torch's dispatcher do on the host. A layer is the
difference of models with 6 and 2 layers, by 4. The ways run in turn; a figure is the lower quartile over the rounds of
this thread's processor time, which other programs on the machine disturb less than the clock. Each step runs twice, and
the second one is timed: the first brings its code back into the processor's caches.

Counts do not vary: the operators of ATen that run (those that others call, too), the functions of backward, and the
frames of Python of a layer.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # It registers the backend.

import autotp

DEPTHS = 2, 6
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
PLAIN = "one device"
WAYS: dict[str, dict[str, Any]] = {
    "tp": {},
    "tp, sequence_parallel": {"sequence_parallel": True},
    'tp, recompute="full"': {"recompute": "full"},
}
Step = Callable[[], object]
Steps = dict[tuple[str, str, int], Step]
"""What is measured: what it does, the way, and the number of layers -> a function."""


def llama(layers: int) -> nn.Module:
    """Returns a narrow Llama."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=layers))


def gpt2(layers: int) -> nn.Module:
    """Returns a narrow GPT-2 without dropout."""
    sizes = {"n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off, n_layer=layers))


MODELS = {"llama": llama, "gpt2": gpt2}


def training(model: nn.Module) -> Step:
    """Returns a step: forward and backward."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()

    return step


def decoding(model: Any) -> Step:
    """Returns a decoded token, with the keys and values of 16 tokens before it."""

    def token() -> None:
        with torch.no_grad():
            cache = transformers.DynamicCache()
            for ids in (TOKENS, TOKENS[:, :1]):
                model(input_ids=ids, past_key_values=cache, use_cache=True)

    return token


def steps_of(make: Callable[[int], nn.Module]) -> Steps:
    """Returns what is timed."""
    steps: Steps = {}
    for layers in DEPTHS:
        example = {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}
        steps["step", PLAIN, layers] = training(make(layers).train())
        for way, settings in WAYS.items():
            model = autotp.parallelize(make(layers).train(), tp=2, example_inputs=example, **settings)
            steps["step", way, layers] = training(model)
        steps["token", PLAIN, layers] = decoding(make(layers).eval())
        model = autotp.parallelize(make(layers).eval(), tp=2, example_inputs={"input_ids": TOKENS})
        steps["token", "tp", layers] = decoding(model)
    return steps


def seconds(steps: Steps, rounds: int) -> dict[tuple[str, str, int], float]:
    """Returns the processor time of each step, in seconds."""
    times: dict[tuple[str, str, int], list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 4):
        gc.collect()
        gc.disable()
        for name, step in steps.items():
            step()  # The code of the way before, and the garbage collector, have filled the caches.
            start = time.thread_time()
            step()
            times[name].append(time.thread_time() - start)
        gc.enable()
    return {name: statistics.quantiles(found[4:], n=4)[0] for name, found in times.items()}


def counts(step: Step) -> tuple[int, int, int]:
    """Returns how many operators, functions of backward, and frames of Python a step has."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    names = [event.name for event in profiled.events()]
    frames = 0

    def entered(frame: Any, event: str, _: Any) -> None:
        nonlocal frames
        frames += event == "call"

    sys.setprofile(entered)
    try:
        step()
    finally:
        sys.setprofile(None)
    backward = sum(name.startswith("autograd::engine::evaluate_function") for name in names)
    return sum(name.startswith("aten::") for name in names), backward, frames


def counts_of_layers(steps: Steps) -> dict[tuple[str, str], list[float]]:
    """Returns the counts a layer of each way. `steps` have run in each kind of call before."""
    few, many = DEPTHS
    counted = {name: counts(step) for name, step in steps.items()}
    return {
        (what, way): [
            (more - less) / (many - few)
            for less, more in zip(counted[what, way, few], counted[what, way, many], strict=True)
        ]
        for what, way, _ in steps
    }


def rows(name: str, rounds: int) -> list[str]:
    """Returns the lines of a model: for each way the time a layer and of a call, their ratios to one device's, counts.

    The counts are of a layer: operators, functions of backward, and frames of Python.
    """
    steps, lines = steps_of(MODELS[name]), []
    times = seconds(steps, rounds)
    few, many = DEPTHS
    counted = counts_of_layers(steps)
    for what, way in dict.fromkeys((what, way) for what, way, _ in steps):
        layer, plain = ((times[what, which, many] - times[what, which, few]) / (many - few) for which in (way, PLAIN))
        call = times[what, way, many]
        lines.append(
            f"{name:<8}{what:<8}{way:<24}{layer * 1e6:>8.0f}{layer / plain:>8.2f}"
            f"{call * 1e6:>10.0f}{call / times[what, PLAIN, many]:>8.2f}"
            + "".join(f"{number:>10.0f}" for number in counted[what, way])
        )
    return lines


HEADER = (
    f"{'model':<8}{'what':<8}{'way':<24}{'us/layer':>8}{'ratio':>8}{'us/call':>10}{'ratio':>8}"
    f"{'operators':>10}{'backward':>10}{'frames':>10}"
)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    print(HEADER)
    for name in args.models:
        print(*rows(name, args.rounds), sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
