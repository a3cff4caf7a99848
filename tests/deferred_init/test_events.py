"""events: which initialisers a constructor ran, in their order, and which places have one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import Bare, Recurrent, Scale, on_meta
from torch import Tensor, nn

from autotp.deferred_init.events import Event, events_of, made_again, mentioned, places_of, untied


class Applied(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)


class Tied(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Pretrained(nn.Module):
    """As transformers has them: each module is initialised once, by the innermost model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.post_init()

    def post_init(self) -> None:
        pass

    def _initialize_weights(self, module: nn.Module) -> None:
        self._init_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)


class Inner(Pretrained):
    pass


def texts(model: nn.Module) -> list[str]:
    return [str(event) for event in events_of(on_meta(lambda: model))]


def test_events_of_children_precede_those_applied_to_all() -> None:
    own = ["Embedding.reset_parameters()", "LSTM.reset_parameters()", "Linear.reset_parameters()"]
    modules = ["Embedding", "LSTM", "Linear", "Applied"]
    assert texts(Applied()) == [*own, *(f"Applied._init_weights({name})" for name in modules)]
    assert texts(nn.Sequential(Applied())) == texts(Applied())
    assert texts(nn.Sequential(Recurrent())) == own, "no constructor says that it applies `_init_weights`"


def test_events_initialise_a_shared_block_once() -> None:
    block = nn.Linear(2, 2)
    assert texts(nn.Sequential(block, nn.Sequential(block), nn.ReLU())) == ["Linear.reset_parameters()"]


def test_events_of_transformers_count_the_innermost_model_only() -> None:
    events = events_of(on_meta(lambda: Pretrained(Inner(nn.Linear(2, 2)))))
    assert [str(event) for event in events] == [
        "Linear.reset_parameters()",
        "Inner._init_weights(Linear)",
        "Inner._init_weights(Inner)",
        "Pretrained._init_weights(Pretrained)",
    ]
    assert [event.counted for event in events] == [True, False, False, False], "transformers writes nothing on meta"


def test_events_of_copied_layers_name_their_original() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    events = events_of(on_meta(lambda: nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)))
    each = len(events) // 3
    assert [event.copy_of for event in events] == [None] * each + list(range(2 * each))
    assert not any(event.counted for event in events)


@pytest.mark.parametrize("stack", [nn.TransformerEncoder, nn.TransformerDecoder])
def test_no_copies_of_a_layer_draw_nothing(stack: Any) -> None:
    assert texts(stack(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 0)) == []


@pytest.mark.parametrize("bias", [True, False])
def test_made_again_rebuilds_a_module_from_its_attributes(bias: bool) -> None:
    scale = Scale(3, 1.0, bias)
    again = made_again(scale)
    assert isinstance(again, Scale)
    assert again is not scale
    assert (again.size, again.bias is not None) == (3, bias)
    assert texts(scale) == ["Scale.__init__()"]
    assert made_again(Bare(3)) is None, "it does not keep its size"


def test_untied_gives_each_tied_place_its_own_tensor() -> None:
    """All places of a tensor are together; undone, each has a tensor of its own, and then the shared one again."""
    model = on_meta(Tied)
    shared = model.embedding.weight
    tied = places_of(model)
    assert [place.name for place in tied[0]] == ["embedding.weight", "head.weight"]
    assert len(tied) == len(list(model.parameters()))
    with untied(tied):
        assert model.embedding.weight is shared
        assert model.head.weight is not shared
        assert model.head.weight.shape == shared.shape
        assert model.head.weight.is_meta
    assert model.head.weight is shared


def test_untied_restores_ties_after_an_error() -> None:
    model = on_meta(Tied)
    with pytest.raises(KeyError), untied(places_of(model)):
        raise KeyError
    assert model.head.weight is model.embedding.weight


def test_mentioned_lists_names_in_user_constructors_only() -> None:
    """Also in functions inside them; torch's own classes do not count."""

    class Draws(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            draw = lambda: torch.randn(2)  # noqa: E731
            self.extra: Tensor = draw()

    assert "randn" in set(mentioned(Draws()))
    assert set(mentioned(nn.Linear(2, 2))) == set()


def test_event_prints_owner_method_and_module() -> None:
    linear = nn.Linear(2, 2)
    assert str(Event(linear, "reset_parameters")) == "Linear.reset_parameters()"
    assert str(Event(linear, "_init_weights", owner=nn.Sequential())) == "Sequential._init_weights(Linear)"
