"""flex_attention as an operator of a graph: its rule, its form for a rank's part, and what computes it.

    out, totals, peaks = flex_attention(query, key, value, [doc, slopes], text, scale)
    on a rank with heads 2 and 3 of 4:    flex_attention(..., start_1=2)
    and with the second half of the queries over cp:   flex_attention(..., start_1=2, start_2=512)

`text` has the score and mask functions (`mods.py`). On a GPU torch's fused kernel computes the operator, and no tensor
of queries x keys is made. Elsewhere it is computed by products: torch's flex_attention has no backward for CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from autotp.integrations.attention_kernels.flex.mods import CUTTABLE, Mods, mods_of, working_dtype
from autotp.passes import builder
from autotp.passes.check import erase
from autotp.passes.emit import python_calls
from autotp.passes.lower import localize
from autotp.passes.lower.local_sizes import Local
from autotp.passes.plan.infer_axes import Axes
from autotp.rules.call import Call, arguments_of
from autotp.rules.language import Rule, spell
from autotp.rules.registry import add_rows
from autotp.rules.row import Row, Trait
from autotp.sharding.axis import Axis, Size, touches

Totals = tuple[Tensor, Tensor, Tensor]
Starts = tuple[int, int, int]
"""Where the batch, the heads and the queries of a rank begin."""
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    text: str,
    scale: float | None,
    peaks: bool = False,
    start_1: int | None = None,
    start_2: int | None = None,
) -> Totals:
    """Returns attention [batch heads queries width], the log-sum-exp and the maximum of scores [batch heads queries].

    Args:
        query: those of this rank, [batch heads queries width].
        key, value: [batch groups keys width]; each head of a group reads the same keys.
        captured: the tensors that score and mask functions read.
        text: these functions, and options of the kernel: see `mods.py`.
        scale: of the products of queries and keys; None for 1/sqrt(width).
        peaks: whether the maximum is read; no kernel for CPUs returns it.
        start_1, start_2: the first head and the position of the first query of this rank; None for 0.
    """
    if torch.compiler.is_dynamo_compiling():  # It cannot make functions of a text: what it records runs what follows.
        recorded: Totals = FLEX(query, key, value, captured, text, scale, peaks, start_1, start_2)
        return recorded
    mods = mods_of(text, str(query.device))
    starts = (0, start_1 or 0, start_2 or 0)
    plain = torch._C._functorch.peek_interpreter_stack() is None
    if query.is_cuda and query.dtype in KERNEL_DTYPES and query.numel() and key.numel() and plain:
        return by_kernel(query, key, value, captured, mods, scale, starts, peaks)
    return by_products(query, key, value, captured, mods, scale, starts)


def by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    mods: Mods,
    scale: float | None,
    starts: Starts,
) -> Totals:
    """Returns the same as `flex_attention`, by products of queries and keys; arguments as there.

    As in torch's kernels, a query that may read no key gets zeros, and -inf as its log-sum-exp and its maximum.
    """
    with torch.autocast(query.device.type, enabled=False):
        heads, groups = query.shape[1], key.shape[1]
        if groups != heads and groups:  # A rank without heads has none to repeat.
            key, value = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        working = working_dtype(query)
        scores = query.to(working) @ key.to(working).transpose(-2, -1) * scale
        if scores.numel():
            part = [torch.arange(n, device=query.device) for n in scores.shape]
            whole_positions = [x + start for x, start in zip(part, starts, strict=False)]
            positions = *whole_positions, part[3], *part[:3]
            read = _batched(mods.mask, (), captured)(*positions)
            scores = _batched(mods.score, (0,), captured)(scores, *positions).to(working)
            scores = scores.masked_fill(~read, -math.inf)
        else:  # Each tensor that others have a gradient of has one here.
            scores = scores + sum(x.sum() * 0 for x in captured if x.is_floating_point())
        peaks = scores.detach().amax(-1) if scores.shape[-1] else scores.detach().sum(-1) - math.inf
        unread = peaks.isneginf()
        totals = scores.masked_fill(unread.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(unread, -math.inf)
        weights = torch.ops.aten._safe_softmax.default(scores, -1)
        return weights.to(value.dtype) @ value, totals, peaks


def _batched(function: Callable[..., Any], first: tuple[int, ...], captured: Sequence[Tensor]) -> Callable[..., Any]:
    """Returns a function of numbers as one of all scores, [batch heads queries keys].

    What it reads is no argument of `torch.vmap`, which would gather the parts of parameters.

    Args:
        first: 0 for each argument before the positions, which is of all scores.
    """

    def batched(*arguments: Any) -> Any:
        return function(*arguments, *captured)

    # From the innermost to the outermost dimension: the positions in the whole, and those in the part.
    for dim in ((3,), (2, 6), (1, 5), (0, 4)):
        batched = torch.vmap(batched, (*first, *(0 if i in dim else None for i in range(7))))
    return batched


def by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    mods: Mods,
    scale: float | None,
    starts: Starts,
    peaks: bool,
) -> Totals:
    """Returns the same as `flex_attention`, by torch's kernel; arguments as there."""
    from torch.nn.attention import flex_attention as torchs  # All of Dynamo comes with it.

    def whole(positions: Any) -> Any:
        return *(x + start for x, start in zip(positions, starts, strict=False)), positions[3], *positions[:3]

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return mods.mask(*whole((b, h, q, k)), *captured)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return mods.score(score, *whole((b, h, q, k)), *captured)

    sizes = [n if letter in (mods.mask_reads or "") else None for letter, n in zip("bh", query.shape, strict=False)]
    mask = None
    if mods.mask_reads is not None:
        make = _compiled(torchs.create_block_mask)
        mask = make(mask_mod, *sizes, query.shape[2], key.shape[2], device=query.device)
    out, aux = _compiled(torchs.flex_attention)(
        query, key, value, score_mod, mask, scale, query.shape[1] != key.shape[1],
        kernel_options=dict(mods.options) or None, return_aux=torchs.AuxRequest(lse=True, max_scores=peaks),
    )  # fmt: skip
    return out, aux.lse, aux.max_scores if peaks else torch.empty_like(aux.lse)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function compiled; inside of torch.compile as it is. torch keeps what it compiled by the code."""
    return function if torch.compiler.is_compiling() else torch.compile(function)


# ---- the operator

torch.library.define(
    "autotp::flex_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor[] captured, str text, float? scale, bool peaks=False, "
    "SymInt? start_1=None, SymInt? start_2=None) -> (Tensor, Tensor, Tensor)",
)
FLEX = torch.ops.autotp.flex_attention.default
NAMES = tuple(argument.name for argument in FLEX._schema.arguments)


def flex_attention_like(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Totals:
    """Returns tensors without values, of the shapes that `flex_attention` returns."""
    rows = query.new_empty(query.shape[:3], dtype=working_dtype(query))
    return query.new_empty((*query.shape[:3], value.shape[3])), rows, torch.empty_like(rows)


class _WithoutValues(torch.autograd.Function):
    """The results without values, of which the operands have gradients as of those with values.

    A pipeline asks a run without values which parameters have one.
    """

    @staticmethod
    def forward(ctx: Any, *operands: Tensor) -> Totals:
        ctx.save_for_backward(*operands)
        output, totals, peaks = flex_attention_like(*operands[:3])
        ctx.mark_non_differentiable(peaks)
        return output, totals, peaks

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        return tuple(torch.empty_like(x) if x.is_floating_point() else None for x in ctx.saved_tensors)


@torch.library.impl("autotp::flex_attention", "CompositeImplicitAutograd")
def _(query: Tensor, key: Tensor, value: Tensor, captured: Sequence[Tensor], *arguments: Any) -> Totals:
    if isinstance(query, FakeTensor) or query.is_meta:
        examples: Totals = _WithoutValues.apply(query, key, value, *captured)
        return examples
    return flex_attention(query, key, value, captured, *arguments)


def _rule(call: Call) -> Rule:
    """Returns the rule: each head and each query by itself. NOTE [Positions of a rank] in `mods.py`

    What reads the position in the whole needs the form of a part, which knows where the part begins.
    """
    query, key = call["query"], call["key"]
    mods = mods_of(call["text"])
    shared = Size.of(query.shape[1]) != Size.of(key.shape[1])
    b = "b^" if "b" in mods.reads else "b"
    h, s = (
        "" if letter not in mods.reads else "!" if call[name] is None else "^"
        for letter, name in (("h", "start_1"), ("q", "start_2"))
    )
    minor = "^" if h else ""  # The first head of a rank says which heads it has only if these follow one another.
    one_group = shared and Size.of(key.shape[1]) == Size.of(1)
    heads, groups = (f"h{h}", "1") if one_group else (f"(k{h} g{minor})", f"k{h}") if shared else (f"h{h}", f"h{h}")
    of_keys = b if Size.of(query.shape[0]) == Size.of(key.shape[0]) else "1"
    terms = [[b, heads, f"s{s}", "d^"], [of_keys, groups, "t^", "d^"], [of_keys, groups, "t^", "e"]]
    named = {"b": b, "h": heads, "q": f"s{s}"}
    terms += [[named.get(x, f"x{i}_{d}^") for d, x in enumerate(row)] for i, row in enumerate(mods.dims)]
    rows = [b, heads, f"s{s}"]
    return Rule.of(
        spell(terms, [[*rows, "e"], rows, rows]), **({"k": key.shape[1]} if shared and not one_group else {})
    )


def _form(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    """Returns the call of a part that begins at the start of this rank's heads or queries."""
    arguments = arguments_of(node)
    dims = axes.of(arguments["query"])
    dim = next(d for d in range(len(CUTTABLE)) if touches(dims[d], leaf))
    start = localize.start_of_part(local, node, dims[dim], leaf)
    return FLEX, tuple((local.builder.map(arguments) | {f"start_{dim}": start}).values())


def add_operator() -> None:
    """Adds the operator to the tables of the passes."""
    add_rows({FLEX: Row(_rule, Trait.ATTENTION)})
    localize.FORMS[FLEX] = _form
    erase.FORMS[FLEX] = FLEX, NAMES, ""
    builder.SIZES[FLEX] = flex_attention_like
    python_calls.PYTHON_CALLS[FLEX] = flex_attention
