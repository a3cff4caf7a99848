"""exact_bits: which kept tensors can be kept in fewer bytes without a loss.

    Before: gather saves an index: int64 [4096 8]         After: int32 [4096 8]
    Before: where saves a condition: bool [4096 4096]     After: uint8 [4096 512]

A number that chooses among the elements of a dimension is smaller than the dimension. The operator that reads it tells
this, so nobody looks at values, and the host does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autotp.passes.emit.kept_values.fates import Geometry, SavedTensor
from autotp.passes.emit.kept_values.stores import Bits, ShortNumbers
from autotp.rules.call import operator_of

aten = torch.ops.aten
STORES: dict[torch.dtype, type[Bits] | type[ShortNumbers]] = {torch.bool: Bits, torch.int64: ShortNumbers}
"""dtype -> the form with fewer bytes."""
INDEXING = {
    aten.gather.default, aten.index_select.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default,
    aten.take_along_dim.default, aten.embedding.default, aten.index.Tensor, aten.index_put.default,
    aten.index_add.default, aten.index_copy.default, aten.topk.default, aten.sort.default, aten.sort.stable,
    aten.max.dim, aten.min.dim, aten.kthvalue.default, aten.median.dim, aten.mode.default, aten.cummax.default,
    aten.cummin.default,
}  # fmt: skip
"""Operators whose saved whole numbers choose among the elements of one dimension of an operand."""


def is_exact(saved: SavedTensor, node: fx.Node, geometries: Mapping[str, Geometry]) -> bool:
    """True if a tensor that an operator saves can be kept in fewer bytes without a loss.

    Args:
        node: the operator that saves it.
        geometries: of the tensors that it reads, by the name of their node.
    """
    if saved.dtype == torch.bool:
        return True
    operands = [geometries[n.name] for n in node.all_input_nodes if n.name in geometries]
    bounded = all(size < 2**31 for x in operands for size in x.shape)
    return saved.dtype == torch.int64 and operator_of(node) in INDEXING and bounded
