"""formats: tells the format of a checkpoint, reads it, and writes it in another."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4

import torch

from autotp.checkpoint.files.atomic_folder import new_folder, sync_path
from autotp.checkpoint.files.checksums import INVALID_CONTENT, WRITABLE, read_regular, write_whole
from autotp.checkpoint.files.tensor_pieces import file_of, write_pieces
from autotp.checkpoint.keys import SEPARATOR, entry_key, path_of
from autotp.checkpoint.manifest import MANIFEST, OF_FORMAT_1, Item, manifest_content, read_manifest
from autotp.checkpoint.save import saved_steps
from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.integrations.transformers.files.safetensors_files import INDEX, ONE_FILE, stored_tensors, tensors_of_file
from autotp.integrations.transformers.files.tensor_sources import Cast, InMemory, Source, read_whole
from autotp.integrations.transformers.files.weights import write_checkpoint
from autotp.tools.conversion.content import Content, Format, Saved
from autotp.tools.conversion.torch_files import state_dict_in

CONFIG = "config.json"
A_CONFIG = "the config.json as save_pretrained wrote it"
OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")


def format_of(path: Path) -> Format:
    """Returns the format of a checkpoint.

    Raises:
        Error: it is none that autotp reads.
    """
    if path.is_file():
        return "safetensors" if path.suffix == ".safetensors" else "torch"
    if path.is_dir() and ((path / ONE_FILE).is_file() or (path / INDEX).is_file()):
        return "safetensors"
    if path.is_dir() and (_has_manifest(path) or any(map(_has_manifest, path.glob("step-*")))):
        return "training"
    kinds = f"{ONE_FILE}, a checkpoint of save_checkpoint, or a file of torch.save"
    raise Error(f"{path} is no checkpoint" if path.exists() else f"there is no {path}", expected=kinds)


def _has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() or (folder / OF_FORMAT_1).is_file()


def read_content(path: Path) -> Content:
    """Returns the tensors and the configuration of a checkpoint.

    Raises:
        Error: the checkpoint cannot be read.
    """
    match format_of(path):
        case "training":
            return _training(path)
        case "torch":
            return Content("torch", {name: InMemory(tensor) for name, tensor in state_dict_in(path).items()})
        case "safetensors":
            tensors = tensors_of_file(path) if path.is_file() else stored_tensors(path)
            beside = (path.parent if path.is_file() else path) / CONFIG
            return Content("safetensors", tensors, config_in(beside) if beside.is_file() else None)


def config_in(file: Path) -> Mapping[str, object]:
    """Returns the JSON object in a configuration's file."""
    try:
        config = json.loads(read_regular(file))
    except (*INVALID_CONTENT, OSError) as error:
        raise Error(f"the configuration cannot be read: {error}", at=str(file), fix=A_CONFIG) from error
    if not isinstance(config, dict):
        raise Error("the configuration is no JSON object", at=str(file), fix=A_CONFIG)
    return config


def _training(path: Path) -> Content:
    """Returns a training's checkpoint; of a folder with several the newest."""
    if not _has_manifest(path):
        steps = saved_steps(path)
        if not steps:
            was = f"the name that `save_checkpoint` gave it, such as {path_of(Path(), 1000).name}"
            raise Error(f"{path} has checkpoints under other names", fix=was)
        path = path_of(path, steps[-1])
    manifest, prefix = read_manifest(path), f"model{SEPARATOR}"
    sources = {key: Saved(manifest, key) for key in manifest.tensors}
    tensors = {key.removeprefix(prefix): source for key, source in sources.items() if key.startswith(prefix)}
    state = {key: source for key, source in sources.items() if not key.startswith(prefix)}
    return Content("training", tensors, state=state, step=manifest.about["step"])


# ---- writing


def write_content(
    content: Content,
    path: Path,
    to: Format,
    *,
    largest: int = 5 * 10**9,
    beside: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Writes a model's tensors in a format, in one step; an optimizer's state is not written.

    Args:
        largest: the most bytes in one file of safetensors.
        beside: writes further files into a folder of safetensors.

    Raises:
        Error: the checkpoint cannot be written.
    """
    try:
        match to:
            case "training":
                _write_training(path, content)
            case "torch":
                _write_torch(path, content)
            case "safetensors":
                write_checkpoint(
                    path, content.tensors, Mesh(), largest, lambda folder: _beside(folder, content, beside)
                )
    except OSError as error:
        raise Error(f"the checkpoint cannot be written: {error}", at=str(path), fix=WRITABLE) from error


def _beside(folder: Path, content: Content, more: Callable[[Path], None]) -> None:
    if content.config is not None:
        (folder / CONFIG).write_text(json.dumps(content.config, indent=2) + "\n", encoding="utf-8")
    more(folder)


def _write_torch(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a rename is one step within one file system only.
    unfinished = path.with_name(f".{path.name}.{uuid4().hex[:8]}.new")
    try:
        torch.save({name: read_whole(source).contiguous() for name, source in content.tensors.items()}, unfinished)
        # On the disk before it gets its name: after a crash the name must not lead to half a file.
        sync_path(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_path(path.parent)


def _write_training(path: Path, content: Content) -> None:
    """Writes a checkpoint of parameters alone, for `load_checkpoint(folder, trainer)` without an optimizer."""
    step_folder = path_of(path, content.step)
    if step_folder.exists():
        raise Error(f"{step_folder} is there already", fix="another folder")
    items = (
        Item(entry_key("model", name), (0,) * len(source.shape), tuple(source.shape), read_whole(source))
        for name, source in content.tensors.items()
    )
    # A row is noted when its tensor is written, so that one tensor at a time is in memory.
    item_rows = []

    def parts() -> object:
        for item in items:
            item_rows.append(item.row())
            yield item.at, item.tensor

    about = {"step": content.step, "optimizer": "no optimizer", "sizes": {}, "model": {}, "more": {}, "values": {},
             "groups": []}  # fmt: skip
    with new_folder(step_folder, lambda name: True) as unfinished:
        pieces = write_pieces(unfinished, 0, parts())  # type: ignore[arg-type]
        rows = [[row, piece.row()] for row, piece in zip(item_rows, pieces, strict=True)]
        size = (unfinished / file_of(0)).stat().st_size
        write_whole(unfinished / MANIFEST, manifest_content(about, [(size, rows)]))


def cast_sources(tensors: Mapping[str, Source], dtype: torch.dtype) -> dict[str, Source]:
    """Returns the sources with floating tensors in another dtype."""
    return {name: Cast(source, dtype) if source.dtype.is_floating_point else source for name, source in tensors.items()}
