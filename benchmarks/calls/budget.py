"""Measures a training step under `memory=` beside `recompute="none"` and "full": seconds, kept bytes, equal gradients.

    python -m benchmarks.calls.budget --rounds 5

One process, float32, one thread. The ways take turns in each round; the table has medians. "kept" is what backward
keeps of a call, measured by hooks on what autograd saves, beside what the budget predicted.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autotp
from autotp.models.gpt import GPT, GPTConfig
from autotp.passes.emit.memory.budget import budget_of
from autotp.runtime.module import executable_of

WAYS: dict[str, dict[str, Any]] = {
    "none": {}, "full": {"recompute": "full"}, **{f"{n}%": {"memory": f"{n}%"} for n in (70, 50, 30)},
}  # fmt: skip


def gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a GPT of 14M parameters, with dropout, and a call."""
    x = torch.randint(0, 2048, (4, 256))
    config = GPTConfig(vocab_size=2048, block_size=256, n_layer=4, n_head=8, n_embd=512, dropout=0.1)
    return GPT(config), {"tokens": x, "labels": x}


def causal(name: str, **sizes: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a causal model of transformers, and a call."""
    import transformers

    shape = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**shape | sizes)
    x = torch.randint(0, 2048, (4, 256))
    return getattr(transformers, f"{name}ForCausalLM")(config), {"input_ids": x, "labels": x}


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a T5, and a call."""
    import transformers

    config = transformers.T5Config(
        vocab_size=2048,
        d_model=512,
        d_kv=64,
        d_ff=1024,
        num_layers=3,
        num_heads=8,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    x = torch.randint(0, 2048, (4, 192))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": x, "labels": x}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "GPT": gpt, "Llama": lambda: causal("Llama"), "T5": t5,
    "Mixtral": lambda: causal("Mixtral", intermediate_size=688, num_local_experts=4),
}  # fmt: skip


def loss_of(output: Any) -> Tensor:
    """Returns the loss of what a model returned."""
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def kept_bytes(model: nn.Module, call: dict[str, Tensor]) -> int:
    """Returns the bytes that backward keeps of a call, each memory once, without the model's own."""
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    tensors: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = model(**call)
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    del output
    return sum(size for place, size in sizes.items() if place not in own)


def step(model: nn.Module, call: dict[str, Tensor]) -> float:
    """Returns the processor seconds of forward and backward."""
    model.zero_grad()
    torch.manual_seed(1)
    start = time.process_time()  # Other programs on the machine do not count.
    loss_of(model(**call)).backward()
    return time.process_time() - start


def measure(name: str, rounds: int) -> None:
    """Prints the rows of a model."""
    torch.manual_seed(0)
    whole, call = MODELS[name]()
    whole.train()
    models = {
        way: autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=call, **options)
        for way, options in WAYS.items()
    }
    for model in models.values():
        step(model, call)
        step(model, call)
    times: dict[str, list[float]] = {way: [] for way in models}
    for _ in range(rounds):
        for way, model in models.items():
            times[way].append(step(model, call))
    reference = [p.grad for p in models["none"].parameters()]
    base, whole_kept = statistics.median(times["none"]), kept_bytes(models["none"], call)
    for way, model in models.items():
        budget = budget_of(executable_of(model).latest.ready.module)
        choice = None if budget is None else budget.latest
        worst = max(
            (float((a - p.grad).abs().max()) for a, p in zip(reference, model.parameters(), strict=True)
             if a is not None and p.grad is not None), default=0.0,
        )  # fmt: skip
        kept, seconds = kept_bytes(model, call), statistics.median(times[way])
        predicted = "" if choice is None else f"{choice.kept / 1e6:.1f}"
        more = "" if choice is None else f"{choice.chosen.seconds / base:+.1%}"
        print(
            f"| {name} | {way} | {1e3 * seconds:.0f} ms | {seconds / base - 1:+.1%} | {more} | {kept / 1e6:.1f} MB "
            f"({kept / whole_kept:.0%}) | {predicted} | {worst:.1e} |",
            flush=True,
        )


def main() -> None:
    """Prints a row of the table for each model and budget."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | way | step | more | predicted | kept | predicted MB | largest difference of a gradient |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.models:
        measure(name, arguments.rounds)


if __name__ == "__main__":
    main()
