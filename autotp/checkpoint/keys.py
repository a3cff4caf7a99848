"""The names of the entries of a training checkpoint, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotp.errors import Error
from autotp.runtime.holdings import Holdings
from autotp.training.trainer import Trainer

SEPARATOR = "|"
"""Between what a key is of: `optimizer|h.0.ln_1.weight|exp_avg`."""

STEPS = 2**63
"""More than any number of steps: ranks tell each other int64."""

NAMES = ("params", "param_names")
"""What of an optimizer's group stands for its parameters: a checkpoint has them under their names in the model."""

NOTHING: Any = SimpleNamespace(param_groups=[], state={})
"""Stands for no optimizer."""


def path_of(folder: Path, step: int) -> Path:
    """The folder of a checkpoint."""
    return folder / f"step-{step:08d}"


def key_of(*names: Any) -> str:
    """What something is called in a checkpoint."""
    return SEPARATOR.join(map(str, names))


def sizes(trainer: Trainer) -> dict[str, int]:
    """The layout."""
    return dict(zip(("pp", "dp", "tp"), trainer.mesh.shape, strict=True))


def names_held(parts: Holdings) -> list[str]:
    """What of this rank's is in the model's state dict."""
    return [name for name in dict.fromkeys(parts.saved.values()) if name in parts.held]


def names_of(optimizer: Optimizer, parts: Holdings) -> dict[nn.Parameter, str]:
    """The optimizer's parameters, by name."""
    known = {id(tensor): name for name, tensor in parts.held.items()}
    found = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in known for p in found):
        raise Error("the optimizer has parameters that the trainer does not have", fix="AdamW(trainer.parameters())")
    return {p: known[id(p)] for p in found}


def random_states(device: torch.device) -> dict[str, Tensor]:
    """This rank's, by the kind of device."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def listed(names: list[str]) -> str:
    """Three of them, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
