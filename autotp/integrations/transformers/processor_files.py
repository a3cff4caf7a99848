"""Lists the files of a checkpoint that are not weights: tokenizers and image processors."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

from autotp.integrations.transformers.files.checksum_file import SIDE_FILE

GENERATION = "generation_config.json"
WRITTEN = ("config.json", GENERATION, SIDE_FILE)
"""The files that a save writes anew, and does not copy."""

OF_A_TRAINING = re.compile(r"(trainer_state|all_results|.*_results|adapter_config)\.json|.*\.index\.json")
TEXTS = re.compile(r"(vocab|merges|dict|bpe|sentencepiece|spiece|special_tokens|added_tokens).*\.txt")
TABLE_SUFFIXES = (".model", ".spm", ".tiktoken", ".vocab", ".bpe", ".codes", ".tokenizer", ".jinja")
TEMPLATES = "additional_chat_templates"


def belongs(file: Path) -> bool:
    """Whether a file is copied along with the weights.

    Copied are: JSON files, except those of weights and of a training; tables of a tokenizer, by their suffixes; text
    files with the name of a vocabulary. Code, pickles and hidden files are not copied.
    """
    name = file.name
    if not file.is_file() or name.startswith(".") or name in WRITTEN:
        return False
    if file.suffix == ".json":
        return not OF_A_TRAINING.fullmatch(name)
    return file.suffix in TABLE_SUFFIXES or bool(TEXTS.fullmatch(name))


def is_of(file: Path, source: Path) -> bool:
    """Whether a file is in the folder, or in the hub cache's files of this model; warns if it is not.

    The cache has `snapshots/x/tokenizer.json -> ../../blobs/...`. Any other link may lead to a private file.
    """
    home = source.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    target = file.resolve()
    if any(target.is_relative_to(home) for home in homes):
        return True
    warnings.warn(
        f"{file} is a link to {target}, out of its folder: it is not copied. Copy it yourself, if it is of the model",
        stacklevel=2,
    )
    return False


def has_tokenizer(folder: Path) -> bool:
    """True for a folder from which transformers reads a tokenizer."""
    from transformers import AutoTokenizer

    try:
        names = AutoTokenizer.from_pretrained(folder.resolve()).vocab_files_names if folder.is_dir() else {}
    except Exception:  # Whatever it is, a script that reads it would end with it.
        return False
    # Without files, transformers makes some tokenizers that know no word.
    return any((folder / name).is_file() for name in names.values())


def copy_beside(source: Path, folder: Path, *more: str) -> None:
    """Copies the files that belong to the weights; warns if the folder that the model was read from does not exist.

    Args:
        more: names of further files that are copied if they are there.

    Raises:
        OSError: the file system fails.
    """
    if source.is_absolute() and not source.is_dir():  # A relative path is a name on a hub.
        warnings.warn(
            f"{source} is gone: its tokenizer's files are not copied to {folder}. Write them: "
            "tokenizer.save_pretrained(folder)",
            stacklevel=2,
        )
    for file in sorted(source.iterdir()) if source.is_dir() else ():
        if (belongs(file) or (file.name in more and file.is_file())) and is_of(file, source):
            shutil.copyfile(file, folder / file.name)
    templates = sorted((source / TEMPLATES).glob("*.jinja"))
    for file in templates:
        if not (file.is_file() and is_of(file, source)):
            continue
        (folder / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(file, folder / TEMPLATES / file.name)
