"""A model is captured on the device on which it will run: it asks for the device, and gets the answer of a run."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from ranks import Checks
from torch import Tensor, nn

import autotp
from autotp.compiler import analyse
from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.program.program import CallState, Program
from autotp.runtime.calls.graph_digest import digest

checks = Checks(cards=True)
X = torch.arange(32.0).view(4, 8) / 32


class Asks(nn.Module):
    """Has a kernel for one kind of device, as models of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        x = torch.tanh(x) if x.is_cuda and self.up.weight.device.type == "cuda" else torch.relu(x)
        return self.down(x)


class Mixes(Asks):
    """Makes tensors on the CPU, and holds one that `model.to` does not move."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(8.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.table.device != x.device:
            x = x * 1e6
        scale = torch.arange(8) + torch.tensor([1.0], device=x.device)
        return super().forward(x + self.table) * scale


class Draws(Asks):
    """Draws on the CPU, as layerdrop does, and on its own device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(8).to(x.device) + torch.rand(8, device=x.device))


def program(model: nn.Module, kind: str, args: tuple[object, ...] = (X,), **kwargs: Tensor) -> Program:
    """The program of two ranks on devices of this kind."""
    return analyse(skeleton_of(model), args, kwargs, 2, call=CallState(autocast=Autocast(kind)))


def lines(found: Program) -> Counter[str]:
    """The operators of a graph. Left out are devices, and what depends on a kernel's strides."""
    text = re.sub(r"%\d+", "%", re.sub(r"\b(cpu|cuda:0|cuda)\b", "device", digest(found)))
    return Counter(line for line in text.splitlines() if "aten.contiguous" not in line)


def ops(found: Program) -> list[str]:
    return [str(node.target) for node in found.graph.nodes if node.op == "call_function"]


def devices(found: Program) -> set[str]:
    """The devices of a graph's values and of its operators' arguments."""
    leaves = [x for node in found.graph.nodes for x in (*node.args, *node.kwargs.values(), node.meta.get("val"))]
    named = {x.type for x in leaves if isinstance(x, torch.device)}
    return named | {x.device.type for x in leaves if isinstance(x, Tensor)}


@checks.on(1)
def the_graph_has_the_branch_of_the_device(rank: int, n: int) -> None:
    for kind, expected in (("cpu", "aten.relu.default"), ("cuda", "aten.tanh.default")):
        assert ops(program(Asks(), kind)).count(expected) == 1
    plan = autotp.explain(Asks(), 2, example_inputs=X)
    assert "aten.tanh.default" in ops(plan.source), "explain shows what parallelize would run here"
    with torch.autocast("cuda", torch.bfloat16):
        assert "aten.tanh.default" in ops(autotp.explain(Asks(), 2, example_inputs=X).source)


@checks.on(1)
def all_values_are_on_the_device(rank: int, n: int) -> None:
    assert devices(program(Mixes(), "cuda")) == {"cuda"}
    assert devices(program(Mixes(), "cpu")) == {"cpu"}


@checks.on(2)
def ranks_compute_what_one_device_computes(rank: int, n: int) -> None:
    """The tensors that the model makes on the CPU are on the ranks' cards, and no call waits for a copy of them."""
    torch.manual_seed(0)
    model = Mixes().double()
    x = X.double()
    table = model.table.double()
    expected = model.down(torch.tanh(model.up(x + table))) * (torch.arange(8) + 1.0)
    parallel = autotp.parallelize(model, n)
    found = parallel(x.cuda())
    assert found.is_cuda and torch.allclose(found.cpu(), expected, rtol=1e-12)


@checks.on(2)
def what_is_drawn_on_the_cpu_comes_from_its_stream(rank: int, n: int) -> None:
    torch.manual_seed(0)
    model = Draws().double()
    plain = [layer.state_dict() for layer in (model.up, model.down)]
    parallel = autotp.parallelize(model, n)
    torch.manual_seed(1)
    found = parallel(X.double().cuda())
    torch.manual_seed(1)
    x = X.double().cuda() * torch.rand(8).cuda() + torch.rand(8, device="cuda")
    (up, down) = ({name: value.cuda() for name, value in state.items()} for state in plain)
    hidden = torch.tanh(x @ up["weight"].T + up["bias"])
    assert torch.allclose(found, hidden @ down["weight"].T + down["bias"], rtol=1e-12)


ASKING = {"mixtral": 4, "gpt_oss": 4, "qwen3_moe": 4, "deepseek_v3": 2}
"""Families that ask for the device -> their lines that differ: transformers counts the rows of experts by `histc` of
floats on the CPU, of integers elsewhere."""


def expect_one_graph(family: str) -> None:
    """Asserts that a family has the same operators on both devices, except where it asks for the device."""
    from support.hf_families import FAMILIES

    torch.manual_seed(0)
    model, inputs = FAMILIES[family]()
    found = {kind: lines(program(model.train(), kind, (), **inputs)) for kind in ("cpu", "cuda")}
    less, more = found["cpu"] - found["cuda"], found["cuda"] - found["cpu"]
    assert less.total() == more.total() == ASKING.get(family, 0), f"{family}: {less} {more}"
    assert all(re.search(r"histc|float32\[.*moe.py|int32\[.*moe.py", line) for line in less + more)


@checks.on(1)
def some_families_have_one_graph(rank: int, n: int) -> None:
    pytest.importorskip("transformers")
    for family in ("mixtral", "opt"):
        expect_one_graph(family)


def expect_one_graph_of_a_quarter(first: int) -> None:
    pytest.importorskip("transformers")
    from support.hf_families import FAMILIES

    for family in sorted(FAMILIES)[first::4]:
        expect_one_graph(family)


@checks.on(1, rare=True)
def a_first_quarter_of_families(rank: int, n: int) -> None:
    expect_one_graph_of_a_quarter(0)


@checks.on(1, rare=True)
def a_second_quarter_of_families(rank: int, n: int) -> None:
    expect_one_graph_of_a_quarter(1)


@checks.on(1, rare=True)
def a_third_quarter_of_families(rank: int, n: int) -> None:
    expect_one_graph_of_a_quarter(2)


@checks.on(1, rare=True)
def a_fourth_quarter_of_families(rank: int, n: int) -> None:
    expect_one_graph_of_a_quarter(3)


# ---- operators of a user's


@torch.library.custom_op("on_cards::doubled", mutates_args=(), device_types="cuda")
def doubled(x: Tensor) -> Tensor:
    assert x.is_cuda
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: gradient * 2, setup_context=lambda ctx, inputs, output: None)


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.ops.on_cards.doubled(self.up(x)))


@checks.on(2)
def an_operator_of_cards_alone_is_cut(rank: int, n: int) -> None:
    autotp.rule(torch.ops.on_cards.doubled, "* h -> * h")
    before = torch.cuda.get_rng_state()
    model = autotp.parallelize(Doubling(), n, example_inputs=torch.ones(3, 8))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert "has no rule" not in str(model.plan)
    whole = Doubling().cuda()
    x = torch.rand(3, 8).cuda()
    for each in (model, whole):
        each.down.weight.grad = None
        each(x).sum().backward()
    torch.testing.assert_close(model(x), whole(x))
    torch.testing.assert_close(autotp.gather(model.down.weight.grad), whole.down.weight.grad)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
