"""Reads the configuration of a folder of transformers, and finds the class of its model; keeps transformers offline."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autotp.checkpoint.files.checksums import INVALID_CONTENT, read_regular
from autotp.errors import Error

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
OTHER_FILES = "configuration_files"
"""A key of old configurations: names of files that transformers reads in place of this one."""
MOST_LABELS, MOST_PARTS = 10**6, 10**4
LOCAL = {"trust_remote_code": False}  # Without it, transformers asks on the terminal whether to run code.


@dataclass(frozen=True)
class ModelArguments:
    """The arguments of `from_pretrained` about the model itself."""

    dtype: torch.dtype | None
    model_class: Any
    config: Mapping[str, Any]
    missing: str
    unexpected: str


WRITTEN_AGAIN = "the file as save_pretrained wrote it"


def read_config(folder: Path, arguments: ModelArguments, name: str = CONFIG) -> Any:
    """Reads the configuration of a folder. name: its file

    Raises:
        Error: transformers does not know the configuration, it is of quantized tensors, or it names code.
    """
    file = folder / name
    if not file.is_file():
        remedy = "the folder that save_pretrained wrote"
        raise Error(f"no checkpoint of transformers: {name} is not there", at=str(folder), fix=remedy)
    if (folder / ADAPTER).is_file():
        remedy = "load both with peft, and autotp.parallelize what it returns; or merge_and_unload() and save that"
        raise Error(f"an adapter is beside the model: {ADAPTER}", at=str(folder), fix=remedy)
    expect_no_code(file, arguments.config)
    config_class = getattr(arguments.model_class, "config_class", None)
    source, local = (config_class, {}) if config_class else (transformers_module().AutoConfig, LOCAL)
    config = read_object(file, source, **arguments.config, **local)
    if getattr(config, "quantization_config", None) is not None:
        raise Error("the checkpoint is quantized", at=str(file), fix="a checkpoint of floating tensors")
    return config


def expect_no_code(file: Path, overrides: Mapping[str, Any]) -> None:
    """Raises Error if a configuration names code to run: classes in its folder, or kernels on a hub."""
    try:
        config = json.loads(read_regular(file), parse_constant=_raise_not_a_number, parse_float=_number)
        # The caller's word counts: {"auto_map": {}} asks for the class of transformers.
        config |= {key: overrides[key] for key in overrides if key == "auto_map"}
        entries = [(key, value, _texts(value) if "_implementation" in key else []) for key, value in _entries(config)]
        # transformers writes NaN in this form.
        if any(key == "__float__" and value == "NaN" for key, value, _ in entries):
            _raise_not_a_number("NaN")
    except (*INVALID_CONTENT, OSError) as error:
        raise Error(
            f"the configuration cannot be read: {first_line(error)}", at=str(file), fix=WRITTEN_AGAIN
        ) from error
    if OTHER_FILES in config:
        remedy = f"write the settings of the file that is meant into {file.name}, without {OTHER_FILES}"
        raise Error(
            f"the configuration names other files ({OTHER_FILES}), which are not read", at=str(file), fix=remedy
        )
    for key, value, texts in entries:
        _expect_count(file, key, value, overrides)
        if key == "auto_map" and value:
            advice = 'config={"auto_map": {}} for the class of transformers, if it has one of this model_type'
            raise Error("the checkpoint has code of its own (auto_map): it is not run", at=str(file), fix=advice)
        hubs = [text for text in texts if "/" in text and key not in overrides]
        if hubs:
            named = f"the checkpoint names code in a hub ({key}: {hubs[0]}): it is not fetched"
            raise Error(named, at=str(file), fix=f'config={{"{key}": "sdpa"}}')


def _raise_not_a_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _number(text: str) -> float:
    """Returns a number of JSON; 1e999 would be infinite."""
    if math.isinf(number := float(text)):
        _raise_not_a_number(text)
    return number


def _expect_count(file: Path, key: str, value: Any, overrides: Mapping[str, Any]) -> None:
    """Raises Error if a model would have too many parts: building one takes memory and time for each."""
    counted = re.search(r"(?:^|_)(labels|layers?|blocks|stages|experts|heads)$", key)
    limit = MOST_LABELS if counted and counted[1] == "labels" else MOST_PARTS
    if counted and isinstance(value, int) and value > limit and key not in overrides:
        raise Error(
            f"the configuration says {key}={value}, and a model has at most {limit:,}",
            at=str(file),
            fix=f'config={{"{key}": {value}}}, if it is true',
        )


def _texts(value: Any) -> list[str]:
    """Returns all texts in a JSON value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, str) else [text for item in inner for text in _texts(item)]


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields all keys in a JSON value, with their values."""
    if isinstance(value, dict):
        yield from value.items()
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _entries(inner)


def read_object(file: Path, source_class: Any, **options: Any) -> Any:
    """Returns the object that a class of transformers reads from a file of a checkpoint."""
    try:
        read_regular(file)  # transformers would also wait for a pipe, and read a file with holes into the memory.
        with offline_and_silent():
            where = file.parent if file.name == CONFIG or "generation" in file.name else file
            return source_class.from_pretrained(where, local_files_only=True, **options)
    except Exception as error:
        raise Error(
            f"the configuration cannot be read: {first_line(error)}", at=str(file), fix=WRITTEN_AGAIN
        ) from error


def class_of(config: Any, arguments: ModelArguments, folder: Path) -> Any:
    """Returns the class of the model: `model_class`, resolved if it is an Auto class, or else the saved class."""
    hf, chosen = transformers_module(), arguments.model_class
    if chosen is None:
        saved = [getattr(hf, name, None) for name in config.architectures or []]
        if not saved or not (isinstance(saved[0], type) and issubclass(saved[0], hf.PreTrainedModel)):
            reason = "which is no model that transformers has"
            named = f"names {config.architectures[0]}, {reason}" if saved else "names no class"
            remedy = "model_class=transformers.AutoModelForCausalLM, or the class itself"
            raise Error(f"config.json {named}", at=str(folder / "config.json"), fix=remedy)
        return saved[0]
    if isinstance(chosen, type) and issubclass(chosen, hf.PreTrainedModel):
        return chosen
    try:
        # On meta, as only its class is asked for.
        with offline_and_silent(), torch.device("meta"):
            return type(chosen.from_config(config, **LOCAL))
    except Exception as error:
        problem = f"model_class={chosen!r} makes no model of {type(config).__name__}: {first_line(error)}"
        raise Error(problem, fix="model_class=transformers.AutoModelForCausalLM, or the class itself") from error


# ---- transformers


def transformers_module() -> Any:
    """Returns the module transformers.

    Raises:
        Error: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise Error(f"transformers cannot be imported: {error}", fix="pip install autotp[hf]") from error
    return transformers


@contextmanager
def offline_and_silent() -> Iterator[list[str]]:
    """Keeps transformers offline and silent in a `with` block; yields the list of its warnings."""
    from huggingface_hub import constants
    from transformers.utils import logging as theirs

    messages: list[str] = []
    # huggingface_hub reads its environment variable when it is imported, and never again.
    offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    library, progress_bar = logging.getLogger("transformers"), theirs.is_progress_bar_enabled()
    handlers, spread = library.handlers[:], library.propagate
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    theirs.disable_progress_bar()
    # Its warnings may say why it could not build a model: `pretrained._build_model` reads them.
    library.handlers[:], library.propagate = [listener], False
    try:
        yield messages
    finally:
        constants.HF_HUB_OFFLINE = offline
        library.handlers[:], library.propagate = handlers, spread
        if progress_bar:
            theirs.enable_progress_bar()


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text, or the name of its class if it has none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
