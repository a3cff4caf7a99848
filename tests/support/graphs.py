"""What the tests of passes share: graphs written by hand or captured, printed, and run."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from mlp import Plain
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

from autotp.diagnostics.lockstep import COLLECTIVES
from autotp.passes.builder import Builder
from autotp.passes.canonicalize.canonicalize import canonicalize
from autotp.passes.canonicalize.cse import cse
from autotp.passes.canonicalize.functionalize import functionalize
from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.passes.capture.capture import capture
from autotp.passes.capture.captured import Captured
from autotp.passes.capture.skeleton import skeleton_of


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
