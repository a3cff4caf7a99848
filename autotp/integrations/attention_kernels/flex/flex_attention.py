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
from functools import cache
from hashlib import sha256
from types import FunctionType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from autotp.integrations.attention_kernels.flex.mods import CUTTABLE, Mods, mods_of, working_dtype
from autotp.ops.attention.documents import read_documents, stop_of_keys
from autotp.ops.placement_moves import nearby
from autotp.passes import builder
from autotp.passes.check import erase
from autotp.passes.emit import python_calls
from autotp.passes.lower import localize
from autotp.passes.lower.local_sizes import Local
from autotp.passes.plan.infer_axes import Axes
from autotp.rules.call import Call, arguments_of
from autotp.rules.language import Rule, spell
from autotp.rules.registry import add_rows
from autotp.rules.row import Reach, Row, Trait
from autotp.sharding.axis import Axis, Size, find, touches

Totals = tuple[Tensor, Tensor, Tensor]
Starts = tuple[int, int, int, int]
"""Where the batch, the heads, the queries and the keys of a rank begin."""
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: Sequence[Tensor],
    text: str,
    scale: float | None,
    peaks: bool = False,
    ends: Tensor | None = None,
    start_1: int | None = None,
    start_2: int | None = None,
    near: int | None = None,
) -> Totals:
    """Returns attention [batch heads queries width], the log-sum-exp and the maximum of scores [batch heads queries].

    Args:
        query: those of this rank, [batch heads queries width].
        key, value: [batch groups keys width]; each head of a group reads the same keys.
        captured: the tensors that score and mask functions read.
        text: these functions, and options of the kernel: see `mods.py`.
        scale: of the products of queries and keys; None for 1/sqrt(width).
        peaks: whether the maximum is read; no kernel for CPUs returns it.
        ends: where documents end that the mask says, [documents + 1], if the keys are chosen by them.
        start_1, start_2: the first head and the position of the first query of this rank; None for 0.
        near: the number of all keys, if these are only those that some of the queries see.
    """
    if torch.compiler.is_dynamo_compiling():  # It cannot make functions of a text: what it records runs what follows.
        recorded: Totals = FLEX(query, key, value, captured, text, scale, peaks, ends, start_1, start_2, near)
        return recorded
    mods = mods_of(text, str(query.device))
    first_key = 0
    if near is not None and mods.window is not None:
        after = mods.window[1] if mods.window[1] >= 0 else near
        end = stop_of_keys(near, (start_2 or 0) + query.shape[2], after, read_documents(ends, near))
        first_key = end - key.shape[2]
    starts = (0, start_1 or 0, start_2 or 0, first_key)
    plain = torch._C._functorch.peek_interpreter_stack() is None
    call = FlexCall(query, key, value, captured, mods, scale, starts, peaks)
    if query.is_cuda and query.dtype in KERNEL_DTYPES and query.numel() and key.numel() and plain:
        return by_kernel(call)
    return by_products(call)


class FlexCall(NamedTuple):
    """The arguments of `flex_attention`, with the functions of its text, and where the rank's part begins."""

    query: Tensor
    key: Tensor
    value: Tensor
    captured: Sequence[Tensor]
    mods: Mods
    scale: float | None
    starts: Starts
    peaks: bool = False


def by_products(call: FlexCall) -> Totals:
    """Returns the same as `flex_attention`, by products of queries and keys.

    As in torch's kernels, a query that may read no key gets zeros, and -inf as its log-sum-exp and its maximum.
    """
    query, key, value, captured, mods, scale, starts, _ = call
    with torch.autocast(query.device.type, enabled=False):
        heads, groups = query.shape[1], key.shape[1]
        if groups != heads and groups:  # A rank without heads has none to repeat.
            key, value = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        working = working_dtype(query)
        scores = query.to(working) @ key.to(working).transpose(-2, -1) * scale
        if scores.numel():
            part = [torch.arange(n, device=query.device) for n in scores.shape]
            positions = _whole(part, starts)
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


def by_kernel(call: FlexCall) -> Totals:
    """Returns the same as `flex_attention`, by torch's kernel."""
    from torch.nn.attention import flex_attention as torchs  # All of Dynamo comes with it.

    query, key, value, captured, mods, scale, starts, peaks = call

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return mods.score(score, *_whole((b, h, q, k), starts), *captured)

    out, aux = _compiled(torchs.flex_attention, mods.text)(
        query, key, value, score_mod, shared_blocks(call), scale, query.shape[1] != key.shape[1],
        kernel_options=dict(mods.options) or None, return_aux=torchs.AuxRequest(lse=True, max_scores=peaks),
    )  # fmt: skip
    return out, aux.lse, aux.max_scores if peaks else torch.empty_like(aux.lse)


def _whole(positions: Any, starts: Starts) -> Any:
    """Returns the positions in the whole, and those of the part."""
    return *(x + start for x, start in zip(positions, starts, strict=True)), *positions[:3]


def _compiled(function: Callable[..., Any], text: str) -> Callable[..., Any]:
    """Returns a function compiled; inside of torch.compile as it is."""
    return function if torch.compiler.is_compiling() else _own_code(function, text)


@cache
def _own_code(function: Callable[..., Any], text: str) -> Callable[..., Any]:
    """Returns a function compiled for a text.

    Dynamo keeps what it compiled by the code object, eight times, and then compiles no more: without a word the ninth
    mask would be computed by products. So each text has a code object of its own.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    code = called.__code__.replace(co_name=f"{function.__name__}_{sha256(text.encode()).hexdigest()[:8]}")
    return torch.compile(FunctionType(code, globals(), code.co_name, None, called.__closure__))


# ---- blocks

_BLOCKS = dict[Any, tuple[list[Any], list[Any], Any]]()
"""What a mask depends on -> references to the tensors that it reads, their versions, and its blocks; of the
call that runs. NOTE [Layers share blocks]"""


def forget_blocks() -> None:
    """Forgets the blocks of masks. A graph with flex_attention begins with it.

    NOTE [Layers share blocks] Layers that read the same mask with the same tensors share its blocks, which torch makes
    of a matrix of queries x keys. They are those of one call: a later one may have written into the tensors where torch
    counts no versions, as a CUDA graph does.
    """
    if not torch.compiler.is_compiling():  # There nothing is kept.
        _BLOCKS.clear()


def shared_blocks(call: FlexCall) -> Any:
    """Returns the BlockMask of a call's queries and keys; None for a call without a mask."""
    mods, query = call.mods, call.query
    if mods.mask_reads is None:
        return None
    if torch.compiler.is_compiling():
        return _blocks(call)
    read = [call.captured[i] for i in mods.masked_by]
    versions = [None if x.is_inference() else x._version for x in read]
    key = mods.mask_text, query.device, *query.shape[:3], call.key.shape[2], call.starts, *map(id, read)
    tensors, known_versions, mask = _BLOCKS.get(key, ([], [], None))
    # An id is one tensor's as long as that lives.
    if mask is None or versions != known_versions or any(x() is not y for x, y in zip(tensors, read, strict=True)):
        mask = _blocks(call)
        _BLOCKS[key] = [ref(x) for x in read], versions, mask
    return mask


def _blocks(call: FlexCall) -> Any:
    """Makes the BlockMask of a call's queries and keys."""
    from torch.nn.attention import flex_attention as torchs

    query, mods, starts = call.query, call.mods, call.starts
    # Of this function the mask of other layers is one, too: it keeps nothing that a score reads, and no graph.
    captured = [x.detach() if i in mods.masked_by else None for i, x in enumerate(call.captured)]

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return mods.mask(*_whole((b, h, q, k), starts), *captured)

    sizes = [n if letter in (mods.mask_reads or "") else None for letter, n in zip("bh", query.shape, strict=False)]
    make = _compiled(torchs.create_block_mask, mods.mask_text)
    return make(mask_mod, *sizes, query.shape[2], call.key.shape[2], device=query.device, **mods.blocks)


# ---- the operator

torch.library.define(
    "autotp::flex_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor[] captured, str text, float? scale, bool peaks=False, "
    "Tensor? ends=None, SymInt? start_1=None, SymInt? start_2=None, SymInt? near=None) -> (Tensor, Tensor, Tensor)",
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
    terms += [["n^"]] if call["ends"] is not None else []
    return Rule.of(
        spell(terms, [[*rows, "e"], rows, rows]), **({"k": key.shape[1]} if shared and not one_group else {})
    )


def _reach(call: Call) -> Reach | None:
    """Returns the window of a mask and its documents; None without, and for queries and keys of different lengths."""
    mods = mods_of(call["text"])
    if mods.window is None or Size.of(call["query"].shape[2]) != Size.of(call["key"].shape[2]):
        return None
    before, after = mods.window
    if mods.numbers is None:
        return Reach(before, after=after)
    place, dim = mods.numbers
    numbers = (3 + place, dim) if call["ends"] is None else None  # It is behind queries, keys and values.
    return Reach(before, ends="ends", after=after, sequence=2, numbers=numbers)


def _form(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    """Returns the call of a part that begins at the start of this rank's heads or queries."""
    arguments = arguments_of(node)
    dims = axes.of(arguments["query"])
    dim = next(d for d in range(len(CUTTABLE)) if touches(dims[d], leaf))
    part = {f"start_{dim}": localize.start_of_part(local, node, dims[dim], leaf)}
    if arguments["key"].target is nearby:
        part["near"] = local.size(find(dims[dim]).size)
    return FLEX, tuple((local.builder.map(arguments) | part).values())


def add_operator() -> None:
    """Adds the operator to the tables of the passes."""
    add_rows(
        {FLEX: Row(_rule, Trait.ATTENTION, reach=_reach, masked=lambda call: bool(mods_of(call["text"]).masked_by))}
    )
    localize.FORMS[FLEX] = _form
    erase.FORMS[FLEX] = FLEX, NAMES, ""
    builder.SIZES[FLEX] = flex_attention_like
    python_calls.PYTHON_CALLS[FLEX] = flex_attention
    python_calls.BEFORE_CALLS[FLEX] = forget_blocks
