"""repeats, unfold: blocks that are alike are captured once, and the graph is the one that it is without."""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.call import draws, writes
from autotp.models.gpt import GPT, GPTConfig
from autotp.models.gpt import Block as Layer
from autotp.passes.capture import capture, skeleton_of
from autotp.passes.clean import live
from autotp.passes.share import share
from autotp.source import layer_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
FAMILIES = pytest.importorskip("hf_families").FAMILIES

RAN: list[str] = []
X = torch.zeros(3, 5, 8)


def told(graph: fx.Graph) -> list[str]:
    """Every operator that matters: what it reads, what it gives and the module that it is from; draws in their order.

    Values are named for all that they are made of, so that nothing depends on the order of what may come in any.
    """
    if not any(map(writes, graph.nodes)):
        graph = share(graph)  # A size is computed once for all layers, or in each.
    needed, names, found, drawn = live(graph), dict[fx.Node, str](), list[str](), 0

    for node in reversed(graph.nodes):
        if node in needed or writes(node):
            needed.update([node, *node.all_input_nodes])

    def spelled(a: Any) -> str:
        return names[a] if isinstance(a, fx.Node) else f"{type(a).__name__} {a}"

    for node in graph.nodes:
        if "lift" in node.name or (node.all_input_nodes and names.get(node.all_input_nodes[0]) == "constant"):
            names[node] = "constant"  # One for each time its line ran.
        elif node in needed:
            val = node.meta.get("val")
            several = val if isinstance(val, tuple | list) else [val]
            gives = [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in several]
            args = fx.node.map_aggregate((node.args, node.kwargs), spelled)
            drawn += draws(node)
            found.append(f"{node.op} {node.target} {args} {gives} {layer_of(node)} {drawn if draws(node) else ''}")
            names[node] = f"{node.name.rstrip('_0123456789')}-{zlib.crc32(found[-1].encode()):x}"
    return sorted(found)


def runs(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """How many blocks ran while the model was captured, of which the graph is as if all had."""
    graphs, counts = [], []
    for once in (False, True):
        RAN.clear()
        graphs.append(told(capture(skeleton_of(model), args, kwargs, once=once).graph))
        counts.append(len(RAN))
    assert graphs[0] == graphs[1]
    return counts[1]


class Block(nn.Module):
    """x + dropout(down(up(x))), and whatever a test has it do besides."""

    def __init__(self, does: Callable[..., Any] | None = None, width: int = 16, **attributes: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.drop = nn.Dropout(0.1)
        self.does = does
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        RAN.append("block")
        y = x + self.drop(self.down(self.up(x)))
        return y if self.does is None else self.does(self, x, y, *args, **kwargs)


class Stack(nn.Module):
    """Blocks behind one another, each called as `call(model, i, block, x)` says."""

    def __init__(self, *blocks: nn.Module, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks)
        self.call = call

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x) if self.call is None else self.call(self, i, block, x)
        return x


def stack(n: int = 4, does: Callable[..., Any] | None = None, call: Callable[..., Any] | None = None) -> Stack:
    return Stack(*(Block(does) for _ in range(n)), call=call)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_one_block_runs(train: bool) -> None:
    assert runs(stack(6).train(train), X) == 1


def test_what_was_built_otherwise_runs() -> None:
    assert runs(Stack(Block(), Block(width=24), Block(), Block(width=24)), X) == 2
    assert runs(Stack(Block(), Block(), Block().eval(), Block()), X) == 2
    frozen = Block()
    frozen.up.weight.requires_grad_(False)
    assert runs(Stack(Block(), Block(), frozen), X) == 2


def scaled(block: Any, x: Tensor, y: Tensor) -> Tensor:
    return y / (block.index + 1)


@pytest.mark.parametrize(
    ("does", "values", "expected"),
    [
        pytest.param(None, [0, 1, 2, 3], 1, id="nobody-reads"),
        pytest.param(scaled, [0, 1, 2, 3], 4, id="number"),
        pytest.param(scaled, [2, 3, 2, 3], 2, id="two-kinds"),
        pytest.param(scaled, [1, 1.0, True, 1], 3, id="one-three-ways"),
        pytest.param(lambda b, x, y: b.index(y), [torch.sin, torch.cos, torch.sin], 2, id="function"),
        pytest.param(
            lambda b, x, y: b.index(y),
            [functools.partial(torch.mul, other=n) for n in (2, 3, 2)],
            2,
            id="partial",
        ),
        pytest.param(lambda b, x, y: y * b.index["a"][0], [{"a": [n]} for n in (2, 3, 2)], 2, id="container"),
        pytest.param(lambda b, x, y: y * b.index, [torch.ones(8), torch.ones(8)], 2, id="tensor"),
        pytest.param(lambda b, x, y: y * b.drop.p, [0, 1], 1, id="of-a-part"),
    ],
)
def test_what_is_read_is_compared(does: Any, values: list[Any], expected: int) -> None:
    assert runs(Stack(*(Block(does, index=value) for value in values)), X) == expected


def test_what_is_not_there_is_compared() -> None:
    model = stack(3, lambda b, x, y: y * getattr(b, "special", 1))
    model.blocks[1].special = 2
    assert runs(model, X) == 2


class Leveled(Block):
    level = 1

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.level


def test_what_the_class_has_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(model: Any, i: int, block: Any, x: Tensor) -> Any:
        monkeypatch.setattr(Leveled, "level", i // 2)
        return block(x)

    assert runs(Stack(*(Leveled() for _ in range(4)), call=call), X) == 2


def test_what_a_part_reads_is_compared() -> None:
    model = stack(3)
    model.blocks[1].drop.p = 0.2
    assert runs(model, X) == 2


class Config:
    """An object that all share."""

    scale = 1

    def __init__(self) -> None:
        self.step = 0


def test_an_object_that_changes_between_calls() -> None:
    """It is the same object: what it holds is compared."""
    config = Config()

    def call(model: Any, i: int, block: Any, x: Tensor) -> Any:
        block.index.step = i // 2
        return block(x)

    def does(block: Any, x: Tensor, y: Tensor) -> Tensor:
        return y * (block.index.step + 1)

    assert runs(Stack(*(Block(does, index=config) for _ in range(4)), call=call), X) == 2


def test_what_is_too_deep_to_look_through() -> None:
    """Is equal to itself only: blocks that share it are alike, blocks that have their own are not."""

    def chain() -> list[Any]:
        found: list[Any] = []
        for _ in range(180):
            found = [found]
        return found

    def does(block: Any, x: Tensor, y: Tensor) -> Tensor:
        return y * len(block.index)

    shared = chain()
    assert runs(Stack(*(Block(does, index=shared) for _ in range(3))), X) == 1
    assert runs(Stack(*(Block(does, index=chain()) for _ in range(3))), X) == 3


def plus(block: Any, x: Tensor, y: Tensor, n: Tensor | None) -> Tensor:
    return y if n is None else y + n


@pytest.mark.parametrize(
    ("does", "call", "expected"),
    [
        pytest.param(lambda b, x, y, n: y * n, lambda m, i, b, x: b(x, i // 2), 2, id="number"),
        pytest.param(lambda b, x, y, n=1: y * n, lambda m, i, b, x: b(x, n=i // 2), 2, id="by-name"),
        pytest.param(plus, lambda m, i, b, x: b(x, x if i % 2 else None), 2, id="none"),
        pytest.param(lambda b, x, y, n: y * n[0][1], lambda m, i, b, x: b(x, [(1, i)]), 4, id="nested"),
        pytest.param(None, lambda m, i, b, x: b(x if i < 2 else x[:, :3]), 3, id="sizes"),
        pytest.param(None, lambda m, i, b, x: b(x.transpose(0, 1)).transpose(0, 1) if i % 2 else b(x), 2, id="strides"),
        pytest.param(
            lambda b, x, y, n: y + n, lambda m, i, b, x: b(x, x if i % 2 else x + 1), 2, id="one-tensor-twice"
        ),
        pytest.param(None, lambda m, i, b, x: m.blocks[3 - i](b(x)), 1, id="called-twice"),
    ],
)
def test_arguments_are_compared(does: Any, call: Any, expected: int) -> None:
    assert runs(stack(4, does, call), X) == expected


def without_grad(model: Any, i: int, block: Any, x: Tensor) -> Any:
    with torch.set_grad_enabled(i % 2 == 0):
        return block(x)


def in_half(model: Any, i: int, block: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 0):
        return block(x)


@pytest.mark.parametrize("call", [without_grad, in_half])
def test_modes_are_compared(call: Any) -> None:
    graph = capture(skeleton_of(stack(4, call=call)), (X,), {}).graph
    other = capture(skeleton_of(stack(4, call=call)), (X,), {}, once=False).graph
    assert told(graph) == told(other)


def counting(block: Any, x: Tensor, y: Tensor) -> Tensor:
    block.count = block.count + 1
    return y * block.count


def collecting(block: Any, x: Tensor, y: Tensor) -> Tensor:
    block.count.append(1)
    return y * len(block.count)


@pytest.mark.parametrize(("does", "start"), [(counting, 0), (collecting, [])], ids=["attribute", "list"])
def test_a_block_that_counts_its_calls_runs_each_time(does: Any, start: Any) -> None:
    def call(model: Any, i: int, block: Any, x: Tensor) -> Any:
        return block(block(x))

    def fresh() -> Stack:
        return Stack(*(Block(does, count=start if start == 0 else []) for _ in range(2)), call=call)

    found = [told(capture(skeleton_of(fresh()), (X,), {}, once=once).graph) for once in (False, True)]
    assert found[0] == found[1]


def in_place(block: Any, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return y


def through_a_view(block: Any, x: Tensor, y: Tensor) -> Tensor:
    x[:, 0].zero_()
    return y


def written_to(model: Any, i: int, block: Any, x: Tensor) -> Tensor:
    y = block(x)
    y.add_(1)  # Of a view it is `x` that changes.
    return y + x


def one_of_two(model: Any, i: int, block: Any, x: Tensor) -> Tensor:
    y, first = block(x)
    first.add_(1)
    return y


@pytest.mark.parametrize(
    ("does", "call"),
    [
        pytest.param(in_place, lambda m, i, b, x: b(x) + x, id="writes"),
        pytest.param(through_a_view, lambda m, i, b, x: b(x) + x, id="writes-into-a-view"),
        pytest.param(lambda b, x, y: x.view(-1, 8).view(x.shape), written_to, id="returns-a-view"),
        pytest.param(lambda b, x, y: (y, y[:, 0]), one_of_two, id="two"),
        pytest.param(lambda b, x, y: b.up.weight.view(8, 16), lambda m, i, b, x: x @ b(x) @ b.up.weight, id="a-weight"),
    ],
)
def test_memory_that_is_shared(does: Any, call: Any) -> None:
    """Then all run: in the graph of one block alone nobody would see who writes to what."""
    assert runs(stack(3, does, call), X) == 1 + 3


@pytest.mark.parametrize(
    ("does", "call"),
    [
        pytest.param(lambda b, x, y: (x, y), lambda m, i, b, x: sum(b(x)), id="passed-on"),
        pytest.param(lambda b, x, y: {"y": y, "n": 2, "s": "a"}, lambda m, i, b, x: b(x)["y"] * b(x)["n"], id="plain"),
        pytest.param(lambda b, x, y: (y, y), lambda m, i, b, x: sum(b(x)), id="twice"),
        pytest.param(lambda b, x, y: y.clone().add_(1), None, id="writes-to-its-own"),
        pytest.param(lambda b, x, y: checkpoint(torch.sin, y, use_reentrant=False), None, id="checkpoint"),
    ],
)
def test_results(does: Any, call: Any) -> None:
    assert runs(stack(4, does, call), X) == 1


def test_a_size_is_returned() -> None:
    model = stack(3, lambda b, x, y: (y, x.shape[1]), lambda m, i, b, x: (lambda y, n: y * n)(*b(x)))
    assert runs(model, X) == 3


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        RAN.append("block")
        return self.up(self.norm(x))


def test_buffers_that_a_block_updates() -> None:
    assert runs(Stack(*(Normed() for _ in range(3))), X[:, 0]) == 1


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        pytest.param(lambda b: b.steps.add_(1), 1, id="add"),
        pytest.param(lambda b: b.steps.mul_(0.5).add_(1), 4, id="twice"),  # What it writes into is no buffer.
        pytest.param(lambda b: b.steps.copy_(b.up.weight.detach().mean()), 1, id="copy"),
    ],
)
def test_what_a_block_writes_last(last: Callable[[Any], Any], expected: int) -> None:
    """Nobody reads it in the graph, and it is what the model has afterwards."""

    def does(block: Any, x: Tensor, y: Tensor) -> Tensor:
        y = y * block.steps
        last(block)
        return y

    blocks = [Block(does) for _ in range(3)]
    for block in blocks:
        block.register_buffer("steps", torch.ones(()))
    assert runs(Stack(*blocks), X) == expected


class Number(float):
    """A float that has more to it."""


def test_numbers_of_a_class_of_their_own() -> None:
    found = [Number(1.0) for _ in range(3)]
    for i, number in enumerate(found):
        number.times = i // 2 + 1  # type: ignore[attr-defined]
    assert runs(Stack(*(Block(lambda b, x, y: y * b.index.times, index=number) for number in found)), X) == 2


def test_parameters_that_lie_otherwise() -> None:
    blocks = [Block(lambda b, x, y: y if b.up.weight.is_contiguous() else 2 * y) for _ in range(4)]
    for block in blocks[::2]:
        block.up.weight = nn.Parameter(block.up.weight.detach().T.contiguous().T)
    assert runs(Stack(*blocks), X) == 2


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_blocks_in_blocks() -> None:
    assert runs(Stack(Nested(), Nested(), Nested()), X) == 2


def test_a_hook_runs_every_time() -> None:
    model = stack(3)
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda m, args, y, i=i: y * (i + 1))
    assert runs(model, X) == 1


def test_a_hook_inside_is_compared() -> None:
    model = stack(3)
    model.blocks[1].up.register_forward_hook(lambda m, args, y: y * 2)
    assert runs(model, X) == 2


class Noted:
    """An object that a block may leave something in."""


def test_what_a_block_changes_among_its_arguments() -> None:
    """A list, a dict, an object: each call is captured, on the caller's own."""

    def filling(model: Any, i: int, block: Any, x: Tensor) -> Any:
        found, named, noted = [x], {"x": x}, Noted()
        y = block(x, found, named, noted)
        return y + found.pop() * named["y"] + noted.seen  # type: ignore[attr-defined]

    def does(block: Any, x: Tensor, y: Tensor, found: Any, named: Any, noted: Any) -> Tensor:
        found.append(y.sum(-1, keepdim=True))
        named["y"] = y.mean()
        noted.seen = y.exp()
        return y

    assert runs(stack(3, does, filling), X) == 3


def test_classes_are_what_they_are() -> None:
    def does(block: Any, x: Tensor, y: Tensor) -> Tensor:
        return y if type(block) is Block and {nn.Linear: 1}[type(block.up)] else y * 2

    assert runs(stack(3, does, lambda m, i, b, x: b(x) if type(b) is Block else x), X) == 1


def test_other_parameters_than_its_own() -> None:
    def call(model: Any, i: int, block: Any, x: Tensor) -> Any:
        others = {name: p * (i + 1) for name, p in block.named_parameters()}
        return torch.func.functional_call(block, others, (x,))

    assert runs(stack(3, call=call), X) == 1 + 3


def test_what_is_around_a_block() -> None:
    """It is not watched: whoever reads it runs each time."""

    def call(model: Any, i: int, block: Any, x: Tensor) -> Any:
        model.step = i
        return block(x)

    model = stack(3, lambda b, x, y: y * (b.around[0].step + 1), call)
    for block in model.blocks:
        block.around = [model]
    assert runs(model, X) == 3


@pytest.mark.parametrize("read", [lambda b: vars(b)["index"], lambda b: b.__dict__.get("index")], ids=["vars", "dict"])
def test_attributes_read_otherwise(read: Any) -> None:
    def does(block: Any, x: Tensor, y: Tensor) -> Tensor:
        return y * (read(block) + 1)

    assert runs(Stack(*(Block(does, index=i) for i in range(3))), X) == 3


def test_what_a_function_has_closed_over() -> None:
    noted = Noted()

    def scale(y: Tensor) -> Tensor:
        return y * noted.seen  # type: ignore[attr-defined]

    def call(model: Any, i: int, block: Any, x: Tensor) -> Any:
        noted.seen = i // 2  # type: ignore[attr-defined]
        return block(x)

    assert runs(stack(4, lambda b, x, y: scale(y), call), X) == 2


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is F.linear else found


def test_a_mode_around_a_call() -> None:
    def call(model: Any, i: int, block: Any, x: Tensor) -> Any:
        with Doubling() if i == 1 else nullcontext():
            return block(x)

    assert runs(stack(3, call=call), X) == 2


def test_a_parameter_as_an_argument() -> None:
    """Inside it is one still."""

    def does(block: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return y * w if isinstance(w, nn.Parameter) else y

    model = stack(3, does, lambda m, i, b, x: b(x, m.first.bias))
    assert runs(model, X) == 3


def test_shared_parameters() -> None:
    model = stack(4)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    assert runs(model, X) == 1
    for block in model.blocks[:2]:
        block.up.weight = block.down.weight = nn.Parameter(torch.zeros(8, 8))
        block.up.bias = nn.Parameter(torch.zeros(8))
    assert runs(model, X) == 2


def test_values_decide_a_size() -> None:
    """Each block's size is its own."""
    model = stack(3, lambda b, x, y: y + y[y > 0].sum())
    assert runs(model, X) == 3


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack(4, lambda b, x, y, mask: y * mask).blocks

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


def test_a_size_that_a_block_shows_to_be_another() -> None:
    """From the second call on it is known that the mask is as long as the sequence. The first input has no gradient."""
    assert runs(Masked(), X, torch.ones(3, 5, 1)) == 2


def test_the_model_is_left_as_it_was() -> None:
    model = skeleton_of(stack(3))
    kinds = [type(module) for module in model.modules()]
    capture(model, (X,), {})
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_those_of_one_device(sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    model = Stack(*(Block(scaled, index=i // 2) for i in range(6)))
    assert autotp.verify(model, 2, example_inputs=X, sequence_parallel=sequence_parallel).ok


def test_depth_costs_no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPTConfig(n_layer=12, n_embd=16, n_head=2, vocab_size=32, block_size=8)
    with torch.device("meta"):
        model = GPT(config)
    forward = Layer.forward
    monkeypatch.setattr(Layer, "forward", lambda self, x: RAN.append("layer") or forward(self, x))
    RAN.clear()
    capture(skeleton_of(model), (), {"tokens": torch.zeros(2, 7, dtype=torch.int64)})
    assert RAN == ["layer"]


@pytest.mark.rare
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_without_a_cache(name: str, train: bool) -> None:
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    if getattr(model.config, "use_cache", False):
        inputs = {**inputs, "use_cache": False}
    runs(model.train(train), **inputs)
