"""flash_functions: the functions of flash-attn 2, 3 and 4, and of kernels like them, as one operator of a graph.

    FlashAttnFunc.apply(q, k, v, 0.0, None, True, ...)      made by flash_attn_func(q, k, v, causal=True)
    attention_kernel(q, k, v, None, ..., "flash_attn.flash_attn_interface:FlashAttnFunc", "{'causal': True, ...}")

NOTE [Which calls become an operator]
All of them end in a torch.autograd.Function of a known name, however a model calls it: by transformers, by a kernel of
the hub, by `functools.partial`. The names of its arguments say what they are. An argument with another name is refused,
for no rule says what a part of it is, and no product computes it on a CPU: unless it is the function's own default,
or says that nothing is wanted.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from autotp.errors import Error
from autotp.integrations.attention_kernels.kernel_operator import (
    KERNEL,
    NAMES,
    RECORDS,
    TOTALS,
    function_named,
    parameters_of,
)
from autotp.source_location import user_line

FUNCTIONS = {
    name.format(joined): name.format("")
    for name in ("FlashAttn{}Func", "FlashAttnVarlen{}Func")
    for joined in ("", "QKVPacked", "KVPacked")
}
"""A function, also one of joined queries, keys and values -> the function of three tensors."""
PLAIN = bool | int | float | str | None
SCORES = {"softmax_scale", "causal", "window_size", "softcap", "dropout_p"}
SPEED = {"deterministic", "num_splits", "pack_gqa", "sm_margin"}
"""Arguments with a rule, and those that change no more than the order of sums: both are plain values."""


def flash_formula(function: type) -> Callable[..., Any] | None:
    """Returns what stands for a function of flash-attn in a capture; None for other functions."""
    is_kernel = function.__name__ in FUNCTIONS and "flash_attn" in function.__module__
    return partial(_recorded, function) if is_kernel else None


def _recorded(function: Any, *args: Any) -> Any:
    """Returns what the function returns, as results of one operator.

    Raises:
        Error: the function gets a tensor, or a function, of which no rule is known; or its dropped weights are read.
    """
    defaults = parameters_of(function)
    arguments = {**defaults, **dict(zip(defaults, args, strict=False))}
    arguments = _apart(arguments)
    operands = {operand: next((x for n in names if (x := arguments.pop(n, None)) is not None), None)
                for operand, names in NAMES.items()}  # fmt: skip
    flags = {name: arguments.pop(name) for name in (*TOTALS, RECORDS) if name in arguments}
    expect_known(function.__name__, arguments, defaults)
    if arguments.get("dropout_p") and flags.get("return_softmax"):
        raise Error(
            f"{function.__name__} gets return_attn_probs=True with dropout: each rank drops weights of its own",
            at=user_line(traceback.extract_stack()),
            fix="return_attn_probs=False, or dropout_p=0.0",
        )
    before, after = (-1 if n is None else n for n in arguments.get("window_size") or (-1, -1))
    name = f"{function.__module__}:{FUNCTIONS[function.__name__]}"
    function_named(name)
    output, totals = KERNEL(
        *operands.values(), arguments.get("softmax_scale"), before, 0 if arguments.get("causal") else after,
        arguments.get("softcap") or 0.0, arguments.get("dropout_p") or 0.0, name, repr(arguments),
    )  # fmt: skip
    if flags.get(TOTALS[0], True) is False:
        return output
    return (output, totals, output.new_empty(0)) if "dropout_p" in arguments else (output, totals)


def expect_known(function: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises Error for an argument of a kernel that is no plain value with a rule, nor the function's default."""
    for name, value in arguments.items():
        is_plain = all(isinstance(x, PLAIN) for x in (value if isinstance(value, tuple | list) else [value]))
        if not is_plain or (value and value != defaults[name] and name not in SCORES | SPEED):
            raise Error(
                f"{function} gets `{name}`, for which autotp has no rule",
                at=user_line(traceback.extract_stack()),
                fix="F.scaled_dot_product_attention, or a call without it",
            )


def _apart(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the function of three tensors: joined ones are taken apart."""
    if "qkv" in arguments:
        joined, heads = arguments.pop("qkv"), arguments.pop("num_heads_q", None)
        if heads is None or joined.dim() == 5:
            parts = joined.unbind(-3)
        else:  # flash-attn 3: the heads of queries, keys and values, one after the other.
            groups = (joined.shape[-2] - heads) // 2
            parts = joined.split([heads, groups, groups], -2)
        arguments |= dict(zip("qkv", parts, strict=True))
    if "kv" in arguments:
        arguments |= dict(zip("kv", arguments.pop("kv").unbind(-3), strict=True))
    for name in ("cu_seqlens", "max_seqlen"):
        if name in arguments:
            value = arguments.pop(name)
            arguments |= {f"{name}_q": value, f"{name}_k": value}
    return arguments
