"""Measures tokens a second of `generate`: autotp beside transformers' own tensor parallelism and beside one device.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/calls/generate.py

The model is a Llama of 30M parameters (8 layers of 512, vocabulary 8,192); batch 1, a prompt of 8 tokens, then 64 more.
"one device" is the whole model on each rank, while the others do the same. All ways generate the same tokens, which is
tried before the timing. The ways run in turn; a figure is the median over the rounds, and "ratio" the median of this
way's tokens a second divided by those of transformers' `tp_plan` in the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from autotp.experimental.shared_memory import register

sys.path.insert(0, str(Path(__file__).parents[1]))
from peers.plans import by_transformers

PROMPT, NEW = 8, 64
THEIRS = "transformers' tp_plan"


def llama(layers: int) -> Any:
    """Returns the Llama, in eval mode; the same on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "vocab_size": 8192, "num_attention_heads": 8}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, num_key_value_heads=8, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


def ways(layers: int, compiled: bool) -> dict[str, Any]:
    """Returns the models: name -> model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found = {"one device": llama(layers), THEIRS: by_transformers(llama(layers), mesh).eval()}
    found["autotp"] = autotp.parallelize(llama(layers)).eval()
    if compiled:
        found["autotp, compiled"] = autotp.parallelize(llama(layers)).eval()
        found["autotp, compiled"].compile_blocks()
    return found


def generator(model: Any, prompt: Tensor, cache: str, new: int) -> Callable[[], Tensor]:
    """Returns a function that generates greedily."""
    given = {"max_new_tokens": new, "do_sample": False, "cache_implementation": cache}

    def generate() -> Tensor:
        found: Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **given)
        return found

    return generate


def seconds(run: Callable[[], object]) -> float:
    """Returns the seconds of a call that all ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(layers: int, cache: str, rounds: int, new: int, compiled: bool) -> list[str]:
    """Returns a line for each way."""
    prompt = torch.arange(1, PROMPT + 1).unsqueeze(0)
    runs = {name: generator(model, prompt, cache, new) for name, model in ways(layers, compiled).items()}
    expected = runs["one device"]()
    for name, run in runs.items():
        if not torch.equal(run(), expected):
            raise RuntimeError(f"{name} generates other tokens than one device")
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(seconds(runs[name]))
    lines = []
    for name, found in times.items():
        ratio = statistics.median(t / s for s, t in zip(found, times[THEIRS], strict=True))
        lines.append(f"{cache:<8}{name:<24}{new / statistics.median(found):>8.1f} tokens/s   ratio {ratio:.2f}")
    return lines


def main() -> None:
    """Prints the table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", nargs="*", default=["dynamic", "static"], choices=["dynamic", "static"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--new", type=int, default=NEW, help="how many tokens to generate")
    parser.add_argument("--compiled", action="store_true", help="also with compile_blocks()")
    parser.add_argument("--backend", default="gloo", choices=["gloo", "shared_memory"])
    args = parser.parse_args()
    register()
    dist.init_process_group(args.backend)
    for cache in args.caches:
        lines = measure(args.layers, cache, args.rounds, args.new, args.compiled)
        if os.environ["RANK"] == "0":
            print(*lines, sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
