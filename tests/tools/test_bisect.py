"""Halving finds what a difference comes from: the cut, the pass and the rule, whatever else is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import gpt
from torch import Tensor, fx, nn

from autotp.options import DEFAULTS
from autotp.passes.program import emitted
from autotp.rules import common as f
from autotp.rules.registry import RULES
from autotp.tools.bisect import bisect, halve

WEIGHT = "h.1.mlp.c_fc.weight"


@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=4))
def test_halving_finds_all_that_are_needed(n: int, guilty: set[int]) -> None:
    needed = {i for i in guilty if i < n}
    tried = 0

    def differs(on: Sequence[int]) -> bool:
        nonlocal tried
        tried += 1
        return needed <= set(on)

    assert halve(range(n), differs) == sorted(needed)
    assert len(needed) != 1 or tried <= 1 + 2 * n.bit_length()


def test_halving_finds_one_of_several_that_suffice() -> None:
    assert halve(range(9), lambda on: bool({3, 7} & set(on))) == [3]


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass `in_place`, which runs behind the check, scales a weight that is cut."""
    bind = emitted.bind

    def run(graph: fx.Graph, device: Any, groups: Any, owned: Any, in_place: bool) -> fx.Graph:
        bound = bind(graph, device, groups, owned, in_place)
        weight = next(node for node in bound.nodes if node.op == "placeholder" and "h_1_mlp_c_fc_weight" in node.name)
        if in_place and weight.meta["val"].shape != (64, 16):
            reader = next(iter(weight.users))
            with bound.inserting_before(reader):
                scaled = bound.call_function(torch.ops.aten.mul.Tensor, (weight, 1.001))
            scaled.meta = {**reader.meta, "val": weight.meta["val"]}
            weight.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        return bound

    monkeypatch.setattr(emitted, "bind", run)


def test_bisect_finds_the_guilty_weight_and_pass(spoilt: None) -> None:
    model = gpt(block_size=8, vocab_size=61, n_layer=2, n_head=4, n_embd=16)
    blame = bisect(model, ((), model.dummy_inputs), 2, DEFAULTS)
    assert blame is not None
    assert set(blame.weights) == {WEIGHT, "h.1.mlp.c_fc.bias", "h.1.mlp.c_proj.weight"} and blame.weights[0] == WEIGHT
    assert (blame.passes, blame.rule) == (("in_place",), "")
    assert blame.why == "linear -> activation -> linear"
    assert 1 < blame.trials < 30


def test_nothing_is_guilty_of_no_difference() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    assert bisect(model, ((torch.ones(2, 4),), {}), 2, DEFAULTS) is None


# ---- a rule that is not true


@torch.library.custom_op("bisect_tests::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


centred.register_fake(lambda x: torch.empty_like(x))
centred.register_autograd(lambda ctx, grad: grad - grad.mean(-1, keepdim=True))


class Centred(nn.Module):
    """An MLP that needs the whole width between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.ops.bisect_tests.centred(self.up(x)))


@pytest.fixture
def untrue(registry: None) -> Iterator[None]:
    """A rule that nobody tried: those that users register are."""
    RULES[torch.ops.bisect_tests.centred.default] = f.fixed("* h -> * h")
    yield


def test_bisect_finds_the_guilty_rule(untrue: None) -> None:
    blame = bisect(Centred(), ((torch.randn(3, 4),), {}), 2, DEFAULTS)
    assert blame is not None
    assert blame.rule == "bisect_tests.centred.default" and blame.passes == ()
    assert set(blame.weights) == {"up.weight", "up.bias", "down.weight"}
    assert torch.ops.bisect_tests.centred.default in RULES, "trials put rules back"
