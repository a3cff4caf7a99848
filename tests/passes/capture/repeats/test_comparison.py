"""comparison: what of two blocks and their calls is compared, before one is said to do what the other did."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from small_models import ZEROS, Block, Noted, Stack, runs, scaled, stack, told
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autotp.passes.capture.capture import capture
from autotp.passes.capture.captured import Attempt
from autotp.passes.capture.skeleton import skeleton_of


def test_what_was_built_otherwise_runs() -> None:
    assert runs(Stack(Block(), Block(width=24), Block(), Block(width=24)), ZEROS) == 2
    assert runs(Stack(Block(), Block(), Block().eval(), Block()), ZEROS) == 2
    frozen = Block()
    frozen.up.weight.requires_grad_(False)
    assert runs(Stack(Block(), Block(), frozen), ZEROS) == 2


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
    assert runs(Stack(*(Block(does, index=value) for value in values)), ZEROS) == expected


def test_what_is_not_there_is_compared() -> None:
    model = stack(3, lambda b, x, y: y * getattr(b, "special", 1))
    model.blocks[1].special = 2
    assert runs(model, ZEROS) == 2


class Leveled(Block):
    level = 1

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.level


def test_what_the_class_has_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leveled, "level", 1)

    def call(model: Any, i: int, block: Any, x: Tensor) -> Any:
        Leveled.level = i // 2
        return block(x)

    assert runs(Stack(*(Leveled() for _ in range(4)), call=call), ZEROS) == 2


def test_what_a_part_reads_is_compared() -> None:
    model = stack(3)
    model.blocks[1].drop.p = 0.2
    assert runs(model, ZEROS) == 2


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

    captures = 2  # What forward sets is an input of the second.
    assert runs(Stack(*(Block(does, index=config) for _ in range(4)), call=call), ZEROS) == 2 * captures


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
    assert runs(Stack(*(Block(does, index=shared) for _ in range(3))), ZEROS) == 1
    assert runs(Stack(*(Block(does, index=chain()) for _ in range(3))), ZEROS) == 3


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
    assert runs(stack(4, does, call), ZEROS) == expected


def without_grad(model: Any, i: int, block: Any, x: Tensor) -> Any:
    with torch.set_grad_enabled(i % 2 == 0):
        return block(x)


def in_half(model: Any, i: int, block: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 0):
        return block(x)


@pytest.mark.parametrize("call", [without_grad, in_half])
def test_modes_are_compared(call: Any) -> None:
    graph = capture(skeleton_of(stack(4, call=call)), (ZEROS,), {}).graph
    other = capture(skeleton_of(stack(4, call=call)), (ZEROS,), {}, attempt=Attempt(blocks="each")).graph
    assert told(graph) == told(other)


class Number(float):
    """A float that has more to it."""


def test_numbers_of_a_class_of_their_own() -> None:
    found = [Number(1.0) for _ in range(3)]
    for i, number in enumerate(found):
        number.times = i // 2 + 1  # type: ignore[attr-defined]
    assert runs(Stack(*(Block(lambda b, x, y: y * b.index.times, index=number) for number in found)), ZEROS) == 2


def test_parameters_that_lie_otherwise() -> None:
    blocks = [Block(lambda b, x, y: y if b.up.weight.is_contiguous() else 2 * y) for _ in range(4)]
    for block in blocks[::2]:
        block.up.weight = nn.Parameter(block.up.weight.detach().T.contiguous().T)
    assert runs(Stack(*blocks), ZEROS) == 2


def test_a_hook_inside_is_compared() -> None:
    model = stack(3)
    model.blocks[1].up.register_forward_hook(lambda m, args, y: y * 2)
    assert runs(model, ZEROS) == 2


@pytest.mark.parametrize("read", [lambda b: vars(b)["index"], lambda b: b.__dict__.get("index")], ids=["vars", "dict"])
def test_attributes_read_otherwise(read: Any) -> None:
    def does(block: Any, x: Tensor, y: Tensor) -> Tensor:
        return y * (read(block) + 1)

    assert runs(Stack(*(Block(does, index=i) for i in range(3))), ZEROS) == 3


def test_what_a_function_has_closed_over() -> None:
    noted = Noted()
    noted.seen = 1  # type: ignore[attr-defined]  # As at the end.

    def scale(y: Tensor) -> Tensor:
        return y * noted.seen  # type: ignore[attr-defined]

    def call(model: Any, i: int, block: Any, x: Tensor) -> Any:
        noted.seen = i // 2  # type: ignore[attr-defined]
        return block(x)

    assert runs(stack(4, lambda b, x, y: scale(y), call), ZEROS) == 2


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is F.linear else found


def test_a_mode_around_a_call() -> None:
    def call(model: Any, i: int, block: Any, x: Tensor) -> Any:
        with Doubling() if i == 1 else nullcontext():
            return block(x)

    assert runs(stack(3, call=call), ZEROS) == 2


def test_a_parameter_as_an_argument() -> None:
    """Inside it is one still."""

    def does(block: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return y * w if isinstance(w, nn.Parameter) else y

    model = stack(3, does, lambda m, i, b, x: b(x, m.first.bias))
    assert runs(model, ZEROS) == 3


def test_shared_parameters() -> None:
    model = stack(4)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    assert runs(model, ZEROS) == 1
    for block in model.blocks[:2]:
        block.up.weight = block.down.weight = nn.Parameter(torch.zeros(8, 8))
        block.up.bias = nn.Parameter(torch.zeros(8))
    assert runs(model, ZEROS) == 2
