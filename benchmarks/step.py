"""Step time against the floor: forward and backward, autotp and Megatron-style layers by hand, in turn in one run.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/step.py

First the loss and every gradient of both are compared with one device's, and their collectives counted. Then steps are
timed in pairs, the order swapped each time. The ratio is the median over the pairs, with the quartiles beside it; "cpu"
is the same of this process's processor time, which other processes on a busy machine disturb less.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron import Megatron, MegatronBERT, MegatronGPT
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.models.bert import BERT, BERTConfig
from autotp.models.gpt import GPT, GPTConfig

TOLERANCE = 1e-4
"""Of losses, and of gradients relative to the largest element of the whole model's gradient, in float32."""
WARM_UP = 3

SHAPES: dict[str, GPTConfig | BERTConfig] = {
    "gpt-tiny": GPTConfig(block_size=128, vocab_size=1024, n_layer=4, n_head=4, n_embd=128, dropout=0.0),
    "gpt-small": GPTConfig(block_size=256, vocab_size=8192, n_layer=6, n_head=8, n_embd=256, dropout=0.0),
    "gpt-30M": GPTConfig(block_size=256, vocab_size=8192, n_layer=8, n_head=8, n_embd=512, dropout=0.0),
    "gpt-vocab": GPTConfig(block_size=256, vocab_size=50258, n_layer=2, n_head=8, n_embd=256, dropout=0.0),
    "bert-small": BERTConfig(block_size=256, vocab_size=8192, n_layer=6, n_head=8, n_embd=256, dropout=0.0),
}

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Collectives:
    """What one step sends: how many collectives, and the bytes of what each rank puts in."""

    number: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.number} / {self.bytes / 1e6:.1f} MB"


class Counted(TorchDispatchMode):
    """Counts the collectives of a region, whichever interface they come through."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace in ("c10d", "_c10d_functional") and not op._opname.startswith(("wait_tensor", "barrier")):
            given = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self.number, self.bytes = self.number + 1, self.bytes + given.numel() * given.element_size()
        return op(*args, **(kwargs or {}))


def collectives(step: Step) -> Collectives:
    """Those of one step."""
    with Counted() as count:
        step()
    return Collectives(count.number, count.bytes)


def build(config: GPTConfig | BERTConfig, batch: int, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in train mode, and a batch for it."""
    torch.manual_seed(0)
    shape = (batch, config.block_size)
    tokens, labels = (torch.randint(config.vocab_size, shape) for _ in range(2))
    inputs = {"tokens": tokens, "labels": labels}
    if isinstance(config, BERTConfig):
        inputs["types"] = torch.randint(2, shape)
        inputs["mask"] = (torch.arange(shape[1]) < shape[1] - torch.arange(batch).unsqueeze(-1)).long()
        inputs["labels"] = labels.masked_fill(torch.rand(shape) > 0.15, -100)
        inputs["next_sentence"] = torch.randint(2, (batch,))
    model = BERT(config) if isinstance(config, BERTConfig) else GPT(config)
    return model.train().to(device), {name: value.to(device) for name, value in inputs.items()}


def stepper(model: nn.Module, inputs: Mapping[str, Tensor]) -> Step:
    """One forward and backward, gradients dropped before; returns the loss."""

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(**inputs)
        loss.backward()
        return loss.detach()

    return step


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those it holds, by parameter name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def full_gradients(model: autotp.ParallelModule) -> dict[str, Tensor]:
    """Every gradient put together, on the CPU of the first rank; empty on the others."""
    held = {name: p.data for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = torch.zeros_like(p) if p.grad is None else p.grad
    try:
        return autotp.full_state_dict(model)
    finally:
        for name, p in model.named_parameters():
            p.data = held[name]


def apart(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference between gradients of the same names, over the largest element of all, and where it is."""
    scale = max(float(grad.abs().max()) for grad in expected.values())
    return max((float((found[name].cpu() - grad.cpu()).abs().max()) / scale, name) for name, grad in expected.items())


def compare(plain: nn.Module, hand: Megatron, ours: autotp.ParallelModule, inputs: Mapping[str, Tensor]) -> None:
    """Losses and all gradients of the two against one device's.

    Raises:
        RuntimeError: something differs by more than TOLERANCE.
    """
    losses = [float(stepper(model, inputs)()) for model in (plain, hand, ours)]
    whole = gradients(plain)
    part = {name: hand.takes[name](grad, dist.get_rank(), dist.get_world_size()) for name, grad in whole.items()}
    gathered = full_gradients(ours)
    errors = {
        "the floor's loss": (abs(losses[1] - losses[0]), ""),
        "autotp's loss": (abs(losses[2] - losses[0]), ""),
        "the floor's gradient": apart(part, gradients(hand.m)),
        "autotp's gradient": apart(whole, gathered) if gathered else (0.0, ""),
    }
    for what, (error, where) in errors.items():
        if not error <= TOLERANCE:
            raise RuntimeError(f"{what} differs from one device's by {error:.1e} {where}")


@dataclass(frozen=True)
class Seconds:
    """What a step takes: on the clock, and of this process's processor time."""

    wall: float
    cpu: float


def seconds(step: Step, device: str) -> Seconds:
    """Of one step, the ranks started together."""
    dist.barrier()
    _wait(device)
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    _wait(device)
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def in_pairs(first: Step, second: Step, pairs: int, device: str) -> list[tuple[Seconds, Seconds]]:
    """Pairs of a step of the one and of the other; who goes first changes from pair to pair."""
    times: tuple[list[Seconds], list[Seconds]] = ([], [])
    gc.collect()
    gc.disable()
    for i in range(pairs):
        order = ((0, first), (1, second)) if i % 2 else ((1, second), (0, first))
        for side, step in order:
            times[side].append(seconds(step, device))
    gc.enable()
    return list(zip(*times, strict=True))


@dataclass(frozen=True)
class Row:
    """A shape's figures: medians in seconds, the ratio with its quartiles, what a step sends."""

    name: str
    parameters: int
    by_hand: float
    ours: float
    quartiles: Sequence[float]
    cpu: float
    sent: tuple[Collectives, Collectives]

    def __str__(self) -> str:
        low, ratio, high = self.quartiles
        return (
            f"{self.name:<11}{self.parameters / 1e6:>7.1f}M{self.by_hand * 1e3:>9.1f}{self.ours * 1e3:>10.1f}"
            f"{ratio:>8.3f}  {low:.2f}-{high:.2f}{self.cpu:>8.3f}{self.sent[0]!s:>14}{self.sent[1]!s:>14}"
        )


HEADER = (
    f"{'shape':<11}{'params':>8}{'hand ms':>9}{'autotp ms':>10}{'ratio':>8}  {'quarters':<9}{'cpu':>8}"
    f"{'hand sends':>14}{'autotp sends':>14}"
)


def measure(name: str, config: GPTConfig | BERTConfig, batch: int, pairs: int, device: str) -> Row:
    """A row of the table."""
    plain, inputs = build(config, batch, device)
    rank, tp = dist.get_rank(), dist.get_world_size()
    hand = (MegatronBERT if isinstance(config, BERTConfig) else MegatronGPT)(plain, rank, tp)  # type: ignore[arg-type]
    ours = autotp.parallelize(build(config, batch, device)[0], device=device)
    compare(plain, hand, ours, inputs)
    first, second = stepper(hand, inputs), stepper(ours, inputs)
    for _ in range(WARM_UP):
        first(), second()
    sent = collectives(first), collectives(second)
    size = sum(p.numel() for p in plain.parameters())
    times = in_pairs(first, second, pairs, device)
    by_hand, autotps = (statistics.median(pair[side].wall for pair in times) for side in (0, 1))
    cpu = statistics.median(b.cpu / a.cpu for a, b in times)
    return Row(name, size, by_hand, autotps, _quartiles([b.wall / a.wall for a, b in times]), cpu, sent)


def _quartiles(values: list[float]) -> Sequence[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    """Prints the table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=20, help="how many steps of each are timed")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cuda: NCCL, a GPU a rank")
    args = parser.parse_args()
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    device = args.device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    rows = [measure(name, SHAPES[name], args.batch, args.pairs, device) for name in args.shapes]
    if dist.get_rank() == 0:
        print(f"{_machine(device)}, torch {torch.__version__}, tp={dist.get_world_size()}, batch {args.batch}, "
              f"{args.pairs} pairs, {torch.get_num_threads()} thread(s) a rank", HEADER, *rows, sep="\n")  # fmt: skip
    dist.destroy_process_group()


def _machine(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
