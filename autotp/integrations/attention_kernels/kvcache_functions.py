"""kvcache_functions: flash-attn's `flash_attn_with_kvcache`, which decodes with a cache, as a write and an operator.

    y = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

    k_cache[rows, lengths + arange(new)] = k            and v, by torch's own operators
    y, _ = attention_with_cache(q, k_cache, v_cache, lengths + new, ...)

So who holds the cache decides where it lies: that of an attribute or buffer of a module has this rank's heads, an
argument is whole. On a GPU the operator calls the function, without new keys. It has no gradient, as the function.
"""

from __future__ import annotations

import ast
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from autotp.errors import Error
from autotp.integrations.attention_kernels.kernel_operator import expect_known, expect_taken, function_named
from autotp.integrations.attention_kernels.packed import ScoreSettings, packed_attention
from autotp.rules.call import Call
from autotp.rules.language import Rule, spell
from autotp.rules.registry import add_rows
from autotp.rules.row import Row, Trait
from autotp.sharding.axis import Size
from autotp.source_location import user_line
from autotp.torch_internals import set_until_undone

FUNCTION = "flash_attn_with_kvcache"
TENSORS = ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens")
PAGES, TOTALS = ("block_table", "page_table"), "return_softmax_lse"
"""How flash-attn 2 and 3 call the pages of each row, and the wish for the log-sum-exp."""


def _code(*args, **kwargs):  # type: ignore[no-untyped-def]
    from autotp.integrations.attention_kernels.kvcache_functions import write_and_attend

    return write_and_attend(__name__, args, kwargs)  # The name of the module whose function has this code now.


@contextmanager
def caches_in_operators() -> Iterator[None]:
    """A region in which the functions of flash-attn 2, 3 and of hub kernels are operators, by whatever name."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            function = vars(module).get(FUNCTION) if "flash_attn" in name and module is not None else None
            if isinstance(function, FunctionType) and function.__module__ == name:
                _defaults(name)  # Before the function has another signature.
                stack.callback(set_until_undone(function, "__code__", _code.__code__))
        yield


@cache
def _defaults(module: str) -> Mapping[str, Any]:
    """Returns the parameters of a module's function, with their defaults or None."""
    parameters = inspect.signature(function_named(f"{module}:{FUNCTION}")).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in parameters}


def write_and_attend(module: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns what the function returns; writes the new keys and values into the caches.

    Args:
        module: the name of the function's module.
        args, kwargs: the arguments of the call.

    Raises:
        Error: the function gets a tensor of which no rule is known.
    """
    defaults = _defaults(module)
    arguments = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
    query, keys, values, new_keys, new_values, lengths = (arguments.pop(name) for name in TENSORS)
    pages = next((x for name in PAGES if (x := arguments.pop(name, None)) is not None), None)
    slopes, wants_totals = arguments.pop("alibi_slopes", None), arguments.pop(TOTALS, False)
    expect_known(FUNCTION, arguments, defaults)
    _expect_fitting(query, keys, values, new_keys, new_values)
    if lengths is None and (new_keys is not None or pages is not None):
        raise Error(f"{FUNCTION} gets no cache_seqlens", at=user_line(traceback.extract_stack()), fix="cache_seqlens=")
    if not isinstance(lengths, Tensor):
        full = keys.shape[1] if lengths is None else lengths
        lengths = torch.full((query.shape[0],), full, dtype=torch.int32, device=query.device)
    if new_keys is not None:
        places = lengths.unsqueeze(1) + torch.arange(new_keys.shape[1], device=query.device)  # [batch new]
        _write(keys, new_keys.detach(), places, pages)
        _write(values, new_values.detach(), places, pages)
        lengths = lengths + new_keys.shape[1]
    before, after = (-1 if n is None else n for n in arguments.get("window_size") or (-1, -1))
    output, totals = WITH_CACHE(
        *(x.detach() for x in (query, keys, values)), lengths, pages, slopes, arguments.get("softmax_scale"),
        before, 0 if arguments.get("causal") else after, arguments.get("softcap") or 0.0,
        f"{module}:{FUNCTION}", repr(arguments),
    )  # fmt: skip
    return (output, totals) if wants_totals else output


def _expect_fitting(query: Tensor, keys: Tensor, values: Tensor, *new: Tensor | None) -> None:
    """Raises Error for caches of other heads or widths. The comparison tells a capture that the sizes are equal."""
    pairs = [(x, y) for x, y in zip((keys, values), new, strict=True) if y is not None]
    fits = all(x.shape[-2] == y.shape[-2] and x.shape[-1] == y.shape[-1] for x, y in [(keys, values), *pairs])
    if not fits or keys.shape[-1] != query.shape[-1] or query.shape[-2] % keys.shape[-2]:
        shapes = ", ".join(str([*map(int, x.shape)]) for x in (query, keys, values, *new) if x is not None)
        raise Error(
            f"{FUNCTION} gets {shapes}, whose heads or widths do not fit",
            at=user_line(traceback.extract_stack()),
            fix="caches of [rows places groups width], with the groups and the width of the new keys and values",
        )


def _write(target: Tensor, new: Tensor, places: Tensor, pages: Tensor | None) -> None:
    """Writes [batch new groups width] to these places of each row of a cache."""
    if pages is None:
        rows = torch.arange(new.shape[0], device=places.device).unsqueeze(1)
        target[rows, places] = new
        return
    size = target.shape[1]
    page = pages.gather(1, (places // size).long())
    target[page.long(), places % size] = new


@torch.library.custom_op("autotp::attention_with_cache", mutates_args=())
def _attention_with_cache(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, pages: Tensor | None, slopes: Tensor | None,
    scale: float | None, before: int, after: int, softcap: float, function: str, settings: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns attention to a cache and its log-sum-exp, [batch seq heads width] and [batch heads seq].

    Args:
        query: [batch seq heads width]; the last one of a row is at the position of the row's last key.
        key, value: caches, [batch places groups width]; with pages [pages places groups width].
        lengths: how many keys each row has, [batch].
        pages: the pages of each row, [batch pages_of_a_row].
        slopes, scale, before, after, softcap: as in `attention_kernel`.
        function: the kernel, as `function_named` reads it.
        settings: its arguments that are plain values, as the text of a dict.
    """
    expect_taken(query, function)
    if query.is_cpu or not query.numel():
        scores = ScoreSettings(scale, (before, after), softcap, slopes)
        return _by_products(query, key, value, lengths, pages, scores)
    defaults = _defaults(function.partition(":")[0])
    named = {"q": query, "k_cache": key, "v_cache": value, "cache_seqlens": lengths, "alibi_slopes": slopes,
             **dict.fromkeys(PAGES, pages), TOTALS: True}  # fmt: skip
    values = {**ast.literal_eval(settings), **{name: x for name, x in named.items() if name in defaults}}
    output, totals, *_ = function_named(function)(**values)
    return output, totals


WITH_CACHE = torch.ops.autotp.attention_with_cache.default


@_attention_with_cache.register_fake
def _results(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Returns tensors for the results, without values."""
    batch, seq, heads, _width = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty((batch, seq, heads, value.shape[-1])), query.new_empty((batch, heads, seq), dtype=dtype)


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, pages: Tensor | None, scores: ScoreSettings
) -> tuple[Tensor, Tensor]:
    """Returns the same by products, one row after another; for CPUs."""
    output, totals = _results(query, key, value)
    for row, length in enumerate(lengths.tolist()):
        keys, values = (_keys_of_row(x, row, length, pages) for x in (key, value))
        of_queries, of_keys = (torch.tensor([0, n], dtype=torch.int32) for n in (query.shape[1], length))
        slopes = scores.slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[row]
        settings = scores._replace(slopes=slopes)
        output[row], totals[row] = packed_attention(query[row], keys, values, of_queries, of_keys, settings)
    return output, totals


def _keys_of_row(x: Tensor, row: int, length: int, pages: Tensor | None) -> Tensor:
    """Returns what a row of the cache has, [length groups width]."""
    if pages is None:
        return x[row, :length]
    used = -(-length // x.shape[1])
    return x[pages[row, :used].long()].flatten(0, 1)[:length]


def _rule(call: Call) -> Rule:
    """Returns the rule: rows and heads by themselves; pages are of no row."""
    shared = Size.of(call["query"].shape[-2]) != Size.of(call["key"].shape[-2])
    heads, groups = ("(k g)", "k") if shared else ("h", "h")
    slopes = call["slopes"]
    row, place = ("b", "t^") if call["pages"] is None else ("n^", "p^")
    ins = [["b", "s^", heads, "d^"], [row, place, groups, "d^"], [row, place, groups, "e^"], ["b"]]
    ins += [["b", "y^"]] * (call["pages"] is not None)
    ins += [[heads] if slopes.dim() == 1 else ["b", heads]] if slopes is not None else []
    sizes = {"k": call["key"].shape[-2]} if shared else {}
    return Rule.of(spell(ins, [["b", "s^", heads, "e^"], ["b", heads, "s^"]]), **sizes)


def add_cache() -> None:
    """Adds the operator to the table of rules."""
    add_rows({WITH_CACHE: Row(_rule, Trait.ATTENTION)})
