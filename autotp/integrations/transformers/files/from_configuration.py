"""Builds a model of transformers from a configuration alone: no weights are read, and nothing is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotp.errors import Error
from autotp.integrations.transformers.files.configuration import (
    CONFIG,
    ModelArguments,
    class_of,
    first_line,
    offline_and_silent,
    read_config,
    transformers_module,
)

LAYERS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
    "encoder_num_hidden_layers", "decoder_num_hidden_layers",
)  # fmt: skip
"""The names under which configurations have a number of layers."""
KINDS = "layer_types"
"""The name of the list of the layers' kinds."""
FIRST_DENSE = "first_k_dense_replace"
"""The number of layers without experts, before those with experts."""


def model_from_configuration(
    path: Path,
    config: Mapping[str, Any],
    *,
    layers: int | None = None,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
    model_class: str | None = None,
) -> nn.Module:
    """Returns a model with the weights of its initialisers, in training mode; on `meta` under `torch.device("meta")`.

    Args:
        path: a folder with config.json, or such a file.
        config: values that replace those of the file.
        layers: the largest number of layers; layers of different kinds come first.
        dtype: of the parameters; None means the configuration's.
        attention: transformers' `attn_implementation`; None means its default.
        model_class: the name of a class of transformers; None means the class that the file names.

    Raises:
        Error: the configuration cannot be read, or names code; transformers has no such class, or cannot build it.
    """
    folder, name = (path, CONFIG) if path.is_dir() else (path.parent, path.name)
    arguments = ModelArguments(dtype, _named(model_class), config, "error", "error")
    read = read_config(folder, arguments, name)
    build = class_of(read, arguments, folder)
    if layers is not None:
        read = type(read).from_dict(_shortened(read.to_dict(), layers, path))
    options = {"attn_implementation": attention, "dtype": dtype}
    try:
        with offline_and_silent():
            model = build._from_config(read, **{name: value for name, value in options.items() if value is not None})
    except Exception as error:
        problem, remedy = f"{build.__name__} cannot be built: {first_line(error)}", "other values in this configuration"
        raise Error(problem, at=str(path), fix=remedy) from error
    return model.train()


def _named(model_class: str | None) -> Any:
    if model_class is None:
        return None
    cls = getattr(transformers_module(), model_class, None)
    if not isinstance(cls, type):
        raise Error(f"transformers has no class {model_class}", expected="such as AutoModelForCausalLM")
    return cls


def _shortened(settings: dict[str, Any], layers: int, path: Path) -> dict[str, Any]:
    """Returns the values of a configuration with at most `layers` layers.

    Raises:
        Error: the configuration has no number of layers.
    """
    has_layers, shorter = _fewer(settings, layers)
    if not has_layers:
        remedy = "--kwargs, with the setting of this model"
        raise Error("the configuration has no number of layers", expected=", ".join(LAYERS), at=str(path), fix=remedy)
    return shorter


def _fewer(settings: Mapping[str, Any], layers: int) -> tuple[bool, dict[str, Any]]:
    """Returns whether there is a number of layers, and the settings with fewer; also in the settings of parts."""
    counts = {name: settings[name] for name in LAYERS if type(settings.get(name)) is int}
    layers_by_count = {count: _representatives(settings, count, layers) for count in counts.values()}
    has_layers, shorter = bool(counts), dict(settings)
    for name, value in settings.items():
        if name in counts:
            shorter[name] = min(value, layers)
        elif isinstance(value, list) and len(value) in layers_by_count:  # One entry a layer.
            shorter[name] = [value[i] for i in layers_by_count[len(value)]]
        elif isinstance(value, dict):
            inside, shorter[name] = _fewer(value, layers)
            has_layers = has_layers or inside
        elif name == FIRST_DENSE and type(value) is int:
            # At least one layer with experts stays.
            shorter[name] = min(value, max(layers - 1, 0))
    return has_layers, shorter


def _representatives(settings: Mapping[str, Any], count: int, layers: int) -> list[int]:
    """Returns the numbers of the layers that stay: the first of each kind, then the first ones."""
    kinds = settings.get(KINDS)
    if not isinstance(kinds, list) or len(kinds) != count:
        return list(range(min(count, layers)))
    firsts = [i for i, layer_kind in enumerate(kinds) if layer_kind not in kinds[:i]]
    rest = [i for i in range(count) if i not in firsts]
    return sorted([*firsts, *rest][:layers])
