"""A BERT to start from: of random numbers, or the one whose state dict is in a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from autotp.models.bert import BERT, BERTConfig

SHOWN = 3  # Names in a message.


def initial(file: Path, heads: int, dropout: float) -> BERT:
    """The BERT in a file that `torch.save` wrote of its state dict. Its sizes are those of the tensors.

    Args:
        heads: of attention, which no tensor tells.

    Raises:
        ValueError: the file has no state dict, or one with other names or shapes than those of a BERT.
    """
    state = _read(file)
    try:
        config = config_of(state, heads, dropout)
    except KeyError as error:
        raise ValueError(f"{file} is no state dict of a BERT: no {error}, but {_some(state)}") from None
    with torch.device("meta"):
        bert = BERT(config)
    wanted = bert.state_dict()
    problems = {
        "missing": [name for name in wanted if name not in state],
        "unexpected": [name for name in state if name not in wanted],
        "of another shape": [n for n, t in wanted.items() if n in state and state[n].shape != t.shape],
    }
    found = "; ".join(f"{problem}: {_some(names)}" for problem, names in problems.items() if names)
    if found:
        raise ValueError(f"{file} is no state dict of a BERT with {config.n_layer} layers, norm={config.norm}: {found}")
    bert.load_state_dict(state, assign=True)
    return bert.float()


def config_of(state: Mapping[str, Tensor], heads: int, dropout: float) -> BERTConfig:
    """The sizes of a BERT with these tensors.

    Raises:
        KeyError: a tensor that tells a size is missing.
        ValueError: the heads do not divide the width.
    """
    vocab, width = state["embeddings.word.weight"].shape
    layers = {int(found[1]) for name in state if (found := re.match(r"layer\.(\d+)\.", name))}
    return BERTConfig(
        block_size=len(state["embeddings.position.weight"]), vocab_size=vocab,
        type_size=len(state["embeddings.segment.weight"]), n_layer=max(layers, default=-1) + 1, n_head=heads,
        n_embd=width, dropout=dropout, norm="pre" if "norm.weight" in state else "post",
    )  # fmt: skip


def _read(file: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what its readers raise: four kinds at least.
        raise ValueError(f"{file} cannot be read: {error}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file} has no state dict: names and tensors, and nothing else")
    return state


def _some(names: Mapping[str, object] | list[str]) -> str:
    first = list(names)[:SHOWN]
    return ", ".join(first) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
