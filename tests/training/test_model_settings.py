"""model_settings: what of a model its tensors do not show."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autotp.training.model_settings import differing_settings, model_settings


@dataclass(frozen=True)
class Config:
    heads: int = 4
    dropout: float = 0.1
    inner: Any = None


class Block(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.config, self.layer, self.act, self.scale = config, layer, F.gelu, lambda x: x
        self.past: list[Any] = []
        self.past.append(self.past)  # Of no use to a checkpoint, and no reason to fail.
        self.tower: list[Any] = []
        for _ in range(5000):
            self.tower = [self.tower]
        self.norm, self.drop, self.table = nn.LayerNorm(2, eps=1e-3), nn.Dropout(0.3), torch.ones(2)


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, i) for i in range(2))
        self.words, self._own, self.sizes = ["w"] * 99, 3, {"a": (1, 2.5)}


def test_model_settings_lists_attributes_and_config() -> None:
    config = Config(inner=SimpleNamespace(theta=10000.0, itself=None))
    config.inner.itself = config.inner
    found = model_settings(Model(config).eval())
    assert found.pop("words").startswith("495 characters, crc32 ")
    assert found == {
        "": "Model",
        "sizes.a": (1, 2.5),
        "blocks": "ModuleList",
        "blocks.*": "Block",
        "blocks.*.act": "gelu",
        "blocks.*.config.heads": 4,
        "blocks.*.config.inner.theta": 10000.0,
        "blocks.*.layer": [0, 1],
        "blocks.*.norm": "LayerNorm",
        "blocks.*.norm.elementwise_affine": True,
        "blocks.*.norm.eps": 0.001,
        "blocks.*.norm.normalized_shape": (2,),
        "blocks.*.drop": "Dropout",
    }


class Act(Enum):
    GELU = 1


@dataclass(frozen=True)
class Slots:
    __slots__ = ("heads", "inner")
    heads: int
    inner: Any


def test_model_settings_reads_slots_enums_partials_and_sets() -> None:
    """Whatever says how a model computes, and has a text that stays the same."""
    model = nn.Module()
    model.config, model.layers = Slots(4, Slots(8, None)), [Config(heads=3), Config(heads=5)]
    model.act, model.gelu, model.cast = Act.GELU, partial(F.gelu, approximate="tanh"), torch.bfloat16
    model.heads, model.kept, model.drop_heads, model.drop_rates = {2, 1}, range(3), 4, [0.0, 0.5]
    assert model_settings(model) == {
        "": "Module",
        "config.heads": 4,
        "config.inner.heads": 8,
        "config.inner.inner": None,
        "layers.0.heads": 3,
        "layers.0.inner": None,
        "layers.1.heads": 5,
        "layers.1.inner": None,
        "act": "Act.GELU",
        "gelu.0": "gelu",
        "gelu.approximate": "tanh",
        "cast": "torch.bfloat16",
        "heads": [1, 2],
        "kept": [0, 1, 2],
        "drop_heads": 4,
    }


def test_settings_differences_leave_out_named_settings() -> None:
    there, here = {"a.n": 1, "b.n": [1, 2], "old": 3, "t": (1,)}, {"a.n": 2, "b.n": [1, 3], "new": 3, "t": [1]}
    assert differing_settings(there, here, ()) == [
        "`a.n` is 1 there, and 2 here",
        "`b.n` is [1, 2] there, and [1, 3] here",
    ]
    assert differing_settings(there, here, ["b.n"]) == ["`a.n` is 1 there, and 2 here"]
    assert differing_settings(there, here, ["n"]) == []
