"""checkpoint: no rank holds more than its shards and a block."""

from __future__ import annotations

from pathlib import Path

import checkpoint as benchmark
import memory
import pytest
import torch.distributed as dist
from ranks import run_ranks

from autotp.integrations.transformers.files.tensor_sources import BLOCK

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
