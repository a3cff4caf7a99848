"""The keys of the entries in a training checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotp.checkpoint.optimizers import Optimizers
from autotp.errors import Error
from autotp.runtime.holdings import Holdings
from autotp.training.trainer import Trainer

SEPARATOR = "|"
"""Separates the names in a key: `optimizer|h.0.ln_1.weight|exp_avg`."""

STEPS = 2**63
"""The upper bound of a step: ranks exchange steps as int64."""

PARAMETER_ENTRIES = ("params", "param_names")
"""The entries of an optimizer's group that contain its parameters: a checkpoint has these by their names."""


def path_of(folder: Path, step: int) -> Path:
    """Returns the folder of a step's checkpoint."""
    return folder / f"step-{step:08d}"


def entry_key(*names: Any) -> str:
    """Returns the key of these names."""
    return SEPARATOR.join(map(str, names))


def sizes(trainer: Trainer) -> dict[str, int]:
    """Returns the sizes of the mesh's axes."""
    return dict(zip(trainer.mesh.mesh_dim_names or (), trainer.mesh.shape, strict=True))


def names_held(parts: Holdings) -> list[str]:
    """Returns the names of this rank's tensors that are in the model's state dict."""
    # A tied tensor has several names in the state dict, and one entry.
    return [name for name in dict.fromkeys(parts.saved.values()) if name in parts.held]


def names_of(optimizer: Optimizer | Optimizers, parts: Holdings) -> dict[nn.Parameter, str]:
    """Returns the optimizers' parameters with their names; raises Error if one is not the trainer's."""
    names_by_id = {id(tensor): name for name, tensor in parts.held.items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in names_by_id for p in parameters):
        raise Error("the optimizer has parameters that the trainer does not have", fix="AdamW(trainer.parameters())")
    return {p: names_by_id[id(p)] for p in parameters}


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Returns this rank's random states, by the kind of device."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def expect_states(more: Mapping[str, Any], methods: Sequence[str]) -> None:
    """Raises Error if an object that is saved or loaded by name is a class, or lacks one of these methods."""
    for name, stateful in more.items():
        lacks = [method for method in methods if not callable(getattr(stateful, method, None))]
        if lacks or isinstance(stateful, type):
            description = (
                f"the class {stateful.__name__}" if isinstance(stateful, type) else f"a {type(stateful).__name__}"
            )
            remedy = f"an object with {' and '.join(methods)}, such as a schedule or a scaler"
            raise Error(f"`{name}` is {description}, which cannot be saved by name", fix=remedy)


def names_as_text(names: list[str]) -> str:
    """Returns the first three names as text, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
