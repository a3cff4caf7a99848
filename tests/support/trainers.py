"""Trainings that tests start, go on with and compare, and files of checkpoints that they damage."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_models import Mixture, assert_values_close, gpt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.checkpoint.files.checksums import sealed, unsealed
from autotp.integrations.transformers.files.tensor_sources import Box
from autotp.ops.grouped_mm import OPERATOR
from autotp.training.distribute import distribute

Layout = tuple[int, int, int]

SMALL = {"block_size": 8, "vocab_size": 49, "n_head": 4, "n_embd": 16}
"""The sizes of a GPT: a vocabulary that four does not divide."""


def batch(step: int) -> dict[str, Tensor]:
    x = (torch.arange(32).view(4, 8) * 7 + step * 5) % 49
    return {"tokens": x, "labels": x.roll(1, 1).masked_fill(x % 3 == 0, -100)}


def started(
    layout: Layout, dropout: float = 0.0, layers: int = 2, model: Any = None, **more: Any
) -> tuple[autotp.Trainer, AdamW]:
    """The trainer of a model, by default a GPT of the sizes `SMALL`, and its optimizer."""
    tp, pp, dp = layout
    example = {name: x[: max(1, 4 // (2 * dp))] for name, x in batch(0).items()}
    trainer = autotp.distribute(
        model or gpt(seed=0, n_layer=layers, dropout=dropout, **SMALL),
        tp=tp, pp=pp, dp=dp, microbatches=2, example_inputs=example, **more,
    )  # fmt: skip
    return trainer, AdamW(trainer.parameters(), lr=0.01, weight_decay=0.1)


def trained(trainer: autotp.Trainer, optimizer: AdamW, steps: range) -> list[float]:
    """The losses of these steps."""
    losses, dp, rank = [], trainer.mesh["dp"].size(), trainer.mesh["dp"].get_local_rank()
    for step in steps:
        losses.append(trainer.step(**{name: x.chunk(dp)[rank] for name, x in batch(step).items()}).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class _Order(TorchDispatchMode):
    """A mode that notes gathers, sums and products in the order in which they start."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = {"all_gather_into_tensor": "G", "reduce_scatter_tensor": "S", "mm": ".", "addmm": "."}
        self.text = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What ranks compare in a step are whole numbers.
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self.text += self.letters.get(func.overloadpacket.__name__, "")
        return func(*args, **(kwargs or {}))


def order_of_a_step(trainer: autotp.Trainer) -> str:
    """The second step, as text: G for a gather of parameters, S for a sum of gradients, a point for a product."""
    dp, rank = trainer.mesh["dp"].size(), trainer.mesh["dp"].get_local_rank()
    for step in range(2):
        with _Order() as order:
            trainer.step(**{name: x.chunk(dp)[rank] for name, x in batch(step).items()})
        trainer.zero_grad()
    return order.text


def fingerprint(trainer: autotp.Trainer, optimizer: AdamW) -> str:
    """All that a checkpoint may change, as text."""
    state = [p.tolist() for p in trainer.parameters()], optimizer.state_dict(), torch.get_rng_state().tolist()
    return repr((state, trainer.steps))


def mine(batch: dict[str, Tensor], rank: int, dp: int) -> dict[str, Tensor]:
    """A replica's part of a batch."""
    return {name: value.chunk(dp)[rank] for name, value in batch.items()}


@contextmanager
def wide_muon() -> Iterator[None]:
    """A region in which Muon orthogonalizes in float64: torch rounds to bfloat16, and a last bit changes much there."""
    from torch.optim import _muon

    before = _muon._zeropower_via_newtonschulz

    def orthogonalized(grad: Tensor, factors: tuple[float, float, float], steps: int, eps: float) -> Tensor:
        a, b, c = factors
        x = grad.T if grad.size(0) > grad.size(1) else grad
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.T if grad.size(0) > grad.size(1) else x

    _muon._zeropower_via_newtonschulz = orthogonalized  # type: ignore[assignment]
    try:
        yield
    finally:
        _muon._zeropower_via_newtonschulz = before


@contextmanager
def changed(file: Path, rank: int, content: bytes | None) -> Iterator[None]:
    """Within, a file has another content, or is gone."""
    before = file.read_bytes()
    dist.barrier()
    if rank == 0:
        file.unlink()
        if content is not None:
            file.write_bytes(content)
    dist.barrier()
    yield
    dist.barrier()
    if rank == 0:
        file.write_bytes(before)
    dist.barrier()


def bit_flips(file: Path, draw: random.Random, count: int) -> Iterator[bytes]:
    """The content of a file with one bit changed, so many times."""
    before = file.read_bytes()
    for _ in range(count):
        at = draw.randrange(len(before))
        yield before[:at] + bytes([before[at] ^ 1 << draw.randrange(8)]) + before[at + 1 :]


def torn(file: Path, draw: random.Random, count: int) -> Iterator[bytes | None]:
    """The content of a file that ends too early, is longer, has a page of zeros or of another place, or is gone."""
    before = file.read_bytes()
    yield None
    yield b""
    yield before + b"\0"
    for _ in range(count):
        at, size = draw.randrange(len(before)), draw.randrange(1, 4096)
        yield before[:at]
        yield before[:at] + b"\xff" * len(before[at : at + size]) + before[at + size :]


def edited(step: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes what the manifest says, its checksum included."""
    content = unsealed(step / "manifest.json")
    change(content)
    del content["crc32"]
    (step / "manifest.json").write_bytes(sealed(content))


@dataclass(frozen=True, eq=False)
class Given:
    """A tensor that counts how many elements were read of it."""

    tensor: Tensor
    counts: list[int] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, box: Box) -> Tensor:
        self.counts.append(math.prod(b - a for a, b in box))
        return self.tensor[tuple(slice(a, b) for a, b in box)]


class LayersOfExperts(nn.Module):
    """Two layers of four experts, which read their weights in groups and row by row, and a loss."""

    def __init__(self, idle: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head = Mixture(OPERATOR), Mixture(), nn.Linear(8, 3)
        if idle:  # No row chooses the last two experts of either layer.
            for layer in (self.first, self.second):
                layer.router.bias.data.copy_(torch.tensor([40.0, 30.0, -30.0, -40.0]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [batch seq 8], y: [batch seq 3]"""
        rows = self.second(self.first(x.flatten(0, 1)))
        return F.mse_loss(self.head(rows), y.flatten(0, 1))


def layers_of_experts(idle: bool = False) -> LayersOfExperts:
    torch.manual_seed(0)
    return LayersOfExperts(idle).double()


def batch_of_experts(step: int) -> dict[str, Tensor]:
    """Eight rows, in the second step sixteen longer ones."""
    draw, size = torch.Generator().manual_seed(step), (16, 5) if step == 1 else (8, 3)
    return {
        "x": torch.randn(*size, 8, generator=draw).double() * 3,
        "y": torch.randn(*size, 3, generator=draw).double(),
    }


def rows_of_replica(values: dict[str, Tensor], trainer: autotp.Trainer) -> dict[str, Tensor]:
    dp = trainer.mesh["dp"]
    return {name: x.chunk(dp.size())[dp.get_local_rank()] for name, x in values.items()}


def trainer_of_experts(model: nn.Module, **layout: Any) -> autotp.Trainer:
    parts = layout["dp"] * layout.get("microbatches", 1)
    return distribute(
        model, example_inputs={name: x[: 8 // parts] for name, x in batch_of_experts(0).items()}, **layout
    )


def train_experts_beside_one_device(whole: nn.Module, **layout: Any) -> tuple[autotp.Trainer, torch.optim.AdamW]:
    """Three steps; each compares the loss, all gradients, their norm, and the loss of an evaluation."""
    trainer = trainer_of_experts(copy.deepcopy(whole), **layout)
    optimizers = [torch.optim.AdamW(autotp.weight_decay_groups(m, 0.1), lr=0.01) for m in (whole, trainer)]
    for step in range(3):
        values = batch_of_experts(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = whole(**values)
        expected.backward()
        assert_values_close(trainer.step(**rows_of_replica(values, trainer)), expected.detach(), rtol=0, atol=1e-10)
        wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
        for name, parameter in trainer.named_parameters():
            found, text = whole_of(parameter.grad), f"{name}: {{}}".format
            assert_values_close(found, wanted[name], rtol=0, atol=1e-10, msg=text)
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        assert_values_close(autotp.clip_grad_norm_(trainer, 0.5), norm, rtol=0, atol=1e-10)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            expected = whole(**values)
        assert_values_close(trainer.evaluate(**rows_of_replica(values, trainer)), expected, rtol=0, atol=1e-10)
    return trainer, optimizers[1]


def whole_of(tensor: Any) -> Tensor:
    """What all ranks hold of a tensor."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole
