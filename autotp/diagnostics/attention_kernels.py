"""attention_kernels: which kernels can compute an attention of a rank, and those that one device has and it has not.

    12 x causal float32, 3 heads of 64: GPU efficient, in bf16 flash, cuDNN, efficient; CPU flash

torch itself answers for tensors on a GPU (`torch.backends.cuda.can_use_flash_attention`, ...), and without CUDA always
no. A plan is made anywhere, so the conditions stand here as a table. They are those of torch 2.13 for GPUs from A100
on: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, sdp_utils_cpp.h and, for CPUs, sdp_utils_cpp.cpp.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from autotp.diagnostics.node_text import operator_text
from autotp.display.sheet import Table
from autotp.ops.attention.causal_rows import causal_rows
from autotp.ops.attention.products import attention
from autotp.ops.attention.zigzag import zigzag_rows
from autotp.ops.dropout import exact_attention, fast_attention, fast_causal_rows, fast_zigzag_rows
from autotp.rules.call import arguments_of
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Size
from autotp.source_location import layer_of, line_of

ROWS = (causal_rows, zigzag_rows, fast_causal_rows, fast_zigzag_rows)
"""Causal attention of some of the queries. torch aligns its mask to the lower right."""
SDPA = (torch.ops.aten.scaled_dot_product_attention.default, attention, fast_attention, exact_attention, *ROWS)
HALF = (torch.float16, torch.bfloat16)
DEVICES = GPU, IN_HALF, CPU = "GPU", "GPU in bf16", "CPU"
GROUPED_EFFICIENT = torch.torch_version.TorchVersion(torch.__version__) >= "2.14"
"""Whether torch's memory-efficient kernel takes fewer heads of keys than of queries."""
DRAWN = 'randomness="exact" draws the mask of one device, for which attention is computed by products'


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionCall:
    """What kernels ask of a call of attention, as torch's `SDPAParams`.

    Attributes:
        query, key, value: tensors of the shapes and strides of the call, [batch heads positions width].
        mask: that of the call, if there is one.
        dtype: of queries, keys and values.
        dropout: its probability.
        causal: "upper left", as `is_causal` of torch, "lower right", or "" for a call that is not causal.
        enable_gqa: whether there may be fewer heads of keys than of queries.
        learned_mask: whether the mask has a gradient.
        by_products: whether the call is computed by products, whatever kernels take.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    dtype: torch.dtype
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: str = ""
    enable_gqa: bool = False
    learned_mask: bool = False
    by_products: bool = False

    def __str__(self) -> str:
        form = "causal" if self.causal else "masked" if self.mask is not None else "full"
        dropout = " with dropout" if self.dropout else ""
        heads, groups = (x.shape[-3] if x.dim() > 2 else 1 for x in (self.query, self.key))
        grouped = f" in {groups} group{'s' * (groups != 1)}" if groups != heads else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{form} {dtype}{dropout}, {heads} heads{grouped} of {self.query.shape[-1]}"


@dataclass(frozen=True)
class AttentionRow:
    """An attention of a rank's graph.

    Attributes:
        name: the layer.
        at: the source line.
        call: what it computes: `causal float32, 3 heads of 64`; the operator, if it is a kernel of its own.
        kernels: "GPU" (from A100 on), "GPU in bf16" if the dtype is another one, "CPU" -> the kernels that can run it,
            those of torch: flash, cuDNN, efficient; none: products, with a matrix of queries and keys.
        lost: the same devices -> the kernels that one device has and the rank has not, and why.
    """

    name: str
    at: str
    call: str
    kernels: Mapping[str, tuple[str, ...]]
    lost: Mapping[str, str]

    def __str__(self) -> str:
        on_gpu, in_half, on_cpu = self.cells()
        half = f", in bf16 {in_half}" if in_half else ""
        return f"{self.call}: " + (f"GPU {on_gpu}{half}; CPU {on_cpu}" if self.kernels else "a kernel of its own")

    def cells(self) -> list[str]:
        """Returns the kernels on each device as text; an empty one where nothing is said."""
        return [", ".join(self.kernels[x]) or "products" if x in self.kernels else "" for x in DEVICES]


def attention_lines(rows: Sequence[AttentionRow]) -> Iterator[str]:
    """Yields the text of attentions: a line for those that are alike, and one for what they lose."""
    for text, n in Counter(map(str, rows)).items():
        yield f"{n} x {text}"
    yield from dict.fromkeys(text for row in rows for text in _losses(row))


def attention_table(rows: Sequence[AttentionRow]) -> Table:
    """Returns the table of attentions; those that are alike are one row."""
    cells = Counter((row.call, *row.cells(), ". ".join(_losses(row))) for row in rows)
    head = ("attention", *DEVICES, "what one device has, too")
    return Table(head, tuple((f"{n} x {call}", *rest) for (call, *rest), n in cells.items()), ("", "", "", "", "note"))


def _losses(row: AttentionRow) -> list[str]:
    return [f"{device} loses {lost}" for device, lost in row.lost.items()]


# ---- conditions


def _lengths(*tensors: Tensor, dim: int) -> list[Size]:
    return [Size.of(x.shape[dim]) for x in tensors]


def _has_heads(call: AttentionCall, grouped: bool = True) -> bool:
    batches = _lengths(call.query, call.key, call.value, dim=0)
    heads, *groups = (x.shape[-3] for x in (call.query, call.key, call.value))
    if not batches[0] == batches[1] == batches[2] or groups[0] != groups[1]:
        return False
    return heads == groups[0] or bool(grouped and call.enable_gqa and groups[0] and heads % groups[0] == 0)


def _is_dense(call: AttentionCall, masks: bool = True) -> bool:
    tensors = [call.query, call.key, call.value, *([call.mask] if masks and call.mask is not None else [])]
    return all(Size.of(x.stride(-1)) == Size.of(1) for x in tensors)


def _widths(call: AttentionCall) -> list[int]:
    widths = [x.shape[-1] for x in (call.query, call.key, call.value)]
    return [n if isinstance(n, int) else n.node.hint for n in widths]


def _has_one_width(call: AttentionCall, widest: int | None = None) -> bool:
    width, *other_widths = set(_widths(call))
    return not other_widths and (widest is None or width <= widest)


def _is_square(call: AttentionCall) -> bool:
    queries, keys = _lengths(call.query, call.key, dim=-2)
    return call.causal != "upper left" or queries == keys


def _has_lengths(call: AttentionCall) -> bool:
    return Size.of(0) not in _lengths(call.query, call.key, dim=-2)


def _is_aligned(call: AttentionCall) -> bool:
    query, key, value = _widths(call)
    step = 8 if call.dtype in HALF else 4
    return bool(query == key and query and value and query % step == 0 and value % step == 0)


def _fits_mask(call: AttentionCall) -> bool:
    return call.mask is None or (not call.learned_mask and call.mask.dim() in (2, 4))


Condition = tuple[str, Callable[[AttentionCall], bool]]
"""What a kernel needs, as a sentence about it, and the test."""
BATCHES: Condition = (
    "takes [batch heads positions width]",
    lambda call: call.query.dim() == call.key.dim() == call.value.dim() == 4,
)
LENGTHS: Condition = ("needs a query and a key", _has_lengths)
HEADS: Condition = ("takes fewer heads of keys with enable_gqa alone", _has_heads)
HALVES: Condition = ("takes float16 and bfloat16", lambda call: call.dtype in HALF)
STRIDES: Condition = ("takes tensors whose last dimension has stride 1", _is_dense)
PLAIN_MASKS: Condition = ("takes masks of 2 or 4 dimensions that do not learn", _fits_mask)

ON_GPU: Mapping[str, tuple[Condition, ...]] = {
    "flash": (
        BATCHES,
        ("takes no mask", lambda call: call.mask is None),
        ("takes one width of queries, keys and values, up to 256", lambda call: _has_one_width(call, 256)),
        ("takes is_causal for as many queries as keys", _is_square),
        HALVES, HEADS, LENGTHS, STRIDES,
    ),
    "cuDNN": (
        BATCHES, PLAIN_MASKS, HALVES,
        ("draws dropout in steps of 1/16", lambda call: (call.dropout * 16).is_integer()),
        ("has no causal mask for some of the queries", lambda call: call.causal != "lower right"),
        LENGTHS, STRIDES, HEADS,
        ("takes widths up to 128 that are multiples of 8", lambda call: {*_widths(call)} <= {*range(8, 129, 8)}),
        ("takes more than one key", lambda call: Size.of(call.key.shape[-2]) != Size.of(1)),
    ),
    "efficient": (
        BATCHES,
        ("takes queries and keys of one width, and widths that are multiples of 8, or 4 in float32", _is_aligned),
        LENGTHS, STRIDES,
        ("takes as many heads of keys as of queries", lambda call: _has_heads(call, GROUPED_EFFICIENT)),
        ("takes float16, bfloat16 and float32", lambda call: call.dtype in (*HALF, torch.float32)),
    ),
}  # fmt: skip
"""A kernel of SDPA -> its conditions, in the words and the order of torch's functions `can_use_..._attention`."""
ON_CPU: Mapping[str, tuple[Condition, ...]] = {
    "flash": (
        ("has no dropout", lambda call: not call.dropout),
        BATCHES, HEADS, PLAIN_MASKS,
        ("takes one width of queries, keys and values", _has_one_width),
        LENGTHS,
        ("takes tensors whose last dimension has stride 1", lambda call: _is_dense(call, masks=False)),
        ("takes floating-point numbers", lambda call: call.dtype in (*HALF, torch.float32, torch.float64)),
    ),
}  # fmt: skip


def refusals(call: AttentionCall, device: str) -> dict[str, str]:
    """Returns for each kernel of a device, one of `DEVICES`, why it cannot run a call; "" if it can."""
    why = {
        kernel: next((f"it {text}" for text, holds in conditions if not holds(call)), "")
        for kernel, conditions in (ON_CPU if device == CPU else ON_GPU).items()
    }
    if call.by_products:
        return dict.fromkeys(why, DRAWN)
    if call.causal == "lower right" and device != CPU and why["flash"] and why["efficient"]:
        # torch writes the mask then, and takes the kernel that takes it.
        mask = call.query.new_empty(call.query.shape[-2], call.key.shape[-2], dtype=torch.bool)
        return refusals(replace(call, causal="", mask=mask), device)
    return why


# ---- the rows of a plan


def attention_rows(
    graph: fx.Graph, learning: Set[fx.Node], whole: fx.Graph, learning_in_whole: Set[fx.Node], exact: bool
) -> tuple[AttentionRow, ...]:
    """Returns the attentions of a rank's graph.

    Args:
        graph: the lowered graph of a rank.
        learning: its values that have a gradient.
        whole: the graph of the same function on one device.
        learning_in_whole: its values that have a gradient.
        exact: whether dropout draws the numbers of one device.
    """
    calls = defaultdict[tuple[str, str], list[AttentionCall]](list)
    for node in _attentions(whole):
        calls[layer_of(node), line_of(node)].append(_call_of(node, learning_in_whole, False))
    rows, counts = list[AttentionRow](), Counter[tuple[str, str]]()
    for node in _attentions(graph):
        place = layer_of(node), line_of(node)
        # Halves of a batch have two calls for one of the model's.
        beside = calls[place][min(counts[place], len(calls[place]) - 1)] if calls[place] else None
        counts[place] += 1
        rows.append(_row(place, _call_of(node, learning, exact), beside))
    with_own_kernel = (node for node in graph.nodes if has(node.target, Trait.ATTENTION) and node.target not in SDPA)
    rows += [AttentionRow(layer_of(node), line_of(node), _own_kernel(node), {}, {}) for node in with_own_kernel]
    return tuple(rows)


def _own_kernel(node: fx.Node) -> str:
    """Returns the name of the kernel that an attention calls: of one for several kernels the function's."""
    function = str(arguments_of(node).get("function") or "")
    return function.rpartition(":")[2].lstrip("_") or operator_text(node)


def _attentions(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.target in SDPA)


def _call_of(node: fx.Node, learning: Set[fx.Node], exact: bool) -> AttentionCall:
    arguments = arguments_of(node)
    query, key, value = (arguments[name].meta["val"] for name in ("query", "key", "value"))
    mask, dropout = arguments.get("attn_mask"), arguments.get("dropout_p") or 0.0
    rows, causal = node.target in ROWS, arguments.get("is_causal")
    return AttentionCall(
        query=query, key=key, value=value, dtype=query.dtype, mask=None if mask is None else mask.meta["val"],
        dropout=dropout, causal="lower right" if rows else "upper left" if causal else "",
        enable_gqa=bool(arguments.get("enable_gqa")), learned_mask=mask in learning,
        by_products=node.target is exact_attention or (exact and bool(dropout)),
    )  # fmt: skip


def _row(place: tuple[str, str], call: AttentionCall, beside: AttentionCall | None) -> AttentionRow:
    """Returns the row of a rank's call. beside: that of one device"""
    dtypes = {GPU: call.dtype, IN_HALF: torch.bfloat16, CPU: call.dtype}
    kernels, lost = dict[str, tuple[str, ...]](), dict[str, str]()
    for device, dtype in dtypes.items():
        if device == IN_HALF and call.dtype in HALF:
            continue
        why = refusals(replace(call, dtype=dtype), device)
        kernels[device] = tuple(kernel for kernel, reason in why.items() if not reason)
        of_one = refusals(replace(beside, dtype=dtype), device) if beside is not None else why
        missing = [kernel for kernel, reason in why.items() if reason and not of_one[kernel]]
        if missing:
            lost[device] = "; ".join(f"{kernel}: {why[kernel]}" for kernel in missing)
    return AttentionRow(*place, str(call), kernels, lost)
