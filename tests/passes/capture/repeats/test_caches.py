"""Models of transformers with their key-value caches: layers that are alike are captured once, and nothing differs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import RAN, runs
from torch import Tensor, fx, nn

from autotp.passes.capture.capture import capture
from autotp.passes.capture.captured import Attempt, Captured
from autotp.passes.capture.pytree import flatten, states
from autotp.passes.capture.skeleton import skeleton_of

transformers = pytest.importorskip("transformers")
from support.hf_families import FAMILIES  # noqa: E402

NAMES = ("llama", "mistral", "qwen3", "gpt2", "gemma", "gemma3", "phi3")
"""Families whose two layers are alike: with and without windows, and with keys and values that one linear makes."""


def noted(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on each layer that runs is in `RAN`."""
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    kind: Any = type(layers[0])
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *a, **k: RAN.append("layer") or forward(self, *a, **k))


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.rare) for name in NAMES[1:])])
def test_layers_with_the_model_s_cache_are_captured_once(
    name: str, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = FAMILIES[name]()
    noted(model, monkeypatch)
    assert model.config.use_cache and runs(model.train(train), **inputs) == 1


@pytest.mark.rare
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", sorted({*FAMILIES} - {*NAMES}))
def test_other_families_with_caches_have_the_full_graph(name: str, train: bool) -> None:
    model, inputs = FAMILIES[name]()
    runs(model.train(train), **inputs)


def returned(captured: Captured, model: nn.Module, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a graph returns, the caller's own cache among them."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    names = captured.parameters | captured.buffers
    inputs = [leaf for leaf in flatten(((), kwargs))[0] if isinstance(leaf, Tensor)]
    values = {name: state[target] for name, target in names.items()} | captured.constants
    values |= dict(zip(captured.inputs, inputs, strict=True))
    module = fx.GraphModule(nn.Module(), captured.graph)
    found = module(*(values[node.name] for node in captured.graph.nodes if node.op == "placeholder"))
    return tensors(captured.outputs(found, states(((), kwargs))))


def tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]


def following(model: nn.Module, inputs: dict[str, Any], kind: str, new: int) -> dict[str, Any]:
    """Arguments for the next tokens after a prompt."""
    ids = inputs["input_ids"]
    cache = transformers.StaticCache(config=model.config, max_cache_len=16) if kind == "static" else None
    cache = model(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values
    mask = torch.ones(len(ids), ids.shape[1] + new, dtype=torch.int64)
    return {"input_ids": ids[:, :new], "attention_mask": mask, "past_key_values": cache}


@pytest.mark.system
@torch.no_grad()
@pytest.mark.parametrize("new", [1, pytest.param(3, marks=pytest.mark.rare)])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.rare) for name in NAMES[1:])])
def test_layers_with_a_given_cache_are_captured_once(
    name: str, kind: str, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer's has sizes of its own, which are those of the first from then on: the graphs differ in that."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    given = following(model.eval(), inputs, kind, new)
    noted(model, monkeypatch)
    found = []
    for blocks in ("each", "by objects"):
        RAN.clear()
        captured = capture(skeleton_of(model), (), copy.deepcopy(given), attempt=Attempt(blocks=blocks))
        found.append(returned(captured, model, copy.deepcopy(given)))
    assert len(RAN) == 1
    expected = tensors(model(**given))
    for one, other, true in zip(*found, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(other, true)


def sizes(given: dict[str, Any]) -> list[torch.Size]:
    return [leaf.shape for leaf in flatten(((), given))[0] if isinstance(leaf, Tensor)]


@torch.no_grad()
def test_graph_does_not_fit_caches_of_differing_lengths() -> None:
    """The graph is for layers that keep as much as each other."""
    model, inputs = FAMILIES["llama"]()
    given = following(model.eval(), inputs, "dynamic", 1)
    fits = capture(skeleton_of(model), (), copy.deepcopy(given)).fits
    assert fits(sizes(given))
    layer = given["past_key_values"].layers[1]
    layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]
    assert not fits(sizes(given))
