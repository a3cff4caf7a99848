"""Small models of any class of transformers, from the defaults of its configuration.

`smallest(name)` returns a model of a class and the arguments of a call, or says why there are none. Nothing is
downloaded. The rules go by the names of fields, not by model: `num_hidden_layers` and its kin become 2, widths are
divided by one factor, vocabularies become small. Where the small model does not run, other ways are tried: heads are
divided as well, fields that are None are filled, a field keeps its default, the model runs in eval mode only.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import transformers
from support.hf_calls import VOCAB, Fields, call_of
from torch import nn
from transformers import BertConfig, PreTrainedConfig, ViTConfig, Wav2Vec2Config

Model = tuple[nn.Module, Fields]

LARGEST = 40_000_000
"""The most parameters of a model that is run."""

SEARCH = 60
"""The seconds after which no other way is tried."""

LARGE_IMAGE = 256
"""The largest side of an image that is not made smaller."""

ROUNDS = 3
"""The most fields that keep their defaults."""

TOO_MANY = "LookupError: N million parameters"

LAYERS = re.compile(r"(num_\w*layers|n_layers?|\w*_layers|layers|num_blocks|depth|n_blocks|\w*_depth)$")
NO_LAYERS = re.compile(r"(skip|freeze|mask|unused|shared|nextn|predict|cross|drop|decoder_layers_to|resid|feat|select)")
BLOCKS = ("depths", "block_repeats", "block_sizes", "blocks_per_stage")
"""How the fields end that say how many layers each stage has."""

DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""The fields that say how many layers a model has."""

DERIVED = ("transformers_version", "architectures", "dtype")
"""Fields that say nothing of the model."""

STAGES = ("out_features", "out_indices", "stage_names")
"""Fields that name layers: they are computed of others, unless `depths` has a number for each stage."""

EVERYWHERE = PreTrainedConfig().to_dict()
"""The fields that each configuration has. Some constructors do not take them."""

OFTEN = ("pad_token_id", "decoder_start_token_id", "num_key_value_heads")
"""Fields that models read, and that their configurations may lack."""

HEADS = re.compile(r"(\w*num_(\w+_)?heads|n_heads?|\w*_attention_heads|\w*_n_heads)$")
HEAD_SIZES = re.compile(r"(\w*head_dim|qk_\w*_dim|d_kv|\w*d_head|rotary_dim)$")
EXPERTS = re.compile(r"(\w*n(um)?_\w*experts|\w*expert_num)$")
VOCABULARY = re.compile(r"(\w*_)?vocab_size(_\w+)?$")
TOKEN = re.compile(r"\w*(token_id|_token_index|_idx|token_ids?)$")
NO_WIDTHS = re.compile(r"(num_channels|in_channels|in_chans|num_mel_bins|input_channels|out_channels|rotary_dim)$")
WIDTHS = re.compile(
    r"(\w*hidden_size\w*|d_model|n_embd|\w*embed_dim|\w*_dim|dim|\w*intermediate_size|\w*ffn_dim|d_ff|d_kv|d_inner|"
    r"n_inner|\w*_rank|\w*hidden_sizes|\w*channels|\w*embed_dims|width|\w*embedding_size|head_dim|ffn_hidden_size|"
    r"\w*projection_size|\w*_hidden_dims?|neck_hidden_sizes|fusion_hidden_size|conv_dim|tdnn_dim|pooler_output_size|"
    r"embed_dim_per_stage|\w*channel_list)$"
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
    """Returns a small model of a class, and arguments with which it runs in its present mode.

    The mode is eval where the model does not run in training mode.

    Raises:
        LookupError: transformers has no such class, or no small configuration of it runs; the text says why.
    """
    try:
        kind = getattr(transformers, name)
        default = _default(kind)
    except Exception as error:
        raise LookupError(f"transformers does not export it, or it has no configuration: {_first(error)}") from error
    ends, problem = time.monotonic() + SEARCH, ""
    for train, way in product((True, False), WAYS):
        found = _built(kind, default, way, train)
        if not isinstance(found, str):
            return found
        problem = problem or found
        if time.monotonic() > ends:
            break
    for train, heads in product((True, False), (False, True)):
        found = _relaxed(kind, default, Way(8, heads), train, ends)
        if not isinstance(found, str):
            return found
    raise LookupError(problem)


# ---- ways


@dataclass(frozen=True)
class Way:
    """A way to make a configuration small.

    Attributes:
        factor: what widths are divided by.
        heads: the numbers of heads are divided too; heads and images keep their size; there are few experts, and
            fields that are None are filled.
        kept: the fields that keep their defaults.
    """

    factor: int
    heads: bool = False
    kept: frozenset[str] = frozenset()


WAYS = (Way(16), Way(8), Way(16, heads=True), Way(8, heads=True), Way(4, heads=True), Way(4), Way(1))
"""The first with which the model runs is taken."""


def _relaxed(kind: Any, default: Fields, way: Way, train: bool, ends: float) -> Model | str:
    """Returns a model in which some fields keep their defaults: a field more, as long as the error becomes another."""
    problem = _built(kind, default, way, train) if time.monotonic() < ends else "LookupError: no time is left"
    for _ in range(ROUNDS):
        if not isinstance(problem, str):
            return problem
        better: tuple[Way, str] | None = None
        for field in sorted(_changed(default, _small(default, way)) - way.kept):
            if time.monotonic() > ends:
                return problem
            wider = replace(way, kept=way.kept | {field})
            found = _built(kind, default, wider, train)
            if not isinstance(found, str):
                return found
            if better is None and _kind_of(found) not in (_kind_of(problem), TOO_MANY):
                better = wider, found
        if better is None:
            return problem
        way, problem = better
    return problem


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Returns the names of the fields that differ, also in inner configurations."""
    found = set[str]()
    for key, value in after.items():
        if isinstance(value, Mapping) and isinstance(before.get(key), Mapping):
            found |= _changed(before[key], value)
        elif value != before.get(key):
            found.add(key)
    return found


def _kind_of(error: str) -> str:
    """Returns the text of an error without numbers."""
    return re.sub(r"\d+", "N", error)


def _built(kind: Any, default: Fields, way: Way, train: bool) -> Model | str:
    """Returns a model and its arguments; the text of the error where it is not built or does not run."""
    try:
        config = shrunk(kind.config_class, default, way)
        with torch.device("meta"):
            count = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
        if count > LARGEST:
            raise LookupError(f"{count / 1e6:.0f} million parameters")
        torch.manual_seed(0)
        model = kind(config).train(train)
        return model, call_of(model)
    except Exception as error:
        return f"{type(error).__name__}: {_first(error)}"


def _first(error: Exception) -> str:
    """Returns the first paragraph of an error in one line."""
    return " ".join(str(error).strip().split("\n\n")[0].split())


# ---- configurations


def _default(kind: Any) -> Fields:
    """Returns the fields of the default configuration of a class of models; inner configurations that have no default
    are those of `PARTS`."""
    config = kind.config_class
    try:
        return dict(config().to_dict())
    except Exception:
        missing = {key: _part(key, kind.main_input_name) for key, one in config.sub_configs.items()}
        return dict(config(**missing, pad_token_id=1, decoder_start_token_id=2).to_dict())


def _part(key: str, main: str) -> Fields:
    """Returns the fields of an inner configuration that may be of any kind."""
    if key == "decoder":
        return dict(BertConfig(is_decoder=True, add_cross_attention=True).to_dict())
    kinds = {"pixel_values": ViTConfig, "inputs": Wav2Vec2Config, "input_values": Wav2Vec2Config}
    one = ViTConfig if key.startswith("vision") else kinds.get(main, BertConfig) if key == "encoder" else BertConfig
    return dict(one().to_dict())


def shrunk(kind: Any, default: Fields, way: Way) -> Any:
    """Returns a small configuration of a class of configurations, from the fields of its default."""
    config = kind.from_dict(_small(default, way))
    config.use_cache = False
    for one in (config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))):
        one._experts_implementation = "batched_mm"  # It has float64, and no loop over the experts that are hit.
    return config


def _small(fields: Mapping[str, Any], way: Way) -> Fields:
    depth = next((fields[key] for key in DEPTHS if fields.get(key)), 0)
    if "depths" in fields:
        depth = 0  # `depths` says it: lists have a value for each stage.
    found = {}
    for key, value in fields.items():
        if key in DERIVED or (key in STAGES and "depths" not in fields):
            continue
        if way.heads and key in EVERYWHERE and value == EVERYWHERE[key]:
            continue
        if key in way.kept or (key == "blocks_per_stage" and "global_attention_blocks" in fields):  # Numbers of blocks.
            found[key] = value
        elif isinstance(value, dict):
            found[key] = _small({k: v for k, v in value.items() if not _is_later_label(k, v)}, way)
        else:
            found[key] = _small_value(key, value, way, depth if isinstance(depth, int) else 0)
    if "depths" not in fields and isinstance(fields.get("out_indices"), (list, tuple)):
        found |= _stages(fields, found)
    if not way.heads and isinstance(fields.get("image_size"), int):
        found["image_size"] = _side(fields["image_size"], fields.get("patch_size"))
    return found | _filled(fields, found) if way.heads and "model_type" in fields else found


def _is_later_label(key: Any, value: Any) -> bool:
    """True for a number and a name of a label, after the first two labels."""
    return isinstance(value, str) and str(key).isdigit() and int(key) >= 2


def _side(size: int, patch: Any) -> int:
    """Returns the side of an image: of eight patches, or a quarter, if it is large."""
    if size <= LARGE_IMAGE:
        return size
    if isinstance(patch, int) and size % patch == 0:
        return min(8 * patch, size)
    return size // 4 if size % 128 == 0 else size


def _stages(fields: Mapping[str, Any], small: Fields) -> Fields:
    """Returns the number of layers of a backbone, and which of them it returns: as many as before, the last."""
    key = next((key for key in DEPTHS if key in fields), None)
    if key is None:
        return {}
    wanted = len(fields["out_indices"])
    layers = max(small[key], wanted)
    return {key: layers, "out_indices": list(range(layers - wanted + 1, layers + 1))}


def _filled(fields: Mapping[str, Any], small: Fields) -> Fields:
    """Returns fields that are None in a default, and that models need: heads, padding, kinds of layers."""
    heads, width = small.get("num_attention_heads"), small.get("hidden_size")
    found: Fields = {
        "pad_token_id": 1,
        "decoder_start_token_id": 2,
        "prediction_length": 4,
        "layer_types": ["full_attention"] * small.get("num_hidden_layers", 0),
        "default_language": next(iter(fields.get("languages") or []), None),
    }
    if isinstance(heads, int) and heads:
        found["num_key_value_heads"] = heads
        found |= {"head_dim": width // heads} if isinstance(width, int) else {}
    return {key: value for key, value in found.items() if fields.get(key) is None and (key in fields or key in OFTEN)}


def _small_value(key: str, value: Any, way: Way, depth: int) -> Any:
    number = isinstance(value, int) and not isinstance(value, bool)
    key = str(key)
    if number and LAYERS.match(key) and not NO_LAYERS.search(key):
        return min(value, 2)
    if number and VOCABULARY.match(key):
        return min(value, VOCAB)
    if number and TOKEN.match(key):
        return value if value < 8 else VOCAB - 2 - value % 16
    if way.heads and HEAD_SIZES.match(key):
        return value
    if way.heads and HEADS.match(key) and (number or isinstance(value, (list, tuple))):
        return _each(value, lambda one: _divisor(one, way.factor))
    if way.heads and number and EXPERTS.match(key):
        return min(value, 16)
    if number and WIDTHS.match(key) and not NO_WIDTHS.search(key):
        return _width(value, way.factor)
    if number and key.startswith("max_") and "position" in key:
        return min(value, 1024)
    if not isinstance(value, (list, tuple)) or not value:
        return value
    if key.endswith(BLOCKS):
        return [min(one, 2) for one in value]
    if depth > 2 and len(value) == depth:
        return [value[0], next((one for one in value if one != value[0]), value[0])]
    if all(isinstance(one, int) for one in value) and WIDTHS.match(key) and not (way.heads and NO_WIDTHS.match(key)):
        return [_width(one, way.factor) for one in value]
    return value


def _each(value: Any, change: Callable[[int], int]) -> Any:
    return change(value) if isinstance(value, int) else [change(one) for one in value]


def _divisor(heads: int, factor: int) -> int:
    """Returns the largest number of heads that divides `heads`, and is at most `heads / factor`, or 1."""
    return next((n for n in range(max(heads // factor, 1), 0, -1) if heads % n == 0), heads)


def _width(value: int, factor: int) -> int:
    return value // factor if value % factor == 0 and value // factor >= 2 else value
