"""Measures one rank's share of a step at tp=8, on one card: what cutting costs in addition to the arithmetic.

    python benchmarks/share.py

It runs two layers of each shape, forward and backward, in bfloat16: the whole layers; the share of the first of eight
ranks, eager and compiled; and for the Llama also the share under DTensor. Collectives are those of torch's `fake`
backend, which sends nothing: an all-reduce in place does nothing, every other collective copies a tensor of its size.
"Gflop" counts the flops of products and attention. "of card" compares their rate with that of one large product,
measured here. "of ideal" is the time divided by an eighth of the time of the whole layers: at 1, cutting costs nothing.
Without a GPU, tiny shapes run on the CPU; their figures mean nothing.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from peers.plans import COLUMNS, ROWS
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # It registers the backend.
from torch.utils.flop_counter import FlopCounterMode

import autotp
from autotp.models.configs import GPT_SIZES
from autotp.models.gpt import Block, GPTConfig

TP = 8
LAYERS = 2


class Blocks(nn.Module):
    """Layers of a GPT, from hidden states to hidden states."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(config) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: [batch seq hidden]"""
        for block in self.h:
            x = block(x)
        return x


class LlamaBlocks(nn.Module):
    """Layers of a Llama of transformers, with the operators that its model runs before and after them."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        self.model = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=8, use_cache=False))

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: [batch seq hidden]"""
        found: Tensor = self.model(inputs_embeds=x).last_hidden_state
        return found


@dataclass(frozen=True)
class Shape:
    """A function that makes layers, and the size of the hidden states: [batch seq hidden]."""

    make: Callable[[], nn.Module]
    size: tuple[int, int, int]


def _gpt(name: str) -> Callable[[], nn.Module]:
    config = GPT_SIZES[name]
    return lambda: Blocks(GPTConfig(n_layer=LAYERS, n_embd=config.n_embd, n_head=config.n_head, dropout=0.0))


def _llama(hidden: int, inner: int, heads: int, kv_heads: int) -> Callable[[], nn.Module]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner}
    return lambda: LlamaBlocks(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads)


SHAPES = {
    "gpt 2.5B": Shape(_gpt("2.5B"), (8, 1024, 1920)),
    "gpt 8.3B": Shape(_gpt("8.3B"), (8, 1024, 3072)),
    "llama-3 8B": Shape(_llama(4096, 14336, 32, 8), (2, 4096, 4096)),
}
TINY = {
    "gpt tiny": Shape(lambda: Blocks(GPTConfig(n_embd=64, n_head=8, dropout=0.0)), (2, 16, 64)),
    "llama tiny": Shape(_llama(64, 128, 8, 8), (2, 16, 64)),
}

Step = Callable[[], None]


def by_dtensor(llama: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cuts the layers by PyTorch's usual plan."""
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ROWS}
    return parallelize_module(llama, mesh, plan)


def ways(shape: Shape, device: str, mesh: DeviceMesh, compiled: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yields name and model of each way to time, the whole layers first."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return shape.make().train().to(device, torch.bfloat16)

    yield "whole", made()
    example = torch.zeros(2, 7, shape.size[2], dtype=torch.bfloat16, device=device)

    def cut() -> nn.Module:
        return autotp.parallelize(made(), mesh=mesh, device=device, example_inputs=example)

    yield "autotp", cut()
    if compiled:
        yield "autotp, compiled", torch.compile(cut(), fullgraph=True)  # type: ignore[misc]
    if isinstance(model := made(), LlamaBlocks):
        yield "DTensor", by_dtensor(model, mesh)


def stepper(model: nn.Module, size: tuple[int, int, int], device: str) -> Step:
    """Returns a step: forward and backward on hidden states that need a gradient, as in the middle of a model."""
    x = torch.randn(size, dtype=torch.bfloat16, device=device, requires_grad=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).float().sum().backward()

    return step


def seconds(step: Step, rounds: int, device: str) -> float:
    """Returns the median time of a step, in seconds."""
    found = []
    for _ in range(rounds + 3):
        _wait(device)
        start = time.perf_counter()
        step()
        _wait(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[3:])


def flops(step: Step) -> int:
    """Returns the flops of the products and attentions of a step."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def rate(device: str, n: int) -> float:
    """Returns the flops per second of a product of two matrices of n by n."""
    a = torch.randn(n, n, dtype=torch.bfloat16, device=device)
    return 2 * n**3 / seconds(lambda: torch.mm(a, a), 10, device)  # type: ignore[arg-type,return-value]


@dataclass(frozen=True)
class Row:
    """The figures of one shape and one way."""

    shape: str
    way: str
    seconds: float
    flops: int
    rate: float
    ideal: float

    def __str__(self) -> str:
        speed = self.flops / self.seconds
        return (
            f"{self.shape:<12}{self.way:<18}{self.seconds * 1e3:>9.2f}{self.flops / 1e9:>10.1f}{speed / 1e12:>9.1f}"
            f"{speed / self.rate:>9.1%}{self.seconds / self.ideal:>9.2f}"
        )


HEADER = f"{'shape':<12}{'way':<18}{'ms':>9}{'Gflop':>10}{'Tflop/s':>9}{'of card':>9}{'of ideal':>9}"


def measure(name: str, shape: Shape, device: str, rounds: int, card: float, compiled: bool) -> Iterator[Row]:
    """Yields the rows of a shape."""
    mesh = init_device_mesh(device.partition(":")[0], (TP,), mesh_dim_names=("tp",))
    ideal = 0.0
    for way, model in ways(shape, device, mesh, compiled):
        step = stepper(model, shape.size, device)
        step()
        work = flops(step) if "compiled" not in way else work  # noqa: F821 - the same as eager
        found = seconds(step, rounds, device)
        ideal = ideal or found / TP
        yield Row(name, way, found, work, card, ideal)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    gpu = args.device.startswith("cuda")
    if gpu:
        torch.cuda.set_device(args.device)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=TP)
    card = rate(args.device, 8192 if gpu else 256)
    where = torch.cuda.get_device_name() if gpu else f"NO GPU ({platform.processor() or platform.machine()})"
    print(
        f"{where}, torch {torch.__version__}, bfloat16, one large product {card / 1e12:.1f} Tflop/s", HEADER, sep="\n"
    )
    for name, shape in (SHAPES if gpu else TINY).items():
        for row in measure(name, shape, args.device, args.rounds, card, not args.no_compile):
            print(row, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
