"""kernel_operator: a call of a kernel of attention as one operator of a graph.

    flash_attn_func(q, k, v, causal=True)   ->   attention_kernel(q, k, v, ..., "flash_attn...:FlashAttnFunc", ...)

On a GPU the operator calls the kernel with this rank's heads and tokens, and autograd records what the kernel records.
On a CPU, and for a part without heads or tokens, it computes the same by products (`packed.py`).

NOTE [Mirrored]
A kernel takes the last query for that at the last key. So a part of the queries that reads keys behind it by their
distance is followed by as many queries of zeros as there are such keys (`packed_rows.py`). Where all later keys are
read, queries and keys in the opposite order read earlier ones, and need as many as a window has, or fewer.
"""

from __future__ import annotations

import ast
import inspect
import sys
import traceback
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor

from autotp.errors import Error
from autotp.integrations.attention_kernels.packed import ScoreSettings, packed_attention
from autotp.integrations.attention_kernels.packed_rows import first_rows, read_by_part
from autotp.integrations.attention_kernels.padded_rows import attention_of_rows
from autotp.integrations.attention_kernels.reference import REFERENCE, attention_in_one_row
from autotp.ops.attention.documents import expect_no_longer
from autotp.ops.attention.zigzag import in_order, pieces, zigzag
from autotp.ops.dropout import own_stream
from autotp.ops.eager_mode import is_computed, runs_at_once
from autotp.rules.call import bound_arguments
from autotp.rules.registry import loaded_operator
from autotp.source_location import user_line

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? query_ends, Tensor? key_ends, Tensor? slopes, Tensor? sinks, "
    "SymInt? longest_query, SymInt? longest_key, float? scale, int before, int after, float softcap, float dropout_p, "
    "str function, str settings"
)
_OUTPUTS = "(Tensor, Tensor)"
_TAGS = (torch.Tag.nondeterministic_seeded,)
torch.library.define(
    "autotp::attention_kernel", f"({_ARGUMENTS}, SymInt? start=None, SymInt? near=None) -> {_OUTPUTS}", tags=_TAGS
)
torch.library.define(
    "autotp::zigzag_attention_kernel", f"({_ARGUMENTS}, int parts, int? rank) -> {_OUTPUTS}", tags=_TAGS
)
KERNEL, ZIGZAG = torch.ops.autotp.attention_kernel.default, torch.ops.autotp.zigzag_attention_kernel.default


def _with_own_mask(name: str, base: Any, more: str) -> Any:
    """Returns a new operator: `base` with a separate dropout mask on each rank, whose number is the last argument."""

    def dropped(*arguments: Any) -> tuple[Tensor, Tensor]:
        query, rank = arguments[0], arguments[-1]
        with own_stream(query.device, rank) if runs_at_once(query) else nullcontext():
            result: tuple[Tensor, Tensor] = base(*arguments[:-1])
            return result

    torch.library.define(f"autotp::{name}", f"({_ARGUMENTS}{more}, int rank) -> {_OUTPUTS}", tags=_TAGS)
    torch.library.impl(f"autotp::{name}", "CompositeImplicitAutograd")(dropped)
    return getattr(torch.ops.autotp, name).default


DROPPED = _with_own_mask("dropped_attention_kernel", KERNEL, "")
DROPPED_PART = _with_own_mask("dropped_part_of_attention_kernel", KERNEL, ", SymInt? start, SymInt? near")
DROPPED_ZIGZAG = _with_own_mask("dropped_zigzag_attention_kernel", ZIGZAG, ", int parts, int? place")
"""Of a part of the heads or rows, of a part of the queries, and of the queries of a rank in the order of `zigzag`."""
NAMES: Mapping[str, tuple[str, ...]] = {
    "query": ("q", "query"), "key": ("k", "key"), "value": ("v", "value"),
    "query_ends": ("cu_seqlens_q", "cu_seq_q"), "key_ends": ("cu_seqlens_k", "cu_seq_k"),
    "slopes": ("alibi_slopes",), "sinks": ("learnable_sink", "s_aux"),
    "longest_query": ("max_seqlen_q", "max_q"), "longest_key": ("max_seqlen_k", "max_k"),
}  # fmt: skip
"""Argument of the operator -> how the functions of kernels call it."""
SCALE, CAUSAL = ("softmax_scale", "scale"), ("causal", "is_causal")
SCORES = {*SCALE, *CAUSAL, "window_size", "softcap", "dropout_p"}
SPEED = {"deterministic", "num_splits", "pack_gqa", "sm_margin", "enable_gqa"}
"""Arguments with a rule, and those that change no more than the order of sums: both are plain values."""
PLAIN = bool | int | float | str | None
CHUNK = "attention_chunk"
"""How flash-attn 3 calls the length of chunks: a query reads the keys of its own chunk of a document."""
TOTALS, RECORDS = ("return_softmax", "return_lse"), "is_grad_enabled"
"""How they call the wish for the log-sum-exp, and for gradients."""
DTYPES, WIDEST = (torch.float16, torch.bfloat16), 256


@torch.library.impl("autotp::attention_kernel", "CompositeImplicitAutograd")
def _attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor | None, key_ends: Tensor | None,
    slopes: Tensor | None, sinks: Tensor | None, longest_query: Any, longest_key: Any, scale: float | None,
    before: int, after: int, softcap: float, dropout_p: float, function: str, settings: str, start: Any = None,
    near: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns attention and its log-sum-exp: [batch seq heads width] and [batch heads seq]; packed without `batch`.

    Args:
        query: [batch seq heads width], or packed rows, [tokens heads width].
        key, value: the same with groups in place of heads; the heads of a group read the same keys.
        query_ends, key_ends: of packed rows, where the documents begin and end: [documents + 1]. Of a batch with
            padding, where its tokens are: [batch seq]. None for a batch without.
        slopes, sinks, scale, softcap, dropout_p: as in `ScoreSettings`.
        longest_query, longest_key: of packed rows, a length that no document exceeds.
        before, after: how many keys before and after its own position a query reads; -1 for all.
        function: the kernel, as `function_named` reads it.
        settings: all its arguments that are plain values, as the text of a dict: `chunk_of` reads one more there.
        start: where this rank's part of the queries begins; None if it has all queries. NOTE [Mirrored]
        near: the number of all keys, if keys and values are only those that some of these queries see.

    Raises:
        Error: the kernel refuses the dtype or the width of the heads; or a document is longer than is said.
    """
    expect_taken(query, function)
    expect_no_longer(query_ends, longest_query, start is not None)
    expect_no_longer(key_ends, longest_key)
    padded = query_ends is not None and key_ends is not None and query_ends.dim() == 2
    if start is not None and padded:
        if after == 0:  # The last token of the queries stays that of the keys, as kernels take it.
            key, value, key_ends = (x.narrow(1, 0, start + query.shape[1]) for x in (key, value, key_ends))  # type: ignore[union-attr]
        start = None
    if start is not None:
        places = after > 0 or (after < 0 and (before >= 0 or slopes is not None))
        if places and after < 0 and query_ends is None and not isinstance(query, FakeTensor):
            mirrored = (key.shape[1] if near is None else near) - query.shape[1] - start
            if before >= 0 or start < mirrored:
                flipped = [x.flip(1) for x in (query, key, value)]
                output, totals = KERNEL(
                    *flipped, None, None, slopes, sinks, longest_query, longest_key, scale, after, before, softcap,
                    dropout_p, function, _mirrored(settings), mirrored, near,
                )  # fmt: skip
                return output.flip(1), totals.flip(2)
        *operands, rows = read_by_part(query, key, value, query_ends, key_ends, after, start, near, places)
        how = longest_query, longest_key, scale, before, after, softcap, dropout_p, function, settings
        output, totals = KERNEL(*operands, slopes, sinks, *how)
        return first_rows(output, totals, rows)
    traced, window = isinstance(query, FakeTensor) or query.is_meta, (before, after, chunk_of(settings))
    if query_ends is not None and key_ends is not None and query_ends.dim() == 2:
        if traced:
            return REFERENCE(query, key, value, None, None, slopes, sinks, scale, window, softcap)
        rest = scale, before, after, softcap, dropout_p, function, settings
        attend = lambda *packed: KERNEL(*packed[:5], slopes, sinks, *packed[5:], *rest)  # noqa: E731
        return attention_of_rows(attend, query, key, value, query_ends, key_ends)
    nothing = is_computed(query) and not (query.numel() and key.numel())
    if query.is_cpu or traced or nothing:
        scores = ScoreSettings(scale, window, softcap, slopes, sinks, dropout_p)
        if dropout_p and not traced and not nothing:  # Autograd keeps the mask.
            return attention_in_one_row(packed_attention, query, key, value, query_ends, key_ends, scores)
        result: tuple[Tensor, Tensor] = REFERENCE(query, key, value, query_ends, key_ends, slopes, sinks, *scores[:3])
        return result
    tensors = query, key, value, query_ends, key_ends, slopes, sinks, longest_query, longest_key
    return _by_kernel(function, dict(zip(NAMES, tensors, strict=True)), ast.literal_eval(settings))


def _mirrored(settings: str) -> str:
    """Returns the settings of a kernel for queries and keys in the opposite order."""
    values = ast.literal_eval(settings)
    sides = values.get("window_size")
    return settings if sides is None else repr({**values, "window_size": type(sides)(reversed(sides))})


@torch.library.impl("autotp::zigzag_attention_kernel", "CompositeImplicitAutograd")
def _zigzag(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Returns causal attention of the rows of a batch, whose queries are in the order of `zigzag`.

    A rank calls the kernel for each of its two pieces, with the keys up to the piece's last query.

    Args:
        arguments: those of `attention_kernel`; the number of parts; and whose queries they are, None for all.
    """
    (query, key, value, *rest), parts, rank = arguments[:-2], *arguments[-2:]
    if isinstance(query, FakeTensor):
        return KERNEL(query, key, value, *rest)
    if rank is None:
        ordered = KERNEL(in_order(query, 1, parts), key, value, *rest)
        return zigzag(ordered[0], 1, parts), zigzag(ordered[1], 2, parts)
    bounds = pieces(key.shape[1], parts, rank)
    rows = query.split([stop - start for start, stop in bounds], 1)
    results = [
        KERNEL(piece, key.narrow(1, 0, stop), value.narrow(1, 0, stop), *rest)
        for piece, (start, stop) in zip(rows, bounds, strict=True)
        if stop > start or not query.numel()
    ]
    if len(results) == 1:
        return results[0]
    outputs, totals = zip(*results, strict=True)
    return torch.cat(outputs, 1), torch.cat(totals, 2)


def recorded_call(name: str, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns what a kernel returns, as results of the operator.

    Args:
        name: the kernel, as `function_named` reads it.
        arguments: all its arguments by name, but for those in `TOTALS` and `RECORDS`.

    Raises:
        Error: an argument is a tensor or a function of which no rule is known.
    """
    defaults, tensors = parameters_of(function_named(name)), {x for names in NAMES.values() for x in names}
    settings = {argument: value for argument, value in arguments.items() if argument not in tensors}
    expect_known(_shown(name), {argument: x for argument, x in settings.items() if argument != CHUNK}, defaults)
    before, after = (-1 if n is None else n for n in settings.get("window_size") or (-1, -1))
    result: tuple[Tensor, Tensor] = KERNEL(
        *(_first(names, arguments) for names in NAMES.values()), _first(SCALE, settings), before,
        0 if _first(CAUSAL, settings) else after, settings.get("softcap") or 0.0, settings.get("dropout_p") or 0.0,
        name, repr(settings),
    )  # fmt: skip
    return result


@cache
def chunk_of(settings: str) -> int:
    """Returns the length of chunks among the settings of a kernel; 0 for none."""
    return ast.literal_eval(settings).get(CHUNK) or 0


def expect_known(function: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises Error for an argument of a kernel that is no plain value with a rule, nor the function's default."""
    for name, value in arguments.items():
        is_plain = all(isinstance(x, PLAIN) for x in (value if isinstance(value, tuple | list) else [value]))
        if not is_plain or (value and value != defaults.get(name) and name not in SCORES | SPEED):
            raise Error(
                f"{function} gets `{name}`, for which autotp has no rule",
                at=user_line(traceback.extract_stack()),
                fix="F.scaled_dot_product_attention, or a call without it",
            )


def _first(names: Iterable[str], arguments: Mapping[str, Any]) -> Any:
    """Returns the first argument of these names that is not None; None if all are."""
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def _shown(name: str) -> str:
    """Returns a kernel's name as users know it."""
    return name.rpartition(":")[2].lstrip("_")


def expect_taken(query: Tensor, function: str) -> None:
    """Raises Error if a kernel refuses the dtype or the width of the heads."""
    if query.is_cpu or query.is_meta:
        return
    problem, (dtypes, widest) = "", getattr(function_named(function), "TAKES", (DTYPES, WIDEST))
    if query.shape[-1] > widest:
        problem = f"heads of width {query.shape[-1]}, and computes with at most {widest}"
    elif query.dtype not in dtypes and is_computed(query):  # In a capture the dtype may not be the last one.
        names = [str(dtype).removeprefix("torch.") for dtype in (query.dtype, *dtypes)]
        problem = f"{names[0]}, and computes in {' and '.join(names[1:])}"
    if problem:
        raise Error(
            f"{_shown(function)} gets {problem}",
            fix='F.scaled_dot_product_attention, or attn_implementation="sdpa"; for a dtype also autocast, '
            "model.bfloat16(), or compute_dtype of distribute",
        )


def _by_kernel(name: str, arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns what a kernel computes."""
    function = function_named(name)
    values = {**parameters_of(function), **settings, **dict.fromkeys(TOTALS, True), RECORDS: torch.is_grad_enabled()}
    values |= {name: arguments[operand] for operand, names in NAMES.items() for name in names}
    result = getattr(function, "apply", function)(*(values.get(name) for name in parameters_of(function)))
    return result[0], result[1]


@cache
def function_named(name: str) -> Any:
    """Returns the torch.autograd.Function of a name, `module:class`, or the operator of a name, `library::operator`."""
    if "::" in name:
        return loaded_operator(name)
    module, _, attribute = name.partition(":")
    return getattr(sys.modules[module], attribute)


@cache
def parameters_of(function: Any) -> Mapping[str, Any]:
    """Returns the parameters of a torch.autograd.Function, but for `ctx`, or of an operator: with defaults or None."""
    if isinstance(function, OpOverload):
        return bound_arguments(function, (), {})
    parameters = list(inspect.signature(function.forward).parameters.values())[1:]
    return {p.name: None if p.default is p.empty else p.default for p in parameters}
