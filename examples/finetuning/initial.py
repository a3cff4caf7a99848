"""Makes a BERT to start from: with random weights, or from a state dict in a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from autotp.models.bert import BERT, BERTConfig

SHOWN = 3  # The most names in a message.


def initial(file: Path, heads: int, dropout: float) -> BERT:
    """Returns the BERT whose state dict `torch.save` wrote into a file. The shapes of the tensors give its sizes.

    Args:
        heads: the number of attention heads, which no shape shows.

    Raises:
        ValueError: the file has no state dict, or its names or shapes are not those of a BERT.
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
    """Returns the sizes of a BERT with these tensors.

    Raises:
        KeyError: a tensor is missing whose shape gives a size.
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
    except Exception as error:  # torch raises the errors of its readers, of at least four classes.
        raise ValueError(f"{file} cannot be read: {error}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file} has no state dict: names and tensors, and nothing else")
    return state


def _some(names: Mapping[str, object] | list[str]) -> str:
    first = list(names)[:SHOWN]
    return ", ".join(first) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
