"""Small configurations and inputs for any class of transformers, from the defaults of its configuration.

`smallest(name)` returns a model of a class and the arguments of a call, or says why there are none. Nothing is
downloaded. The rules go by the names of fields, not by model: `num_hidden_layers` and its kin become 2, widths are
divided by one factor, vocabularies become small. Where the small model does not run, the widths stay.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

Fields = dict[str, Any]
Model = tuple[nn.Module, Fields]
BATCH, SEQ, VOCAB = 2, 8, 160
FACTORS = (16, 8, 1)
"""Widths are divided by the first of these with which the model runs."""

LARGEST = 40_000_000
"""The most parameters of a model that is run."""

LAYERS = re.compile(r"(num_\w*layers|n_layers?|\w*_layers|layers|num_blocks|depth|n_blocks|\w*_depth)$")
NO_LAYERS = re.compile(r"(skip|freeze|mask|unused|shared|nextn|predict|cross|drop|decoder_layers_to|resid|feat|select)")
DERIVED = ("transformers_version", "architectures", "dtype", "out_features", "out_indices", "stage_names")
"""Fields that are computed of others, or say nothing of the model."""

VOCABULARY = re.compile(r"(\w*_)?vocab_size(_\w+)?$")
TOKEN = re.compile(r"\w*(token_id|_token_index|_idx|token_ids?)$")
NO_WIDTHS = re.compile(r"(num_channels|in_channels|in_chans|num_mel_bins|input_channels|out_channels|rotary_dim)$")
WIDTHS = re.compile(
    r"(\w*hidden_size\w*|d_model|n_embd|\w*embed_dim|\w*_dim|dim|\w*intermediate_size|\w*ffn_dim|d_ff|d_kv|d_inner|"
    r"n_inner|\w*_rank|\w*hidden_sizes|\w*channels|\w*embed_dims|width|\w*embedding_size|head_dim|ffn_hidden_size|"
    r"\w*projection_size|\w*_hidden_dims?|neck_hidden_sizes|fusion_hidden_size|conv_dim|tdnn_dim)$"
)


def classes() -> dict[str, str]:
    """Returns the classes of transformers' Auto mappings, class -> the mapping that has it first, by name."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for mapping, names in sorted(vars(modeling_auto).items()):
        if mapping.startswith("MODEL_") and mapping.endswith("_MAPPING_NAMES"):
            for one in names.values():
                for name in (one,) if isinstance(one, str) else one:
                    found.setdefault(name, mapping)
    return {name: found[name] for name in sorted(found)}


def smallest(name: str) -> Model:
    """Returns a small model of a class in float64, and arguments with which it runs in training mode.

    Raises:
        LookupError: transformers has no such class, or no small configuration of it runs; the text says why.
    """
    kind = getattr(transformers, name, None)
    if kind is None or getattr(kind, "config_class", None) is None:
        raise LookupError("transformers does not export it, or it has no configuration")
    reasons = []
    for factor in FACTORS:
        try:
            config = shrunk(kind.config_class, factor)
            with torch.device("meta"):
                count = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
            if count > LARGEST:
                raise LookupError(f"{count / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = kind(config).double()
            return model, call_of(model)
        except Exception as error:
            reasons.append(
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            )
    raise LookupError(reasons[0])


# ---- configurations


def shrunk(kind: Any, factor: int) -> Any:
    """Returns a small configuration of a class of configurations; widths are divided by `factor`."""
    fields = kind().to_dict()
    config = kind.from_dict(_small(fields, factor))
    config.use_cache = False
    for one in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        one._experts_implementation = "batched_mm"  # It has float64, and no loop over the experts that are hit.
    return config


def _small(fields: Mapping[str, Any], factor: int) -> Fields:
    depth = next(
        (fields[key] for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if fields.get(key)), 0
    )
    found = {}
    for key, value in fields.items():
        if key in DERIVED:
            continue
        if isinstance(value, dict):
            found[key] = _small({k: v for k, v in value.items() if not str(k).isdigit() or int(k) < 2}, factor)
        else:
            found[key] = _small_value(key, value, factor, depth if isinstance(depth, int) else 0)
    return found


def _small_value(key: str, value: Any, factor: int, depth: int) -> Any:
    number = isinstance(value, int) and not isinstance(value, bool)
    if number and LAYERS.match(key) and not NO_LAYERS.search(key):
        return min(value, 2)
    if number and VOCABULARY.match(key):
        return min(value, VOCAB)
    if number and TOKEN.match(key):
        return value if 0 <= value < 8 or value < 0 else VOCAB - 2 - value % 16
    if number and WIDTHS.match(key) and not NO_WIDTHS.search(key):
        return _width(value, factor)
    if number and key.startswith("max_") and "position" in key:
        return min(value, 1024)
    if not isinstance(value, (list, tuple)) or not value:
        return value
    if key.endswith("depths"):
        return [min(one, 2) for one in value]
    if depth > 2 and len(value) == depth:
        return [value[0], value[-1]]
    if all(isinstance(one, int) for one in value) and WIDTHS.match(key):
        return [_width(one, factor) for one in value]
    return value


def _width(value: int, factor: int) -> int:
    return value // factor if value % factor == 0 and value // factor >= 2 else value


# ---- calls


def call_of(model: nn.Module) -> Fields:
    """Returns arguments with which a model runs: with labels if it takes them.

    Raises:
        Exception: that of the first of the calls which were tried.
    """
    first: Exception | None = None
    for call in _calls(model):
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                model.train()(**call)
            return call
        except Exception as error:
            first = first or error
    raise first or LookupError("no arguments are known")


def _calls(model: Any) -> Iterator[Fields]:
    names = set(inspect.signature(model.forward).parameters)
    for base in _bases(model, names):
        for labels in _labels(model, names, base):
            yield base | labels
        yield base


def _bases(model: Any, names: set[str]) -> Iterator[Fields]:
    tokens = torch.arange(BATCH * SEQ).view(BATCH, SEQ) * 17 % (VOCAB - 40) + 9
    main, config = model.main_input_name, model.config
    end = _field(config, "eos_token_id", None)
    tokens[:, -1] = end if isinstance(end, int) and 0 <= end < VOCAB else VOCAB - 40
    if type(model).__name__.endswith("MultipleChoice"):
        tokens = tokens.unsqueeze(1).expand(-1, 2, -1).contiguous()
    found: Fields = {}
    if "input_ids" in names:
        found["input_ids"] = tokens
        if "attention_mask" in names:
            found["attention_mask"] = torch.ones_like(tokens)
    if "decoder_input_ids" in names and "labels" not in names:
        found["decoder_input_ids"] = tokens
    if "bbox" in names:
        found["bbox"] = torch.arange(4).expand(BATCH, SEQ, 4) * 9
    pixels = _pixels(config)
    inputs: dict[str, list[Tensor]] = {
        "pixel_values": pixels,
        "pixel_values_videos": [x.unsqueeze(1).expand(-1, _field(config, "num_frames", 2), -1, -1, -1) for x in pixels],
        "input_values": [_wave(4000), _wave(1, 4000), _wave(1024, 128)],
        "input_features": [_wave(_field(config, "num_mel_bins", 80), 2 * _field(config, "max_source_positions", 50)),
                           _wave(64, _field(config, "num_mel_bins", 80))],
    }  # fmt: skip
    if main in inputs and "input_ids" not in names:
        others = {k: v for k, v in found.items() if k.startswith("decoder")}
        yield from ({main: x, **others} for x in inputs[main])
        yield from ({main: x.unsqueeze(1).expand(-1, 2, -1, -1, -1), **others} for x in pixels)
    else:
        if "pixel_values" in names:
            yield from ({**found, "pixel_values": x} for x in pixels)
        for key in ("input_features", "input_values"):
            if key in names:
                yield from ({**found, key: x} for x in inputs[key])
        if found:
            yield found


def _wave(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, *shape, dtype=torch.float64, generator=generator)


def _pixels(config: Any) -> list[Tensor]:
    size, channels = _field(config, "image_size", 224), _field(config, "num_channels", 3)
    sizes = [size] if isinstance(size, int) else list(size) if isinstance(size, (list, tuple)) else [224]
    height, width = (sizes * 2)[:2]
    found = [_wave(channels, height, width)]
    return found if height == 64 else [*found, _wave(channels, 64, 64)]


def _field(config: Any, name: str, otherwise: Any) -> Any:
    """Returns a field of a configuration, or of the first inner configuration that has it."""
    inner = [
        getattr(config, key, None)
        for key in ("text_config", "vision_config", "audio_config", "encoder", "backbone_config")
    ]
    values = (getattr(one, name, None) for one in (config, *inner) if one is not None)
    return next((value for value in values if value is not None), otherwise)


def _labels(model: Any, names: set[str], base: Fields) -> Iterator[Fields]:
    rows = torch.arange(BATCH)
    if {"start_positions", "end_positions"} <= names:
        yield {"start_positions": rows, "end_positions": rows + 2}
    if "labels" not in names:
        return
    if "input_ids" in base:
        tokens = base["input_ids"]
        sequence, each = ("ForSequenceClassification", "ForImageClassification"), type(model).__name__
        by_row = each.endswith((*sequence, "ForMultipleChoice"))
        yield from ({"labels": x} for x in ((rows % 2, tokens) if by_row else (tokens, rows % 2)))
        yield {"labels": tokens % 2}
    else:
        yield {"labels": rows % 2}
        yield {"labels": torch.arange(BATCH * 4).view(BATCH, 4) % 20 + 5}
