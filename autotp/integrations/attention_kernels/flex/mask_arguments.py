"""A BlockMask among the arguments of a model: the tensors of its blocks, and those that its function reads, are inputs.

    documents = batch["documents"]
    mask = create_block_mask(lambda b, h, q, k: documents[b, q] == documents[b, k], ...)
    model(tokens, mask)         leaves: tokens, kv_num_blocks, kv_indices, ..., documents

A call with a mask of the same code takes the same graph, with the tensors of its own mask. Another number that the
function reads, as a window, is another graph. (torch's own way of taking a BlockMask apart leaves out what functions
read while a model is compiled, and defaults of arguments always.)

NOTE [Globals of a mask's function]
In a script the loop stands at the top level, and its `documents` are a global. So the tensors, numbers and functions of
the same file that the code names are children, too, and the function that a call gets has globals of its own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import Tensor
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
    """A function as a node of a structure: what it reads around it, and the defaults of its arguments, are children.

    Attributes:
        function: the function.
        outer_codes: the code of the functions of which it is a child. One that calls itself is no child of itself.
    """

    function: Any
    outer_codes: tuple[CodeType, ...] = ()


def _opened(tree: Any, outer_codes: tuple[CodeType, ...] = ()) -> Any:
    """Returns a structure with its functions as nodes."""
    return pytree.tree_map(lambda x: _Function(x, outer_codes) if isinstance(x, FunctionType | partial) else x, tree)


def _children(node: _Function) -> tuple[list[Any], Any]:
    function = node.function
    if isinstance(function, partial):
        return [_opened(x, node.outer_codes) for x in (function.func, function.args, function.keywords)], None
    outer_codes = *node.outer_codes, function.__code__
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = cells, function.__defaults__, function.__kwdefaults__, _globals_of(function, outer_codes)
    return [_opened(x, outer_codes) for x in parts], _Code(function)


def _globals_of(function: FunctionType, outer_codes: tuple[CodeType, ...]) -> dict[str, Any]:
    """Returns the globals that a function reads and that may differ in the next call: see the NOTE above."""

    def may_differ(x: Any) -> bool:
        is_own = isinstance(x, FunctionType) and x.__module__ == function.__module__ and x.__code__ not in outer_codes
        return is_own or isinstance(x, Tensor | bool | int | float)

    values = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    return {name: x for name, x in values.items() if all(map(may_differ, pytree.tree_leaves(x)))}


def _names(code: CodeType) -> list[str]:
    """Returns the names that a function's code and that of the functions in it look up, in order."""
    inner = (name for x in code.co_consts if isinstance(x, CodeType) for name in _names(x))
    return sorted({*code.co_names, *inner})


@dataclass(frozen=True, eq=False)
class _Code:
    """The code of a function; equal for functions of one code."""

    function: FunctionType

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Code) and self.function.__code__ == other.function.__code__

    def __hash__(self) -> int:
        return hash(self.function.__code__)


def _function_of(children: Any, code: _Code | None) -> Any:
    if code is None:
        first, defaults, named = children
        return partial(first, *defaults, **named)
    contents, defaults, named, read = children
    of, cells = code.function, tuple(map(CellType, contents))
    function = FunctionType(of.__code__, {**of.__globals__, **read}, of.__name__, defaults, cells)
    function.__kwdefaults__ = named
    return function


pytree.register_pytree_node(_Function, _children, _function_of)
