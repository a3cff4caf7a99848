"""differences: how far the ranks' tensors are from those of one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from autotp.passes.program.program import Program
from autotp.sharding.layout import Layout

TOLERANCE = 1e-9
"""The largest difference, relative to the scale of the compared values, that is round-off of float64."""


@dataclass(frozen=True)
class Difference:
    """The largest difference of one tensor from one device, relative to its scale.

    The scale of a gradient is the largest element of the whole model's gradient, because some true gradients are
    zero (a key bias under softmax).
    """

    name: str
    error: float

    def __str__(self) -> str:
        return f"{self.error:.1e}  {self.name}"


RankTensors = dict[str, Tensor]
"""The tensors of a rank, or of one device: parameters and buffers by name, and inputs as `input 0`, ..."""


def rank_tensors(
    model: nn.Module, layouts: Mapping[str, Layout], rank: int, caches: Mapping[str, Layout] = MappingProxyType({})
) -> RankTensors:
    """Returns copies of the parameters' parts that a rank holds, and of the model's buffers.

    Args:
        layouts, caches: layouts of the parameters, and of the buffers that are cut, by name.
    """
    parameters = {name: model.get_parameter(name) for name in layouts}
    parts = {n: layout.take(parameters[n].detach(), rank) for n, layout in layouts.items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers |= {name: layout.take(buffers[name], rank) for name, layout in caches.items()}
    return {n: part.requires_grad_(parameters[n].requires_grad) for n, part in parts.items()} | buffers


def gradient_differences(
    whole: Mapping[str, Tensor], ranks: Sequence[RankTensors], analysis: Program
) -> list[Difference]:
    """Compares the gradients of one device with those of the ranks."""
    floating = {name: tensor for name, tensor in whole.items() if tensor.is_floating_point()}
    scale = largest([t.grad for t in floating.values() if t.grad is not None])
    layouts = {name: analysis.layouts.get(name, Layout(tuple(t.shape))) for name, t in floating.items()}
    differences = []
    for n, t in floating.items():
        parts = [r[n].grad for r in ranks]
        # `difference` would take a missing gradient for zeros.
        missing = t.grad is not None and any(part is None for part in parts)
        differences.append(Difference(n, float("inf") if missing else difference(t.grad, parts, layouts[n], scale)))
    return differences


def step_differences(whole: Mapping[str, Tensor], ranks: Sequence[RankTensors], analysis: Program) -> list[Difference]:
    """Takes a step of an optimizer, on one device and on the ranks."""
    for tensors in (whole, *ranks):
        trained = [tensors[name] for name in analysis.layouts if tensors[name].requires_grad]
        if trained:
            torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.1).step()
    after = [{name: tensors[name].detach() for name in analysis.layouts} for tensors in (whole, *ranks)]
    scale = largest(list(after[0].values()))
    rows = {n: (after[0][n], [rank[n] for rank in after[1:]], layout) for n, layout in analysis.layouts.items()}
    return [Difference(name, difference(*row, scale)) for name, row in rows.items()]


def largest(tensors: Sequence[Tensor]) -> float:
    """Returns the largest absolute element of all tensors; 1 if it is 0."""
    return max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0) or 1.0


def descending(row: Difference) -> float:
    """Returns the key that sorts differences, the largest or an undefined one first."""
    return -float("inf") if row.error != row.error else -row.error


def difference(whole: Tensor | None, parts: Sequence[Tensor | None], layout: Layout, scale: float) -> float:
    """Returns the largest difference between a tensor and its joined parts, or its copies, divided by `scale`."""
    if whole is None:
        # Where one device has no gradient, zeros of a rank are as good.
        return 0.0 if all(part is None or not part.any() for part in parts) else float("inf")
    ranks = len(layout.pieces) or 1
    zeros = [torch.zeros(layout.local_shape(r % ranks), dtype=whole.dtype) for r in range(len(parts))]
    filled = [zero if part is None else part for zero, part in zip(zeros, parts, strict=True)]
    if layout.dim is None:
        return max(_distance(part, whole) for part in filled) / scale
    distance = 0.0
    for first in range(0, len(filled), ranks):  # Each context-parallel rank has all the parts.
        # A position that no rank holds stays NaN, and so is a difference.
        joined = torch.full_like(whole, float("nan")) if whole.is_floating_point() else torch.zeros_like(whole)
        for rank in range(ranks):
            layout.put(joined, filled[first + rank], rank)
        distance = max(distance, _distance(joined, whole))
    return distance / scale


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    equal = (a == b) | ((a != a) & (b != b))  # Infinities and undefined values agree with themselves.
    return float((a.double() - b.double()).abs().masked_fill(equal, 0).max()) if a.numel() else 0.0
