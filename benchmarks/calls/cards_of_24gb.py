"""Prints whether Llama-3-8B trains on four cards of 24 GB, with rows of 8,192 tokens: the table of docs/memory.md.

    python -m benchmarks.calls.cards_of_24gb

It needs no card: the model is on `meta`. "LoRA" has adapters of rank 16 on all linear layers, and frozen weights.
"""

from __future__ import annotations

import torch
from torch import nn

import autotp
from autotp.costs.hardware import GIB
from autotp.options import memory_limit

ROWS = (("LoRA, bfloat16", 1), ("LoRA, bfloat16", 2), ("full, bfloat16", 1), ("full, float32 masters", 1))


def llama_3_8b(layers: int = 32) -> nn.Module:
    """Returns the model on `meta`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rope_theta=5e5, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def trained(way: str, layers: int = 32) -> nn.Module:
    """Returns the model with the parameters of a row of the table."""
    model = llama_3_8b(layers) if way.endswith("masters") else llama_3_8b(layers).bfloat16()
    if not way.startswith("LoRA"):
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))


def estimated(model: nn.Module, rows: int, memory: str | None) -> autotp.Estimate:
    """Returns the estimate of a step of one microbatch."""
    ids = torch.empty(1, 8192, dtype=torch.int64, device="meta")  # peft's `forward` does not name its inputs.
    return autotp.estimate(
        model, gpu="rtx4090-24gb", tp=4, batch=rows, micro_batch=rows, sequence_parallel=True, dtype=torch.bfloat16,
        memory=memory, example_inputs={"input_ids": ids, "labels": ids},
    )  # fmt: skip


def row(way: str, rows: int) -> str:
    """Returns a row of the table."""
    model = trained(way)
    whole = estimated(model, rows, None)
    start = f"| {way} | {rows} | {whole.fullest.total / GIB:.1f} GiB"
    try:
        budgeted = estimated(model, rows, "auto")
    except autotp.Error as error:
        needed = str(error).partition('try      memory="')[2].partition('"')[0]
        return f"{start} | no: tensors take at least {memory_limit(needed) / GIB:.1f} GiB | | | |"
    (stage,) = budgeted.budgets
    fits = "yes" if budgeted.fits else "no"
    return (
        f"{start} | {fits} | {stage.kept / GIB:.1f} of {stage.kept_without / GIB:.1f} GiB | "
        f"{budgeted.fullest.total / GIB:.1f} GiB | {budgeted.seconds:.2f} s "
        f"({budgeted.seconds / whole.seconds - 1:+.1%}) |"
    )


if __name__ == "__main__":
    print('| training | rows | tensors without a budget | fits with memory="auto" | a call keeps | tensors | a step |')
    print("|---|---|---|---|---|---|---|")
    for way, rows in ROWS:
        print(row(way, rows), flush=True)
