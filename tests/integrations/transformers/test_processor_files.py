"""processor_files: the files that make texts into tensors go along, whatever a tokenizer calls them; others do not."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from autotp.integrations.transformers.processor_files import copy_beside

ALONG = [
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "source.spm", "target.spm", "spm.model", "normalizer.json", "dict.txt", "qwen.tiktoken",
]  # fmt: skip
NOT = [
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "training_args.bin", "trainer_state.json", "optimizer.pt", "modeling_evil.py",
    "notes.txt", "requirements.txt", "README.md", ".gitattributes", "autotp.checksums.json", "vocab.pkl",
]  # fmt: skip


def names_of_tokenizers() -> set[str]:
    """The files of every tokenizer that transformers has."""
    pairs = TOKENIZER_MAPPING_NAMES.values()
    kinds = {kind for pair in pairs for kind in (pair if isinstance(pair, tuple) else [pair]) if kind}
    found: set[str] = set()
    for kind in kinds:
        with suppress(ImportError, AttributeError):  # It wants a library that is not here, or has no files.
            found |= set(map(str, getattr(transformers, kind).vocab_files_names.values()))
    return found


def test_copy_beside_takes_the_files_of_tokenizers_alone(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "folder"
    expected = {*ALONG, *names_of_tokenizers()}
    assert len(expected) > len(ALONG)
    for path in (source, source / "additional_chat_templates", source / "onnx", folder):
        path.mkdir()
    for name in [*expected, *NOT, "additional_chat_templates/tools.jinja", "onnx/tokenizer.json"]:
        (source / name).write_text(name)
    copy_beside(source, folder)
    assert {path.name for path in folder.iterdir()} == expected | {"additional_chat_templates"}
    assert (folder / "additional_chat_templates" / "tools.jinja").read_text() == "additional_chat_templates/tools.jinja"


def test_copy_beside_warns_of_a_source_that_is_gone(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="gone is gone: its tokenizer's files are not copied"):
        copy_beside(tmp_path / "gone", tmp_path)
    copy_beside(Path("a-name", "on-a-hub"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_copy_beside_follows_links_within_the_model_only(tmp_path: Path) -> None:
    """Into the folder itself, or the hub's cache of this model; what else is linked is not handed on."""
    cache, folder = tmp_path / "models--a--b", tmp_path / "folder"
    source, blobs, other = cache / "snapshots" / "x", cache / "blobs", tmp_path / "models--c--d" / "blobs"
    for path in (source, blobs, other, source / "additional_chat_templates", folder):
        path.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (blobs / "1").write_text("mine")
    (other / "1").write_text("another's")
    (source / "tokenizer.json").symlink_to(Path("..", "..", "blobs", "1"))
    (source / "vocab.json").symlink_to("tokenizer.json")
    (source / "merges.txt").symlink_to(other / "1")
    (source / "added_tokens.json").symlink_to(tmp_path / "secret")
    (source / "additional_chat_templates" / "x.jinja").symlink_to(tmp_path / "secret")
    with pytest.warns(UserWarning, match="is a link to "):
        copy_beside(source, folder)
    assert {path.name for path in folder.rglob("*.*")} == {"tokenizer.json", "vocab.json"}
    assert (folder / "vocab.json").read_text() == "mine"
