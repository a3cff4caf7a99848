"""The score and mask functions of flex_attention as a text, which is an argument of the operator in a graph.

    def mask_mod(b, h, q, k): return (q >= k) & (doc[b, q] == doc[b, k])
    slopes = nn.Parameter(...)
    def score_mod(score, b, h, q, k): return score + slopes[h] * (k - q)

Both become functions of numbers, of positions, and of the tensors that they read: here `doc` and `slopes`. The text has
a function for each, and says by which position a dimension of a tensor is read, and which positions are read otherwise:

    dims = ('b-', 'h')        doc is read by b, and by both q and k; slopes by h alone
    reads = 'qk'              a rank has to know where its queries begin, and not which heads it has
    options = {'BLOCK_M': 64}     of the kernel, as the call gave them
    blocks = {'BLOCK_SIZE': (64, 64)}     arguments of create_block_mask, as the mask's blocks were made
    masked_by = (0,)                      the places of the tensors that the mask reads
    window = (3, 0)                       how many keys before and after its own a query reads, if the mask says it
    numbers = (0, 1)                      the place of the tensor that says documents, and its dimension of positions

NOTE [Positions of a rank]
A function has two of each position: that in the whole tensor, and that in this rank's part. `slopes[h]` of a rank that
has heads 2 and 3 reads places 0 and 1 of its part of the slopes. So a tensor can be cut along a dimension if each read
of it takes there the same position, as it is, and if it is as long there as the queries. Other reads take the position
in the whole tensor, and other dimensions stay whole.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from traceback import extract_stack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autotp.errors import Error
from autotp.integrations.attention_kernels.flex.mask_window import window_of
from autotp.sharding.axis import Size
from autotp.source_location import user_line

aten = torch.ops.aten
Function = Callable[..., Any]
POSITIONS = ("b", "h", "q", "k")
"""Batch, head, query and key: the positions that score and mask functions get."""
CUTTABLE = POSITIONS[:3]
"""The positions along which a rank may have a part: the first dimensions of the queries."""
NUMBERS = (torch.SymInt, torch.SymFloat)
FACTS = ("dims", "reads", "mask_reads", "options", "blocks", "masked_by", "window", "numbers")
"""The names that a text has beside the functions."""


@dataclass(frozen=True)
class Mods:
    """The functions of a text.

    Attributes:
        score: (score, b, h, q, k, b, h and q of the part, tensors...) -> the score of one query and one key.
        mask: (b, h, q, k, b, h and q of the part, tensors...) -> whether the query reads the key.
        dims: for each tensor, a letter for each dimension: the position by which it is read; `-` for another index.
        reads: the positions in whole tensors that the functions read.
        mask_reads: the positions that the mask reads, of both kinds; None for a call without a mask.
        options: `kernel_options` of the call.
        blocks: arguments of create_block_mask, for the blocks of each rank.
        masked_by: the places of the tensors that the mask reads.
        window: the numbers of keys before and after its own that a query reads, -1 for all; None where the mask says
            nothing.
        numbers: the place of the tensor with numbers of documents, of which a query reads its own, and its dimension of
            positions; None for one document.
        text: the text.
    """

    score: Function
    mask: Function
    dims: tuple[str, ...] = ()
    reads: str = "".join(POSITIONS)
    mask_reads: str | None = "".join(POSITIONS)
    options: Mapping[str, Any] = field(default_factory=dict)
    blocks: Mapping[str, Any] = field(default_factory=dict)
    masked_by: tuple[int, ...] = ()
    window: tuple[int, int] | None = None
    numbers: tuple[int, int] | None = None
    text: str = ""

    @property
    def mask_text(self) -> str:
        """The mask's function and its blocks, without what the score reads: equal for layers with one mask."""
        source = self.text.partition("def mask_mod")[2].partition("):")[2].partition("\ndims = ")[0]
        for place, i in enumerate(self.masked_by):  # Another score may read other tensors before them.
            source = re.sub(rf"\bcaptured_{i}\b", f"read_{place}", source)
        return f"{source}\n{dict(self.blocks)}"


@cache
def mods_of(text: str, device: str = "cpu") -> Mods:
    """Returns the functions of a text; the tensors that they make are on `device`."""
    names: dict[str, Any] = {"torch": torch, "inf": math.inf, "nan": math.nan, "device": lambda *_, **__: device}
    exec(text, names)
    return Mods(
        score=names["score_mod"],
        mask=names["mask_mod"],
        text=text,
        **{fact: names[fact] for fact in FACTS},
    )


def working_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of scores: kernels compute them in float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class ModText(NamedTuple):
    """What was recorded of the functions of a call.

    Attributes:
        text: see the module's docstring.
        captured: the tensors that they read, and the numbers that are computed of sizes.
    """

    text: str
    captured: tuple[Any, ...]


def recorded_mods(
    score_mod: Function,
    mask_mod: Function | None,
    query: Tensor,
    options: Mapping[str, Any] | None = None,
    blocks: Mapping[str, Any] | None = None,
) -> ModText:
    """Runs the functions once, on example numbers, and returns what they compute.

    Args:
        score_mod, mask_mod: as users write them for flex_attention; without a mask each query reads all keys.
        query: the example of the queries, [batch heads queries width].
        options: `kernel_options` of the call, plain values.
        blocks: arguments of create_block_mask, plain values.

    Raises:
        Error: a function writes, draws random numbers, or asks for the value of a tensor.
    """
    captured = _Captured(query)
    with _disable_current_modes(), detect_fake_mode(query) or ExitStack():
        positions = [captured.number(torch.int64) for _ in POSITIONS]
        score = captured.number(working_dtype(query))
        score_graph = _recorded(score_mod, {"score": score}, positions, captured)
        mask_graph = _recorded(mask_mod or _all_keys, {}, positions, captured)
    graphs = score_graph, mask_graph
    dims = tuple(_dims(graphs, i, value, query) for i, value in enumerate(captured.values))
    of_score, of_mask = ({node.name for node in graph.find_nodes(op="placeholder") if node.users} for graph in graphs)
    facts = {
        "dims": dims,
        "reads": "".join(name for name in POSITIONS if name in of_score | of_mask),
        "mask_reads": "".join(name for name in POSITIONS if {name, f"{name}_part"} & of_mask) if mask_mod else None,
        "options": dict(options or {}),
        "blocks": dict(blocks or {}) if mask_mod else {},
        "masked_by": tuple(i for i in range(len(dims)) if f"captured_{i}" in of_mask),
    }
    facts |= dict(zip(FACTS[-2:], _window(mask_graph), strict=True))
    lines = [f"{name} = {value!r}" for name, value in facts.items()]
    count = len(captured.values)
    sources = _source(score_graph, "score_mod", count), _source(mask_graph, "mask_mod", count)
    return ModText("\n".join([*sources, *lines, ""]), tuple(captured.values))


def _window(graph: fx.Graph) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Returns the window and the numbers of a mask."""
    window = window_of(graph)
    if window is None:
        return None, None
    name, dim = window.numbers or ("", 0)
    return (window.before, window.after), (int(name.rpartition("_")[2]), dim) if name else None


def _all_keys(row: Tensor, *_: Tensor) -> Tensor:
    """The mask of a call without one; it reads no position."""
    return torch.ones((), dtype=torch.bool, device=row.device)


# ---- recording


class _Captured:
    """What functions read beside their arguments.

    Attributes:
        values: tensors, and numbers that are computed of sizes.
        stand_ins: the tensor that stands for each of them; a tensor stands for itself.
    """

    def __init__(self, query: Tensor) -> None:
        self.query, self.values, self.stand_ins = query, list[Any](), list[Tensor]()

    def number(self, dtype: torch.dtype) -> Tensor:
        """Returns an example number."""
        return torch.zeros((), dtype=dtype, device=self.query.device)

    def tensor(self, x: Any) -> Tensor:
        """Returns the tensor that stands for a value."""
        for value, stand_in in zip(self.values, self.stand_ins, strict=True):
            if value is x or (type(value) is type(x) and isinstance(x, NUMBERS) and value.node.expr == x.node.expr):
                return stand_in
        if not isinstance(x, Tensor):
            dtype = torch.int64 if isinstance(x, torch.SymInt) else working_dtype(self.query)
            with _disable_current_modes(), detect_fake_mode(self.query) or ExitStack():
                self.stand_ins.append(self.number(dtype))
        else:
            self.stand_ins.append(x)
        self.values.append(x)
        return self.stand_ins[-1]


def _recorded(
    function: Function, first: dict[str, Tensor], positions: Sequence[Tensor], captured: _Captured
) -> fx.Graph:
    """Returns the graph of a function: of its arguments, the positions in this rank's part, and what is captured.

    Args:
        first: the arguments before the positions, by name.
    """
    arguments = first | dict(zip(POSITIONS, positions, strict=True))
    recorder = _ModTrace(arguments, captured)
    with Indices(captured), recorder:
        result = function(*arguments.values())
    if not isinstance(result, Tensor) or result.dim():
        returned = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise _refused(f"returns {returned}", "a tensor without dimensions, such as q_idx >= kv_idx")
    recorder.graph.output(recorder.node_of(result))
    recorder.graph.eliminate_dead_code()
    return recorder.graph


class _ModTrace(TorchDispatchMode):
    """Records the operators of a function."""

    def __init__(self, arguments: dict[str, Tensor], captured: _Captured) -> None:
        super().__init__()
        self.graph, self.captured = fx.Graph(), captured
        # With the tensors themselves: an id is one tensor's as long as that lives.
        self.nodes = {id(x): (self.graph.placeholder(name), x) for name, x in arguments.items()}
        for name in CUTTABLE:
            self.graph.placeholder(f"{name}_part")

    def node_of(self, x: Any) -> Any:
        """Returns the node of a tensor; one that comes from outside of the function becomes a placeholder."""
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self.nodes:
            if not any(stand_in is x for stand_in in self.captured.stand_ins):
                self.captured.tensor(x)
            place = next(i for i, stand_in in enumerate(self.captured.stand_ins) if stand_in is x)
            self.nodes[id(x)] = self.graph.placeholder(f"captured_{place}"), x
        return self.nodes[id(x)][0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            raise _refused("asks for the value of a tensor", "torch.where(condition, a, b), not `if` or .item()")
        if func._schema.is_mutable:
            raise _refused(f"writes by `{func}`", "an operator that returns a new tensor")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _refused(f"draws random numbers by `{func}`", "numbers that forward draws, read by position")
        result = func(*args, **(kwargs or {}))
        if not any(isinstance(x, Tensor) for x in pytree.tree_leaves(result)):
            return result  # A fact about a tensor, such as its device.
        node = self.graph.call_function(func, *pytree.tree_map(self.node_of, (tuple(args), kwargs or {})))
        if isinstance(result, Tensor):
            self.nodes[id(result)] = node, result
        else:
            for i, x in enumerate(result):
                self.nodes[id(x)] = self.graph.call_function(operator.getitem, (node, i)), x
        return result


class Indices(TorchFunctionMode):
    """Reads a tensor at a position by an operator, where Python would ask for the position's value.

    Args:
        captured: has the tensors that stand for numbers that are computed of sizes; None for plain numbers.
    """

    def __init__(self, captured: _Captured | None = None) -> None:
        super().__init__()
        self.captured = captured

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.captured is not None:
            args, kwargs = pytree.tree_map_only(NUMBERS, self.captured.tensor, (args, kwargs))
        if func is Tensor.__getitem__:
            x, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Tensor) for i in indices) and all(isinstance(i, Tensor | int) for i in indices):
                return aten.index.Tensor(x, [i if isinstance(i, Tensor) else torch.full((), i) for i in indices])
        return func(*args, **kwargs)


def _refused(what: str, instead: str) -> Error:
    return Error(f"a score or mask function of flex_attention {what}", at=user_line(extract_stack()), fix=instead)


# ---- NOTE [Positions of a rank]


def _dims(graphs: Sequence[fx.Graph], i: int, value: Any, query: Tensor) -> str:
    """Returns the letters of a captured tensor; its reads by positions of a rank become those of the part."""
    reads = [read for graph in graphs for read in _reads(graph, f"captured_{i}")]
    letters = ""
    for d, length in enumerate(value.shape if isinstance(value, Tensor) else ()):
        names = {str(indices[d]) if len(indices) > d else "-" for _, indices in reads}
        letter = names.pop() if len(names) == 1 else "-"
        if letter not in CUTTABLE or Size.of(length) != Size.of(query.shape[CUTTABLE.index(letter)]):
            letter = "-"
        for node, indices in reads if letter != "-" else ():
            indices[d] = next(x for x in node.graph.find_nodes(op="placeholder") if x.name == f"{letter}_part")
            node.args = (node.args[0], list(indices))
        letters += letter
    return letters


def _reads(graph: fx.Graph, name: str) -> Iterator[tuple[fx.Node, list[Any]]]:
    """Yields the operators that read a captured tensor, and by which indices; no index for another operator."""
    for place in (node for node in graph.find_nodes(op="placeholder") if node.name == name):
        for user in place.users:
            is_read = user.target is aten.index.Tensor and user.args[0] is place
            yield user, [] if not is_read or place in user.args[1] else list(user.args[1])


# ---- text


def _source(graph: fx.Graph, name: str, count: int) -> str:
    """Returns a graph as a function of Python, whose last arguments are all captured tensors."""
    # Each rank has a card of its own, and ranks compare what they run.
    code = re.sub(r"\bdevice\(type=[^()]*\)", "device()", graph.python_code("self").src)
    first = ("score",) * (name == "score_mod")
    arguments = [*first, *POSITIONS, *(f"{x}_part" for x in CUTTABLE), *(f"captured_{i}" for i in range(count))]
    return re.sub(r"^\s*def forward\(.*?\):", f"def {name}({', '.join(arguments)}):", code, count=1).rstrip()
