"""operators: what an operator is for the roofline: its kind, the shape and FLOPs of products, the memory it touches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from autotp.rules.registry import is_grouped
from autotp.rules.row import Trait
from autotp.rules.traits import functional_of, has

aten = torch.ops.aten
Phase = Literal["forward", "backward", "again"]
"""When an operator runs; `again` is forward that backward runs once more."""
Kind = Literal["product", "attention", "pointwise", "softmax", "other", "view", "collective", "wait"]

SAME_WORK = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
"""An operator that torch does not count -> one that it counts, with the same products of the same operands."""
ARITHMETIC = {
    aten.gelu: 26.0, aten.gelu_backward: 42.0, aten.silu: 23.0, aten.silu_backward: 28.0, aten.sigmoid: 22.0,
    aten.exp: 63.0, aten.tanh: 215.0, aten.cos: 118.0, aten.sin: 118.0, aten.rsqrt: 25.0, aten.sqrt: 37.0,
    aten._softmax: 42.0, aten._safe_softmax: 42.0, aten._log_softmax: 38.0, aten._log_softmax_backward_data: 23.0,
    aten.native_layer_norm: 27.0, aten.native_layer_norm_backward: 30.0, aten.cumsum: 76.0, aten.bernoulli_: 464.0,
    aten.bernoulli: 464.0, aten.gt: 35.0, aten.embedding_dense_backward: 100.0,
    aten._scaled_dot_product_flash_attention_for_cpu: 72.0,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 72.0,
}  # fmt: skip
"""What torch 2.13's kernels for CPUs compute for each element of a result (attention: of each score), beside products.

In FLOPs at the peak of products in float32: the time of the operator on one core, in the cache, times the peak of
`cpu-gloo`. On GPUs this is hidden behind the time to move the tensors.
"""
TANH = 122.0
"""The same of `gelu(approximate="tanh")`, forward and backward."""
KEYS = 512
"""The keys of a block of the fused attention for CPUs: of a causal mask, it leaves out whole blocks."""


@dataclass(frozen=True)
class Touch:
    """Memory that an operator reads or writes.

    Attributes:
        memory: the number of the memory (a storage) in the record.
        bytes: the bytes that are read or written, at most.
    """

    memory: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operator that ran.

    Attributes:
        name: the operator, such as `mm`.
        kind: what it is for the roofline.
        phase: when it runs.
        shape: of a product: batch, rows, columns, summed length.
        flops: the floating-point operations of a product, two for each multiplication; of a causal attention those
            of all pairs of positions, as is usual.
        share: computed FLOPs for each of these: half of a fused causal attention.
        reads: the memory that it reads.
        writes: the memory that it writes.
        arithmetic: FLOPs for each element of the result, or for each score of an attention, beside products.
        dtype: of its result.
        axis: of a collective: the mesh axis, such as "tp".
        size: of a collective: the bytes of the whole tensor that its ranks hold together or sum.
        waits: of a wait: the place of the collective in the record.
    """

    name: str
    kind: Kind
    phase: Phase
    shape: tuple[int, int, int, int] = (0, 0, 0, 0)
    flops: float = 0.0
    share: float = 1.0
    reads: tuple[Touch, ...] = ()
    writes: tuple[Touch, ...] = ()
    arithmetic: float = 0.0
    dtype: torch.dtype = torch.float32
    axis: str = ""
    size: int = 0
    waits: int = -1


@cache
def counter_of(func: OpOverload) -> Callable[..., int] | None:
    """Returns torch's own function for the FLOPs of an operator, or of its functional form; None if it has none."""
    # torch counts `addmm`, and not `addmm_`.
    packet = _functional(func).overloadpacket
    return flop_registry.get(SAME_WORK.get(packet, packet))


@cache
def is_free(func: OpOverload) -> bool:
    """True for an operator that allocates memory, and neither reads nor writes it."""
    return has(func, Trait.UNINITIALIZED) or func is aten._efficientzerotensor.default


@cache
def kind_of(func: OpOverload) -> Kind:
    """Returns what an operator does, for its price."""
    name = func.overloadpacket.__name__
    if counter_of(func) or is_grouped(func):
        return "attention" if "attention" in name else "product"
    if name.endswith("softmax"):
        return "softmax"
    elementwise = has(_functional(func), Trait.SAME | Trait.RANDOM_EACH | Trait.ELEMENTWISE)
    return "pointwise" if torch.Tag.pointwise in func.tags or elementwise else "other"


def _functional(func: OpOverload) -> OpOverload:
    return (functional_of(func) if func._schema.is_mutable else None) or func


def work_of(func: OpOverload, args: Any, kwargs: Any, results: Any) -> tuple[tuple[int, int, int, int], float, float]:
    """Returns shape and FLOPs of a product, and how much of these is computed; (0, 0, 0, 0), 0 and 1 for others."""
    kind, counter = kind_of(func), counter_of(func)
    if is_grouped(func):
        shape = _of_groups(*args[:2])
        return shape, 2.0 * math.prod(shape), 1.0
    if counter is None:
        return (0, 0, 0, 0), 0.0, 1.0
    flops = float(counter(*args, **kwargs, out_val=results))
    if kind == "attention":
        return _attention(func, args, flops)
    name = func.overloadpacket.__name__
    # The gradient that backward reads has the sizes of the forward result.
    made = args[0] if "backward" in name else results if isinstance(results, Tensor) else results[0]
    if "conv" in name:  # [batch channels ...]: a product for each position.
        batch, rows, columns = 1, made.numel() // max(1, made.shape[1]), made.shape[1]
    else:
        batch, rows, columns = math.prod(made.shape[:-2]), made.shape[-2], made.shape[-1]
    return (batch, rows, columns, round(flops / 2 / max(1, made.numel()))), flops, 1.0


def _of_groups(x: Tensor, y: Tensor) -> tuple[int, int, int, int]:
    """Returns the shape of a product of groups of rows; the groups of a gradient of weights are along the sum.

    x: [rows summed]; y: [groups summed columns] or [summed columns]
    """
    return 1, x.shape[-2], y.shape[-1], x.shape[-1]


def arithmetic_of(packet: Any, kwargs: Any) -> float:
    """Returns the FLOPs of an operator for each element of its result, beside products."""
    return TANH if kwargs.get("approximate") == "tanh" else ARITHMETIC.get(packet, 0.0)


def _attention(func: OpOverload, args: Any, computed: float) -> tuple[tuple[int, int, int, int], float, float]:
    """Returns the shape of the product of queries and keys, the FLOPs of an attention, and how much of it is computed.

    Backward computes the scores again, which does not count. A fused attention leaves out what a causal mask hides.
    """
    backward = "backward" in func.overloadpacket.__name__
    # Backward reads the gradient of the result first, and then queries and keys.
    query, key = args[backward : backward + 2]
    shape = math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1]
    flops = computed - 2.0 * math.prod(shape) * backward
    places = [i for i, argument in enumerate(func._schema.arguments) if argument.name == "is_causal"]
    part = 1.0
    if any(args[i] is True for i in places if i < len(args)):
        # Of n blocks of keys, whole ones are left out: (n + 1) / 2n is computed. Blocks of a GPU are small: a half.
        blocks = math.ceil(shape[2] / KEYS) if func.overloadpacket in SAME_WORK else math.inf
        part = (1 + 1 / blocks) / 2
    return shape, flops, part * computed / flops if flops else 1.0
