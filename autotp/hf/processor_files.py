"""Lists the files of a checkpoint that are not weights: tokenizers and image processors."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

from autotp.checkpoint.files.checksums import SIDE_FILE

WRITTEN = ("config.json", "generation_config.json", SIDE_FILE)
"""Of the model that is saved, and written anew."""

OF_A_TRAINING = re.compile(r"(trainer_state|all_results|.*_results|adapter_config)\.json|.*\.index\.json")
TEXTS = re.compile(r"(vocab|merges|dict|bpe|sentencepiece|spiece|special_tokens|added_tokens).*\.txt")
TABLES = (".model", ".spm", ".tiktoken", ".vocab", ".bpe", ".codes", ".tokenizer", ".jinja")
TEMPLATES = "additional_chat_templates"


def belongs(file: Path) -> bool:
    """Whether a file goes along with the weights.

    All JSON does, but what is of weights or of a training, and all tables of a tokenizer, by their endings; of plain
    text what is called as vocabularies are. Code, pickles and what begins with a dot do not.
    """
    name = file.name
    if not file.is_file() or name.startswith(".") or name in WRITTEN:
        return False
    if file.suffix == ".json":
        return not OF_A_TRAINING.fullmatch(name)
    return file.suffix in TABLES or bool(TEXTS.fullmatch(name))


def is_of(file: Path, source: Path) -> bool:
    """Whether a file lies in the folder, or where the hub's cache keeps the files of this model; else a warning.

    The cache has `snapshots/x/tokenizer.json -> ../../blobs/...`. Any other link may lead to what is not to be copied.
    """
    home = source.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    found = file.resolve()
    if any(found.is_relative_to(home) for home in homes):
        return True
    warnings.warn(f"{file} is a link to {found}, out of its folder: it is not copied", stacklevel=2)
    return False


def copy_beside(source: Path, folder: Path) -> None:
    """Copies what goes along with the weights; a warning where the folder that the model was read from is gone.

    Raises:
        OSError: as the file system says.
    """
    if source.is_absolute() and not source.is_dir():  # Another is a name on a hub.
        warnings.warn(f"{source} is gone: its tokenizer's files are not copied to {folder}", stacklevel=2)
    for file in sorted(source.iterdir()) if source.is_dir() else ():
        if belongs(file) and is_of(file, source):
            shutil.copyfile(file, folder / file.name)
    templates = sorted((source / TEMPLATES).glob("*.jinja"))
    for file in templates:
        if not (file.is_file() and is_of(file, source)):
            continue
        (folder / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(file, folder / TEMPLATES / file.name)
