"""tree: what autotp keeps on the modules of a parallel model, and the original model as a capture sees it."""

from __future__ import annotations

import copy
from inspect import signature
from types import MethodType
from typing import Any

import pytest
import torch
from errors import message
from small_models import Plain
from torch import Tensor, nn

import autotp
from autotp.distributed.mesh import Mesh
from autotp.options import Options
from autotp.runtime.tree import (
    ModuleState,
    Tree,
    attribute_of,
    give_state,
    held_in,
    original_class,
    original_of,
    state_of,
    table_of,
)
from autotp.sharding.layout import Layout

X = torch.ones(3, 8)


class Model(Plain):
    scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.scale


class Answers(nn.Module):
    """Has an answer for each name."""

    def __getattr__(self, name: str) -> Any:
        return f"{name} is asked"


def parallel(**more: Any) -> Any:
    return autotp.parallelize(Model(), 1, example_inputs=X, **more)


def test_only_modules_of_parallel_models_have_a_state() -> None:
    """A module that answers for any attribute is not asked."""
    assert state_of(Answers()) is None and not held_in(Model())
    model = parallel()
    states = [state_of(module) for module in model.modules()]
    assert all(isinstance(state, ModuleState) for state in states)
    assert len({id(state.tree) for state in states if state is not None}) == 1
    assert {name: layout.shape for name, layout in held_in(model.up).items()} == {"weight": (32, 8), "bias": (32,)}


def test_original_class_undoes_the_parallel_class() -> None:
    model = parallel()
    assert type(model) is not Model and original_class(type(model)) is Model
    assert original_class(type(model.up)) is original_class(nn.Linear) is nn.Linear


def test_original_of_gives_the_model_for_a_capture() -> None:
    """Its classes, hooks and attributes, whole tensors in place of parts, and nothing of autotp's."""
    made = Model()
    made.up.register_forward_hook(lambda *_: None)
    model: Any = autotp.parallelize(made, 1, example_inputs=X)
    model.scale = 3.0
    whole = {
        name: torch.empty(64, 8, device="meta") if name == "up.weight" else p for name, p in model.named_parameters()
    }
    found: Any = original_of(model, whole)
    assert (type(found), type(found.up), found.scale) == (Model, nn.Linear, 3.0)
    assert found.up.weight.shape == (64, 8) and found.up.weight.is_meta
    assert not any(state_of(module) for module in found.modules())
    assert len(found.up._forward_hooks) == 1
    assert not model.up._forward_hooks, "a call of the parallel model runs a graph"


def test_a_forward_set_on_the_module_is_kept_beside_it() -> None:
    """A call of the module runs a graph, so the user's `forward` is kept beside it, and a capture finds it."""
    model = parallel()
    assert attribute_of(model, "forward") is Model.forward
    model.forward = lambda x: x
    own = state_of(model)
    assert own is not None and own.own["forward"] is attribute_of(model, "forward")
    assert table_of(model, "forward") is own.own
    assert table_of(model, "scale") is vars(model)
    assert vars(model)["forward"].__wrapped__ is own.own["forward"]  # It stands for it.
    assert original_of(model, {}).forward(X) is X
    for given in (lambda x, scale=2: x, MethodType(lambda self, x, scale=2: x, model)):
        model.forward = given
        assert list(signature(model.forward).parameters) == ["x", "scale"]


@pytest.mark.parametrize("how", ["selective", "none"])
def test_set_recompute_changes_the_settings(how: Any) -> None:
    tree = Tree(Mesh(), Options(recompute="full"))
    tree.set_recompute(how)
    assert tree.settings == Options(recompute=how)


def test_set_recompute_refuses_an_unknown_choice() -> None:
    tree = Tree(Mesh(), Options())
    assert message(lambda: tree.set_recompute("all")) == (  # type: ignore[arg-type]
        "recompute='all' is not one of its values\n  expected 'none', 'selective', 'full'"
    )
    assert tree.settings == Options()


def test_outputs_stay_cut_ends_with_its_region() -> None:
    tree = Tree(Mesh(), Options(outputs="full"))
    with pytest.raises(KeyError), tree.outputs_stay_cut():
        assert tree.settings.outputs == "local"
        raise KeyError
    assert tree.settings.outputs == "full"


def test_a_copied_module_state_shares_a_tree_of_its_own() -> None:
    """The modules of the copy share a state of their own; it captures anew, on the same mesh."""
    tree = Tree(Mesh(), Options(), read={"scale"})
    modules = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for module in modules:
        give_state(module, ModuleState(tree, {"weight": Layout((2, 2))}, {})).executable = "graphs"
    first, second = (state_of(module) for module in copy.deepcopy(modules))
    assert first is not None and second is not None
    assert first.tree is second.tree is not tree
    assert first.tree.mesh is tree.mesh
    assert first.executable is None and first.held == {"weight": Layout((2, 2))}
    first.tree.read.add("other")
    assert tree.read == {"scale"}
