"""Measures memory and time of `from_pretrained` and `save_pretrained`: no rank ever holds the whole model.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/checkpoint.py

A Llama checkpoint of 2 GB is generated (bfloat16, files of 500 MB), read and written again. Columns in MB, of the
fullest rank: the whole checkpoint; the rank's shard; the largest slice that it reads; "allowed", the sum of the slice,
500 MB for other memory (the graphs, a block of a file) and, for reading, the shard; "grown", the growth of the process
from its size after all imports to its largest size.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import memory
import torch
import torch.distributed as dist
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

BESIDES = 500e6  # bytes
SIZES = {
    "2GB": {"hidden_size": 2048, "num_hidden_layers": 21, "intermediate_size": 5632, "vocab_size": 32000},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 160, "vocab_size": 1000},
}


@dataclass(frozen=True)
class Row:
    """The bytes and seconds of one call, the maximum over all ranks."""

    name: str
    whole: int
    shard: int
    slice: int
    grown: int
    seconds: float

    @property
    def allowed(self) -> float:
        """Returns the bytes by which the process may grow."""
        return self.shard * (self.name == "read") + self.slice + BESIDES

    def __str__(self) -> str:
        mb = [self.whole, self.shard, self.slice, self.allowed, self.grown]
        return f"{self.name:<8}" + "".join(f"{n / 1e6:>9.1f}" for n in mb) + f"{self.seconds:>9.1f}"


HEADER = f"{'':<8}" + "".join(f"{h:>9}" for h in ("whole", "shard", "slice", "allowed", "grown", "seconds"))


def generate(folder: Path, sizes: dict[str, int], shard: str) -> None:
    """Writes a Llama of random numbers with transformers alone."""
    config = LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=8, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.normal_(std=0.02, generator=generator)
    model.save_pretrained(folder, max_shard_size=shard)


def in_a_process(folder: Path, sizes: dict[str, int], shard: str) -> None:
    """Runs `generate` in a separate process, so that its memory is not counted."""
    process = multiprocessing.get_context("spawn").Process(target=generate, args=(folder, sizes, shard))
    process.start()
    process.join()


def measured(name: str, run: Callable[[], autotp.ParallelModule]) -> tuple[autotp.ParallelModule, Row]:
    """Returns the result of `run`, and its row."""
    memory.forget_peak()
    before, start = memory.resident(), time.perf_counter()
    model = run()
    grown, seconds = memory.resident("VmHWM") - before, time.perf_counter() - start
    whole = sum(p.nbytes for p in model.parameters())
    slices = [memory.local_part(p).nbytes for p in model.parameters()]
    figures = torch.tensor([memory.stored(model), max(slices), grown, int(seconds * 1000)])
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    shard, largest, grown, milliseconds = figures.tolist()
    return model, Row(name, whole, shard, largest, grown, milliseconds / 1000)


def measure(folder: Path) -> list[Row]:
    """Reads the checkpoint in `folder`, and writes it into a second folder."""
    model, first = measured("read", lambda: autotp.from_pretrained(folder))
    _, second = measured(
        "write", lambda: autotp.save_pretrained(model, folder / "again", max_shard_size="500MB") or model
    )
    return [first, second]


def main() -> None:
    """Prints the table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2GB", choices=list(SIZES))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as made:
        places = [made]
        dist.broadcast_object_list(places)
        folder = Path(places[0])
        if dist.get_rank() == 0:
            in_a_process(folder, SIZES[args.size], "500MB")
        dist.barrier()
        rows = measure(folder)
        if dist.get_rank() == 0:
            title = f"tp={dist.get_world_size()}, torch {torch.__version__}, transformers {transformers.__version__}"
            print(f"{title}, MB of the fullest rank", HEADER, *rows, sep="\n")
        dist.barrier()
    dist.destroy_process_group()
    over = [row for row in rows if row.grown > row.allowed]
    assert not over, f"grew by more than allowed: {', '.join(row.name for row in over)}"


if __name__ == "__main__":
    main()
