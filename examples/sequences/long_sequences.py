"""Trains on sequences that do not fit the memory of one process: each of several computes a part of every sequence.

    torchrun --nproc-per-node 4 examples/sequences/long_sequences.py       # cp=4
    torchrun --nproc-per-node 1 examples/sequences/long_sequences.py       # cp=1: there is not enough memory

Each process may have `--limit` MiB of memory of its own (resource.setrlimit), as a GPU has its memory. The losses are
those of one process: `torchrun --nproc-per-node 1 examples/sequences/long_sequences.py --limit 2000` prints them, too.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
import torch.distributed as dist
from torch import Tensor

import autotp
from autotp.distributed.launch import launch
from autotp.models.gpt import GPT, GPTConfig


def batch(length: int, step: int) -> tuple[Tensor, Tensor]:
    """Returns tokens and the tokens that follow them: a random half, and the same again. [1 length]"""
    source = torch.Generator().manual_seed(step)
    half = torch.randint(256, (1, (length + 2) // 2), generator=source)
    text = torch.cat([half, half], 1)
    return text[:, :length], text[:, 1 : length + 1]


def limited(mebibytes: int) -> None:
    """Allows this process so much memory of its own; what it asks for beyond that is an error."""
    resource.setrlimit(resource.RLIMIT_DATA, (mebibytes * 2**20, mebibytes * 2**20))


def main() -> None:
    """Trains; the status is 1 if there is not enough memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", type=int, default=800, help="MiB of memory of each process")
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    started = launch()
    ranks = started.size if started else 1
    config = GPTConfig(block_size=args.length, vocab_size=256, n_layer=args.layers, n_head=4, n_embd=256, dropout=0.0)
    tokens, labels = batch(32, 0)
    model = autotp.parallelize(GPT(config), tp=1, cp=ranks, example_inputs={"tokens": tokens, "labels": labels})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    limited(args.limit)
    first = autotp.is_first_rank()
    for step in range(args.steps):
        tokens, labels = batch(args.length, step)
        start = time.perf_counter()
        try:
            loss = model(tokens, labels)
            loss.backward()
        except (RuntimeError, MemoryError) as error:
            if "allocate memory" not in str(error):
                raise
            print(f"{args.length} tokens on {ranks} process{'es' * (ranks > 1)} need more than {args.limit} MiB each")
            raise SystemExit(1) from None
        optimizer.step()
        optimizer.zero_grad()
        if first:
            print(f"step {step}: loss {loss.item():.4f}, {time.perf_counter() - start:.1f} s", flush=True)
    if first:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(f"{args.length} tokens, cp={ranks}: at most {most:.0f} MiB in memory, libraries included")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
