"""Compares the time of a step, forward and backward, with handwritten Megatron-style layers ("the floor").

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/step.py

First it compares all losses, and every gradient of the floor and of autotp, with those of one device, and counts the
collectives. Then it times the steps of all ways in turn; each round starts with another way. A ratio is the time of a
step divided by the floor's time in the same round: the median over all rounds, with the quartiles beside it. "cpu" is
the same ratio of this process's processor time, which other processes on a busy machine disturb less; "calls" counts
the functions written in Python that a step calls. The plans of other libraries (`peers/plans.py`) are for Llamas only.
A Llama of transformers returns its logits beside the loss. The floor returns the loss alone and uses the memory of the
logits again; "by hand, logits" returns both.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from peers.megatron import Megatron, MegatronBERT, MegatronGPT, MegatronLlama
from peers.plans import by_dtensor, by_transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.models.bert import BERT, BERTConfig
from autotp.models.gpt import GPT, GPTConfig

TOLERANCE = 1e-4
"""The largest allowed difference of losses, and of gradients relative to their largest element, in float32."""
WARM_UP = 3


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama of transformers; it has as many key/value heads as heads, if `n_kv` is not given."""

    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    n_inner: int
    n_kv: int | None = None


Shape = GPTConfig | BERTConfig | LlamaShape
SHAPES: dict[str, Shape] = {
    "gpt-tiny": GPTConfig(block_size=128, vocab_size=1024, n_layer=4, n_head=4, n_embd=128, dropout=0.0),
    "gpt-small": GPTConfig(block_size=256, vocab_size=8192, n_layer=6, n_head=8, n_embd=256, dropout=0.0),
    "gpt-30M": GPTConfig(block_size=256, vocab_size=8192, n_layer=8, n_head=8, n_embd=512, dropout=0.0),
    "gpt-vocab": GPTConfig(block_size=256, vocab_size=50258, n_layer=2, n_head=8, n_embd=256, dropout=0.0),
    "bert-small": BERTConfig(block_size=256, vocab_size=8192, n_layer=6, n_head=8, n_embd=256, dropout=0.0),
    "llama-tiny": LlamaShape(block_size=128, vocab_size=1024, n_layer=4, n_head=4, n_embd=128, n_inner=344),
    "llama-small": LlamaShape(block_size=256, vocab_size=8192, n_layer=6, n_head=8, n_embd=256, n_inner=688),
    "llama-30M": LlamaShape(block_size=256, vocab_size=8192, n_layer=8, n_head=8, n_embd=512, n_inner=1376),
}

Step = Callable[[], Tensor]
Way = TypeVar("Way", bound=Hashable)


@dataclass(frozen=True)
class Collectives:
    """The collectives of one step: their number, and the bytes that each rank gives them."""

    number: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.number} / {self.bytes / 1e6:.1f} MB"


class Counted(TorchDispatchMode):
    """A mode that counts collectives, through whichever interface they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace in ("c10d", "_c10d_functional") and not op._opname.startswith(("wait_tensor", "barrier")):
            given = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self.number, self.bytes = self.number + 1, self.bytes + given.numel() * given.element_size()
        return op(*args, **(kwargs or {}))


def collectives(step: Step) -> Collectives:
    """Returns the collectives of one step."""
    with Counted() as count:
        step()
    return Collectives(count.number, count.bytes)


def python_calls(step: Step) -> int:
    """Returns how many functions written in Python one step calls."""
    count = 0

    def noted(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(noted)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def build(config: Shape, batch: int, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a model in train mode, and a batch for it."""
    torch.manual_seed(0)
    shape = (batch, config.block_size)
    tokens, labels = (torch.randint(config.vocab_size, shape) for _ in range(2))
    inputs = {"tokens": tokens, "labels": labels}
    if isinstance(config, LlamaShape):
        inputs = {"input_ids": tokens, "labels": labels}
    if isinstance(config, BERTConfig):
        inputs["types"] = torch.randint(2, shape)
        inputs["mask"] = (torch.arange(shape[1]) < shape[1] - torch.arange(batch).unsqueeze(-1)).long()
        inputs["labels"] = labels.masked_fill(torch.rand(shape) > 0.15, -100)
        inputs["next_sentence"] = torch.randint(2, (batch,))
    return _model(config).train().to(device), {name: value.to(device) for name, value in inputs.items()}


def _model(config: Shape) -> nn.Module:
    if isinstance(config, LlamaShape):
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": config.n_embd, "intermediate_size": config.n_inner, "vocab_size": config.vocab_size}
        heads = {"num_attention_heads": config.n_head, "num_key_value_heads": config.n_kv or config.n_head}
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=config.n_layer, use_cache=False))
    return BERT(config) if isinstance(config, BERTConfig) else GPT(config)


FLOORS: dict[type, type[Megatron]] = {GPTConfig: MegatronGPT, BERTConfig: MegatronBERT, LlamaShape: MegatronLlama}
HAND, KEPT, OURS = "by hand", "by hand, logits", "autotp"


def ways(config: Shape, batch: int, device: str) -> dict[str, nn.Module]:
    """Returns the models to time, the floor first: name -> model."""
    rank, tp = dist.get_rank(), dist.get_world_size()
    made = lambda: build(config, batch, device)[0]  # noqa: E731
    floor = FLOORS[type(config)]
    found: dict[str, nn.Module] = {HAND: floor(made(), rank, tp), OURS: autotp.parallelize(made(), device=device)}
    found["autotp, sequence"] = autotp.parallelize(made(), device=device, sequence_parallel=True)
    if isinstance(config, LlamaShape):
        found[KEPT] = MegatronLlama(made(), rank, tp, keep=True)
        mesh = init_device_mesh(device.partition(":")[0], (tp,), mesh_dim_names=("tp",))
        found["parallelize_module"] = by_dtensor(made(), mesh)
        found["transformers"] = by_transformers(made(), mesh)
    return found


def stepper(model: nn.Module, inputs: Mapping[str, Tensor]) -> Step:
    """Returns a step: removes the gradients, runs forward and backward, and returns the loss."""

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        found = model(**inputs)
        loss = loss_of(found)
        loss.backward()
        return loss.detach()

    return step


def loss_of(found: Any) -> Tensor:
    """Returns the loss from a model's output."""
    loss: Tensor = found if isinstance(found, Tensor) else found.loss
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients that the model holds: parameter name -> gradient."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def full_gradients(model: autotp.ParallelModule) -> dict[str, Tensor]:
    """Returns every gradient, gathered on the CPU of the first rank; empty on the other ranks."""
    held = {name: p.data for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = torch.zeros_like(p) if p.grad is None else p.grad
    try:
        return autotp.full_state_dict(model)
    finally:
        for name, p in model.named_parameters():
            p.data = held[name]


def apart(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[float, str]:
    """Returns the largest difference between gradients, relative to the largest element of all, and its place.

    It is infinite where one of them is NaN.
    """
    scale = max(float(grad.abs().max()) for grad in expected.values())
    errors = {name: (found[name].cpu() - grad.cpu()).abs().nan_to_num(nan=math.inf) for name, grad in expected.items()}
    return max((float(error.max()) / scale, name) for name, error in errors.items())


def compare(plain: nn.Module, models: Mapping[str, nn.Module], inputs: Mapping[str, Tensor]) -> None:
    """Compares all losses, and the gradients of the floor and of autotp, with those of one device.

    Raises:
        RuntimeError: a loss or a gradient differs by more than TOLERANCE.
    """
    expected = float(stepper(plain, inputs)())
    whole, errors = gradients(plain), {}
    for name, model in models.items():
        errors[f"the loss of {name}"] = abs(float(stepper(model, inputs)()) - expected), ""
        if isinstance(model, Megatron):
            part = {n: model.takes[n](grad, dist.get_rank(), dist.get_world_size()) for n, grad in whole.items()}
            errors[f"the gradient of {name}"] = apart(part, gradients(model.m))
        if isinstance(model, autotp.ParallelModule) and (gathered := full_gradients(model)):
            errors[f"the gradient of {name}"] = apart(whole, gathered)
    for what, (error, where) in errors.items():
        if not error <= TOLERANCE:
            raise RuntimeError(f"{what} differs from one device's by {error:.1e} {where}")


@dataclass(frozen=True)
class Seconds:
    """The seconds of a step: on the clock, and of this process's processor time."""

    wall: float
    cpu: float


def seconds(step: Step, device: str) -> Seconds:
    """Returns the seconds of one step that all ranks start together."""
    dist.barrier()
    _wait(device)
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    _wait(device)
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def in_turn(steps: Mapping[Way, Step], rounds: int, device: str) -> dict[Way, list[Seconds]]:
    """Returns the times of each step; a round runs each step once, and the first step changes from round to round."""
    times: dict[Way, list[Seconds]] = {name: [] for name in steps}
    names = list(steps)
    gc.collect()
    gc.disable()
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(seconds(steps[name], device))
    gc.enable()
    return times


@dataclass(frozen=True)
class Row:
    """One shape and one way: the median in seconds, the ratio to the floor with quartiles, and what a step calls."""

    shape: str
    parameters: int
    way: str
    seconds: float
    quartiles: Sequence[float]
    cpu: float
    sent: Collectives
    calls: int

    def __str__(self) -> str:
        low, ratio, high = self.quartiles
        return (
            f"{self.shape:<12}{self.parameters / 1e6:>6.1f}M  {self.way:<19}{self.seconds * 1e3:>8.1f}"
            f"{ratio:>8.3f}  {low:.2f}-{high:.2f}{self.cpu:>8.3f}{self.sent!s:>15}{self.calls:>8}"
        )


HEADER = (
    f"{'shape':<12}{'params':>7}  {'way':<19}{'ms':>8}{'ratio':>8}  {'quarters':<9}{'cpu':>8}{'sends':>15}{'calls':>8}"
)


def measure(name: str, config: Shape, batch: int, rounds: int, device: str) -> list[Row]:
    """Returns the rows of a shape."""
    plain, inputs = build(config, batch, device)
    models = ways(config, batch, device)
    compare(plain, models, inputs)
    steps = {way: stepper(model, inputs) for way, model in models.items()}
    for _ in range(WARM_UP):
        for step in steps.values():
            step()
    sent = {way: collectives(step) for way, step in steps.items()}
    calls = {way: python_calls(step) for way, step in steps.items()}
    size = sum(p.numel() for p in plain.parameters())
    times = in_turn(steps, rounds, device)
    rows = []
    for way, found in times.items():
        both = list(zip(found, times[HAND], strict=True))
        cpu = statistics.median(a.cpu / b.cpu for a, b in both)
        quarters = _quartiles([a.wall / b.wall for a, b in both])
        rows.append(
            Row(name, size, way, statistics.median(a.wall for a in found), quarters, cpu, sent[way], calls[way])
        )
    return rows


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
    parser.add_argument("--rounds", type=int, default=20, help="how many steps of each way to time")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cuda: NCCL, one GPU for each rank")
    args = parser.parse_args()
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    device = args.device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    rows = [row for name in args.shapes for row in measure(name, SHAPES[name], args.batch, args.rounds, device)]
    if dist.get_rank() == 0:
        print(f"{_machine(device)}, torch {torch.__version__}, tp={dist.get_world_size()}, batch {args.batch}, "
              f"{args.rounds} rounds, {torch.get_num_threads()} thread(s) a rank", HEADER, *rows, sep="\n")  # fmt: skip
    dist.destroy_process_group()


def _machine(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
