"""kept_values: what autograd keeps of a block for backward, operator by operator, and what shall happen with it.

    Before: h = linear(x, w); g = gelu(h); y = linear(g, v)
    After:  linear saves x and w, gelu saves h (of linear), linear_1 saves g (of gelu) and v

NOTE [Whose fate a kept tensor has]
A tensor that autograd saves is either the output of an operator (or a view of one), or internal to the operator that
saves it: a mask, a log-sum-exp. Its fate is that of the operator that MADE its memory: of `gelu` for `g`, although
`linear_1` saves it. An internal tensor has the fate of the operator that saves it. Inputs of a block are kept, because
the block before has made them. A view, and an operator that writes in place, have the fate of the operator that made
the memory: their own names in the fates do not count.
What a recomputed operator reads is there when it runs again: the output of a kept operator then stays in memory, also
if autograd has not saved it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

Fate = Literal["keep", "recompute", "host", "bits"]
"""What happens with the memory that an operator makes, and that backward reads.

    keep: it stays.
    recompute: it is dropped; backward runs the operator again, and the dropped ones before it that it reads.
    host: it is copied to the host's memory, and back before backward reads it.
    bits: it stays in fewer bytes where that is exact; else as it is.
"""
Fates = Mapping[str, Fate]
"""Name of an operator (a node of a block's graph) -> its fate; "keep" for those that are not listed."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A tensor that autograd saves while a block runs.

    Attributes:
        node: the name of the operator that saves it.
        index: the place of the tensor in the order in which autograd saves the tensors of the block.
        origin: the name of the operator, or of the input of the block, that made its memory: NOTE [Whose fate a kept
            tensor has]; None for a tensor that is internal to `node`.
        memory: a number of its memory; tensors with the same number share it, and their bytes count once.
        bytes: of this memory, whole.
        dtype: of the tensor.
        shape: of the tensor.
        stride: of the tensor.
        offset: of the tensor in its memory, in elements.
    """

    node: str
    index: int
    origin: str | None
    memory: int
    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def fate(self, fates: Fates) -> Fate:
        """Returns what happens with the tensor. The result for an input of the block is "keep"."""
        return fates.get(self.origin or self.node, "keep")


def saved_by_node(module: fx.GraphModule, args: Sequence[Any]) -> list[Saved]:
    """Returns what autograd saves while a block runs on these arguments, in order. They may be fake, or on `meta`."""
    run = SavingRun(module)
    with torch.enable_grad():
        run.run(*args)
    return run.saved


class SavingRun(fx.Interpreter):
    """A run of a block, operator by operator, that notes which tensors autograd saves.

    Attributes:
        saved: the tensors that autograd saved so far, in order.
        origins: name of a node -> name of the node that made the memory of its output.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.saved: list[Saved] = []
        self.origins: dict[str, str] = {}
        # A reference to a freed memory keeps its address from being used again.
        self._memories: dict[int, tuple[int, StorageWeakRef]] = {}
        self._makers: dict[int, str] = {}
        self._node = ""

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node, and notes what it saves and whose memory its output has."""
        self._node, before = n.name, len(self.saved)
        with torch.autograd.graph.saved_tensors_hooks(self.pack, _same):
            result = super().run_node(n)
        if n.op != "output":
            for x in result if isinstance(result, tuple | list) else (result,):
                if isinstance(x, Tensor):
                    self.origins[n.name] = self._makers.setdefault(self._memory_of(x), n.name)
        # An operator such as softmax saves its own output, before anybody knows it as one.
        for i in range(before, len(self.saved)):
            if self.saved[i].origin is None:
                self.saved[i] = replace(self.saved[i], origin=self._makers.get(self.saved[i].memory))
        return result

    def pack(self, x: Tensor) -> Tensor:
        """Notes a tensor that autograd saves."""
        memory = self._memory_of(x)
        self.saved.append(
            Saved(
                node=self._node, index=len(self.saved), origin=self._makers.get(memory), memory=memory,
                bytes=x.untyped_storage().nbytes(), dtype=x.dtype, shape=tuple(x.shape), stride=x.stride(),
                offset=int(x.storage_offset()),
            )
        )  # fmt: skip
        return x

    def _memory_of(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        if storage._cdata not in self._memories:
            self._memories[storage._cdata] = len(self._memories), StorageWeakRef(storage)
        return self._memories[storage._cdata][0]


def _same(x: Tensor) -> Tensor:
    return x
