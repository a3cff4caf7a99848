"""Measures a rank's memory after `parallelize`: at most (cut bytes / tp) + replicated bytes, and no full tensor left.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/memory.py

Columns in MB: the whole model; the parameters that are cut, and those that are replicated; "allowed", for the largest
parts that torch.chunk gives a rank; "held", the storages of the parameters and buffers of the fullest rank. "left"
counts full tensors of the model that still exist afterwards; "late" counts, at the worst moment, full tensors that
should not exist any more. Both must be 0. "grown" is the growth of the process at its largest: the shards and one
parameter for a model on meta, less for a model that is built whole.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import autotp
from autotp.models.bert import BERT, BERTConfig
from autotp.models.configs import BERT_SIZES, GPT_SIZES
from autotp.models.gpt import GPT, GPTConfig
from autotp.sharding.layout import Layout

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
M_MMAP_THRESHOLD = -3  # a constant of malloc.h


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parameters and buffers, each storage once.

    Attributes:
        cut, replicated: bytes of the whole model.
        allowed: bytes of the fullest rank: the largest part of each cut tensor, and the replicated tensors.
        held: bytes of this rank.
    """

    cut: int
    replicated: int
    allowed: int
    held: int

    @property
    def ideal(self) -> float:
        """Returns `(cut / tp) + replicated`, the bytes of a rank if tp divides everything."""
        return self.cut / dist.get_world_size() + self.replicated


def stored(module: nn.Module) -> int:
    """Returns the bytes of the storages of a module's parameters and buffers: each whole storage, once."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def local_part(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a parameter, a gradient or a state of an optimizer."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sizes(model: autotp.ParallelModule) -> Sizes:
    """Returns the bytes that this rank holds, and those that it may hold."""
    cut = replicated = allowed = 0
    for name, parameter in model.named_parameters():
        layout = model.layouts[name]
        whole = math.prod(layout.shape) * parameter.element_size()
        if layout.dim is None:
            replicated, allowed = replicated + whole, allowed + whole
        else:
            cut, allowed = cut + whole, allowed + whole * max(layout.lengths()) // layout.shape[layout.dim]
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    return Sizes(cut, replicated + buffers, allowed + buffers, stored(model))


class Fullness:
    """Watches the full parameters of a model while it is cut."""

    def __init__(self, model: nn.Module) -> None:
        parameters = {name: p for name, p in model.named_parameters() if not p.is_meta}
        self.storages = {name: StorageWeakRef(p.untyped_storage()) for name, p in parameters.items()}
        self.alive_at: list[int] = []  # how many existed at each cut

    def alive(self) -> int:
        """Returns how many of the full parameters exist."""
        return sum(not storage.expired() for storage in self.storages.values())

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Within the context, counts at every cut the full parameters that still exist."""
        take = Layout.take

        def watched(layout: Layout, full: Tensor, rank: int) -> Tensor:
            if layout.dim is not None:
                self.alive_at.append(self.alive())
            return take(layout, full, rank)

        Layout.take = watched  # type: ignore[method-assign]
        try:
            yield
        finally:
            Layout.take = take  # type: ignore[method-assign]

    def late(self, layouts: Mapping[str, Layout]) -> int:
        """Returns how many parameters that were cut earlier still existed in full, at the worst cut."""
        cut = [i for i, name in enumerate(self.storages) if layouts[name].dim is not None]
        alive = self.alive_at if self.storages else []
        counts = [n - (len(self.storages) - i) for i, n in zip(cut, alive, strict=True)]
        return max(counts, default=0)


def resident(key: str = "VmRSS") -> int:
    """Returns the bytes of this process in memory, now ("VmRSS") or at most so far ("VmHWM"); 0 if unknown."""
    if not STATUS.exists():
        return 0
    found = re.search(rf"^{key}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def forget_peak() -> None:
    """Returns freed memory to the system, and resets "VmHWM" to the present size, on Linux.

    From now on every block of 1 MB or more is returned to the system when it is freed. Otherwise glibc keeps blocks of
    up to 32 MB in its heap, shards fill the holes of full parameters, and the process grows by twice as much.
    """
    gc.collect()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # glibc
            libc.mallopt(M_MMAP_THRESHOLD, 2**20)
            libc.malloc_trim(0)
        CLEAR.write_text("5")


@dataclass(frozen=True)
class Row:
    """A model's figures, in bytes; the maximum over all ranks."""

    name: str
    sizes: Sizes
    left: int
    late: int
    grown: int

    def __str__(self) -> str:
        s = self.sizes
        mb = [s.cut + s.replicated, s.cut, s.replicated, s.ideal, s.allowed, s.held]
        cells = "".join(f"{n / 1e6:>9.1f}" for n in mb)
        return f"{self.name:<16}{cells}{self.left:>6}{self.late:>6}{self.grown / 1e6:>9.1f}"


HEADER = f"{'model':<16}" + "".join(f"{h:>9}" for h in ("whole", "cut", "repl.", "ideal", "allowed", "held"))
HEADER += f"{'left':>6}{'late':>6}{'grown':>9}"


def measure(name: str, config: GPTConfig | BERTConfig, on_meta: bool = False) -> Row:
    """Returns a row of the table: watches `parallelize` over all processes."""
    build = BERT if isinstance(config, BERTConfig) else GPT
    torch.manual_seed(0)
    with torch.device("meta" if on_meta else "cpu"):
        model = build(config)  # type: ignore[arg-type]
    fullness = Fullness(model)
    autotp.explain(model, dist.get_world_size())  # now, so that the memory that an analysis keeps is not counted
    forget_peak()
    before = resident()
    with fullness.watch():
        parallel = autotp.parallelize(model)
    grown = resident("VmHWM") - before
    figures = torch.tensor([sizes(parallel).held, fullness.alive(), fullness.late(parallel.layouts), grown])
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    held, left, late, grown = figures.tolist()
    mine = sizes(parallel)
    return Row(name, Sizes(mine.cut, mine.replicated, mine.allowed, held), left, late, grown)


def main() -> None:
    """Prints the table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt", default="355M", choices=list(GPT_SIZES))
    parser.add_argument("--bert", default="334M", choices=list(BERT_SIZES))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rows = []
    for name, config in ((f"gpt {args.gpt}", GPT_SIZES[args.gpt]), (f"bert {args.bert}", BERT_SIZES[args.bert])):
        rows += [measure(name, config), measure(f"{name} meta", config, on_meta=True)]
    if dist.get_rank() == 0:
        print(f"tp={dist.get_world_size()}, torch {torch.__version__}, MB of the fullest rank", HEADER, *rows, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
