"""Turns text into tokens: trains tokenizers, and writes the tokens once, to memory-mapped files that later runs find.

The name of a file of tokens is a fingerprint of its text and its tokenizer, so another text or tokenizer never gets
this file. All processes may ask for a file at the same time: one process writes it, the others wait.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END = "<|endoftext|>"  # GPT's token at the end of each document.
PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # BERT's first tokens.
PASSAGE = 1 << 20  # Characters in one call of the tokenizer.
AT_ONCE = 256  # Documents in one batch.

T = TypeVar("T")
Documents = Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Kind:
    """How a kind of model reads text.

    Attributes:
        train: trains a tokenizer of at most the given number of tokens on documents.
        pieces: divides a document into parts, each of which is tokenised separately.
        end: the token at the end of each document, if there is one.
    """

    name: str
    train: Callable[[Iterable[str], int], Tokenizer]
    pieces: Callable[[str], Iterable[str]]
    end: str | None


@dataclass(frozen=True)
class Tokens:
    """A text in tokens, on disk.

    Attributes:
        fingerprint: the fingerprint of the text and the tokenizer.
        values: [tokens], uint16 or uint32.
        pieces: [pieces+1] int64, the index of the first token of each piece, and the number of tokens.
        documents: [documents+1] int64, the index of the first piece of each document, and the number of pieces.
    """

    fingerprint: str
    values: np.ndarray[Any, Any]
    pieces: np.ndarray[Any, Any]
    documents: np.ndarray[Any, Any]

    def __str__(self) -> str:
        return f"{len(self.values):,} tokens in {len(self.documents) - 1:,} documents"


def byte_pairs(documents: Iterable[str], size: int) -> Tokenizer:
    """Returns a byte-level BPE of at most `size` tokens, as GPT-2's: it encodes every text, and decodes it exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def word_pieces(documents: Iterable[str], size: int) -> Tokenizer:
    """Returns a WordPiece of at most `size` tokens, as that of uncased BERT: lower case, `##` within words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def passages(document: str) -> Iterator[str]:
    """Yields parts of the document, of whole lines and about PASSAGE characters: no tokenizer can take a gigabyte."""
    start = 0
    while start < len(document):
        end = document.find("\n", start + PASSAGE) + 1 or len(document)
        yield document[start:end]
        start = end


def sentences(document: str) -> list[str]:
    """Returns the lines of the document that have text: in BERT's own files each line is a sentence."""
    return [line for line in document.splitlines() if line.strip()]


GPT = Kind("gpt", byte_pairs, passages, END)
BERT = Kind("bert", word_pieces, sentences, None)


def prepare(cache: Path, kind: Kind, documents: Documents, size: int) -> tuple[Tokenizer, Tokens]:
    """Returns a tokenizer of at most `size` tokens, and the documents in its tokens; writes both to `cache` if needed.

    Args:
        documents: returns the documents; called for each reading, because only one document is in memory at a time.

    Raises:
        ValueError: a file in the cache is not complete.
    """
    text = fingerprint(documents())
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".lock"):
        file = cache / f"{kind.name}-{size}-{text}.json"
        if not file.exists():
            _whole(file, lambda path: kind.train(documents(), size).save(str(path)))
        tokenizer = load_tokenizer(file)
        folder = cache / f"{kind.name}-{fingerprint([text, tokenizer.to_str()])}"
        if not folder.exists():
            _whole(folder, lambda path: _write(path, tokenizer, kind, documents()))
    return tokenizer, load(folder, tokenizer)


def load_tokenizer(file: Path) -> Tokenizer:
    """Returns the tokenizer of a file. In a text, the name of a special token is ordinary text."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.encode_special_tokens = True
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a token.

    Raises:
        ValueError: the tokenizer has no such token.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}: it is another model's")
    return found


def fingerprint(texts: Iterable[str]) -> str:
    """Returns 16 hexadecimal digits, which depend on the texts and on where each text ends."""
    found = hashlib.sha256()
    for text in texts:
        data = text.encode(errors="surrogatepass")
        found.update(f"{len(data)} ".encode())
        found.update(data)
    return found.hexdigest()[:16]


def load(folder: Path, tokenizer: Tokenizer) -> Tokens:
    """Returns the tokens of a folder, mapped into memory.

    Raises:
        ValueError: a file is missing or not complete.
    """
    try:
        pieces, documents = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("pieces", "documents"))
        values = np.memmap(folder / "tokens.bin", dtype_of(tokenizer), "r")
        whole = len(values) == pieces[-1]
    except (OSError, ValueError, EOFError):
        whole = False
    if not whole:
        raise ValueError(f"{folder} is not whole. Delete it, and the next run writes it anew")
    return Tokens(folder.name, values, pieces, documents)


def dtype_of(tokenizer: Tokenizer) -> type[np.unsignedinteger[Any]]:
    """Returns the smaller of two dtypes that can hold every token: uint16 or uint32."""
    return np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32


def _write(folder: Path, tokenizer: Tokenizer, kind: Kind, documents: Iterator[str]) -> None:
    folder.mkdir()
    dtype = dtype_of(tokenizer)
    end = [id_of(tokenizer, kind.end)] if kind.end else []
    lengths, counts = [0], [0]
    with (folder / "tokens.bin").open("wb") as file:
        for some in _batches((list(kind.pieces(document)) for document in documents), AT_ONCE):
            encoded = iter(tokenizer.encode_batch_fast([piece for pieces in some for piece in pieces]))
            for pieces in some:
                found = [encoding.ids for encoding in islice(encoded, len(pieces))]
                found[-1].extend(end)
                lengths.extend(map(len, found))
                counts.append(len(found))
                np.array([token for ids in found for token in ids], dtype).tofile(file)
    np.save(folder / "pieces.npy", np.cumsum(lengths, dtype=np.int64))
    np.save(folder / "documents.npy", np.cumsum(counts, dtype=np.int64))


def _batches(items: Iterator[T], count: int) -> Iterator[list[T]]:
    while some := list(islice(items, count)):
        yield some


def _whole(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file or folder, which appears under its name only when it is complete."""
    partial = path.with_name(f"{path.name}.part")
    if partial.is_dir():
        shutil.rmtree(partial)
    write(partial)
    os.replace(partial, path)
