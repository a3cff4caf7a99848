"""save, load: a training's state in files, written by the ranks that hold it, read by any others.

Each rank writes the boxes of the whole tensors that it holds (`boxes.py`), through torch.distributed.checkpoint; what
reads them takes from each file the boxes that it needs. A checkpoint is whole once its `.metadata` is there, which the
first rank writes after all others have written theirs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from autotp.agree import agree
from autotp.boxed import Boxed
from autotp.errors import Error, within
from autotp.parts import Parts, parts_of
from autotp.trainer import Trainer

FORMAT = 1
WHOLE = ".metadata"
SEPARATOR = "|"
"""Between what a key is of: `optimizer|h.0.ln_1.weight|exp_avg`."""


NOTHING: Any = SimpleNamespace(param_groups=[], state={})
"""Stands for no optimizer."""


def save_checkpoint(
    folder: str | Path, trainer: Trainer, optimizer: Optimizer, step: int, *, wait: bool = True, **more: Any
) -> Future[None]:
    """Writes `folder/step-00000100`: parameters, the optimizer's state, random states, `more`. Call it on every rank.

    Nothing is overwritten; a save that does not come to its end leaves a folder that `load_checkpoint` passes over.

    Args:
        step: how many steps were done.
        wait: False copies the state to the CPU, and writes it while training goes on: the next save, and `.result()` of
            what is returned, wait for it and raise what went wrong.
        more: by name, what else has a `state_dict()`, the same on all ranks: a schedule, a scaler.

    Raises:
        Error: the step is there already; the optimizer holds other parameters, or state that is not shaped as they are.
    """
    path = _path(Path(folder), step)
    _finish(trainer)

    def state() -> dict[str, Any]:
        if not isinstance(optimizer, Optimizer):
            problem = f"{type(optimizer).__name__} is no optimizer"
            raise Error(problem, **{"try": "autotp.full_state_dict(trainer) for the parameters alone"})
        if (path / WHOLE).exists():
            raise Error(f"{path} is there already", **{"try": "another folder, or another step"})
        return dict(_state(trainer, parts_of(trainer, "save_checkpoint"), optimizer, step, more))

    written = within("save_checkpoint", lambda: agree(trainer.everyone, state))
    pool = ThreadPoolExecutor(1)
    trainer.saving = pool.submit(_write, written, path, trainer.files)
    pool.shutdown(wait=False)
    saving = trainer.saving
    if wait:
        _finish(trainer)
    return saving


def load_checkpoint(folder: str | Path, trainer: Trainer, optimizer: Optimizer | None = None, **more: Any) -> int:
    """The step of the newest whole checkpoint in `folder`, once it is loaded; 0 where there is none. On every rank.

    Args:
        trainer: of the same model, in any layout; random states are those of the checkpoint in the same layout only.
        optimizer: of the class that was saved; None to evaluate: its state is left where it is.
        more: what was saved under these names; each has a `load_state_dict`.

    Raises:
        Error: on every rank, and nothing is changed: another model's, truncated, or of a newer format.
    """
    _finish(trainer)
    learning: Any = NOTHING if optimizer is None else optimizer

    def run() -> int:
        steps = agree(trainer.everyone, lambda: saved_steps(folder))
        if not steps:
            return 0
        path = _path(Path(folder), steps[-1])
        parts = parts_of(trainer, "load_checkpoint")
        metadata = agree(trainer.everyone, lambda: _metadata(path))
        about = _read({"about": None}, path, trainer)["about"]
        agree(trainer.everyone, lambda: _expect_same(about, parts, learning, more, path))
        _load(path, metadata, about, trainer, parts, learning, more)
        return steps[-1]

    return within("load_checkpoint", run)


def _finish(trainer: Trainer) -> None:
    """Waits for the save that is under way, and raises what went wrong."""
    saving, trainer.saving = trainer.saving, None
    if saving is not None:
        saving.result()


def saved_steps(folder: str | Path) -> list[int]:
    """The steps of the whole checkpoints in a folder, in order."""
    found = (re.fullmatch(r"step-(\d+)", path.parent.name) for path in Path(folder).glob(f"step-*/{WHOLE}"))
    return sorted(int(match.group(1)) for match in found if match)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


# ---- what is written


def _state(
    trainer: Trainer, parts: Parts, optimizer: Optimizer, step: int, more: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """What this rank writes, by key; copies, so that training may go on."""
    names, groups = _names_of(optimizer, parts), []
    for group in optimizer.param_groups:
        options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        groups.append((options, [names[p] for p in group["params"]]))
    sizes = dict(zip(("pp", "dp", "tp"), trainer.mesh.shape, strict=True))
    yield (
        "about",
        {"format": FORMAT, "step": step, "sizes": sizes, "optimizer": type(optimizer).__name__, "more": sorted(more)},
    )
    yield f"groups{SEPARATOR}{trainer.everyone.rank}", groups
    yield f"random{SEPARATOR}{trainer.everyone.rank}", _random(trainer.place.device)
    for name, thing in more.items():
        yield f"more{SEPARATOR}{name}", copy.deepcopy(thing.state_dict())
    for name in _names(parts):
        yield f"model{SEPARATOR}{name}", Boxed.of(parts, name, parts.held[name], copied=True)
    for name, key, value in _moments(optimizer, parts):
        at = SEPARATOR.join(("optimizer", name, key))
        if isinstance(value, Tensor) and value.shape == parts.held[name].shape:
            yield at, Boxed.of(parts, name, value, copied=True)
        elif not isinstance(value, Tensor) or value.dim() == 0:
            yield at, value.detach().cpu().clone() if isinstance(value, Tensor) else value
        else:
            raise Error(
                f"`{key}` of `{name}` is {list(value.shape)} in {type(optimizer).__name__}, and the parameter "
                f"{list(parts.held[name].shape)}: where it lies in the whole is not known",
                **{"try": "an optimizer whose state is shaped as the parameters are, such as AdamW"},
            )


def _names(parts: Parts) -> list[str]:
    """What of this rank's is in the model's state dict."""
    return [name for name in dict.fromkeys(parts.saved.values()) if name in parts.held]


def _names_of(optimizer: Optimizer, parts: Parts) -> dict[nn.Parameter, str]:
    """The optimizer's parameters, by name."""
    known = {id(tensor): name for name, tensor in parts.held.items()}
    found = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in known for p in found):
        raise Error("the optimizer has parameters that the trainer has not", **{"try": "AdamW(trainer.parameters())"})
    return {p: known[id(p)] for p in found}


def _moments(optimizer: Optimizer, parts: Parts) -> Iterator[tuple[str, str, Any]]:
    for parameter, name in _names_of(optimizer, parts).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield name, key, value


def _random(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _write(state: dict[str, Any], path: Path, group: Any) -> None:
    dcp.save(
        state,
        storage_writer=dcp.FileSystemWriter(path, single_file_per_rank=True),
        planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
    )


# ---- what is read


def _metadata(path: Path) -> Metadata:
    """What is in the checkpoint, all of which is there.

    Raises:
        Error: it is not a checkpoint, or files of it are missing or too short.
    """
    try:
        found = dcp.FileSystemReader(path).read_metadata()
    except Exception as error:
        raise Error(f"{path / WHOLE} cannot be read: {error}", **{"try": "remove it: an older one is used"}) from error
    for info in found.storage_data.values():
        file = path / info.relative_path
        if not file.exists() or file.stat().st_size < info.offset + info.length:
            size = f"has {file.stat().st_size:,} bytes, too few" if file.exists() else "is missing"
            raise Error(f"{file} {size}", **{"try": f"remove {path}: an older one is used"})
    return found


def _read(state: dict[str, Any], path: Path, trainer: Trainer) -> dict[str, Any]:
    """The state, its tensors filled and its other values read."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = dcp.FileSystemReader(path)
    try:
        dcp.load(state, storage_reader=reader, planner=planner, process_group=trainer.files)
    except dcp.CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        raise Error(f"{path} cannot be read, on rank {rank}: {first}") from error
    return state


def _expect_same(
    about: Mapping[str, Any], parts: Parts, optimizer: Optimizer, more: Mapping[str, Any], path: Path
) -> None:
    """Raises Error where a checkpoint is of a newer format, or of another kind of training."""
    if about["format"] > FORMAT:
        newer = f"{path} is of format {about['format']}, and this autotp knows {FORMAT}"
        raise Error(newer, **{"try": "a newer autotp"})
    if optimizer is not NOTHING and about["optimizer"] != type(optimizer).__name__:
        raise Error(f"{path} has the state of {about['optimizer']}, and this is {type(optimizer).__name__}")
    if missing := sorted(set(more) - set(about["more"])):
        raise Error(f"{path} has no {', '.join(missing)}", expected=", ".join(about["more"]) or "nothing of this kind")
    _names_of(optimizer, parts)


def _load(
    path: Path,
    metadata: Metadata,
    about: Mapping[str, Any],
    trainer: Trainer,
    parts: Parts,
    optimizer: Optimizer,
    more: Mapping[str, Any],
) -> None:
    """Reads everything, and only then changes anything."""
    known, rank = metadata.state_dict_metadata, trainer.everyone.rank
    same = about["sizes"] == dict(zip(("pp", "dp", "tp"), trainer.mesh.shape, strict=True))
    state: dict[str, Any] = {f"more{SEPARATOR}{name}": None for name in more}
    state |= {key: None for key in known if key.startswith(f"groups{SEPARATOR}")}
    state |= {f"random{SEPARATOR}{rank}": None} if same else {}

    def places() -> None:
        _expect_model({key: md for key, md in known.items() if key.startswith(f"model{SEPARATOR}")}, parts, path)
        for name in _names(parts):
            state[f"model{SEPARATOR}{name}"] = Boxed.of(parts, name, torch.empty_like(parts.held[name]))
        names = {name: parameter for parameter, name in _names_of(optimizer, parts).items()}
        for key, md in known.items():
            kind, name, *_ = (*key.split(SEPARATOR), "")
            if kind == "optimizer" and name in names:
                state[key] = _place(md, names[name], name, parts)

    agree(trainer.everyone, places)
    read = _read(state, path, trainer)
    options = agree(trainer.everyone, lambda: _options(read, parts, optimizer, path))
    for group, found in zip(optimizer.param_groups, options, strict=True):
        group.update(found)
    _put(read, trainer, parts, optimizer, more)
    if same:
        torch.set_rng_state(read[f"random{SEPARATOR}{rank}"]["cpu"])
        if trainer.place.device.type == "cuda":
            torch.cuda.set_rng_state(read[f"random{SEPARATOR}{rank}"]["cuda"], trainer.place.device)
    trainer.steps = about["step"]


def _expect_model(known: Mapping[str, Any], parts: Parts, path: Path) -> None:
    """Raises Error where a checkpoint is another model's."""
    names = {f"model{SEPARATOR}{name}" for name in parts.saved.values()}
    lines = [("missing", names - set(known)), ("unexpected", set(known) - names)]
    if any(some for _, some in lines):
        told = "; ".join(f"{kind}: {_listed(sorted(x[6:] for x in some))}" for kind, some in lines if some)
        raise Error(f"{path} is another model's; {told}")
    for name in _names(parts):
        md, shape, dtype = known[f"model{SEPARATOR}{name}"], parts.shapes[name], parts.held[name].dtype
        if tuple(md.size) != shape or md.properties.dtype != dtype:
            there = f"{md.properties.dtype} {list(md.size)}"
            raise Error(f"{path} is another model's: `{name}` is {there} there, and {dtype} {list(shape)} here")


def _options(read: Mapping[str, Any], parts: Parts, optimizer: Optimizer, path: Path) -> list[Mapping[str, Any]]:
    """The saved options of each group here: those that its parameters had.

    Raises:
        Error: its parameters were in several groups there.
    """
    groups = [group for key, some in read.items() if key.startswith(f"groups{SEPARATOR}") for group in some]
    had = {name: options for options, names in groups for name in names}
    names, found = _names_of(optimizer, parts), list[Mapping[str, Any]]()
    for i, group in enumerate(optimizer.param_groups):
        mine = [had[names[p]] for p in group["params"] if names[p] in had]
        if any(options != mine[0] for options in mine):
            raise Error(f"{path} has the parameters of group {i} in several groups", **{"try": "the groups of then"})
        found.append(mine[0] if mine else {})
    return found


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _place(md: Any, parameter: nn.Parameter, name: str, parts: Parts) -> Any:
    """Where a value of the optimizer's state is read into."""
    if not isinstance(md, TensorStorageMetadata):
        return None
    if tuple(md.size) == parts.shapes[name]:
        return Boxed.of(parts, name, torch.empty_like(parameter.detach(), dtype=md.properties.dtype))
    return torch.empty(md.size, dtype=md.properties.dtype)


def _put(
    read: Mapping[str, Any], trainer: Trainer, parts: Parts, optimizer: Optimizer, more: Mapping[str, Any]
) -> None:
    """Gives everything what was read."""
    names = {name: parameter for parameter, name in _names_of(optimizer, parts).items()}
    wide = {
        id(p)
        for group in optimizer.param_groups
        for p in group["params"]
        if group.get("fused") or group.get("capturable")
    }
    optimizer.state.clear()
    with torch.no_grad():
        for key, value in read.items():
            kind, name, *rest = (*key.split(SEPARATOR), "")
            if kind == "model":
                parts.held[name].copy_(value.tensor)
            elif kind == "optimizer":
                found = value.tensor if isinstance(value, Boxed) else value
                on_device = isinstance(found, Tensor) and id(names[name]) in wide
                optimizer.state[names[name]][rest[0]] = found.to(trainer.place.device) if on_device else found
    for name, thing in more.items():
        thing.load_state_dict(read[f"more{SEPARATOR}{name}"])
