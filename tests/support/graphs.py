"""What the tests of passes share: graphs written by hand or captured, printed, and run; calls of operators; passes."""

from __future__ import annotations

import copy
import dataclasses
import fcntl
import hashlib
import io
import itertools
import os
import pickle
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from small_models import Plain
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PicklerOptions
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

import autotp
from autotp import compiler
from autotp.compiler import analyse, rank_graph
from autotp.costs.hardware import CPU_GLOO, estimated_on
from autotp.diagnostics.lockstep import COLLECTIVES
from autotp.extensions import values_of
from autotp.model_library import library
from autotp.ops import channels, collectives
from autotp.ops.grouped_mm import OPERATOR
from autotp.ops.losses import chunks, ctc_loss
from autotp.ops.losses.argmax import linear_argmax_key
from autotp.ops.losses.linear_cross_entropy import linear_class_terms, linear_loss_sum
from autotp.ops.losses.linear_mixture import linear_mixture_sums
from autotp.options import OPTIONAL, Options
from autotp.passes.builder import Builder
from autotp.passes.canonicalize.canonicalize import canonicalize
from autotp.passes.canonicalize.cse import cse
from autotp.passes.canonicalize.functionalize import functionalize
from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.passes.capture.capture import capture
from autotp.passes.capture.captured import Captured
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.lower.losses import linear_cross_entropy
from autotp.rules.registry import USER_RULES
from autotp.runtime.calls import executable

if TYPE_CHECKING:
    from autotp.tools.estimation.counts.record import Reads, Record


def draft(make: Callable[..., Any], **inputs: Tensor) -> fx.Graph:
    """The graph that `make(call, **placeholders)` writes: `call(target, *args)` adds an operator."""
    builder = Builder(FakeTensorMode(allow_non_fake_inputs=True))
    places = {name: builder.graph.placeholder(name) for name in inputs}
    for name, value in inputs.items():
        places[name].meta["val"] = builder.mode.from_tensor(value)
    found = make(partial(_call, builder), **places)
    builder.graph.output(found if isinstance(found, tuple) else (found,))
    return builder.graph


def _call(builder: Builder, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    if target in (enter_autocast, exit_autocast):
        return builder.raw(target, args)
    if target not in COLLECTIVES:
        return builder.call(target, *args, **kwargs)
    node = builder.raw(target, args)  # There is no group to run it on.
    node.meta["val"] = args[0].meta["val"]
    return node


class Function(nn.Module):
    """A function as a module, for what must be captured."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def canonical(model: nn.Module, *args: Tensor) -> tuple[Captured, fx.Graph]:
    """What is captured of `model(*args)`, and the graph of which axes are inferred."""
    captured = capture(skeleton_of(model), args, {})
    return captured, cse(canonicalize(functionalize(captured.graph, captured.buffers)[0]))


def lines(graph: fx.Graph) -> list[str]:
    """One line a call, and the output: `add(linear, b)`. Values are named for their operators, a second one `add_1`."""
    names: dict[fx.Node, str] = {}
    taken = [node.name for node in graph.nodes if node.op == "placeholder"]
    found = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            names[node] = str(node.target)
        if node.op == "output":
            found.append("return " + ", ".join(_text(value, names) for value in node.args[0]))
        elif node.op == "call_function":
            kind = op(node)
            names[node] = f"{kind}_{taken.count(kind)}" if kind in taken else kind
            taken.append(kind)
            args = [_text(arg, names) for arg in node.args]
            args += [f"{name}={_text(arg, names)}" for name, arg in node.kwargs.items()]
            found.append(f"{names[node]} = " * (names[node] != kind) + f"{kind}({', '.join(args)})")
    return found


def op(node: fx.Node) -> str:
    """The name of the operator that a node calls, without its overload."""
    target: Any = node.target
    return target._schema.name.split("::")[1] if isinstance(target, OpOverload) else target.__name__


def ops(graph: fx.Graph) -> list[str]:
    """The names of a graph's operators, in order."""
    return [op(node) for node in graph.nodes if node.op == "call_function"]


def _text(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(item, names) for item in value) + "]"
    return repr(value).removeprefix("torch.")


def call_named(graph: fx.Graph, kind: str, at: int = 0) -> fx.Node:
    """The `at`-th call of an operator."""
    return [node for node in graph.nodes if node.op == "call_function" and op(node) == kind][at]


def run(graph: fx.Graph, values: Sequence[Any], seed: int = 0) -> tuple[Any, ...]:
    """What the graph returns, each operator called as it stands."""
    torch.manual_seed(seed)
    module = graph.owning_module or fx.GraphModule(nn.Module(), graph)
    return fx.Interpreter(module, graph=graph).run(*values)


def expect_same(before: fx.Graph, after: fx.Graph, values: Sequence[Tensor]) -> None:
    """Both graphs return the same numbers, and draw the same ones. Inputs are copied: a graph may write into them."""
    found = [run(graph, [value.clone() for value in values]) for graph in (before, after)]
    for old, new in zip(*found, strict=True):
        assert type(old) is type(new)
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-12, equal_nan=True)


def some(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor of numbers that are all different, from -1 to 1."""
    count = torch.Size(shape).numel()
    return (torch.linspace(-1, 1, count, dtype=torch.float64) ** 3).roll(count // 3).reshape(shape).to(dtype)


TOKENS = torch.arange(6).view(2, 3)


class MLP(Plain):
    def __init__(self) -> None:
        super().__init__(12, 10)


class Attention(nn.Module):
    """Three query heads for each of two heads of keys and values."""

    def __init__(self, group: int = 3) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(12, group * 8), nn.Linear(group * 8, 12)
        self.k, self.v = nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.size(1) != k.size(1))


class Language(nn.Module):
    """Tokens and positions, a head of its own or the embedding's weight, with or without a loss."""

    def __init__(self, tied: bool, loss: bool) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(47, 12), nn.Embedding(8, 12), nn.Linear(12, 47, bias=False)
        self.loss = loss
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.tokens(tokens) + self.places(torch.arange(tokens.size(1))))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) if self.loss else logits


# ---- passes that may be left out, chosen one by one


CUTS = [name for name in OPTIONAL if name != "outline"]
"""Those that a rank's graph is made by."""
SEQUENCE, OVERLAPS = "sequence", values_of("overlap")
PASSES = [*CUTS, SEQUENCE, *OVERLAPS]
PAIRS = [pair for pair in itertools.combinations(PASSES, 2) if not {SEQUENCE} < {*pair} <= {SEQUENCE, *OVERLAPS}]


def only(names: Collection[str]) -> dict[str, Any]:
    """The choices with these passes and no others of those that may be left out."""
    overlap = next((name for name in OVERLAPS if name in names), "none")
    choices = {"sequence_parallel": SEQUENCE in names, "overlap": overlap}
    return {**choices, "without": tuple(name for name in CUTS if name not in names)}


# ---- calls of operators: name -> operator, arguments, and perhaps a dictionary of keyword arguments


aten = torch.ops.aten


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


def bools(*shape: int) -> Tensor:
    return ints(2, *shape).bool()


GROUPS = torch.tensor([2, 3, 6], dtype=torch.int32)

CALLS: dict[str, tuple[Any, ...]] = {
    # pointwise
    "and": (aten.__and__.Tensor, bools(5, 3), bools(3)),
    "or": (aten.__or__.Scalar, ints(9, 5), 3),
    "xor": (aten.__xor__.Tensor, ints(9, 5), ints(9, 2, 1)),
    "lshift": (aten.__lshift__.Scalar, ints(9, 5), 2),
    "rshift": (aten.__rshift__.Tensor, ints(9, 5), ints(3, 5)),
    "add": (aten.add.Tensor, r(4, 5), r(5)),
    "add-number": (aten.add.Tensor, r(4, 5), 2.0),
    "sub-alpha": (aten.sub.Tensor, r(4, 5), r(4, 1), {"alpha": 3}),
    "rsub": (aten.rsub.Tensor, r(4), r(3, 1), {"alpha": 2}),
    "rsub-number": (aten.rsub.Scalar, r(4), 2.0),
    "mul": (aten.mul.Tensor, r(4, 5), r(5)),
    "mul-int": (aten.mul.Tensor, ints(5, 4), ints(7, 4)),
    "div": (aten.div.Tensor, r(4, 5), r(5)),
    "div-by": (aten.div.Tensor, 1.0, r(5)),
    "div-floor": (aten.div.Tensor_mode, r(4, 5), r(5), {"rounding_mode": "floor"}),
    "div-trunc": (aten.div.Scalar_mode, r(4, 5), 0.3, {"rounding_mode": "trunc"}),
    "div-true": (aten.div.Tensor_mode, r(4, 5), r(5), {"rounding_mode": None}),
    "where": (aten.where.self, bools(4, 5), r(5), r(4, 1)),
    "where-number": (aten.where.ScalarSelf, bools(4, 5), 1.0, r(4, 1)),
    "where-zero": (aten.where.ScalarOther, bools(4, 5), r(5), 0.0),
    "masked-fill": (aten.masked_fill.Scalar, r(4, 5), bools(5), -inf),
    "masked-fill-zero": (aten.masked_fill.Scalar, r(4, 5), bools(4, 1), 0),
    "masked-fill-tensor": (aten.masked_fill.Tensor, r(4, 5), bools(5), torch.tensor(2.0, dtype=torch.float64)),
    "softplus": (aten.softplus.default, r(7), 2.0, 0.5),
    "type-as": (aten.type_as.default, r(4, 5), r(3)),
    "type-as-cast": (aten.type_as.default, r(4, 5), ints(9, 3)),
    "to-copy": (aten._to_copy.default, r(4, 5), {"dtype": torch.float32}),
    "to-dtype": (aten.to.dtype, r(4, 5), torch.int64),
    "to-other": (aten.to.other, r(4, 5), r(2, 2)),
    "copy": (aten.copy.default, r(4, 5), r(5)),
    "copy-cast": (aten.copy.default, ints(9, 4, 5), r(5)),
    "fill": (aten.fill.Tensor, r(4, 5), torch.tensor(2.0, dtype=torch.float64)),
    "alias": (aten.alias.default, r(4)),
    "ctc": (
        ctc_loss.OPERATOR, r(6, 2, 5).log_softmax(-1), ints(4, 2, 3) + 1, torch.tensor([6, 5]), torch.tensor([3, 2]), 0,
        False,
    ),
    "ctc-backward": (
        ctc_loss.BACKWARD, r(2), r(6, 2, 5).log_softmax(-1), ints(4, 2, 3) + 1, torch.tensor([6, 5]),
        torch.tensor([3, 2]), 0, False,
    ),
    "grouped-mm-own": (OPERATOR, r(7, 5), r(3, 5, 4), GROUPS),
    "grouped-mm": (aten._grouped_mm.default, r(6, 48).float(), r(3, 48, 48).float(), GROUPS),
    "detach": (aten.detach.default, r(4)),
    "lift": (aten.lift.default, r(4)),
    "lift-fresh": (aten.lift_fresh.default, r(4)),
    "contiguous": (aten.contiguous.default, r(4, 5).t()),
    "conj": (aten.conj.default, torch.complex(r(5), r(5))),
    "scalar": (aten.exp.default, r()),
    "glu": (aten.glu.default, r(2, 8, 3), 1),
    "prelu": (aten.prelu.default, r(2, 5, 3), r(5)),
    "prelu-one": (aten.prelu.default, r(2, 5, 3), r(1)),
    "alpha-dropout-eval": (aten.alpha_dropout.default, r(4), 0.5, False),
    # contractions
    "linear": (aten.linear.default, r(2, 3, 7), r(5, 7)),
    "linear-bias": (aten.linear.default, r(2, 3, 7), r(5, 7), r(5)),
    "linear-vector": (aten.linear.default, r(7), r(5, 7)),
    "linear-of-one": (aten.linear.default, r(2, 7), r(1, 7)),
    "bilinear": (aten.bilinear.default, r(2, 3), r(2, 4), r(5, 3, 4)),
    "bilinear-bias": (aten.bilinear.default, r(2, 3), r(2, 4), r(5, 3, 4), r(5)),
    "addmm": (aten.addmm.default, r(4), r(5, 3), r(3, 4), {"beta": 2, "alpha": 3}),
    "baddbmm": (aten.baddbmm.default, r(2, 5, 1), r(2, 5, 3), r(2, 3, 4)),
    "addr": (aten.addr.default, r(4), r(5), r(4)),
    "linalg-matmul": (aten.linalg_matmul.default, r(2, 1, 4, 3), r(3, 3, 5)),
    "vdot": (aten.vdot.default, r(5), r(5)),
    "solve": (aten.linalg_solve_triangular.default, r(2, 1, 3, 3), r(4, 3, 5), {"upper": False}),
    "solve-right": (aten.linalg_solve_triangular.default, r(3, 3), r(4, 5, 3), {"upper": True, "left": False}),
    "einsum-ellipsis": (aten.einsum.default, "...ij,jk->...ik", [r(2, 4, 3), r(3, 5)]),
    "einsum-implicit": (aten.einsum.default, "ij,jk", [r(4, 3), r(3, 5)]),
    "einsum-sums": (aten.einsum.default, "bij,k->b", [r(2, 4, 3), r(5)]),
    "einsum-one": (aten.einsum.default, "ij,jk->ik", [r(4, 1), r(3, 5)]),
    "einsum-diagonal": (aten.einsum.default, "ii->i", [r(4, 4)]),
    "conv1d": (channels.convolution, r(2, 4, 9), r(5, 4, 3), [1], [0], [1]),
    "conv2d-strided": (channels.convolution, r(2, 4, 6, 7), r(5, 4, 3, 2), [2, 1], [1, 0], [1, 2]),
    "conv1d-unbatched": (channels.convolution, r(4, 9), r(5, 4, 3), [1], [0], [1]),
    "conv1d-groups": (channels.convolution, r(2, 6, 9), r(9, 2, 3), [1], [0], [1]),
    "conv3d-same": (channels.convolution, r(2, 4, 4, 3, 3), r(6, 2, 3, 3, 1), [1, 1, 1], "same", [1, 1, 1]),
    "conv1d-of-one": (channels.convolution, r(2, 1, 9), r(5, 1, 3), [1], [0], [1]),
    "depthwise": (channels.convolution, r(2, 4, 9), r(4, 1, 3), [1], [2], [1]),
    "depthwise-twice": (channels.convolution, r(2, 4, 9), r(8, 1, 3), [1], [2], [1]),
    "depthwise-unbatched": (channels.convolution, r(4, 9, 7), r(4, 1, 3, 2), [2, 1], "valid", [1, 2]),
    "transposed": (channels.conv_transpose, r(2, 4, 5), r(1, 4, 6, 3), [2], [1], [1], [1]),
    "transposed-groups": (channels.conv_transpose, r(2, 6, 5, 4), r(3, 2, 4, 2, 3), [1, 2], [0, 0], [0, 0], [1, 1]),
    "transposed-unbatched": (channels.conv_transpose, r(4, 5), r(4, 1, 1, 3), [1], [0], [0], [1]),
    # views and movement
    "view-minus-one": (aten.view.default, r(2, 3, 12), [2, -1, 4, 3]),
    "unsafe-view": (aten._unsafe_view.default, r(6, 4), [4, 6]),
    "view-of-nothing": (aten.view.default, r(0, 3), [3, 0]),
    "unflatten": (aten.unflatten.int, r(3, 12), 1, [4, 3]),
    "view-as": (aten.view_as.default, r(6, 4), r(2, 3, 4)),
    "squeeze": (aten.squeeze.default, r(4, 1, 3)),
    "squeeze-dim": (aten.squeeze.dim, r(4, 1, 3), 1),
    "squeeze-kept": (aten.squeeze.dims, r(4, 1, 3), [0, 1]),
    "expand": (aten.expand.default, r(4, 1), [3, -1, 5]),
    "expand-as": (aten.expand_as.default, r(4, 1), r(3, 4, 5)),
    "broadcast-to": (aten.broadcast_to.default, r(4, 1), [2, 4, 3]),
    "movedim": (aten.movedim.intlist, r(2, 3, 4, 5), [0, -1], [2, 0]),
    "swapaxes": (aten.swapaxes.default, r(2, 3, 4), 0, -1),
    "swapdims": (aten.swapdims.default, r(2, 3, 4), 0, -1),
    "moveaxis": (aten.moveaxis.int, r(2, 3, 4), 0, -1),
    "slice": (aten.slice.Tensor, r(3, 12), 1, 4, 8),
    "slice-negative": (aten.slice.Tensor, r(3, 12), -1, -8, -4),
    "slice-step": (aten.slice.Tensor, r(3, 12), 1, 0, 12, 2),
    "slice-all": (aten.slice.Tensor, r(3, 12), 1, 0, 2**63 - 1),
    "slice-none": (aten.slice.Tensor, r(3, 12), 1, 20, 30),
    "narrow": (aten.narrow.default, r(3, 12), 1, 6, 6),
    "narrow-all": (aten.narrow.default, r(3, 12), 1, 0, 12),
    "select": (aten.select.int, r(3, 12), 1, -1),
    "split": (aten.split.Tensor, r(3, 12), 4, -1),
    "split-rest": (aten.split.Tensor, r(3, 10), 4, 1),
    "split-ones": (aten.split.Tensor, r(3, 4), 1, 1),
    "split-with-sizes": (aten.split_with_sizes.default, r(3, 12), [8, 2, 2], 1),
    "chunk": (aten.chunk.default, r(3, 12), 3, 1),
    "tensor-split": (aten.tensor_split.sections, r(3, 11), 3, 1),
    "tensor-split-at": (aten.tensor_split.indices, r(3, 12), [4, 8], 1),
    "cat": (aten.cat.default, [r(2, 4), r(2, 6)], -1),
    "cat-one": (aten.cat.default, [r(2, 4)], 1),
    "cat-nothing": (aten.cat.default, [r(2, 4), r(2, 0)], 1),
    "cat-empty": (aten.cat.default, [r(2, 0), r(2, 4)], 1),
    "cat-old-style": (aten.cat.default, [r(2, 4), r(0)], 1),
    "cat-ones": (aten.cat.default, [r(4, 1), r(4, 1), r(4, 2)], 1),
    "stack": (aten.stack.default, [r(4, 3), r(4, 3)], -1),
    "vstack": (aten.vstack.default, [r(4, 3), r(2, 3)]),
    "row-stack": (aten.row_stack.default, [r(4), r(4)]),
    "hstack": (aten.hstack.default, [r(4, 2), r(4, 6)]),
    "hstack-flat": (aten.hstack.default, [r(4), r(6)]),
    "dstack": (aten.dstack.default, [r(4, 2, 2), r(4, 2, 4)]),
    "meshgrid": (aten.meshgrid.indexing, [r(4), r(5), r(2)], {"indexing": "xy"}),
    "repeat": (aten.repeat.default, r(4, 1, 3), [2, 1, 5, 2]),
    "tile": (aten.tile.default, r(2, 4, 3), [2]),
    "repeat-interleave": (aten.repeat_interleave.self_int, r(3, 4), 2, 1),
    "repeat-interleave-flat": (aten.repeat_interleave.self_int, r(3, 4), 2),
    "repeat-interleave-tensor": (aten.repeat_interleave.self_Tensor, r(3, 2), torch.tensor([1, 2, 3]), 0),
    "pad": (aten.pad.default, r(4, 5), [1, 2]),
    "pad-value": (aten.constant_pad_nd.default, r(4, 5), [0, 0, 1, 0], 3.0),
    "pad-reflect": (aten.pad.default, r(4, 5, 6), [2, 2], "reflect"),
    "flip": (aten.flip.default, r(4, 5), [1]),
    "roll": (aten.roll.default, r(4, 5), [2], [0]),
    "roll-flat": (aten.roll.default, r(4, 5), [2]),
    "tril": (aten.tril.default, r(2, 4, 5)),
    "diagonal": (aten.diagonal.default, r(2, 4, 5), 1, 0, 2),
    "unfold": (aten.unfold.default, r(2, 9), 1, 3, 2),
    "slice-scatter": (aten.slice_scatter.default, r(4, 6), r(4, 2), 1, 2, 4),
    "slice-scatter-all": (aten.slice_scatter.default, r(4, 6), r(4, 6), 1),
    "select-scatter": (aten.select_scatter.default, r(4, 6), r(4), 1, -1),
    # reductions and norms
    "sum": (aten.sum.dim_IntList, r(4, 5, 3), [0, -1], True),
    "sum-all": (aten.sum.default, r(4, 5)),
    "sum-cast": (aten.sum.dim_IntList, r(4, 5), [1], False, {"dtype": torch.float32}),
    "sum-none": (aten.sum.dim_IntList, r(4, 5), []),
    "sum-scalar": (aten.sum.dim_IntList, r(), [0]),
    "count-nonzero": (aten.count_nonzero.default, ints(2, 4, 5), 1),
    "max-dim": (aten.max.dim, r(4, 5), 1),
    "argmax": (aten.argmax.default, r(4, 5)),
    "norm": (aten.norm.ScalarOpt_dim, r(4, 5), 2, [1]),
    "cumsum": (aten.cumsum.default, r(4, 5), 1),
    "softmax": (aten._softmax.default, r(4, 5), 1, False),
    "log-softmax": (aten._log_softmax.default, r(4, 5), 1, False),
    "topk": (aten.topk.default, r(4, 5), 2),
    "layer-norm": (aten.layer_norm.default, r(2, 4, 5), [5], r(5), r(5)),
    "layer-norm-two": (aten.layer_norm.default, r(3, 4, 5), [4, 5]),
    "rms-norm": (aten.rms_norm.default, r(4, 5), [5], r(5)),
    "batch-norm": (channels.batch_norm, r(4, 5), r(5), r(5), r(5), r(5).abs(), False, 0.1, 1e-5),
    "batch-norm-of-batch": (channels.batch_norm, r(4, 5, 3), r(5), None, None, None, True, 0.1, 1e-5),
    "batch-norm-moving": (channels.batch_norm_moving, r(4, 5, 2, 3), r(5), r(5), r(5), r(5).abs(), 0.1, 1e-5),
    "group-norm": (channels.group_norm, r(2, 3, 4, 5), r(3, 4), r(3, 4), 1e-5),
    "group-norm-plain": (channels.group_norm, r(2, 4, 2), None, None, 1e-5),
    "max-pool": (channels.by_channel, r(2, 5, 6, 7), aten.max_pool2d.default, 1, ([2, 2],)),
    "max-pool-places": (channels.by_channel, r(5, 6, 7), aten.max_pool2d_with_indices.default, 0, ([2, 2],)),
    "mean-pool": (channels.by_channel, r(2, 5, 6), aten.adaptive_avg_pool1d.default, 1, ([1],)),
    "upsample": (channels.by_channel, r(2, 5, 3, 3), aten.upsample_bilinear2d.vec, 1, (None, False, [2.0, 2.0])),
    # creation
    "zeros": (aten.zeros.default, [4, 5], {"dtype": torch.float64}),
    "full": (aten.full.default, [4, 5], 2.0),
    "new-ones": (aten.new_ones.default, r(3), [4, 5]),
    "new-full": (aten.new_full.default, r(), [4, 5], 2.0),
    "arange": (aten.arange.default, 5),
    "randn": (aten.randn.default, [4, 5]),
    "rand-like": (aten.rand_like.default, r(4, 5)),
    "uniform": (aten.uniform.default, r(4, 5)),
    "geometric": (aten.geometric.default, r(4, 5), 0.5),
    "log-normal": (aten.log_normal.default, r(4, 5)),
    "random": (aten.random.default, r(4, 5)),
    "exponential": (aten.exponential.default, r(4, 5)),
    "cauchy": (aten.cauchy.default, r(4, 5)),
    "normal-functional": (aten.normal_functional.default, r(4, 5)),
    "randperm": (aten.randperm.default, 5),
    "poisson": (aten.poisson.default, r(4).abs()),
    # lookups, updates and losses
    "embedding": (aten.embedding.default, r(7, 5), ints(7, 3, 2), 2),
    "gather": (aten.gather.default, r(4, 7), 1, ints(7, 4, 3)),
    "gather-less": (aten.gather.default, r(4, 7), 1, ints(7, 2, 3)),
    "index": (aten.index.Tensor, r(4, 5, 6), [None, ints(5, 3), ints(6, 2, 1)]),
    "index-apart": (aten.index.Tensor, r(4, 5, 6), [ints(4, 3), None, ints(6, 3)]),
    "index-scalar": (aten.index.Tensor, r(4, 5), [torch.tensor(2)]),
    "index-mask": (aten.index.Tensor, r(4, 5), [None, torch.tensor([True, False, True, True, False])]),
    "index-put": (aten.index_put.default, r(4, 5, 6), [None, ints(5, 3)], r(3, 6)),
    "index-put-adds": (aten.index_put.default, r(4, 5), [ints(4, 3), ints(5, 3)], r(3), True),
    "index-select": (aten.index_select.default, r(4, 5), 1, ints(5, 3)),
    "index-add": (aten.index_add.default, r(4, 5), 1, ints(5, 3), r(4, 3)),
    "index-fill": (aten.index_fill.int_Scalar, r(4, 5), 1, ints(5, 3), 2.0),
    "scatter": (aten.scatter.src, r(4, 5), 1, ints(5, 4, 3), r(4, 3)),
    "scatter-value": (aten.scatter.value, r(4, 5), 0, ints(4, 3, 5), 1.0),
    "scatter-add-less": (aten.scatter_add.default, r(4, 5), 1, ints(5, 3, 3), r(4, 3)),
    "one-hot": (aten.one_hot.default, ints(5, 4, 3), 5),
    "one-hot-counted": (aten.one_hot.default, ints(5, 4, 3)),
    "isin": (aten.isin.Tensor_Tensor, ints(5, 4, 3), ints(5, 2)),
    "bucketize": (aten.bucketize.Tensor, r(4, 5), r(3).sort().values),
    "searchsorted": (aten.searchsorted.Tensor, r(4, 5).sort().values, r(4, 3)),
    "nll": (aten.nll_loss.default, r(6, 5), ints(5, 6), None, 0),
    "cross-entropy-sum": (aten.cross_entropy_loss.default, r(6, 5, 3), ints(5, 6, 3), r(5), 2, 1, 0.1),
    "cross-entropy-mean": (aten.cross_entropy_loss.default, r(6, 5), ints(5, 6)),
    "cross-entropy-soft": (aten.cross_entropy_loss.default, r(6, 5), r(6, 5)),
    "mse-sum": (aten.mse_loss.default, r(6, 5), r(6, 5), 2),
    "bce-sum": (aten.binary_cross_entropy_with_logits.default, r(6, 5), r(6, 5), r(5), r(5), 2),
}  # fmt: skip


CAPTURES: OrderedDict[bytes, Captured] = OrderedDict()
"""What `shared_captures` keeps in this process, the latest last."""
CAPTURED_ANEW = Path(__file__).resolve().parent.parent / "passes" / "capture"
WAITS = 30.0
"""The seconds that a process waits for another one that captures the same model."""


@contextmanager
def shared_captures(test: Path, folder: Path | None = None) -> Iterator[None]:
    """A region in which models that are alike are captured once. A test of capture captures each.

    Two models are alike if they have the same classes and attributes, tensors of the same kinds, and if they are
    captured on arguments of the same kinds. A graph is kept only if a call changes nothing of the model or its
    arguments.

    Args:
        test: the file of the test that runs.
        folder: processes with the same one share their captures.
    """
    before = compiler.capture
    # Graphs name the card of their rank.
    card = f"card {torch.cuda.current_device()}".encode() if torch.cuda.is_initialized() else b""

    def shared(skeleton: nn.Module, *asked: Any) -> Captured:
        try:
            key = _key(skeleton, asked) + card
        except Exception:  # The model holds what cannot be written down, such as a function of a function.
            return before(skeleton, *asked)
        if key not in CAPTURES:
            found = _from_folder(key, folder, lambda: before(skeleton, *asked))
            if not _may_be_shared(found):
                return found
            CAPTURES[key] = found
        CAPTURES.move_to_end(key)
        if len(CAPTURES) > 100:
            CAPTURES.popitem(last=False)
        return CAPTURES[key]

    if not test.is_relative_to(CAPTURED_ANEW):
        compiler.capture = shared
    try:
        yield
    finally:
        compiler.capture = before


@contextmanager
def noted_passes() -> Iterator[list[str]]:
    """A region in which the names of the compiler's passes are noted, in the order in which they first run."""
    ran: list[str] = []

    def noted(row: compiler.Pass) -> compiler.Pass:
        def run(*given: Any) -> Any:
            ran.extend([row.name] * (row.name not in ran))
            return row.run(*given)

        return dataclasses.replace(row, run=run)

    rows_of = compiler.passes_of
    with patch.object(compiler, "passes_of", lambda *given: [*map(noted, rows_of(*given))]):
        yield ran


def _may_be_shared(found: Captured) -> bool:
    return not (found.owned or found.changes or found.outputs.into or found.asked)


def _from_folder(key: bytes, folder: Path | None, capture: Callable[[], Captured]) -> Captured:
    """What another process captured; or captures, while others that want the same wait, and writes it for them."""
    if folder is None:
        return capture()
    path = folder / hashlib.sha256(key).hexdigest()
    with open(path.with_suffix(".lock"), "w") as lock:
        ends = time.monotonic() + WAITS
        while not path.exists() and not _locked(lock) and time.monotonic() < ends:
            time.sleep(0.002)
        if path.exists():
            return _read(path.read_bytes()) or capture()
        found = capture()
        path.with_suffix(f".{os.getpid()}").write_bytes(_written(found) if _may_be_shared(found) else b"")
        path.with_suffix(f".{os.getpid()}").rename(path)
    return found


def _locked(file: IO[str]) -> bool:
    """Whether the lock of a file is this process's now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _written(found: Captured) -> bytes:
    """A captured model as bytes; none if it holds what cannot be written down."""
    module = fx.GraphModule(nn.Module(), fx.Graph())
    module._graph = found.graph  # Set as `module.graph`, it would belong to the module from then on.
    rest = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "graph"}
    try:
        return GraphPickler.dumps((module, rest), PicklerOptions(ops_filter=None, node_metadata_key_filter=None))
    except Exception:
        return b""


def _read(data: bytes) -> Captured | None:
    if not data:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of its LeafSpec
        mode = FakeTensorMode(shape_env=ShapeEnv())
        mode.cache_enabled = False  # as in a capture
        module, rest = GraphPickler.loads(data, mode)
    specs = [x for x in pytree.tree_leaves(rest["outputs"].spec) if isinstance(x, pytree.TreeSpec)]
    for spec in specs:  # It grows.
        specs += spec.children()
        if dataclasses.is_dataclass(spec.type) and spec.type not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(spec.type)  # as the capture has done, in its process
    return Captured(graph=module.graph, **rest)


def _key(skeleton: nn.Module, asked: Sequence[Any]) -> bytes:
    tensors = [x for x in pytree.tree_leaves(asked) if isinstance(x, Tensor)]
    first: dict[int, int] = {}
    for i, x in enumerate(tensors):
        first.setdefault(id(x), i)
    kinds = pytree.tree_map_only(Tensor, lambda x: (first[id(x)], *_kind(x)), asked)
    file = io.BytesIO()
    rules = sorted(map(str, (*USER_RULES, *type(library()).mro())))
    _Kinds(file).dump((skeleton, kinds, torch.get_default_dtype(), rules))
    return file.getvalue()


def _kind(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad


class _Kinds(pickle.Pickler):
    """Writes tensors on `meta` by kind, for they have no values."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            return tuple, (_kind(value),), vars(value) or None
        return NotImplemented


class _Calls(nn.Module):
    """A module that calls a function which cannot be traced."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.forward = function  # type: ignore[method-assign]


def recorded_run(
    function: Callable[..., Tensor],
    *shapes: tuple[int, ...],
    groups: dict[str, int] | None = None,
    on_gpu: bool = True,
) -> Record:
    """What a function does on meta, forward and backward: tensors of these shapes, all but the first parameters."""
    from autotp.tools.estimation.counts.record import Value, record

    places: list[Reads] = ["input", *("parameter" for _ in shapes[1:])]
    values = [
        (Value(shape=shape, dtype=torch.float32, learns=True), reads)
        for shape, reads in zip(shapes, places, strict=True)
    ]
    return record(_Calls(function) if groups else fx.symbolic_trace(function), values, groups or {}, on_gpu)


# ---- blocks that torch fuses: symmetric memory needs GPUs, so its fallbacks run


def without_code(graph: fx.GraphModule, inputs: Any, **how: Any) -> Any:
    """What Inductor does with a graph before it generates code; then the graph runs as it is."""
    from torch._dynamo.utils import detect_fake_mode
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    view_to_reshape(graph)
    with V.set_fake_mode(detect_fake_mode(inputs)):
        post_grad_passes(graph, how.get("is_inference", False))
    graph.recompile()
    return make_boxed_func(graph.forward)


@contextmanager
def as_on_gpus(generates_code: bool = False) -> Iterator[None]:
    """A region in which torch fuses on the CPU, with its fallbacks, and sums by the backend's own reduce-scatter."""
    from torch._inductor import compile_fx
    from torch.distributed import _symmetric_memory as memory

    operators = torch.library.Library("symm_mem", "IMPL")
    operators.impl("fused_all_gather_matmul", memory._fused_all_gather_matmul_fallback, "CPU")
    operators.impl("fused_matmul_reduce_scatter", memory._fused_matmul_reduce_scatter_fallback, "CPU")
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Raw SymInt value")  # Of torch's own pass.
        stack.enter_context(memory._test_mode())
        stack.enter_context(patch("torch.distributed.is_nccl_available", lambda: True))
        stack.enter_context(patch.object(executable, "_prepare_async_tp", lambda *_: None))
        stack.enter_context(patch.object(collectives, "_is_gloo", lambda *_: False))
        if not generates_code:
            short = partial(compile_fx.compile_fx, inner_compile=without_code)
            stack.enter_context(patch.object(compile_fx, "compile_fx", short))
        yield


# ---- small vocabularies that are large ones for `linear_cross_entropy`

CLASSES, WIDTH = 37, 16
WORD_ROWS = torch.arange(21).view(3, 7) * 5 % CLASSES
LABELS = WORD_ROWS.flip(1).masked_fill(torch.arange(21).view(3, 7) % 8 < 3, -100)
FUSED = linear_class_terms, linear_loss_sum, linear_argmax_key, linear_mixture_sums


ONLY_PRODUCTS = dataclasses.replace(CPU_GLOO, launch=1e-15, memory_bandwidth=1e20)
"""A device on which logits again in backward take a third longer than gradients in forward."""
ONLY_MEMORY = dataclasses.replace(CPU_GLOO, launch=1e-15, matrix_flops=1e20, vector_flops=1e20)
"""A device on which gradients in forward take longer, as each chunk adds to all of the weight's gradient."""


@contextmanager
def small() -> Iterator[None]:
    """A region in which small vocabularies are large ones: a chunk has two rows, and only products take time."""
    lengths = (linear_cross_entropy, "LEAST", 16), (chunks, "CHUNK", 2 * CLASSES)
    with ExitStack() as stack:
        stack.enter_context(estimated_on(ONLY_PRODUCTS))
        for module, name, length in lengths:
            stack.enter_context(patch.object(module, name, length))
        yield


def first_graph(model: nn.Module, tp: int, **options: Any) -> fx.Graph:
    """The graph of the first rank."""
    return rank_graph(analyse(skeleton_of(model), (WORD_ROWS, LABELS), {}, tp, Options(**options)), 0, "fast")


def fused(model: nn.Module, tp: int, **options: Any) -> list[str]:
    """The operators of heads with what reads their logits in a rank's graph."""
    return [node.target.__name__ for node in first_graph(model, tp, **options).nodes if node.target in FUSED]


def train(mine: nn.Module, whole: nn.Module) -> None:
    """Three steps of SGD at three shapes, one with one label only: loss and parameters are one device's."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (mine, whole)]
    single = torch.full_like(LABELS, -100)
    single[0, 3] = 1
    for rows, labels in ((WORD_ROWS, LABELS), (WORD_ROWS[:2, :5], LABELS[:2, :5]), (WORD_ROWS, single)):
        results = [model(rows.contiguous(), labels.contiguous()) for model in (mine, whole)]
        losses = [result[0] if isinstance(result, tuple) else result for result in results]
        torch.testing.assert_close(*(loss.detach() for loss in losses), rtol=0, atol=1e-10)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for name, tensor in autotp.full_state_dict(mine).items():
            expected = whole.state_dict()[name]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def beside_one_device(n: int, model: nn.Module, **options: Any) -> None:
    whole = copy.deepcopy(model)
    with small():
        train(autotp.parallelize(model, n, example_inputs=(WORD_ROWS, LABELS), **options), whole)
