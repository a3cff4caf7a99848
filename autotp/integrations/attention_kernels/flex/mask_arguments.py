"""A BlockMask among the arguments of a model: the tensors of its blocks, and those that its function reads, are inputs.

    documents = batch["documents"]
    mask = create_block_mask(lambda b, h, q, k: documents[b, q] == documents[b, k], ...)
    model(tokens, mask)         leaves: tokens, kv_num_blocks, kv_indices, ..., documents

A call with a mask of the same code takes the same graph, with the tensors of its own mask. Another number that the
function reads, as a window, is another graph. (torch's own way of taking a BlockMask apart leaves out what functions
read while a model is compiled, and defaults of arguments always.)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any

from torch.utils import _pytree as pytree

MODULE = "torch.nn.attention.flex_attention"


def register_block_mask() -> None:
    """Tells torch how to take a BlockMask apart, once its module is loaded."""
    mask: Any = getattr(sys.modules.get(MODULE), "BlockMask", None)
    if mask is not None and mask not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(mask, lambda x: ([_opened(vars(x))], type(x)), _mask_of)


def _mask_of(children: Any, of_class: Any) -> Any:
    mask = object.__new__(of_class)
    vars(mask).update(*children)
    return mask


@dataclass(frozen=True)
class _Function:
    """A function as a node of a structure: what it reads around it, and the defaults of its arguments, are children."""

    function: Any


def _opened(tree: Any) -> Any:
    """Returns a structure with its functions as nodes."""
    return pytree.tree_map(lambda x: _Function(x) if isinstance(x, FunctionType | partial) else x, tree)


def _children(node: _Function) -> tuple[list[Any], Any]:
    function = node.function
    if isinstance(function, partial):
        return [_opened(x) for x in (function.func, function.args, function.keywords)], None
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [_opened(x) for x in (cells, function.__defaults__, function.__kwdefaults__)], _Code(function)


@dataclass(frozen=True, eq=False)
class _Code:
    """The code of a function; equal for functions of one code."""

    function: FunctionType

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Code) and self.function.__code__ == other.function.__code__

    def __hash__(self) -> int:
        return hash(self.function.__code__)


def _function_of(children: Any, code: _Code | None) -> Any:
    first, defaults, named = children
    if code is None:
        return partial(first, *defaults, **named)
    of, cells = code.function, tuple(map(CellType, first))
    function = FunctionType(of.__code__, of.__globals__, of.__name__, defaults, cells)
    function.__kwdefaults__ = named
    return function


pytree.register_pytree_node(_Function, _children, _function_of)
