"""weight_sums: each half reads a weight of its own, and their gradients are one sum."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_models import gpt as small
from small_models import step_differences
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.compiler import analyse, rank_graph
from autotp.experimental.batch_halves.halves import half_of
from autotp.experimental.batch_halves.interleave import interleave
from autotp.experimental.batch_halves.read_twice import linear, read_twice
from autotp.experimental.batch_halves.weight_sums import weight_sums
from autotp.ops.async_linear import async_linear
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.bind import bind
from autotp.source_location import block_of

TOKENS = torch.randint(27, (4, 7), generator=torch.Generator().manual_seed(0))
CALL = {"tokens": TOKENS, "labels": TOKENS}


def gpt(layers: int = 2) -> nn.Module:
    return small(0, n_layer=layers, n_head=4, n_embd=16, vocab_size=28)


def bound(**options: Any) -> torch.fx.Graph:
    program = analyse(skeleton_of(gpt()), (), CALL, 2, Options(**options))
    return interleave(bind(rank_graph(program, 0, "fast"), torch.device("cpu"), {"tp": "tp"}))


def test_weight_sums_gives_each_half_its_weight() -> None:
    """Four weights of each block, and the head's; the embedding reads the head's weight itself."""
    before = bound(overlap="batch")
    after = weight_sums(before)
    reads = after.find_nodes(op="call_function", target=read_twice)
    assert len(reads) == 4 * 2 + 1
    for read in reads:
        for item in read.users:
            (reader,) = item.users
            assert item.target is operator.getitem and item.args[1] == half_of(reader)
            assert reader.target in (linear, async_linear)
            assert block_of(read) == block_of(item) == block_of(reader)
    made = {node for read in reads for node in (read, *read.users)}
    weight = {item: read.args[0] for read in reads for item in read.users}
    old = {new: one for one, new in zip(before.nodes, [n for n in after.nodes if n not in made], strict=True)}
    for new, one in old.items():
        assert [old[weight.get(x, x)] for x in new.all_input_nodes] == one.all_input_nodes  # type: ignore[index]
        assert new.target == (linear if new.target is linear else one.target)


def test_weight_sums_change_nothing_without_halves() -> None:
    before = bound()
    assert weight_sums(before) is before


class Adds(TorchDispatchMode):
    """Counts sums of matrices."""

    keeps_no_tensor = True

    def __init__(self) -> None:
        super().__init__()
        self.joined = self.apart = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        name = op._schema.name
        self.joined += name == "aten::addmm_" and "addmm_" in str(op)
        self.apart += name in ("aten::add", "aten::add_") and found.dim() == 2
        return found


def sums(rank: int, n: int, given: dict[str, Any]) -> tuple[int, int]:
    model = autotp.parallelize(gpt(), overlap="batch", **given)
    loss = model(**CALL)
    with Adds() as adds:
        loss.backward()
    return adds.joined, adds.apart


def test_weight_sums_add_within_the_product() -> None:
    """Nine of ten; that of the embedding and the head stays."""
    for (joined, apart), (none, all_apart) in zip(
        run_ranks(sums, 2, {}), run_ranks(sums, 2, {"without": "weight_sums"}), strict=True
    ):
        assert none == 0 and joined == 9 and all_apart - apart == 9


def stepped(rank: int, n: int, given: dict[str, Any]) -> list[float]:
    """The largest differences from one device, in steps of other sizes, each of two backwards."""
    whole, model = (gpt().double() for _ in range(2))
    model = autotp.parallelize(model, overlap="batch", **given)
    return step_differences(whole, model, ((4, 7), (3, 5), (1, 6), (5, 3)), backwards=2)


@pytest.mark.parametrize(
    "given",
    [{}, {"recompute": "full"}, {"without": ("overlap", "weight_sums")}, {"without": ("outline",)}],
    ids=str,
)
def test_weight_sums_steps_equal_one_device(given: dict[str, Any]) -> None:
    for found in run_ranks(stepped, 2, given):
        assert max(found) < 1e-10
