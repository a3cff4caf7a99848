"""A backward that the model defines itself, in a graph: four marks around its operators; at run time one operator.

    While passes work:   y, dy = output(f(detach(x)), name); dx = g(kept(x), dy); s = sent(x, dx); z = result(y, ...)
    At run time:         y, = vjp(f(detach(x)), x)         whose backward is g(x, dy)

The operators of `g` are in the graph like those of `f`: they have rules, and are planned, cut and checked like others.
So their communication is found in the same way. `passes/canonicalize/custom_vjp.py` writes both forms.

NOTE [Why these marks are Replicate or Shard]
`output` gives a value and its gradient in the same placement, and `sent` reads both in the same placement. This is true
for Replicate and Shard, whose gradients have the same placement. The gradient of a Copied value is Partial, which only
linear operators of `g` could read. So both rules are `exact`, and a Copied value is made Replicate before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from autotp.errors import Error

torch.library.define("autotp::vjp_output", "(Tensor y, str name) -> (Tensor, Tensor)")
torch.library.define("autotp::vjp_kept", "(Tensor x) -> Tensor")
torch.library.define("autotp::vjp_sent", "(Tensor x, Tensor grad) -> Tensor")
torch.library.define("autotp::vjp_result", "(Tensor y, Tensor[] sent) -> Tensor")
RECORDED = {name: getattr(torch.ops.autotp, f"vjp_{name}").default for name in ("output", "kept", "sent", "result")}
"""The marks that the exporter records: `output(f(x))`, `kept(x)`, `sent(x, dx)`, `result(y, sent)`."""


@torch.library.register_fake("autotp::vjp_output")
def _(y: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return _like(y), _like(y)


@torch.library.register_fake("autotp::vjp_kept")
def _(x: Tensor) -> Tensor:
    return _like(x)


@torch.library.register_fake("autotp::vjp_sent")
def _(x: Tensor, grad: Tensor) -> Tensor:
    return _like(x)


@torch.library.register_fake("autotp::vjp_result")
def _(y: Tensor, sent: Sequence[Tensor]) -> Tensor:
    return _like(y)


def _like(t: Tensor) -> Tensor:
    # In memory of its own: an operator whose schema names no alias must not return its operand.
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


# ---- the marks, as passes see them


def output(y: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Marks an output of the Function of this name; also gives the gradient of it that backward gets. y: [...]"""
    _never_run()


def kept(x: Tensor) -> Tensor:
    """Marks a value of forward that backward reads. x: [...]"""
    _never_run()


def sent(x: Tensor, grad: Tensor) -> tuple[Tensor]:
    """Marks the gradient that backward returns for an operand. x, grad: [...]"""
    _never_run()


def result(y: Tensor, made: tuple[Any, ...]) -> Tensor:
    """Marks a result `y`; `made` are its `output` and all `sent` marks of the call. y: [...]"""
    _never_run()


MARKS = (output, kept, sent, result)


def _never_run() -> NoReturn:
    raise AssertionError("passes/canonicalize/custom_vjp.py makes one operator of these")


def is_gradient(node: fx.Node) -> bool:
    """True for the gradient that a backward gets: autograd treats it as a constant."""
    source: Any = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and source.target is output and bool(node.args[1] == 1)


# ---- at run time


@dataclass(frozen=True)
class Places:
    """The roles of a `Vjp`'s arguments, by position.

    Attributes:
        outputs: the arguments that it returns.
        operands: the arguments that get gradients.
        saved: the arguments that backward reads.
    """

    outputs: tuple[int, ...]
    operands: tuple[int, ...]
    saved: tuple[int, ...]


class Vjp:
    """An operator of a graph that returns its arguments `outputs`; its backward is a graph of its own.

    Attributes:
        graph: (gradients of the outputs, saved values) -> gradients of the operands.
        places: the roles of its arguments.
        name: the name of the user's Function.
    """

    def __init__(self, graph: fx.Graph, places: Places, name: str) -> None:
        self.graph, self.places, self.name = graph, places, name
        self.__name__ = self.__qualname__ = "vjp"
        self._parts: dict[tuple[bool, ...], tuple[nn.Module, tuple[int, ...]]] = {}

    def __str__(self) -> str:
        number = {node: f"%{i}" for i, node in enumerate(self.graph.nodes)}
        rows = [(n.op, str(n.target) * (n.op != "placeholder"), n.args, n.kwargs) for n in self.graph.nodes]
        return "\n".join([self.name, *(str(fx.map_arg(row, number.__getitem__)) for row in rows)])

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        function = CustomVjp if torch.compiler.is_compiling() else NotForward
        outputs: tuple[Tensor, ...] = function.apply(self, *args)
        return outputs

    def on(self, graph: fx.Graph) -> Vjp:
        """Returns the same operator with another backward graph."""
        return Vjp(graph, self.places, self.name)

    def part(self, needs_grad: tuple[bool, ...]) -> tuple[nn.Module, tuple[int, ...]]:
        """Returns a module that computes the wanted gradients only, and the positions of saved values that it reads."""
        if needs_grad not in self._parts:
            self._parts[needs_grad] = _part(self.graph, needs_grad)
        return self._parts[needs_grad]


def _part(graph: fx.Graph, needs_grad: Sequence[bool]) -> tuple[nn.Module, tuple[int, ...]]:
    gradients: Any = graph.output_node().args[0]
    part, env = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = {node for node, is_needed in zip(gradients, needs_grad, strict=True) if is_needed}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in graph.nodes:
        # All placeholders stay, because backward calls the part with all gradients and saved values by position.
        if node.op == "placeholder" or node in needed:
            env[node] = part.node_copy(node, lambda old: env[old])
    part.output(tuple(env[node] if is_needed else None for node, is_needed in zip(gradients, needs_grad, strict=True)))
    places = [node for node in graph.nodes if node.op == "placeholder"]
    return fx.GraphModule(nn.Module(), part), tuple(i for i, node in enumerate(places) if node in needed)


class CustomVjp(torch.autograd.Function):
    """Returns the arguments `outputs`; backward runs the graph of `vjp`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(vjp: Vjp, *args: Any) -> tuple[Tensor, ...]:
        return tuple(args[i].view_as(args[i]) for i in vjp.places.outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        vjp, *args = inputs
        ctx.vjp, ctx.count = vjp, len(args)
        ctx.work, read = vjp.part(tuple(ctx.needs_input_grad[1 + i] for i in vjp.places.operands))
        outs = len(vjp.places.outputs)
        saved = [args[i] if outs + k in read else None for k, i in enumerate(vjp.places.saved)]
        # `save_for_backward` takes tensors only. What the wanted gradients do not read is not kept.
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in saved]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in saved))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = [number if x is None else x for x, number in zip(ctx.saved_tensors, ctx.numbers, strict=True)]
        input_grads = ctx.work(*grads, *saved)
        if torch.is_grad_enabled():
            input_grads = _once(ctx.vjp.name, input_grads, (*grads, *saved))
        return (None, *_placed(input_grads, ctx.vjp.places.operands, ctx.count))


def _placed(gradients: Sequence[Tensor | None], operands: Sequence[int], count: int) -> list[Tensor | None]:
    """Returns the gradients of all arguments of a `Vjp`."""
    row: list[Tensor | None] = [None] * count
    for i, grad in zip(operands, gradients, strict=True):
        # One argument may be several operands of the Function: then their gradients add up.
        before = row[i]
        row[i] = grad if before is None else before if grad is None else before + grad
    return row


def _once(name: str, gradients: Sequence[Tensor | None], of: Sequence[Any]) -> list[Tensor | None]:
    """Returns the gradients; differentiating them by `of` raises an Error."""
    defined = [x for x in gradients if x is not None]
    made = iter(Once.apply(name, len(defined), *defined, *(x for x in of if isinstance(x, Tensor))))
    return [None if x is None else next(made) for x in gradients]


class NotForward(CustomVjp):
    """The same, with an Error in forward mode. (Dynamo refuses Functions with a `jvp`.)"""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise _no_derivative(ctx.vjp.name, "in forward mode")


class Once(torch.autograd.Function):
    """The identity on gradients, connected to the tensors that they depend on; its backward raises an Error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise _no_derivative(ctx.name, "a second time")


def _no_derivative(name: str, how: str) -> Error:
    return Error(
        f"the backward of the torch.autograd.Function `{name}` would be differentiated {how}",
        fix="first derivatives in backward mode (loss.backward(), torch.func.grad, torch.func.vjp); for others "
        "torch.library.custom_op with register_autograd, and autotp.rule",
    )


def run_vjps_in_lockstep(
    vjps: Sequence[Vjp], args_by_rank: Sequence[Sequence[Any]], run: Any
) -> Sequence[tuple[Tensor, ...]]:
    """Returns the results of `vjp(*args)` on all ranks of a simulation; backward runs all ranks' graphs with `run`."""
    outputs = iter(_Lockstep.apply(vjps, run, len(args_by_rank[0]), *(x for row in args_by_rank for x in row)))
    return [tuple(next(outputs) for _ in vjp.places.outputs) for vjp in vjps]


class _Lockstep(torch.autograd.Function):
    """`CustomVjp` on the tensors of all ranks."""

    @staticmethod
    def forward(ctx: Any, vjps: Sequence[Vjp], run: Any, count: int, *args: Any) -> tuple[Tensor, ...]:
        ctx.vjps, ctx.run, ctx.count = vjps, run, count
        ctx.args_by_rank = [args[i * count : (i + 1) * count] for i in range(len(vjps))]
        outputs = [row[i] for vjp, row in zip(vjps, ctx.args_by_rank, strict=True) for i in vjp.places.outputs]
        return tuple(y.view_as(y) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        queue, rows = iter(grads), []
        for vjp, args in zip(ctx.vjps, ctx.args_by_rank, strict=True):
            rows.append([*(next(queue) for _ in vjp.places.outputs), *(args[i] for i in vjp.places.saved)])
        input_grads = ctx.run([vjp.graph for vjp in ctx.vjps], rows)
        pairs = zip(input_grads, ctx.vjps, strict=True)
        return (None, None, None, *(x for row, vjp in pairs for x in _placed(row, vjp.places.operands, ctx.count)))
