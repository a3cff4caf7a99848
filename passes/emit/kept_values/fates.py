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
from typing import Any, Literal, NamedTuple

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


class Geometry(NamedTuple):
    """Where a tensor lies in its memory: sizes, strides and offset in elements."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, x: Tensor) -> Geometry:
        """Returns the geometry of a tensor."""
        return cls(x.dtype, x.shape, x.stride(), int(x.storage_offset()))


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor that autograd saves while a block runs.

    Attributes:
        node: the name of the operator that saves it.
        index: the place of the tensor in the order in which autograd saves the tensors of the block.
        origin: the name of the operator, or of the input of the block, that made its memory: NOTE [Whose fate a kept
            tensor has]; None for a tensor that is internal to `node`.
        memory: a number of its memory; tensors with the same number share it, and their bytes count once.
        bytes: of this memory, whole.
        geometry: where in this memory the tensor lies.
    """

    node: str
    index: int
    origin: str | None
    memory: int
    bytes: int
    geometry: Geometry

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the tensor."""
        return self.geometry.dtype

    def fate(self, fates: Fates) -> Fate:
        """Returns what happens with the tensor. The result for an input of the block is "keep"."""
        return fates.get(self.origin or self.node, "keep")


def saved_by_node(module: fx.GraphModule, args: Sequence[Any]) -> list[SavedTensor]:
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
        outputs: number of a memory -> the output that was the first to have it: name of the node, the place among its
            outputs if it has several, and the tensor's sizes.
        learns: the names of nodes whose output has a gradient.
        geometries: name of a node whose output is a tensor -> its geometry.
        memories: name of such a node -> the number of its memory.
        shared: the numbers of memories that several inputs have.
        irregular: the places in `saved` of tensors that have other values than the output in whose memory they lie:
            their operator has written there, or takes the memory for conjugate or negative.
    """

    def __init__(self, module: fx.GraphModule, keeps_all: bool = False) -> None:
        super().__init__(module, garbage_collect_values=not keeps_all)
        self.extra_traceback = False
        self.saved: list[SavedTensor] = []
        self.origins: dict[str, str] = {}
        self.outputs: dict[int, tuple[str, int | None, Geometry]] = {}
        self.learns: set[str] = set()
        self.geometries: dict[str, Geometry] = {}
        self.memories: dict[str, int] = {}
        self.shared: set[int] = set()
        self.irregular: set[int] = set()
        # A reference to a freed memory keeps its address from being used again.
        self._memories: dict[int, tuple[int, StorageWeakRef]] = {}
        self._versions: dict[int, int] = {}
        self._node = ""

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node, and notes what it saves and whose memory its output has."""
        self._node, before = n.name, len(self.saved)
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            result = super().run_node(n)
        if n.op != "output":
            several = isinstance(result, tuple | list)
            for i, x in enumerate(result if several else (result,)):
                if isinstance(x, Tensor):
                    self._note_output(n, i if several else None, x)
        # An operator such as softmax saves its own output, before anybody knows it as one.
        for i in range(before, len(self.saved)):
            if self.saved[i].origin is None:
                self.saved[i] = replace(self.saved[i], origin=self._maker_of(self.saved[i].memory))
        return result

    def pack(self, x: Tensor) -> Any:
        """Notes a tensor that autograd saves; returns what autograd shall have in its place."""
        memory = self._memory_of(x)
        if self._versions.get(memory, x._version) != x._version or x.is_conj() or x.is_neg():
            self.irregular.add(len(self.saved))
        self.saved.append(
            SavedTensor(
                node=self._node, index=len(self.saved), origin=self._maker_of(memory), memory=memory,
                bytes=x.untyped_storage().nbytes(), geometry=Geometry.of(x),
            )
        )  # fmt: skip
        return x

    def unpack(self, packed: Any) -> Tensor:
        """Returns the tensor that `pack` got."""
        tensor: Tensor = packed
        return tensor

    def _note_output(self, node: fx.Node, place: int | None, x: Tensor) -> None:
        name, memory = node.name, self._memory_of(x)
        if memory not in self.outputs:
            self.outputs[memory] = name, place, Geometry.of(x)
        elif node.op == "placeholder":
            self.shared.add(memory)
        if place is None:
            self.geometries[name], self.memories[name] = Geometry.of(x), memory
        self._versions[memory] = x._version
        self.origins[name] = self.outputs[memory][0]
        if x.requires_grad:
            self.learns.add(name)

    def _maker_of(self, memory: int) -> str | None:
        return self.outputs[memory][0] if memory in self.outputs else None

    def _memory_of(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        if storage._cdata not in self._memories:
            self._memories[storage._cdata] = len(self._memories), StorageWeakRef(storage)
        return self._memories[storage._cdata][0]
