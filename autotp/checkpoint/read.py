"""Reads a rank's part of a training checkpoint; raises Error before it changes the trainer or the optimizer."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autotp.checkpoint.files.checksums import EARLIER, INVALID_CONTENT, invalid_content
from autotp.checkpoint.files.staging import copy_into
from autotp.checkpoint.keys import (
    PARAMETER_ENTRIES,
    SEPARATOR,
    entry_key,
    expect_states,
    names_as_text,
    names_held,
    names_of,
    path_of,
    random_states,
    sizes,
)
from autotp.checkpoint.manifest import MANIFEST, Manifest
from autotp.checkpoint.optimizers import Optimizers
from autotp.display.progress import progress
from autotp.distributed.agreement import Fact, agree, compare, told
from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.runtime.holdings import Holdings
from autotp.sharding.boxes import local_of
from autotp.training.model_settings import differing_settings
from autotp.training.trainer import Trainer

SAME_MODEL = "the model that was saved, with its shapes and dtypes, or a new folder"


@dataclass(frozen=True)
class ReadState:
    """The state that this rank has read, before it is loaded.

    Attributes:
        model: name -> this rank's part of the parameter or buffer.
        optimizer: parameter -> its state.
        options: the options of each group of the optimizer.
        more: name -> the state of an object that was saved by name.
        random: kind of device -> random state.
    """

    model: dict[str, Tensor]
    optimizer: dict[nn.Parameter, dict[str, Any]]
    options: list[dict[str, Any]]
    more: dict[str, Any]
    random: dict[str, Tensor]


def expect_same_files(manifest: Manifest, trainer: Trainer) -> None:
    """Raises Error if ranks see different checkpoints under one name."""
    files = Fact("files", manifest.crc32, f"sees another {manifest.folder}", "one folder, that all machines share")
    compare(trainer.everyone, [files])


def expect_same_training(
    manifest: Manifest,
    trainer: Trainer,
    parts: Holdings,
    optimizers: Optimizers,
    more: Mapping[str, Any],
    changed: Collection[str],
) -> None:
    """Raises Error if a checkpoint has another optimizer, other named states or another model than this training."""
    about, path = manifest.about, manifest.folder
    if path != path_of(path.parent, about["step"]):
        raise Error(f"{path} is of step {about['step']}", fix="the name that it was written under")
    if optimizers.each and about["optimizer"] != optimizers.name:
        raise Error(
            f"{path} has the state of {about['optimizer']}, and this is {optimizers.name}",
            fix="the parameters alone, with an optimizer that begins anew: load_checkpoint(folder, trainer)",
            alternative="an optimizer of the class that was saved",
        )
    expect_states(more, ("state_dict", "load_state_dict"))
    if missing := sorted(set(more) - set(about["more"])):
        raise Error(f"{path} has no {', '.join(missing)}", expected=", ".join(about["more"]) or "nothing of this kind")
    names = names_of(optimizers, parts)
    _expect_model(manifest, parts)
    # Each rank has the settings of the whole model: one comparison is enough.
    if trainer.everyone.rank == 0 and (lines := differing_settings(about["model"], trainer.model_settings, changed)):
        attributes = list(dict.fromkeys(line.split("`")[1].rpartition(".")[2] for line in lines))
        remedy = f"the model that was saved; if it is meant, load_checkpoint(..., changed={attributes})"
        raise Error(f"{path} is another model's: {names_as_text(lines)}", fix=remedy)
    _expect_state(manifest, list(names.values()))


def _expect_model(manifest: Manifest, parts: Holdings) -> None:
    """Raises Error if the names, shapes or dtypes of a checkpoint's tensors are not the model's."""
    path, prefix = manifest.folder, f"model{SEPARATOR}"
    stored = {key.removeprefix(prefix): pieces for key, pieces in manifest.tensors.items() if key.startswith(prefix)}
    names = set(parts.saved.values())
    lines = [("missing", names - set(stored)), ("unexpected", set(stored) - names)]
    if any(some for _, some in lines):
        text = "; ".join(f"{label}: {names_as_text(sorted(some))}" for label, some in lines if some)
        raise Error(f"{path} is another model's; {text}", fix=SAME_MODEL)
    for name in names_held(parts):
        stored_pieces, shape, dtype = stored[name], parts.shapes[name], parts.held[name].dtype
        if stored_pieces.shape != shape or stored_pieces.dtype != dtype:
            text = f"{stored_pieces.dtype} {list(stored_pieces.shape)}"
            problem = f"{path} is another model's: `{name}` is {text} there, and {dtype} {list(shape)} here"
            raise Error(problem, fix=SAME_MODEL)


def _expect_state(manifest: Manifest, names: Sequence[str]) -> None:
    """Raises Error if a checkpoint lacks the optimizer's state of a parameter."""
    holds = {name: keys for _, keys_by_name in manifest.about["groups"] for name, keys in keys_by_name.items()}
    lacking = [name for name in names if name not in holds]
    if lacking:
        problem = f"{manifest.folder} has no state of the optimizer for {names_as_text(lacking)}"
        remedy = "an optimizer of the parameters of then, or none: load_checkpoint(folder, trainer)"
        raise Error(problem, fix=remedy)
    for name in names:
        for key in (entry_key("optimizer", name, key) for key in holds[name]):
            if key not in manifest.tensors and key not in manifest.about["values"]:
                raise Error(f"{manifest.folder / MANIFEST} is not valid: {key} is missing", fix=EARLIER)


def parameter_of_groups(optimizers: Optimizers, parts: Holdings, everyone: Mesh) -> list[str]:
    """Returns a parameter's name for each group of the optimizer; "" for a group that is empty on all ranks.

    A group may be empty on this rank alone: its parameters are in other stages of the pipeline. A schedule changes its
    options, too, so they are loaded as those of the group on the other ranks.
    """

    def names_here() -> list[str]:
        names = names_of(optimizers, parts)
        return [next((names[p] for p in group["params"]), "") for group in optimizers.param_groups]

    every = told(everyone, names_here)
    local_names: list[str] = every[everyone.rank]
    if any(len(row) != len(local_names) for row in every):  # Which groups are the same is unknown.
        return local_names
    return [next(filter(None, (name, *peer_names)), "") for name, *peer_names in zip(local_names, *every, strict=True)]


def unread_state(manifest: Manifest, optimizers: Optimizers, parts: Holdings) -> list[str]:
    """Returns the parameters of this rank that these optimizers do not have, and whose state is in the checkpoint."""
    names = set(names_of(optimizers, parts).values())
    holds = {name: keys for _, keys_by_name in manifest.about["groups"] for name, keys in keys_by_name.items()}
    return [name for name in names_held(parts) if holds.get(name) and name not in names]


def read_state(
    manifest: Manifest,
    trainer: Trainer,
    parts: Holdings,
    optimizers: Optimizers,
    more: Mapping[str, Any],
    of_groups: Sequence[str],
) -> ReadState:
    """Reads this rank's part of a checkpoint. of_groups: as `parameter_of_groups` returns it"""
    random = {}
    # In another layout the checkpoint has no random state for this rank.
    if manifest.about["sizes"] == sizes(trainer):
        for device_type in random_states(trainer.place.device):
            random[device_type] = read_random_state(
                manifest, entry_key("random", trainer.everyone.rank, device_type), device_type
            )
    names = {name: parameter for parameter, name in names_of(optimizers, parts).items()}
    holds = {name: keys for _, keys_by_name in manifest.about["groups"] for name, keys in keys_by_name.items()}
    # Of a state that has an owner only this rank reads it.
    owned = {name: p for name, p in names.items() if optimizers.owner(p) in (None, parts.everyone.rank)}
    entries = [(p, name, key) for name, p in owned.items() for key in holds[name]]
    model, moments = dict[str, Tensor](), {p: dict[str, Any]() for p in names.values()}
    with progress(f"reading {manifest.folder}", len(names_held(parts)) + len(entries)) as line:
        for name in names_held(parts):
            model[name] = _part(manifest, entry_key("model", name), parts, name)
            line.count()
        for parameter, name, key in entries:
            moment = _moment(manifest, parts, name, key, optimizers.owner(parameter) is not None)
            moments[parameter][key] = optimizers.kept(parameter, key, moment)
            line.count()
    options = _options(manifest, parts, optimizers, of_groups)
    named_states = {name: manifest.value(manifest.about["more"][name]) for name in more}
    return ReadState(model, moments, options, named_states, random)


def read_random_state(manifest: Manifest, key: str, device_type: str) -> Tensor:
    """Reads the state of a generator on devices of this kind: [bytes], uint8.

    Raises:
        Error: torch does not accept it.
    """
    try:
        state = manifest.whole(key)
        # torch itself tells whether it is a state.
        torch.Generator(device_type).set_state(state)
    except Error:
        raise
    except INVALID_CONTENT as error:
        raise Error(f"{manifest.folder} has no random state in {key}: {error}", fix=EARLIER) from error
    return state


def _part(manifest: Manifest, key: str, parts: Holdings, name: str) -> Tensor:
    """Reads this rank's part of a tensor that is cut like the parameter or buffer `name`."""
    pieces = manifest.pieces(key)
    # A state of the optimizer may have another dtype than its parameter.
    part = torch.empty_like(parts.held[name].detach(), dtype=pieces.dtype)
    # Also parts that an earlier rank holds: this rank needs the values, too.
    for box in parts.boxes(name, part, first=False):
        pieces.read(manifest.folder, key, box.whole, box.of(local_of(part)))
    return part


def _moment(manifest: Manifest, parts: Holdings, name: str, key: str, whole: bool) -> Any:
    """Reads a value of the optimizer's state: this rank's part, or the whole."""
    entry = entry_key("optimizer", name, key)
    if entry in manifest.about["values"]:
        return manifest.value(manifest.about["values"][entry])
    shape = manifest.pieces(entry).shape
    if whole:
        value = manifest.whole(entry)
        return _on_device(value, parts.held[name].device) if shape else value
    if shape not in (parts.shapes[name], ()):
        problem = f"{manifest.folder} has {entry} of {list(shape)}, and the parameter is {list(parts.shapes[name])}"
        raise Error(problem, fix=EARLIER)
    return _part(manifest, entry, parts, name) if shape == parts.shapes[name] else manifest.whole(entry)


def _decoded_options(manifest: Manifest, encoded: Any) -> dict[str, Any]:
    """Decodes the options of an optimizer's group, without the entries for its parameters."""
    options = manifest.value(encoded)
    if not isinstance(options, dict):
        problem = f"{manifest.folder / MANIFEST} is not valid: options of the optimizer are {options!r}"
        raise Error(problem, fix=EARLIER)
    return {key: value for key, value in options.items() if key not in PARAMETER_ENTRIES}


def _options(
    manifest: Manifest, parts: Holdings, optimizers: Optimizers, of_groups: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns the saved options for each group of these optimizers: the options that its parameters had.

    Raises:
        Error: the parameters of a group had different options in the checkpoint.
    """
    had = {name: options for options, keys_by_name in manifest.about["groups"] for name in keys_by_name}
    names, result = names_of(optimizers, parts), list[dict[str, Any]]()
    for i, (group, defaults) in enumerate(zip(optimizers.param_groups, optimizers.defaults(), strict=True)):
        group_names = [names[p] for p in group["params"]] or [name for name in of_groups[i : i + 1] if name in had]
        saved_options = [_decoded_options(manifest, had[name]) for name in group_names]
        try:
            differ = any(options != saved_options[0] for options in saved_options)
        except INVALID_CONTENT as error:  # Tensors where numbers were.
            raise invalid_content(manifest.folder / MANIFEST, error) from error
        if differ:
            raise Error(f"{manifest.folder} has the parameters of group {i} in several groups", fix="the saved groups")
        if saved_options:
            _expect_options(manifest, saved_options[0], group, defaults)
        result.append(saved_options[0] if saved_options else {})
    return result


def _expect_options(
    manifest: Manifest, saved: Mapping[str, Any], current: Mapping[str, Any], needed: Collection[str]
) -> None:
    """Raises Error if an option of this optimizer's class is missing, or has a value of another kind."""
    wrong = [f"`{key}` is missing" for key in needed if key not in saved]
    wrong += [
        f"`{key}` is {saved[key]!r}" for key in saved if key in current and not _can_replace(saved[key], current[key])
    ]
    if wrong:
        file = manifest.folder / MANIFEST
        raise Error(f"{file} is not valid: of the optimizer's options {names_as_text(wrong)}", fix="an older one")


def _can_replace(value: Any, current: Any) -> bool:
    """Whether a value may replace an option: a bool or a number of the same kind, or a sequence of equal length."""
    if isinstance(current, bool):
        # torch's own flags, such as `foreach`, may be None.
        return value is None or isinstance(value, bool)
    if isinstance(current, list | tuple):
        fits = isinstance(value, list | tuple) and len(value) == len(current)
        return fits and all(map(_can_replace, value, current))
    if isinstance(current, int | float) or (isinstance(current, Tensor) and current.numel() == 1):
        if type(value) is int:
            # JSON has whole numbers of any length, and torch takes 64 bits.
            return abs(value) < 2**63
        number = type(value) is float or (isinstance(value, Tensor) and value.numel() == 1)
        return number and not math.isnan(float(value))
    return current is None or isinstance(value, type(current))


def load_more(more: Mapping[str, Any], states: Mapping[str, Any], trainer: Trainer) -> None:
    """Loads the state of each named object; if one fails on any rank, all objects get their earlier states back."""
    # Copies: a state_dict may share its values with the object, which `load` changes.
    before = agree(
        trainer.everyone, lambda: {name: copy.deepcopy(target.state_dict()) for name, target in more.items()}
    )

    def load() -> None:
        for name, target in more.items():
            try:
                target.load_state_dict(states[name])
            except Exception as error:
                problem = f"`{name}` cannot be loaded into a {type(target).__name__}: {type(error).__name__}: {error}"
                raise Error(problem, fix=f"an object like the one that was saved as `{name}`") from error

    try:
        agree(trainer.everyone, load)
    except Exception:
        for name, target in more.items():
            with suppress(Exception):  # It does not accept even its earlier state: raise the first error.
                target.load_state_dict(before[name])
        raise


def load_state(state: ReadState, trainer: Trainer, parts: Holdings, optimizers: Optimizers) -> None:
    """Loads the state that was read into the model, the optimizer and the random generators."""
    with torch.no_grad():
        for name, tensor in state.model.items():
            parts.held[name].copy_(tensor)
    states = dict[nn.Parameter, dict[str, Any]]()
    for group, options in zip(optimizers.param_groups, state.options, strict=True):
        group.update({key: _on_device_of(group.get(key), value) for key, value in options.items()})
        # torch's other optimizers keep their step counts on the CPU.
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            states[parameter] = {
                key: _on_device(value, trainer.place.device) if on_device and isinstance(value, Tensor) else value
                for key, value in state.optimizer[parameter].items()
            }
    optimizers.replace_states(states)
    if "cpu" in state.random:
        torch.set_rng_state(state.random["cpu"])
    if "cuda" in state.random:
        torch.cuda.set_rng_state(state.random["cuda"], trainer.place.device)


def _on_device_of(old: Any, value: Any) -> Any:
    """Returns an option that was read, on the device of the option that it replaces."""
    return _on_device(value, old.device) if isinstance(old, Tensor) and isinstance(value, Tensor) else value


def _on_device(value: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device; the host does not wait for a card."""
    if value.device == device:
        return value
    moved = torch.empty_like(value, device=device)
    copy_into(moved, value)
    return moved
