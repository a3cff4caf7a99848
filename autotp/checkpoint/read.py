"""Reads a rank's part of a training checkpoint, and raises Error before anything of the training is changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotp.checkpoint.files.checksums import INVALID_CONTENT, invalid_content
from autotp.checkpoint.keys import (
    NAMES,
    NOTHING,
    SEPARATOR,
    key_of,
    listed,
    names_held,
    names_of,
    path_of,
    random_states,
    sizes,
)
from autotp.checkpoint.manifest import MANIFEST, Manifest
from autotp.distributed.consistency import agree
from autotp.distributed.mesh import gather_ints
from autotp.errors import Error
from autotp.runtime.holdings import Holdings
from autotp.sharding.boxes import local_of
from autotp.training.hyperparameters import differences
from autotp.training.trainer import Trainer


@dataclass(frozen=True)
class Found:
    """What this rank reads, before it changes anything.

    Attributes:
        model: name -> what this rank holds.
        optimizer: parameter -> its state.
        options: of each group of the optimizer.
        more: by name.
        random: by kind of device.
    """

    model: dict[str, Tensor]
    optimizer: dict[nn.Parameter, dict[str, Any]]
    options: list[dict[str, Any]]
    more: dict[str, Any]
    random: dict[str, Tensor]


def expect_one(manifest: Manifest, trainer: Trainer) -> None:
    """Raises Error where ranks see different checkpoints under one name."""
    rows = gather_ints([manifest.crc32], trainer.everyone)
    other = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if other:
        problem = f"{manifest.folder} is another one on rank {other[0]} than on rank 0"
        raise Error(problem, fix="one folder, that all machines share")


def expect_same(
    manifest: Manifest,
    trainer: Trainer,
    parts: Holdings,
    optimizer: Optimizer,
    more: Mapping[str, Any],
    changed: Collection[str],
) -> None:
    """Raises Error where a checkpoint is of another kind of training, or another model's."""
    about, path = manifest.about, manifest.folder
    if path != path_of(path.parent, about["step"]):
        raise Error(f"{path} is of step {about['step']}", fix="the name that it was written under")
    if optimizer is not NOTHING and about["optimizer"] != type(optimizer).__name__:
        raise Error(f"{path} has the state of {about['optimizer']}, and this is {type(optimizer).__name__}")
    if missing := sorted(set(more) - set(about["more"])):
        raise Error(f"{path} has no {', '.join(missing)}", expected=", ".join(about["more"]) or "nothing of this kind")
    names = names_of(optimizer, parts)
    _expect_model(manifest, parts)
    if trainer.everyone.rank == 0 and (found := differences(about["model"], trainer.hyperparameters, changed)):
        other = list(dict.fromkeys(line.split("`")[1].rpartition(".")[2] for line in found))
        remedy = f"the model that was saved; if it is meant, load_checkpoint(..., changed={other})"
        raise Error(f"{path} is another model's: {listed(found)}", fix=remedy)
    _expect_state(manifest, list(names.values()))


def _expect_model(manifest: Manifest, parts: Holdings) -> None:
    """Raises Error where a checkpoint has other tensors."""
    path, prefix = manifest.folder, f"model{SEPARATOR}"
    known = {key.removeprefix(prefix): pieces for key, pieces in manifest.tensors.items() if key.startswith(prefix)}
    names = set(parts.saved.values())
    lines = [("missing", names - set(known)), ("unexpected", set(known) - names)]
    if any(some for _, some in lines):
        told = "; ".join(f"{kind}: {listed(sorted(some))}" for kind, some in lines if some)
        raise Error(f"{path} is another model's; {told}")
    for name in names_held(parts):
        there, shape, dtype = known[name], parts.shapes[name], parts.held[name].dtype
        if there.shape != shape or there.dtype != dtype:
            told = f"{there.dtype} {list(there.shape)}"
            raise Error(f"{path} is another model's: `{name}` is {told} there, and {dtype} {list(shape)} here")


def _expect_state(manifest: Manifest, names: Sequence[str]) -> None:
    """Raises Error where a checkpoint lacks the optimizer's state of a parameter."""
    holds = {name: keys for _, held in manifest.about["groups"] for name, keys in held.items()}
    lacking = [name for name in names if name not in holds]
    if lacking:
        problem = f"{manifest.folder} has no state of the optimizer for {listed(lacking)}"
        remedy = "an optimizer of the parameters of then, or none: load_checkpoint(folder, trainer)"
        raise Error(problem, fix=remedy)
    for name in names:
        for key in (key_of("optimizer", name, key) for key in holds[name]):
            if key not in manifest.tensors and key not in manifest.about["values"]:
                raise Error(f"{manifest.folder / MANIFEST} is not valid: {key} is missing")


def read(manifest: Manifest, trainer: Trainer, parts: Holdings, optimizer: Optimizer, more: Mapping[str, Any]) -> Found:
    """Reads everything that this rank is given."""
    random = {}
    if manifest.about["sizes"] == sizes(trainer):
        for kind in random_states(trainer.place.device):
            random[kind] = _random_state(manifest, key_of("random", trainer.everyone.rank, kind), kind)
    names = {name: parameter for parameter, name in names_of(optimizer, parts).items()}
    holds = {name: keys for _, held in manifest.about["groups"] for name, keys in held.items()}
    return Found(
        {name: _part(manifest, key_of("model", name), parts, name) for name in names_held(parts)},
        {p: {key: _moment(manifest, parts, name, key) for key in holds[name]} for name, p in names.items()},
        _options(manifest, parts, optimizer),
        {name: manifest.value(manifest.about["more"][name]) for name in more},
        random,
    )


def _random_state(manifest: Manifest, key: str, kind: str) -> Tensor:
    """A random state.

    Raises:
        Error: torch does not accept it.
    """
    state = manifest.whole(key)
    try:
        torch.Generator(kind).set_state(state)
    except (RuntimeError, TypeError) as error:
        raise Error(f"{manifest.folder} has no random state in {key}: {error}") from error
    return state


def _part(manifest: Manifest, key: str, parts: Holdings, name: str) -> Tensor:
    """What this rank holds of a tensor that lies as a parameter or buffer does."""
    there = manifest.pieces(key)
    found = torch.empty_like(parts.held[name].detach(), dtype=there.dtype)
    for box in parts.boxes(name, found, first=False):
        there.read(manifest.folder, key, box.whole, box.of(local_of(found)))
    return found


def _moment(manifest: Manifest, parts: Holdings, name: str, key: str) -> Any:
    """A value of the optimizer's state."""
    at = key_of("optimizer", name, key)
    if at in manifest.about["values"]:
        return manifest.value(manifest.about["values"][at])
    shape = manifest.pieces(at).shape
    if shape not in (parts.shapes[name], ()):
        raise Error(f"{manifest.folder} has {at} of {list(shape)}, and the parameter is {list(parts.shapes[name])}")
    return _part(manifest, at, parts, name) if shape == parts.shapes[name] else manifest.whole(at)


def _own(manifest: Manifest, encoded: Any) -> dict[str, Any]:
    """The options that a checkpoint says, without what stands for parameters."""
    options = manifest.value(encoded)
    if not isinstance(options, dict):
        raise Error(f"{manifest.folder / MANIFEST} is not valid: options of the optimizer are {options!r}")
    return {key: value for key, value in options.items() if key not in NAMES}


def _options(manifest: Manifest, parts: Holdings, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The saved options of each group here: those that its parameters had.

    Raises:
        Error: its parameters were in several groups there.
    """
    had = {name: options for options, held in manifest.about["groups"] for name in held}
    names, found = names_of(optimizer, parts), list[dict[str, Any]]()
    for i, group in enumerate(optimizer.param_groups):
        mine = [_own(manifest, had[names[p]]) for p in group["params"]]
        try:
            several = any(options != mine[0] for options in mine)
        except INVALID_CONTENT as error:  # Tensors where numbers were.
            raise invalid_content(manifest.folder / MANIFEST, error) from error
        if several:
            raise Error(f"{manifest.folder} has the parameters of group {i} in several groups", fix="the saved groups")
        if mine:
            _expect_options(manifest, mine[0], group, optimizer.defaults)
        found.append(mine[0] if mine else {})
    return found


def _expect_options(
    manifest: Manifest, there: Mapping[str, Any], here: Mapping[str, Any], needed: Collection[str]
) -> None:
    """Raises Error where options lack one of an optimizer of this class, or have one of another kind."""
    wrong = [f"`{key}` is missing" for key in needed if key not in there]
    wrong += [f"`{key}` is {there[key]!r}" for key in there if key in here and not _like(there[key], here[key])]
    if wrong:
        file = manifest.folder / MANIFEST
        raise Error(f"{file} is not valid: of the optimizer's options {listed(wrong)}", fix="an older one")


def _like(value: Any, own: Any) -> bool:
    """Whether an option can be in the place of another: a number of a number, as many of several, yes or no."""
    if isinstance(own, bool):
        return value is None or isinstance(value, bool)
    if isinstance(own, list | tuple):
        given = isinstance(value, list | tuple) and len(value) == len(own)
        return given and all(map(_like, value, own))
    if isinstance(own, int | float) or (isinstance(own, Tensor) and own.numel() == 1):
        number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        return number and not math.isnan(float(value))
    return own is None or isinstance(value, type(own))


def load_more(more: Mapping[str, Any], states: Mapping[str, Any], trainer: Trainer) -> None:
    """Gives each thing its state. Where one fails on any rank all are what they were, and so is the rest."""
    before = agree(trainer.everyone, lambda: {name: copy.deepcopy(thing.state_dict()) for name, thing in more.items()})

    def load() -> None:
        for name, thing in more.items():
            try:
                thing.load_state_dict(states[name])
            except Exception as error:
                problem = f"`{name}` cannot be loaded into a {type(thing).__name__}: {type(error).__name__}: {error}"
                raise Error(problem) from error

    try:
        agree(trainer.everyone, load)
    except Exception:
        for name, thing in more.items():
            with suppress(Exception):  # It refuses even its own: what is told is the first problem.
                thing.load_state_dict(before[name])
        raise


def put(found: Found, trainer: Trainer, parts: Holdings, optimizer: Optimizer) -> None:
    """Gives everything what was read."""
    with torch.no_grad():
        for name, tensor in found.model.items():
            parts.held[name].copy_(tensor)
    optimizer.state.clear()
    for group, options in zip(optimizer.param_groups, found.options, strict=True):
        group.update({key: _beside(group.get(key), value) for key, value in options.items()})
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = found.optimizer[parameter]
            for key, value in state.items():
                moved = value.to(trainer.place.device) if on_device and isinstance(value, Tensor) else value
                optimizer.state[parameter][key] = moved
    if "cpu" in found.random:
        torch.set_rng_state(found.random["cpu"])
    if "cuda" in found.random:
        torch.cuda.set_rng_state(found.random["cuda"], trainer.place.device)


def _beside(old: Any, new: Any) -> Any:
    """An option as it was read, on the device where the one before it was."""
    return new.to(old.device) if isinstance(old, Tensor) and isinstance(new, Tensor) else new
