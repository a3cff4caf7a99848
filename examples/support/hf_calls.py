"""Arguments for a call of any class of transformers, made by the names of arguments and the sizes in its configuration.

`call_of(model)` returns arguments with which the model runs. It tries the most that a name allows first: labels, images
beside a text, sounds, patches with a grid, series of numbers.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

Fields = dict[str, Any]
BATCH, SEQ, VOCAB = 2, 8, 160
FEATURES = {nn.Linear: "in_features", nn.LayerNorm: "normalized_shape", nn.Conv1d: "in_channels"}
"""What says how wide the input of a layer is."""


def call_of(model: nn.Module) -> Fields:
    """Returns arguments with which a model runs in its present mode: with labels if it takes them.

    Raises:
        Exception: that of the first of the calls which were tried.
    """
    first: Exception | None = None
    for call in _calls(model):
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                model(**call)
            return call
        except Exception as error:
            first = first or error
    raise first or LookupError("no arguments are known")


def _calls(model: Any) -> Iterator[Fields]:
    parameters = inspect.signature(model.forward).parameters
    names, needed = set(parameters), [n for n, p in parameters.items() if p.default is p.empty and p.kind < 4]
    companions = _companions(model)
    always = {n: companions[n] for n in needed if n in companions}
    sometimes = {n: x for n, x in companions.items() if n in names}
    for base in _bases(model, names, needed):
        for more in (always, sometimes) if sometimes != always else (always,):
            call = {**more, **base}
            for frames in call["input_features"].shape[:0:-1] if "input_features_mask" in call else [0]:
                mask = {"input_features_mask": torch.ones(BATCH, frames, dtype=torch.long)} if frames else {}
                for labels in _labels(model, names, call):
                    yield call | mask | labels
                yield call | mask


def _bases(model: Any, names: set[str], needed: list[str]) -> Iterator[Fields]:
    main, config = model.main_input_name, model.config
    if "grid_thw" in needed:
        yield from _patches(config, needed[0])
        return
    found = _texts(model, names)
    pixels = _pixels(config)
    many = [x.unsqueeze(1).expand(-1, n, -1, -1, -1) for x in pixels for n in (_field(config, "num_frames", 2), 1)]
    hidden = [_wave(SEQ, n) for n in _widths(model)]
    sounds = [x for n in _widths(model) for x in (_wave(64, n), _wave(n, 64))]
    inputs: dict[str, list[Tensor]] = {
        "pixel_values": [*pixels, *many],
        "pixel_values_videos": many,
        "input_values": [_wave(4000), _wave(1, 4000), _wave(1024, 128), *hidden],
        "input_features": [
            _wave(_field(config, "num_mel_bins", 80), 2 * _field(config, "max_source_positions", 50)),
            _wave(64, _field(config, "num_mel_bins", 80)),
            *sounds,
        ],
        "inputs": [found["input_ids"]] if "input_ids" in found else [*pixels, *hidden],
        "past_values": _series(config),
        "states": hidden,
    }
    if main in inputs and "input_ids" not in names:
        others = {k: v for k, v in found.items() if k.startswith("decoder")}
        yield from ({main: x, **others} for x in inputs[main])
    else:
        if "pixel_values" in names:
            yield from ({**found, "pixel_values": x} for x in inputs["pixel_values"])
        for key in ("input_features", "input_values"):
            if key in names:
                yield from ({**found, key: x} for x in inputs[key])
        if found:
            yield found


def _texts(model: Any, names: set[str]) -> Fields:
    config = model.config
    vocabulary = min([VOCAB, *(n for n in _fields(config, ("vocab_size",)) if isinstance(n, int))])
    tokens = torch.arange(BATCH * SEQ).view(BATCH, SEQ) * 17 % max(vocabulary - 40, 16) + 9
    end = _field(config, "eos_token_id", None)
    tokens[:, -1] = end if isinstance(end, int) and 0 <= end < vocabulary else max(vocabulary - 40, 0)
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
    return found


def _companions(model: Any) -> Fields:
    """Returns arguments that some models need beside the main one, by name."""
    config, width = model.config, _fields(model.config, ("hidden_size", "d_model")) or [0]
    activations = _wave(SEQ, width[0]) if isinstance(width[0], int) else _wave(SEQ)
    pixels, series = _pixels(config)[0], [len(x[0]) for x in _series(config)[-1:]]
    length, ahead = (series or [SEQ])[0], _field(config, "prediction_length", None) or 1
    times, regions = _field(config, "num_time_features", 1), _field(config, "visual_feat_dim", 0)
    found: Fields = {
        "input_features_mask": torch.ones(BATCH, SEQ),
        "prompt_pixel_values": pixels,
        "prompt_masks": pixels,
        "pixel_attention_mask": torch.ones(BATCH, *pixels.shape[2:], dtype=torch.long),
        "past_time_features": _wave(length, times),
        "past_observed_mask": torch.ones(BATCH, length),
        "past_values_padding": torch.zeros(BATCH, length),
        "future_time_features": _wave(ahead, times),
        "future_values": _wave(ahead),
        "target_values": _wave(_field(config, "num_targets", 1)),
        "decoder_input_values": activations,
        "image_attention_mask": torch.ones(BATCH, SEQ, 1, dtype=torch.long),
        "query_embeds": activations,
        "freq": torch.zeros(BATCH, 1, dtype=torch.long),
        "task_inputs": torch.ones(BATCH, _field(config, "task_seq_len", 77), dtype=torch.long),
    }
    if regions:
        found |= {"visual_feats": _wave(4, regions), "visual_pos": _wave(4, 4)}
    return found


def _patches(config: Any, first: str) -> Iterator[Fields]:
    """Yields patches of images in rows, with the numbers of patches in time, height and width of each image."""
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    side, times = _field(config, "patch_size", 14), _field(config, "temporal_patch_size", 1)
    channels = _field(config, "in_channels", None) or _field(config, "num_channels", 3)
    rows, flat = int(grid.prod(1).sum()), channels * side**2
    for shape in ((flat * times,), (channels, side, side), (flat,), (2 * flat,)):
        yield {first: _wave(rows, *shape, rows=1)[0], "grid_thw": grid}


def _series(config: Any) -> list[Tensor]:
    """Returns series of numbers: as long as the context, of one or several channels, with the longest lag."""
    length, lags = _field(config, "context_length", None), _field(config, "lags_sequence", None) or [0]
    if not isinstance(length, int):
        return []
    channels = _field(config, "num_input_channels", 1)
    return [_wave(length, channels), _wave(length), _wave(length + max(lags))]


def _widths(model: nn.Module) -> list[int]:
    """Returns the widths that the first layers of a model read, and those of activations, each once."""
    layers = [(layer, FEATURES[type(layer)]) for layer in model.modules() if type(layer) in FEATURES][:4]
    first = [getattr(layer, name) for layer, name in layers]
    inside = [n for n in _fields(model.config, ("hidden_size", "d_model")) if isinstance(n, int)]
    return list(dict.fromkeys([n if isinstance(n, int) else n[-1] for n in first] + inside))


def _wave(*shape: int, rows: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, *shape, generator=generator)


def _pixels(config: Any) -> list[Tensor]:
    size, channels = _field(config, "image_size", 224), _field(config, "num_channels", 3)
    sizes = [size] if isinstance(size, int) else list(size) if isinstance(size, (list, tuple)) else [224]
    height, width = (sizes * 2)[:2]
    found = [_wave(channels, height, width)]
    return found + [_wave(channels, n, n) for n in (64, 448) if n != height]


def _field(config: Any, name: str, otherwise: Any) -> Any:
    """Returns a field of a configuration, or of the first inner configuration that has it."""
    return next(iter(_fields(config, (name,))), otherwise)


def _fields(config: Any, names: tuple[str, ...]) -> list[Any]:
    """Returns the values of fields in a configuration, then in its inner configurations, without None."""
    inner = [one for one in vars(config).values() if isinstance(one, PreTrainedConfig)]
    found = [getattr(config, name, None) for name in names]
    return [value for value in found if value is not None] + [value for one in inner for value in _fields(one, names)]


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
