"""convert: the command that writes a checkpoint in another format, or prints how two differ."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

from autotp.checkpoint.files.tensor_pieces import nbytes
from autotp.errors import within
from autotp.integrations.transformers.files.conversion import as_in_files, as_in_modules
from autotp.integrations.transformers.files.weights import parse_size
from autotp.integrations.transformers.processor_files import GENERATION, copy_beside
from autotp.tools.cli.flags import Debug, Json
from autotp.tools.cli.model_argument import dtype_named
from autotp.tools.cli.output import DIFFERENT, RIGHT, WrongUse, complain, print_json, show
from autotp.tools.conversion.content import FORMATS, Content, Format
from autotp.tools.conversion.differences import CheckpointDifferences, differences
from autotp.tools.conversion.formats import CONFIG, OF_TORCH, cast_sources, config_in, read_content, write_content

To = Enum("To", {name: name for name in FORMATS})  # type: ignore[misc]


def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A checkpoint; its format is found")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="What is written; with --diff, what is compared")],
    to: Annotated[To | None, typer.Option("--to", help="The format of TARGET; torch for .pt, else safetensors")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Print how the two differ, and write nothing")] = False,
    atol: Annotated[
        float, typer.Option("--atol", min=0, help="With --diff: elements that differ by no more than this are equal")
    ] = 0.0,
    config: Annotated[
        Path | None, typer.Option("--config", help="A folder of transformers or its config.json, for TARGET")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="The dtype of what is written: bfloat16, ...")] = None,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="The largest file of safetensors")] = "5GB",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Writes the model in SOURCE as TARGET: between a training's checkpoint, a folder of safetensors and a torch file.
    Runs in one process, and runs no code of a file.

    Example: autotp convert model.pt weights/

    The exit status of --diff is 1 if the two differ.
    """

    def read(path: Path) -> Content:
        return within("convert", lambda: read_content(path))

    if diff:
        rows = within("convert", lambda: tuple(differences(read(source), read(target), atol)))
        show(CheckpointDifferences(atol, rows), json)
        raise typer.Exit(DIFFERENT if rows else RIGHT)
    if atol:
        raise WrongUse("--atol is for --diff: write --diff, too")
    form: Format = to.value if to is not None else "torch" if target.suffix in OF_TORCH else "safetensors"
    content, dtype_asked_for = read(source), dtype_named(dtype)
    content = within("convert", lambda: _named(content, source, form, config))
    if config is not None and dtype is None:
        dtype = _dtype_of_config(content)
        if dtype is not None:
            complain(f"float32 is written as {dtype}, the dtype of {CONFIG}; --dtype float32 keeps it")
            dtype_asked_for = dtype_named(dtype)
    if dtype_asked_for is not None:
        settings = None if content.config is None else {**content.config, "dtype": dtype}
        content = replace(content, tensors=cast_sources(content.tensors, dtype_asked_for), config=settings)
    if content.state:
        complain("warning: the optimizer's state is not written")
    if form == "safetensors" and content.config is None:
        complain("warning: no config.json is written, which transformers needs: --config FOLDER")
    # The dot of a name such as llama-3.1-8b begins no suffix.
    if form == "safetensors" and target.suffix in (".safetensors", *OF_TORCH):
        raise WrongUse(f"TARGET {target} is a folder for safetensors: leave {target.suffix} out, or use --to torch")

    def beside(folder: Path) -> None:
        for path in (source, config):  # of both: a later one replaces a file of the first
            if path is not None and path.is_dir():
                copy_beside(path, folder, GENERATION)

    largest = parse_size(max_shard_size)
    within("convert", lambda: write_content(content, target, form, largest=largest, beside=beside))
    size = sum(map(nbytes, content.tensors.values()))
    summary = {"ok": True, "source": content.format, "target": form, "tensors": len(content.tensors), "bytes": size}
    if json:
        print_json(summary)
    else:
        print(f"{target}: {form}, {len(content.tensors)} tensors, {size / 1e6:.1f} MB, from {content.format}")


def _named(content: Content, source: Path, form: Format, config: Path | None) -> Content:
    """Returns the content with the configuration of `config`, and with the names that the target has."""
    settings = None if config is None else config_in(config / CONFIG if config.is_dir() else config)
    if form == "training" and content.format == "safetensors" and source.is_dir() and content.config is not None:
        return replace(content, tensors=as_in_modules(source))
    # Those formats have the names of modules; files of transformers may have others, which the configuration decides.
    if form == "safetensors" and config is not None and content.format in ("training", "torch"):
        return replace(content, tensors=as_in_files(content.tensors, config), config=settings)
    return content if settings is None else replace(content, config=settings)


def _dtype_of_config(content: Content) -> str | None:
    """Returns the dtype that the configuration names, if it is a smaller one than that of some float32 weights."""
    settings = content.config or {}
    name = str(settings.get("dtype") or settings.get("torch_dtype") or "float32").removeprefix("torch.")
    dtypes = {source.dtype for source in content.tensors.values()}
    return name if name in ("bfloat16", "float16") and torch.float32 in dtypes else None
