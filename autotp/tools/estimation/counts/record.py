"""record: runs a piece of a rank's graph on `meta`, forward and backward, and writes down what it did.

Before: y = linear(x, w); z = gelu(y)
After:  addmm [64 x 32 x 16], gelu 8 KB; backward: gelu_backward, mm, mm; kept for backward: x, y

The operators are those that would run: the emitted graph is run, with autograd, under a mode that sees each operator.
Collectives go to process groups that have a size and no processes. What autograd keeps, it tells itself
(`torch.autograd.graph.saved_tensors_hooks`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.costs.operators import Op, Phase, Touch, arithmetic_of, is_free, kind_of, work_of
from autotp.costs.work import COLLECTIVES, bytes_moved, nested_tensors, without_processes
from autotp.ops.attention.causal_rows import causal_rows, in_own_memory, mask_of_pieces
from autotp.ops.attention.products import attention_weights
from autotp.ops.attention.zigzag import pieces, zigzag_rows
from autotp.ops.dropout import fast_attention, fast_causal_rows, fast_dropout, fast_zigzag_rows
from autotp.ops.experts.exchange import exchange_counts
from autotp.passes.emit.kept_values.recomputed import Recomputed
from autotp.rules.registry import is_grouped
from autotp.tools.estimation.counts.even_rows import even_exchange, even_groups
from autotp.tools.estimation.counts.on_meta import call

aten = torch.ops.aten
META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor between pieces: its sizes, dtype, and whether a gradient flows through it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool

    @property
    def bytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a piece did for one microbatch.

    Attributes:
        ops: the operators in the order in which they ran.
        kept: memory that backward reads: number -> bytes. Parameters are not among it.
        head: those of them that are kept behind the block: a head's logits.
        inputs: number of the memory of an input -> the input's place among the placeholders.
        bytes: number of a memory -> its bytes.
        held: the numbers of the memory of parameters, buffers and constants.
        sent: the tensors that the piece returns, in order.
        sent_memory: the numbers of their memory.
    """

    ops: tuple[Op, ...]
    kept: Mapping[int, int]
    head: frozenset[int]
    inputs: Mapping[int, int]
    bytes: Mapping[int, int]
    held: frozenset[int]
    sent: tuple[Value, ...]
    sent_memory: tuple[int, ...]


Reads = Literal["parameter", "held", "input"]
"""What a placeholder reads: a parameter; a buffer or a constant; an input, or a value of an earlier piece."""


def record(
    module: nn.Module,
    values: Sequence[tuple[Value, Reads]],
    groups: Mapping[str, int],
    on_gpu: bool = True,
    early_stop: bool = True,
) -> Record:
    """Returns what a module did, forward and backward.

    Args:
        module: an emitted graph for `meta`; communicates over the groups' names.
        values: what each placeholder reads, in order.
        groups: name of a process group -> its size.
        on_gpu: whether dropout and attention are the operators of GPUs; else attention is that of CPUs, and views are
            written down, which take a core's time.
        early_stop: whether what is computed again ends where backward needs no more.
    """
    with ExitStack() as stack:
        stack.enter_context(without_processes(groups))
        for part in module.modules():
            if isinstance(part, Recomputed):
                part.ends_early = early_stop
        return _recorded(module, values, on_gpu)


def _recorded(module: nn.Module, values: Sequence[tuple[Value, Reads]], on_gpu: bool) -> Record:
    # Leaves of autograd: backward of a piece ends at what the piece receives, as backward of a stage does.
    arguments = [torch.empty(v.shape, dtype=v.dtype, device=META, requires_grad=v.learns) for v, _ in values]
    _use_fused(module, FUSED if on_gpu else ON_CPU)
    recorder = _Recorder(views=not on_gpu)
    hooks_of_blocks = [part.register_forward_pre_hook(recorder.enter_block) for part in module.children()]
    hooks_of_blocks += [part.register_forward_hook(recorder.leave_block) for part in module.children()]
    memories = [recorder.memory_of(x) for x in arguments]
    held_memories = {m for m, (_, reads) in zip(memories, values, strict=True) if reads != "input"}
    hooks = torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda x: x)
    try:
        # Torch functions of classes are off, as where a parallel model runs.
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass(), recorder:
            with hooks:
                results = module(*arguments)
            results = tuple(results) if isinstance(results, tuple | list) else (results,)
            recorder.phase = "backward"
            ends = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
            learners = [x for x in arguments if x.requires_grad]
            if ends and learners:
                torch.autograd.grad(ends, learners, [torch.empty_like(x) for x in ends], allow_unused=True)
    finally:
        for hook in hooks_of_blocks:
            hook.remove()
    tensors = [x for x in results if isinstance(x, Tensor)]
    inputs = {m: i for i, (m, (_, reads)) in enumerate(zip(memories, values, strict=True)) if reads == "input"}
    return Record(
        ops=tuple(recorder.ops),
        kept={m: recorder.bytes[m] for m in recorder.kept if m not in held_memories},
        head=frozenset(recorder.head & recorder.kept - held_memories),
        inputs=inputs,
        bytes=recorder.bytes,
        held=frozenset(held_memories),
        sent=tuple(Value(shape=tuple(x.shape), dtype=x.dtype, learns=x.requires_grad) for x in tensors),
        sent_memory=tuple(recorder.memory_of(x) for x in tensors),
    )


def _use_fused(module: nn.Module, kinds: Mapping[Any, Callable[..., Tensor]]) -> None:
    """Makes a module call operators that GPUs have: on `meta` torch would take others."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            before = [node.target for node in part.graph.nodes]
            for node in part.graph.nodes:
                node.target = kinds.get(node.target, node.target)
                if is_padded(node.target):
                    node.target = even_groups  # On a device it loops over the groups, which are numbers.
            if [node.target for node in part.graph.nodes] != before:
                part.recompile()


def is_padded(operator: Any) -> bool:
    """True for products of groups of rows whose number a device reads from values: `even_groups` stands for them."""
    return is_grouped(operator) and operator is not aten._grouped_mm.default


def fused_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Returns the dropout of `x`, as GPUs compute it: it keeps a mask of one byte an element. x: [...]"""
    return aten.native_dropout.default(x, p, train)[0] if train and p else x


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, p: float = 0.0, causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Returns attention in one operator, which keeps no scores. query: [batch heads seq width]

    Flash attention needs values of the keys' width; the memory-efficient one does not.
    """
    key, value, bias = _for_all_heads(query, key, value, mask, enable_gqa)
    if bias is None and value.shape[-1] == query.shape[-1]:
        return aten._scaled_dot_product_flash_attention.default(query, key, value, p, causal, scale=scale)[0]
    bias = None if bias is None else bias.expand(*query.shape[:-1], key.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention.default
    return efficient(query, key, value, bias, True, p, causal, scale=scale)[0]


def _for_all_heads(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns keys and values with a head for each of the queries, and the mask as what is added to scores."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    return key, value, mask


def fused_causal_rows(
    query: Tensor, key: Tensor, value: Tensor, start: int, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Returns causal attention of a rank's queries as GPUs compute it: each reads half of the rank's own positions.

    query: [batch heads seq/cp width]
    """
    keys = start + (query.shape[-2] + 1) // 2
    return fused_attention(
        in_own_memory(query), key.narrow(-2, 0, keys), value.narrow(-2, 0, keys), scale=scale, enable_gqa=enable_gqa
    )


def fused_zigzag_rows(
    query: Tensor, key: Tensor, value: Tensor, parts: int, rank: int, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Returns causal attention of both pieces of a rank's queries as GPUs compute it.

    query: [batch heads seq/cp width]
    """
    bounds = pieces(key.shape[-2], parts, rank)
    rows = query.split([stop - start for start, stop in bounds], -2)
    blocks = zip(rows, bounds, strict=True)
    return torch.cat([fused_causal_rows(x, key, value, bound[0], scale, enable_gqa) for x, bound in blocks], -2)


def fused_fast_attention(*arguments: Any) -> Tensor:
    """Returns attention with dropout in one operator; arguments as for `fast_attention`."""
    *operands, scale, enable_gqa, _ = arguments
    return fused_attention(*operands, scale=scale, enable_gqa=enable_gqa)


FUSED: dict[Any, Callable[..., Tensor]] = {
    aten.dropout.default: fused_dropout,
    fast_dropout: lambda x, p, _: fused_dropout(x, p, True),
    fast_attention: fused_fast_attention,
    causal_rows: fused_causal_rows,
    exchange_counts: even_exchange,
    zigzag_rows: lambda *arguments: fused_zigzag_rows(*arguments[:7]),
    fast_causal_rows: lambda *arguments: fused_causal_rows(*arguments[:6]),
    fast_zigzag_rows: lambda *arguments: fused_zigzag_rows(*arguments[:7]),
    aten.scaled_dot_product_attention.default: fused_attention,
}
"""An operator of a graph -> what a GPU runs for it."""


def cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, p: float = 0.0, causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Returns attention as a CPU computes it: in one operator, but for dropout, other widths, and a mask that learns.

    query: [batch heads seq width]
    """
    if p or value.shape[-1] != query.shape[-1] or (mask is not None and mask.requires_grad):
        attended: Tensor = aten.scaled_dot_product_attention.default(
            query, key, value, mask, p, causal, scale=scale, enable_gqa=enable_gqa
        )
        return attended
    key, value, bias = _for_all_heads(query, key, value, mask, enable_gqa)
    return aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, p, causal, attn_mask=bias, scale=scale
    )[0]


def cpu_fast_attention(*arguments: Any) -> Tensor:
    """Returns attention with dropout by products; arguments as for `fast_attention`."""
    query, key, value, mask, p, causal, scale, enable_gqa, _ = arguments
    weights, value = attention_weights(query, key, value, mask, causal, scale, enable_gqa)
    return fused_dropout(weights, p, True) @ value


def cpu_fast_causal_rows(query: Tensor, key: Tensor, value: Tensor, start: int, *settings: Any) -> Tensor:
    """Returns causal attention of a rank's queries with dropout by products; arguments as for `fast_causal_rows`."""
    scale, enable_gqa, p, rank = settings
    mask = mask_of_pieces(key, [(start, start + query.shape[-2])])
    return cpu_fast_attention(query, key, value, mask, p, False, scale, enable_gqa, rank)


def cpu_fast_zigzag_rows(query: Tensor, key: Tensor, value: Tensor, parts: int, place: int, *settings: Any) -> Tensor:
    """Returns the same for both pieces of a rank's queries; arguments as for `fast_zigzag_rows`."""
    scale, enable_gqa, p, rank = settings
    mask = mask_of_pieces(key, pieces(key.shape[-2], parts, place))
    return cpu_fast_attention(query, key, value, mask, p, False, scale, enable_gqa, rank)


ON_CPU: dict[Any, Callable[..., Tensor]] = {
    exchange_counts: even_exchange,
    fast_dropout: lambda x, p, _: fused_dropout(x, p, True),
    fast_attention: cpu_fast_attention,
    fast_causal_rows: cpu_fast_causal_rows,
    fast_zigzag_rows: cpu_fast_zigzag_rows,
    aten.scaled_dot_product_attention.default: cpu_attention,
}
"""An operator of a graph -> what a CPU runs for it."""


class _Recorder(TorchDispatchMode):
    """A mode that writes down each operator, and numbers the memory that operators touch.

    Attributes:
        phase: "forward" or "backward".
        ops: the operators so far.
        bytes: number of a memory -> its bytes.
        kept: the memory that autograd keeps for backward.
        head: the memory that it keeps behind the block.
    """

    keeps_no_tensor = True

    def __init__(self, views: bool = False) -> None:
        super().__init__()
        self._views = views
        self.phase: Phase = "forward"
        self.ops: list[Op] = []
        self.bytes: dict[int, int] = {}
        self.kept: set[int] = set()
        self.head: set[int] = set()
        self._behind = False
        self._numbers: dict[int, int] = {}
        self._next = itertools.count()
        self._running: dict[int, int] = {}

    def memory_of(self, tensor: Tensor, fresh: bool = False) -> int:
        """Returns the number of a tensor's memory. fresh: it was just allocated, perhaps where another was freed

        Memory of a tensor that no operator made (a constant) gets a number at its first use.
        """
        storage = tensor.untyped_storage()
        if fresh or storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = next(self._next)
        number = self._numbers[storage._cdata]
        self.bytes[number] = storage.nbytes()
        return number

    def keep(self, tensor: Tensor) -> Tensor:
        """Notes that autograd keeps a tensor: all of its memory stays."""
        # What is computed again in backward is needed there only for a moment.
        if self.phase == "forward":
            number = self.memory_of(tensor)
            if self._behind and number not in self.kept:
                self.head.add(number)
            self.kept.add(number)
        return tensor

    def enter_block(self, *_: Any) -> None:
        """Notes that what was kept so far is not behind the last block."""
        self._behind = False
        self.head.clear()

    def leave_block(self, *_: Any) -> None:
        """Notes that what follows is behind the block."""
        self._behind = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        results = call(func, args, kwargs)
        before = nested_tensors((args, kwargs))
        if func.namespace == "_c10d_functional":
            self._communicate(func, before, results, args)
        elif not is_free(func):
            self._compute(func, packet, before, results, args, kwargs)
        else:
            for x in nested_tensors(results):
                self.memory_of(x, fresh=True)
        return results

    def _compute(self, func: Any, packet: Any, before: Sequence[Tensor], results: Any, args: Any, kwargs: Any) -> None:
        operand_memory = {x.untyped_storage()._cdata for x in before}
        after = nested_tensors(results)
        if all(x.device != META for x in (*before, *after)):
            return  # The host does it, in its own memory: a random state is noted.
        made = [x for x in after if x.untyped_storage()._cdata not in operand_memory]
        # All results have the memory of an operand, and none is written: a view.
        if not made and not func._schema.is_mutable:
            if self._views:
                self.ops.append(Op(name=str(packet).partition(".")[2], kind="view", phase=self._now()))
            return
        written = made or _written(func, args)
        reads = [Touch(self.memory_of(x), bytes_moved(x)) for x in before]
        writes = [Touch(self.memory_of(x, fresh=x in _same(made)), bytes_moved(x)) for x in written]
        shape, flops, share = work_of(func, args, kwargs, results)
        # On empty tensors torch starts no kernel.
        if not any(t.bytes for t in (*reads, *writes)):
            return
        self.ops.append(
            Op(
                name=str(packet).partition(".")[2], kind=kind_of(func), phase=self._now(), shape=shape,
                flops=flops, share=share, reads=tuple(reads), writes=tuple(writes),
                dtype=(after or written)[0].dtype, arithmetic=arithmetic_of(packet, kwargs),
            )
        )  # fmt: skip

    def _communicate(self, func: Any, before: Sequence[Tensor], results: Any, args: Any) -> None:
        name = func.overloadpacket.__name__.rstrip("_")
        if name == "wait_tensor":
            number = self.memory_of(before[0])
            for x in nested_tensors(
                results
            ):  # On `meta` the waiting tensor is another one; on a device it is the same.
                self._numbers[x.untyped_storage()._cdata] = number
            # Several operators may wait for one collective: only the first one does.
            if (started := self._running.pop(number, -1)) >= 0:
                self.ops.append(Op(name="wait", kind="wait", phase=self._now(), waits=started))
            return
        known_memory = {x.untyped_storage()._cdata for x in before}
        after = nested_tensors(results)
        if func._schema.is_mutable:  # As above.
            for x, out in zip(before, after, strict=True):
                self._numbers[out.untyped_storage()._cdata] = self.memory_of(x)
            known_memory |= {x.untyped_storage()._cdata for x in after}
        writes = [
            Touch(self.memory_of(x, x.untyped_storage()._cdata not in known_memory), bytes_moved(x)) for x in after
        ]
        # The whole tensor is the result of an all-gather, and the operand of a reduce-scatter.
        whole = max(sum(map(bytes_moved, before)), sum(map(bytes_moved, after)))
        for touch in writes:
            self._running[touch.memory] = len(self.ops)
        group = args[-1] if isinstance(args[-1], str) else ""
        self.ops.append(
            Op(
                name=COLLECTIVES.get(name, name), kind="collective", phase=self._now(), axis=group, size=whole,
                reads=tuple(Touch(self.memory_of(x), bytes_moved(x)) for x in before), writes=tuple(writes),
                dtype=before[0].dtype,
            )
        )  # fmt: skip

    def _now(self) -> Phase:
        """Autograd runs backward without gradients, and what it computes again with them."""
        return "again" if self.phase == "backward" and torch.is_grad_enabled() else self.phase


class _same(list):
    """A list whose `in` compares objects: tensors compare elements."""

    def __contains__(self, x: object) -> bool:
        return any(x is y for y in self)


def _written(func: Any, args: Any) -> list[Tensor]:
    """Returns the arguments that an operator writes into."""
    places = [i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    return nested_tensors([args[i] for i in places if i < len(args)])
