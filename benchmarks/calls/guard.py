"""Measures what a call costs outside its graph: above all, the comparison of the model with its state at capture.

    OMP_NUM_THREADS=1 python benchmarks/calls/guard.py

The model is a GPT of width 48 with 12 or 96 layers, in one process. "outside" is everything that Python does before the
graph runs; "guard" is the part of this that compares attributes, classes and globals. Times are in microseconds, the
first quartile of 30 calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import autotp
from autotp.models.gpt import GPT, GPTConfig
from autotp.passes.capture.autocast_regions import ambient
from autotp.passes.capture.pytree import flatten
from autotp.runtime.calls.executable import FlatCall
from autotp.runtime.module import executable_of

CALLS = 30


def quartile(run: Callable[[], object]) -> float:
    """Returns the first quartile of the times of several calls, in microseconds."""
    found = []
    for _ in range(CALLS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return sorted(found)[CALLS // 4] * 1e6


def measure(depth: int) -> str:
    """Returns a line with the times of a call of a model with `depth` layers."""
    model = GPT(GPTConfig(n_layer=depth, n_head=3, n_embd=48, vocab_size=97, block_size=32)).eval()
    tokens = torch.randint(0, 97, (2, 16))
    parallel = autotp.parallelize(model, 1, example_inputs=(tokens,))

    def outside() -> None:
        it = executable_of(parallel)
        args, kwargs = it.signature.by_name((tokens,), {})
        leaves, spec = flatten((args, kwargs))
        called, model_tensors = FlatCall(leaves, spec, [tokens], ambient(it.mesh.device), True), it.tensors()
        key = it._key(leaves, spec, called.autocast, model_tensors)
        assert it._find(key, called, model_tensors) is not None

    parallel(tokens)
    it = executable_of(parallel)
    guard = it.entries[0][1].guard
    assert guard is not None
    call, around, compared = quartile(lambda: parallel(tokens)), quartile(outside), quartile(lambda: guard.holds(0))
    modules = len(list(parallel.modules()))
    return (
        f"{depth} layers, {modules} modules: call {call:.0f}, outside {around:.0f} ({around / depth:.1f} a layer), "
        f"guard {compared:.0f} ({compared / depth:.1f} a layer, {compared / modules:.2f} a module)"
    )


if __name__ == "__main__":
    for depth in (12, 96):
        print(measure(depth), flush=True)
