"""attach_parameters: a block reads its parameters when its module is called; hooks on the module see the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import draft, some
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.profiler import ProfilerActivity, profile

from autotp.passes.emit.attach_parameters import (
    BlockCall,
    Owner,
    attach_parameters,
    module_at,
    place_in,
    places,
    ties,
    value_at,
    works,
)
from autotp.passes.emit.outline import blocks, outlined

aten = torch.ops.aten
X, WEIGHTS = some(3, 4), [some(4, 4), some(4, 4).t().contiguous()]
NAMES = {"w": "h.0.weight", "v": "h.1.weight", "s": "shared"}


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = Owner) -> None:
        super().__init__()
        self.shared = nn.Parameter(some(4))
        self.h = nn.ModuleList(kind() for _ in range(2))
        for block, weight in zip(self.h, WEIGHTS, strict=True):
            block.weight = nn.Parameter(weight.clone())


def two_blocks(call: Any, x: Any, w: Any, v: Any, s: Any) -> fx.Node:
    """Each block has a weight of its own; both read `s`."""
    for i, weight in enumerate((w, v)):
        for target, operand in ((aten.linear.default, weight), (aten.add.Tensor, s)):
            x = call(target, x, operand)
            x.meta["nn_module_stack"] = {"": (f"h.{i}", None)}
    return x


def attached(model: Model) -> fx.GraphModule:
    graph = draft(two_blocks, x=X, w=WEIGHTS[0], v=WEIGHTS[1], s=some(4))
    its = {f"h.{i}": block for i, block in enumerate(model.h)}
    return attach_parameters(outlined(graph, list(blocks(graph)), "block"), NAMES, places(model)[1], its.get)


def expected(model: Model) -> Tensor:
    x = X
    for block in model.h:
        x = x @ block.get_parameter("weight").T + model.shared
    return x


@pytest.mark.parametrize("kind", [Owner, nn.ModuleList])
def test_attached_blocks_read_their_own_parameters(kind: type[nn.Module]) -> None:
    """What both read is passed to them. A module that cannot be called is not called."""
    model = Model(kind)
    module = attached(model)
    assert [node.name for node in module.graph.nodes if node.op == "placeholder"] == ["x", "s"]
    torch.testing.assert_close(module(X, model.shared)[0], expected(model))
    model.h[1].weight = nn.Parameter(some(4, 4) * 2)
    torch.testing.assert_close(module(X, model.shared)[0], expected(model))
    assert not list(module.parameters()), "the parameters belong to the model alone"


def test_attached_blocks_get_shared_parameters_as_arguments() -> None:
    """Also if it belongs to one of them: while the other is called, that one's hooks have not run."""
    graph = draft(two_blocks, x=X, w=WEIGHTS[0], v=WEIGHTS[1], s=some(4))
    model = Model()
    model.h[0].scale = model.shared
    del model.shared
    module = outlined(graph, list(blocks(graph)), "block")
    its = {f"h.{i}": block for i, block in enumerate(model.h)}
    found = attach_parameters(module, NAMES | {"s": "h.0.scale"}, places(model)[1], its.get)
    assert [node.name for node in found.graph.nodes if node.op == "placeholder"] == ["x", "s"]


def test_works_lists_a_shared_graph_once() -> None:
    module = attached(Model())
    first, second = (part for part in module.children() if isinstance(part, BlockCall))
    assert first.work is second.work
    assert works(module) == {"block": first.work}


def test_attached_blocks_run_hooks_of_their_module() -> None:
    model, seen = Model(), list[str]()
    for i, block in enumerate(model.h):
        block.register_forward_pre_hook(lambda *_, i=i: seen.append(f"h.{i}"))
    attached(model)(X, model.shared)
    assert seen == ["h.0", "h.1"]


def test_profiler_shows_the_names_of_blocks() -> None:
    """Also of blocks that share one graph."""
    model = Model()
    graph = attached(model)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        graph(X, model.shared)
    names = [event.name for event in trace.events()]
    assert [name for name in names if name.startswith("h.")] == ["h.0", "h.1"]


def test_value_at_reads_the_call_s_tensors() -> None:
    """functional_call puts other tensors into the tables; a property of a parametrization is asked."""
    linear, seen = nn.Linear(2, 2), list[Tensor]()
    linear.register_forward_hook(lambda *_: seen.append(value_at((linear, "weight"))))
    other = torch.ones(2, 2)
    functional_call(linear, {"weight": other}, (torch.ones(1, 2),))
    assert seen[0] is other
    nn.utils.parametrizations.weight_norm(linear)
    assert value_at((linear, "weight")).shape == (2, 2)


def test_places_know_names_and_ties() -> None:
    model = Model()
    model.h[1].weight = model.h[0].weight
    names, found = places(model)
    assert names == {"shared": "shared", "h.0.weight": "h.0.weight", "h.1.weight": "h.0.weight"}
    assert found == {"shared": (model, "shared"), "h.0.weight": (model.h[0], "weight")}
    assert place_in(model, "h.1.weight") == (model.h[1], "weight")
    assert ties(model, names, found) == {"h.1.weight": ((model.h[1], "weight"), "h.0.weight")}


def test_ties_leave_out_modules_with_two_names() -> None:
    model = Model()
    model.h[1] = model.h[0]
    assert ties(model, *places(model)) == {}


def test_module_at_makes_missing_modules() -> None:
    root = nn.Module()
    made = module_at(root, "h.0.plan", Owner)
    assert isinstance(made, Owner)
    assert module_at(root, "h.0.plan") is made
    assert [type(root.get_submodule(path)) for path in ("h", "h.0")] == [nn.Module, nn.Module]
    assert module_at(root, "") is root
