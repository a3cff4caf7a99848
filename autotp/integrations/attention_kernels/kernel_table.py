"""The table of kernels: name of an operator -> its rule, and a reference that computes the same on a CPU.

NOTE [Kernels that a machine lacks]
An operator of a kernel is registered for GPUs only. When a model is analysed, each operator of the table that is loaded
gets its reference as the kernel for CPUs, unless it has one. So the model runs on a CPU, as does `verify`, and the
operator stays one node of the graph. On a GPU nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from autotp.errors import Error
from autotp.integrations.attention_kernels import kernel_rule
from autotp.integrations.attention_kernels.counted_positions import counted_positions
from autotp.integrations.attention_kernels.flash_functions import flash_formula
from autotp.integrations.attention_kernels.flex.flex_attention import add_operator
from autotp.integrations.attention_kernels.flex.mask_arguments import register_block_mask
from autotp.integrations.attention_kernels.flex.recorded import flex_without_kernels
from autotp.integrations.attention_kernels.packed import ScoreSettings, packed_attention, packed_attention_backward
from autotp.integrations.attention_kernels.packed_rows import Window, add_form
from autotp.integrations.attention_kernels.padded_rows import padding_in_operators
from autotp.model_library import ModelLibrary
from autotp.rules.call import Call
from autotp.rules.common import present
from autotp.rules.language import Rule, spell
from autotp.rules.registry import add_reference, add_rows, has_rule, loaded_operator
from autotp.rules.row import Row, Trait
from autotp.sharding.axis import Size


class Kernel(NamedTuple):
    """An operator of a kernel.

    Attributes:
        reference: a function with the operator's arguments, for CPUs.
        window: returns which keys a call reads; None for an operator that only backward calls.
    """

    reference: Callable[..., Any]
    window: Window | None = None


def _packed_rule(call: Call, window: Window) -> Rule:
    """Returns the rule of attention of packed rows: each head by itself, or each group of heads that share keys.

    `query: [tokens heads width]`, `key` and `value: [tokens groups width]`; outputs `[tokens heads width]` and
    `[heads tokens]`, the log-sum-exp. A part of the tokens has the form `packed_rows`: if a query reads all keys of its
    document, or those up to its own position. Then queries and keys must be of the same tokens, and all be used.
    """
    query, key, _, query_ends, key_ends = list(call.arguments.values())[:5]
    before, after = window(call.arguments)
    shared = Size.of(query.shape[1]) != Size.of(key.shape[1])
    heads, groups = ("(k g)", "k") if shared else ("h", "h")
    same_tokens = query_ends is key_ends and call.get("seqused_k") is None and call.get("block_table") is None
    cuttable = (before, after) == (-1, -1) or (after == 0 and same_tokens)
    s = "s!" if cuttable and "start" not in call.arguments else "s^"
    terms = [[s, heads, "d^"], ["t^", groups, "d^"], ["t^", groups, "e^"]]
    integer_terms = [[f"x{i}_{dim}^" for dim in range(x.dim())] for i, x in enumerate(present(call)[3:])]
    outputs = [[s, heads, "e^"], [heads, s], ["r^"]]
    return Rule.of(spell([*terms, *integer_terms], outputs), **({"k": key.shape[1]} if shared else {}))


# ---- torch.nn.attention.varlen


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,
    is_causal: bool = False, scale: float | None = None, window_size: list[int] | None = None,
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if seqused_k is not None or block_table is not None or cu_seq_k is None:
        raise Error(
            "varlen_attn on a CPU reads packed documents only, with `cu_seq_k`",
            fix="a GPU for a key-value cache with `seqused_k` or `block_table`",
        )
    output, totals = packed_attention(
        query, key, value, cu_seq_q, cu_seq_k, ScoreSettings(scale, _window(window_size, is_causal))
    )
    # The kernel's totals are float32. In float64, which no kernel takes, they are not rounded: `verify` would see it.
    return output, totals, torch.zeros(2, dtype=torch.uint64, device=query.device)


def _varlen_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_seq_q: Tensor,
    cu_seq_k: Tensor, max_q: int, max_k: int, is_causal: bool, rng_state: Tensor, scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scores = ScoreSettings(scale, _window(window_size, is_causal))
    return packed_attention_backward(grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, scores)[:3]


def _window(sizes: Sequence[int] | None, causal: bool) -> tuple[int, int]:
    before, after = sizes or (-1, -1)
    return before, 0 if causal else after


KERNELS: Mapping[str, Kernel] = {
    "torch_attn::_varlen_attn": Kernel(_varlen, lambda a: _window(a["window_size"], a["is_causal"])),
    "torch_attn::_varlen_attn_backward": Kernel(_varlen_backward),
}


class AttentionKernels(ModelLibrary):
    """The operators of kernels of attention."""

    def formula_of(self, function: type) -> Callable[..., Any] | None:
        """Returns what makes one operator of a call of flash-attn's functions."""
        return flash_formula(function) or super().formula_of(function)

    def add_operators(self) -> None:
        """Adds the kernels that are loaded, with their references. NOTE [Kernels that a machine lacks]"""
        kernel_rule.add_kernel()
        for name in KERNELS:
            op = loaded_operator(name)
            if op is not None:
                _add(op)
        add_operator()
        register_block_mask()
        super().add_operators()

    @contextmanager
    def during_capture(self, exactly: bool, looks: bool) -> Iterator[None]:
        """torch's flex_attention is an operator, rows with padding are operands of one, and positions are counted."""
        with (
            flex_without_kernels(),
            padding_in_operators(),
            counted_positions(),
            super().during_capture(exactly, looks),
        ):
            yield

    @contextmanager
    def without_kernels(self) -> Iterator[None]:
        """torch's flex_attention has a backward, also on a CPU."""
        with flex_without_kernels(), super().without_kernels():
            yield


def _add(op: OpOverload) -> None:
    reference, window = KERNELS[op._schema.name]
    if window is not None and not has_rule(op):
        row = Row(partial(_packed_rule, window=window), Trait.ATTENTION)
        add_rows({op: row})
        add_form(op, row, window)
    add_reference(op, reference)
