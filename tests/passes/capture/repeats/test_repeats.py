"""repeats, unfold: blocks that are alike are captured once, and the graph is the one that it is without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import RAN, ZEROS, Block, Noted, Stack, gpt, runs, scaled, stack, told
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.models.gpt import Block as Layer
from autotp.passes.capture.capture import capture
from autotp.passes.capture.captured import Attempt
from autotp.passes.capture.skeleton import skeleton_of

pytest.importorskip("transformers")

from support.hf_families import FAMILIES


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_like_blocks_are_captured_once(train: bool) -> None:
    assert runs(stack(6).train(train), ZEROS) == 1


def counting(block: Any, x: Tensor, y: Tensor) -> Tensor:
    block.count = block.count + 1
    return y * block.count


def collecting(block: Any, x: Tensor, y: Tensor) -> Tensor:
    block.count.append(1)
    return y * len(block.count)


@pytest.mark.parametrize(("does", "start"), [(counting, 0), (collecting, [])], ids=["attribute", "list"])
def test_blocks_that_count_calls_have_the_full_graph(does: Any, start: Any) -> None:
    def call(model: Any, i: int, block: Any, x: Tensor) -> Any:
        return block(block(x))

    def fresh() -> Stack:
        return Stack(*(Block(does, count=start if start == 0 else []) for _ in range(2)), call=call)

    found = [
        told(capture(skeleton_of(fresh()), (ZEROS,), {}, attempt=Attempt(blocks=blocks)).graph)
        for blocks in ("each", "by objects")
    ]
    assert found[0] == found[1]


class LastOnly(nn.Module):
    """Calls each block on the same input and returns what the last one returns, as UVDoc does."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
        return y


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5))


@pytest.mark.parametrize("make", [normed, dropped])
def test_blocks_with_unused_results_keep_their_effects(make: Callable[[], nn.Module]) -> None:
    """Running statistics are updated, and random numbers are drawn: the next blocks get the next ones."""
    torch.manual_seed(0)
    model, x = LastOnly(make).double(), torch.randn(5, 4, dtype=torch.float64)
    parallel = autotp.parallelize(copy.deepcopy(model), 1, example_inputs=x)
    for _ in range(3):
        found = []
        for one in (model, parallel):
            torch.manual_seed(1)
            found.append(one(x))
        torch.testing.assert_close(*found)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(parallel.state_dict()[name], value, msg=name)


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
def test_blocks_that_share_memory_all_run(does: Any, call: Any) -> None:
    """Then all run: in the graph of one block alone nobody would see who writes to what."""
    assert runs(stack(3, does, call), ZEROS) == 1 + 3


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
def test_blocks_with_any_results_are_captured_once(does: Any, call: Any) -> None:
    assert runs(stack(4, does, call), ZEROS) == 1


def test_blocks_with_no_op_conversions_are_captured_once() -> None:
    """It returns the parameter itself."""
    assert runs(stack(3, lambda b, x, y: y * b.up.weight.float().mean() * b.up.bias.contiguous().mean()), ZEROS) == 1


def test_blocks_that_return_a_size_all_run() -> None:
    model = stack(3, lambda b, x, y: (y, x.shape[1]), lambda m, i, b, x: (lambda y, n: y * n)(*b(x)))
    assert runs(model, ZEROS) == 3


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        RAN.append("block")
        return self.up(self.norm(x))


def test_blocks_that_update_buffers_are_captured_once() -> None:
    assert runs(Stack(*(Normed() for _ in range(3))), ZEROS[:, 0]) == 1


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        pytest.param(lambda b: b.steps.add_(1), 1, id="add"),
        pytest.param(lambda b: b.steps.mul_(0.5).add_(1), 4, id="twice"),  # What it writes into is no buffer.
        pytest.param(lambda b: b.steps.copy_(b.up.weight.detach().mean()), 1, id="copy"),
    ],
)
def test_blocks_keep_what_they_write_last(last: Callable[[Any], Any], expected: int) -> None:
    """Nobody reads it in the graph, and it is what the model has afterwards."""

    def does(block: Any, x: Tensor, y: Tensor) -> Tensor:
        y = y * block.steps
        last(block)
        return y

    blocks = [Block(does) for _ in range(3)]
    for block in blocks:
        block.register_buffer("steps", torch.ones(()))
    assert runs(Stack(*blocks), ZEROS) == expected


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_blocks_in_blocks_are_captured_outermost() -> None:
    assert runs(Stack(Nested(), Nested(), Nested()), ZEROS) == 2


def test_forward_hooks_of_blocks_run_each_time() -> None:
    model = stack(3)
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda m, args, y, i=i: y * (i + 1))
    assert runs(model, ZEROS) == 1


class Noting(Stack):
    """Notes what a part of each block gives, while it runs: as transformers 5.0 collects attentions, or by hooks."""

    def __init__(self, hooks: bool) -> None:
        super().__init__(*(Block() for _ in range(3)))
        self.hooks = hooks

    def forward(self, x: Tensor) -> Any:
        noted, before = list[Tensor](), []
        for block in self.blocks:
            part: Any = block.up
            if self.hooks:
                before.append(part.register_forward_hook(lambda m, args, y: noted.append(y)).remove)
                continue

            def noting(x: Tensor, own: Any = part.forward) -> Tensor:
                noted.append(own(x))
                return noted[-1]

            part.forward = noting
            before.append(lambda part=part: vars(part).pop("forward"))
        y = super().forward(x)
        for undo in before:
            undo()
        return y, noted


@pytest.mark.parametrize("hooks", [False, True], ids=["forward", "hooks"])
def test_what_the_model_notes_of_each_block_is_returned(hooks: bool) -> None:
    graph = capture(skeleton_of(Noting(hooks)), (ZEROS,), {}).graph
    assert len(graph.output_node().args[0]) == 1 + 3  # type: ignore[arg-type]


def test_blocks_that_change_their_arguments_all_run() -> None:
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

    assert runs(stack(3, does, filling), ZEROS) == 3


def test_blocks_keep_their_class_during_capture() -> None:
    def does(block: Any, x: Tensor, y: Tensor) -> Tensor:
        return y if type(block) is Block and {nn.Linear: 1}[type(block.up)] else y * 2

    assert runs(stack(3, does, lambda m, i, b, x: b(x) if type(b) is Block else x), ZEROS) == 1


@pytest.mark.parametrize("other", [lambda p, i: p * (i + 1), lambda p, i: p.half().float()], ids=["computed", "cast"])
def test_blocks_called_with_other_parameters_all_run(other: Any) -> None:
    def call(model: Any, i: int, block: Any, x: Tensor) -> Any:
        others = {name: other(p, i) for name, p in block.named_parameters()}
        return torch.func.functional_call(block, others, (x,))

    assert runs(stack(3, call=call), ZEROS) == 1 + 3


def test_blocks_that_read_their_surroundings_all_run() -> None:
    """It is not watched: whoever reads it runs each time."""

    def call(model: Any, i: int, block: Any, x: Tensor) -> Any:
        model.step = i
        return block(x)

    model = stack(3, lambda b, x, y: y * (b.around[0].step + 1), call)
    for block in model.blocks:
        block.around = [model]
    assert runs(model, ZEROS) == 3


def test_blocks_with_data_dependent_sizes_all_run() -> None:
    """Each block's size is its own."""
    model = stack(3, lambda b, x, y: y + y[y > 0].sum())
    assert runs(model, ZEROS) == 3


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack(4, lambda b, x, y, mask: y * mask).blocks

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


def test_a_size_learnt_in_the_first_block_runs_a_second() -> None:
    """From the second call on it is known that the mask is as long as the sequence. The first input has no gradient."""
    assert runs(Masked(), ZEROS, torch.ones(3, 5, 1)) == 2


def test_capture_of_blocks_leaves_module_classes() -> None:
    model = skeleton_of(stack(3))
    kinds = [type(module) for module in model.modules()]
    capture(model, (ZEROS,), {})
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_repeated_blocks_have_one_device_s_gradients(sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    model = Stack(*(Block(scaled, index=i // 2) for i in range(6)))
    assert autotp.verify(model, 2, example_inputs=ZEROS, sequence_parallel=sequence_parallel).ok


def test_twelve_layers_are_captured_by_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = gpt(n_layer=12, n_embd=16, n_head=2, vocab_size=32, block_size=8, dropout=0.1)
    forward = Layer.forward
    monkeypatch.setattr(Layer, "forward", lambda self, x: RAN.append("layer") or forward(self, x))
    RAN.clear()
    capture(skeleton_of(model), (), {"tokens": torch.zeros(2, 7, dtype=torch.int64)})
    assert RAN == ["layer"]


@pytest.mark.rare
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_without_a_cache_have_the_full_graph(name: str, train: bool) -> None:
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    if getattr(model.config, "use_cache", False):
        inputs = {**inputs, "use_cache": False}
    runs(model.train(train), **inputs)
