"""repeats, queries: what a model does around its blocks, and to them, is seen, or all blocks run."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from small_models import ZEROS, Block, Stack, runs, stack
from torch import Tensor, nn

from autotp.passes.capture.capture import capture
from autotp.passes.capture.repeats.blocks import patched
from autotp.passes.capture.repeats.queries import BlockNumber
from autotp.passes.capture.skeleton import skeleton_of


class Adapters:
    """Numbered modules that are alike, and what else a block may ask for."""

    def __init__(self, model: Any) -> None:
        self.parts, self.blocks = model.parts, model.blocks

    def apply(self, y: Tensor, layer: int) -> Tensor:
        return self.parts[layer](y)

    def change(self, y: Tensor, layer: int) -> Tensor:
        if layer == 2:
            self.blocks[layer].scale = 7.0
        return y * 1.0


class Adapted(nn.Module):
    def __init__(self, does: Any, n: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(does, index=i, scale=1.0) for i in range(n))
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        given = Adapters(self)
        for block in self.blocks:
            x = block(x, given)
        return x


def test_an_object_that_calls_like_modules_has_the_full_graph() -> None:
    """They are others than the block, which goes on with its own operators."""
    assert runs(Adapted(lambda b, x, y, it: y + it.apply(y, b.index)), ZEROS) < 4


def test_an_object_that_changes_blocks_lets_more_run() -> None:
    assert runs(Adapted(lambda b, x, y, it: it.change(y, b.index) * b.scale), ZEROS) > 1


def either(b: Any, x: Tensor, y: Tensor, it: Any) -> Tensor:
    try:
        return it.change(y, 0) * b.index
    except TypeError:
        return y


@pytest.mark.parametrize(
    "does",
    [
        pytest.param(lambda b, x, y, it: it.change(y, 0) * (torch.arange(8) == b.index), id="equal"),
        pytest.param(lambda b, x, y, it: it.change(y, 0) * (b.index != torch.arange(8)), id="unequal"),
        pytest.param(lambda b, x, y, it: it.change(y, 0) - 2**b.index + b.index // 2, id="arithmetic"),
        pytest.param(either, id="tried"),
    ],
)
def test_layer_numbers_beside_tensors_let_all_blocks_run(does: Any) -> None:
    assert runs(Adapted(does), ZEROS) == 4


def test_number_compares_and_computes_as_an_integer() -> None:
    used: list[int] = []
    three, x = BlockNumber(3, ("", ""), lambda: used.append(1)), torch.arange(5)
    for found, expected in ((x == three, x == 3), (three == x, x == 3), (x != three, x != 3), (7 - three, 4)):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    for found, expected in ((x**three, x**3), (three - x, 3 - x), (three < x, x > 3), (x // three, x // 3)):
        assert torch.equal(found, expected)
    assert (divmod(7, three), pow(three, 2, 5), 7 % three, -three, {3: "a"}[three]) == ((2, 1), 4, 1, -3, "a")
    assert len(used) > 12


def sparse(b: Any, x: Tensor, y: Tensor) -> Tensor:
    return y + torch.sparse_coo_tensor(torch.arange(8)[None], b.down.bias, (8,), check_invariants=False).to_dense()


def test_blocks_with_sparse_tensors_run_again() -> None:
    """It has several storages."""
    assert runs(stack(3, sparse), ZEROS) > 1


def counted(model: Any, i: int, block: Any, x: Tensor) -> Tensor:
    x, known = block(x)
    known["scale"] = known["scale"] + 1 if i < 3 else 1
    return x


def test_blocks_that_return_a_kept_dict_run_again() -> None:
    """It is the one that the blocks have, not another like it."""
    model, known = stack(4, lambda b, x, y: (y * b.known["scale"], b.known), counted), {"scale": 1}
    for block in model.blocks:
        block.known = known  # type: ignore[assignment]
    assert runs(model, ZEROS) > 1


def test_blocks_that_return_a_new_dict_run_once() -> None:
    assert runs(stack(4, lambda b, x, y: {"y": [y]}, lambda m, i, b, x: b(x)["y"][0]), ZEROS) == 1


def noted(model: Any, i: int, block: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    x._scale = i + 1  # type: ignore[attr-defined]
    found: Tensor = block(x)
    return found


def test_blocks_given_tensors_with_attributes_all_run() -> None:
    assert runs(stack(3, lambda b, x, y: y * getattr(x, "_scale", 9), noted), ZEROS) == 3


def put_in(model: Any, i: int, block: Any, x: Tensor) -> Tensor:
    block.extra = model.extras[i]
    found: Tensor = block(x)
    block.extra = None
    return found


def test_blocks_with_a_module_put_in_all_run() -> None:
    model = Stack(*(Block(lambda b, x, y: b.extra(y), extra=None) for _ in range(3)), call=put_in)
    model.extras = [nn.Linear(8, 8, bias=i == 1) for i in range(3)]
    for i, extra in enumerate(model.extras):
        model.register_module(f"extra{i}", extra)
    assert runs(model, ZEROS) == 3


def test_blocks_of_linears_run_once_beside_linear_heads() -> None:
    """Two heads are linears, and so are the parts of each block, whose `forward` somebody reads."""

    class Heads(Stack):
        def __init__(self) -> None:
            super().__init__(*(Block(lambda b, x, y: b.up.forward(y) @ b.down.weight.T) for _ in range(4)))
            self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            found: Tensor = self.heads[0](x) + self.heads[1](x)
            return found

    assert runs(Heads(), ZEROS) == 1


def test_captures_in_two_threads_restore_the_classes() -> None:
    models, failed = [stack(n) for n in (3, 4)], []
    before = nn.Module.__getattribute__, nn.Module.__setattr__, torch.autograd.Function.apply

    def run(model: nn.Module) -> None:
        try:
            capture(skeleton_of(model), (ZEROS,), {})
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert (nn.Module.__getattribute__, nn.Module.__setattr__, torch.autograd.Function.apply) == before


def test_patched_undoes_all_after_a_refused_attribute() -> None:
    class Sealed:
        first = 1

    with pytest.raises(TypeError), patched(Sealed, {"first": 2, "__name__": 2}):
        pass
    assert Sealed.first == 1
