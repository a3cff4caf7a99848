"""operators: what an operator is for the roofline: its kind, the shape and FLOPs of products, the memory it touches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

aten = torch.ops.aten
Phase = Literal["forward", "backward", "again"]
"""When an operator runs; `again` is forward that backward runs once more."""
Kind = Literal["product", "attention", "pointwise", "softmax", "other", "view", "collective", "wait"]

PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addmm_, aten._grouped_mm})
ATTENTION = {
    aten._scaled_dot_product_flash_attention: (2, 2),
    aten._scaled_dot_product_efficient_attention: (2, 2),
    aten._scaled_dot_product_flash_attention_backward: (4, 5),
    aten._scaled_dot_product_efficient_attention_backward: (4, 5),
    aten._scaled_dot_product_flash_attention_for_cpu: (2, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (4, 5),
}
"""Fused attention -> the products of its size that count, and those computed: backward computes the scores again."""
SOFTMAX = frozenset({aten._softmax, aten._safe_softmax, aten._log_softmax})
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
FREE = frozenset({
    aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided, aten.empty_permuted,
    aten._efficientzerotensor,
})  # fmt: skip
"""Operators that allocate memory, and neither read nor write it."""


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


def kind_of(func: Any, packet: Any) -> Kind:
    """Returns what an operator does, for its price; `packet` has all overloads of `func`."""
    if packet in PRODUCTS:
        return "product"
    if packet in ATTENTION:
        return "attention"
    if packet in SOFTMAX:
        return "softmax"
    return "pointwise" if torch.Tag.pointwise in func.tags or packet in POINTWISE else "other"


POINTWISE = frozenset({
    aten.native_dropout, aten.native_dropout_backward, aten.clone, aten._to_copy, aten.copy_, aten.fill_, aten.zero_,
    aten.ones_like, aten.zeros_like, aten.full_like, aten.bernoulli_,
})  # fmt: skip
"""Operators that work element by element, beside those that torch marks so."""


def work_of(packet: Any, args: Any, results: Sequence[Tensor]) -> tuple[tuple[int, int, int, int], float]:
    """Returns shape and FLOPs of a product; zeros for other operators."""
    if packet in ATTENTION:
        return _attention(packet, args)
    if packet not in PRODUCTS:
        return (0, 0, 0, 0), 0.0
    x, y = [a for a in args if isinstance(a, Tensor)][-2:] if packet is not aten._grouped_mm else args[:2]
    if packet is aten._grouped_mm:
        batch, rows, summed, columns = 1, x.shape[-2], x.shape[-1], y.shape[-1]
        if x.dim() == 2 and y.dim() == 2:  # The gradient of the weights: groups along the summed dimension.
            batch, rows, summed, columns = 1, x.shape[0], x.shape[1], y.shape[1]
    else:
        batch, (rows, summed), columns = math.prod(x.shape[:-2]), x.shape[-2:], y.shape[-1]
    return (batch, rows, columns, summed), 2.0 * batch * rows * columns * summed


def share_of(func: Any, packet: Any, args: Any) -> float:
    """Returns how much of the FLOPs is computed: a fused attention leaves out what a causal mask hides."""
    if packet not in ATTENTION:
        return 1.0
    counted, computed = ATTENTION[packet]
    places = [i for i, argument in enumerate(func._schema.arguments) if argument.name == "is_causal"]
    causal = any(args[i] is True for i in places if i < len(args))
    if causal and "for_cpu" in str(packet):
        blocks = math.ceil(_attention(packet, args)[0][2] / KEYS)
        return computed / counted * (blocks + 1) / (2 * blocks)
    return computed / counted * (0.5 if causal else 1.0)


def arithmetic_of(packet: Any, kwargs: Any) -> float:
    """Returns the FLOPs of an operator for each element of its result, beside products."""
    tanh = packet in (aten.gelu, aten.gelu_backward) and kwargs.get("approximate") == "tanh"
    return TANH if tanh else ARITHMETIC.get(packet, 0.0)


def _attention(packet: Any, args: Any) -> tuple[tuple[int, int, int, int], float]:
    """Returns the shape of the product of queries and keys, and the FLOPs of all products of an attention.

    Half of the products have the width of keys, and half that of values.
    """
    first = 1 if "backward" in str(packet) else 0
    query, key, value = args[first : first + 3]
    batch, rows, columns, width = math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1]
    flops = float(ATTENTION[packet][0] * batch * rows * columns * (width + value.shape[-1]))
    return (batch, rows, columns, width), flops
