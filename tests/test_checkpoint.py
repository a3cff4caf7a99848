"""checkpoint: no rank holds more than its shards and a block; sizes as people write them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import checkpoint as benchmark
import memory

from autotp.checkpoint.files.tensor_sources import BLOCK
from autotp.checkpoint.weights import parse_size

SIZES = {"hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 2816, "vocab_size": 32000}
BESIDES = 60e6  # bytes: the graphs, and what torch allocates


def read_and_written(rank: int, n: int, folder: Path) -> list[benchmark.Row]:
    if rank == 0:
        benchmark.generate(folder, SIZES, "100MB")
    dist.barrier()
    return benchmark.measure(folder)


@pytest.mark.skipif(memory.resident() == 0, reason="this system does not tell how large a process is")
@pytest.mark.timeout(300)
def test_no_rank_ever_holds_the_whole(tmp_path: Path) -> None:
    for read, written in run_ranks(read_and_written, 2, tmp_path, timeout=240):
        assert read.shard < 0.51 * read.whole
        assert read.shard + BLOCK + BESIDES < 0.95 * read.whole
        assert read.grown < read.shard + BLOCK + BESIDES
        assert written.grown < 2 * BLOCK + BESIDES


@pytest.mark.parametrize(
    ("text", "size"),
    [(1, 1), ("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("200KiB", 204_800), ("7B", 7), ("0.5TiB", 2**39)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size
