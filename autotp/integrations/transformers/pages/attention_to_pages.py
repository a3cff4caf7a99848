"""attention_to_pages: attention to the pages of a cache, for continuous batching of transformers, as one operator.

    paged(module, q, k, v, mask, cache=c, read_index=[...], ...)  ->  attention_to_pages(q, k, v, [...], ..., "...")

transformers' scheduler owns the cache. So the cache is no tensor of a graph: a call of the model says which one it is,
and the operator calls transformers' function, which writes and reads it in place.

NOTE [Pages of a rank's heads]
transformers divides the heads of a cache over ranks where its `tp_plan` has keys and values, and their number can be
divided. `divided` tells it which models autotp cuts so, as GPT-2. Elsewhere, as where two ranks have the same head of
keys, and over cp, its pages have all heads, and a rank gives them as many as it computes when it first writes there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from autotp.attached import attach, attached_if_any
from autotp.errors import Error
from autotp.rules.call import Call
from autotp.rules.language import Rule, spell
from autotp.rules.registry import add_rows
from autotp.rules.row import Row, Trait
from autotp.sharding.axis import Size

INTERFACE, PAGED = "transformers.modeling_utils", "paged|"
FACTS = ("layer_idx", "sliding_window", "scaling", "training", "is_causal")
"""The attributes of a module that transformers' functions read, all plain values."""
SINKS = ("sinks", "s_aux")
"""How a module, and the arguments of a function, call the scores beside those of keys."""
KEYS = tuple(f"layers.*.self_attn.{name}_proj" for name in "kv")
"""What transformers looks up in a `tp_plan` to know whether ranks have a part of the heads."""
TENSOR, NUMBER = "a tensor", "a number"
_cache: ContextVar[Any] = ContextVar("cache", default=None)


@contextmanager
def pages_of(cache: Any) -> Iterator[None]:
    """A region in which attention writes and reads this cache, in this thread."""
    before = _cache.set(cache)
    try:
        yield
    finally:
        _cache.reset(before)


def is_pages(x: Any) -> bool:
    """True for a cache of transformers' continuous batching."""
    module: Any = sys.modules.get("transformers.generation.continuous_batching.cache")
    return module is not None and isinstance(x, module.PagedAttentionCache)


def divided(plan: dict[str, Any] | None, config: Any, ranks: int, cp: int) -> dict[str, Any]:
    """Returns a `tp_plan` by which transformers divides pages as autotp does heads. NOTE [Pages of a rank's heads]"""
    plan = {key: how for key, how in (plan or {}).items() if key.removeprefix("model.") not in KEYS}
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return plan if cp > 1 or heads % ranks else plan | dict.fromkeys(KEYS, "colwise")


def _functions() -> dict[str, Any]:
    interface: Any = getattr(sys.modules.get(INTERFACE), "AttentionInterface", None)
    functions: dict[str, Any] = {} if interface is None else interface._global_mapping
    return functions


@contextmanager
def pages_in_operators() -> Iterator[None]:
    """A region in which attention to pages is one operator."""
    functions = _functions()
    with patch.dict(functions, {name: partial(_recorded, name) for name in functions if name.startswith(PAGED)}):
        yield


def _recorded(
    name: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: Any = None, **named: Any
) -> tuple[Tensor, None]:
    """Returns what an attention of transformers returns, [1 tokens heads width] and no weights."""
    if _cache.get() is None:
        raise Error(
            f'attn_implementation="{name}" reads pages of continuous batching, which generate_batch alone has',
            fix=f'attn_implementation="{name.removeprefix(PAGED)}", and model.generate(**inputs)',
            alternative="model.generate_batch(prompts)",
        )
    tensors, numbers = list[Tensor](), list[Any]()
    facts = {fact: x for fact in FACTS if isinstance(x := getattr(module, fact, None), bool | int | float)}
    sinks = named.pop(SINKS[1], getattr(module, SINKS[0], None))
    arguments = {"attention_mask": mask, "scaling": scaling, "dropout": 0.0, **named}
    template = {key: _template(x, tensors, numbers) for key, x in arguments.items()}
    return ATTENTION_TO_PAGES(query, key, value, sinks, tensors, numbers, repr((name, facts, template))), None


def _template(value: Any, tensors: list[Tensor], numbers: list[Any]) -> Any:
    """Returns a value as a literal, with places for its tensors and numbers, which are added to the lists."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR, len(tensors) - 1
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        numbers.append(value)
        return NUMBER, len(numbers) - 1
    if isinstance(value, dict):
        return {key: _template(x, tensors, numbers) for key, x in value.items()}
    if isinstance(value, list):
        return [_template(x, tensors, numbers) for x in value]
    return value if isinstance(value, bool | float | str | None) else None


def _filled(template: Any, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Any:
    """Returns the value of a template."""
    match template:
        case dict():
            return {key: _filled(x, tensors, numbers) for key, x in template.items()}
        case list():
            return [_filled(x, tensors, numbers) for x in template]
        case (kind, place):
            return (tensors if kind == TENSOR else numbers)[place]
    return template


@torch.library.custom_op("autotp::attention_to_pages", mutates_args=())
def _attention_to_pages(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, tensors: list[Tensor], numbers: list[int],
    settings: str,
) -> Tensor:  # fmt: skip
    """Returns attention, [1 tokens heads width]; writes keys and values into the cache of this call.

    Args:
        query: [1 heads tokens width]. key, value: [1 groups tokens width].
        sinks: [heads], a score beside those of the keys.
        tensors, numbers: those among the arguments of transformers' function.
        settings: the name of the function, facts of the module, and all arguments, as the text of a tuple.
    """
    name, facts, template = ast.literal_eval(settings)
    cache, arguments = _cache.get(), _filled(template, tensors, numbers)
    if not query.numel():  # A rank without heads of queries reads nothing, and no kernel takes that.
        return _result(query, key, value)
    _fit(cache, key.shape[1])
    module = SimpleNamespace(
        **facts, config=SimpleNamespace(_attn_implementation=name), num_key_value_groups=query.shape[1] // key.shape[1]
    )
    if sinks is not None:
        module.sinks = arguments[SINKS[1]] = sinks
    output, _ = _functions()[name](module, query, key, value, arguments.pop("attention_mask"), cache=cache, **arguments)
    result: Tensor = output.view(1, query.shape[2], query.shape[1], value.shape[3])
    return result


@dataclass(frozen=True)
class PageHeads:
    """Belongs to a cache that was written: its number of heads on this rank."""

    number: int


def _fit(cache: Any, heads: int) -> None:
    """Gives a cache pages of so many heads, before anything is in them. NOTE [Pages of a rank's heads]

    Raises:
        Error: it was written with another number of heads.
    """
    written = attached_if_any(cache, PageHeads)
    if written is None:
        attach(cache, PageHeads(heads))
    if cache.num_key_value_heads == heads:
        return
    if written is not None:
        raise Error(
            f"layers of this rank compute {written.number} and {heads} heads of keys, and all pages have as many",
            fix="model.generate(**inputs)",
        )
    cache.num_key_value_heads = heads
    cache.cache_shape = (cache.cache_shape[0], heads, cache.cache_shape[2])
    for tensors in (cache.key_cache, cache.value_cache):
        for i in range(len(tensors)):
            tensors[i] = tensors[i].new_empty(0)  # So that both are not there at once.
            tensors[i] = tensors[i].new_empty(cache.cache_shape)
            # transformers reads zeros for padding there.
            tensors[i][cache.read_trash_index : cache.read_trash_index + cache.block_size] = 0


ATTENTION_TO_PAGES = torch.ops.autotp.attention_to_pages.default


@_attention_to_pages.register_fake
def _result(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _rule(call: Call) -> Rule:
    """Returns the rule: heads by themselves."""
    query, key, page_tensors = call["query"], call["key"], call["tensors"]
    shared = Size.of(query.shape[1]) != Size.of(key.shape[1])
    heads, groups = ("(k g)", "k") if shared else ("h", "h")
    ins = [["n^", heads, "s^", "d^"], ["n^", groups, "s^", "d^"], ["n^", groups, "s^", "e^"]]
    ins += [[heads]] * (call["sinks"] is not None)
    ins += [[f"x{i}d{d}^" for d in range(x.dim())] for i, x in enumerate(page_tensors)]
    sizes: Mapping[str, Any] = {"k": key.shape[1]} if shared else {}
    return Rule.of(spell(ins, [["n^", "s^", heads, "e^"]]), **sizes)


def add_pages() -> None:
    """Adds the operator to the table of rules."""
    add_rows({ATTENTION_TO_PAGES: Row(_rule, Trait.ATTENTION)})
