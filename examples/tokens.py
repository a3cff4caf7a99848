"""Text as tokens: tokenizers trained on it, and memory-mapped files that are written once and found again.

A file of tokens belongs to a text and a tokenizer, of which it has the fingerprint as its name: another text or another
tokenizer never finds it. Every process may ask for it at once; one of them writes, the others wait.
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

END = "<|endoftext|>"  # GPT's, behind each document.
PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # BERT's, the first tokens.
PASSAGE = 1 << 20  # Characters that are tokenised as one.
AT_ONCE = 256  # Documents.

T = TypeVar("T")
Documents = Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Kind:
    """What a model reads.

    Attributes:
        train: a tokenizer of at most so many tokens, trained on documents.
        pieces: a document in parts, each tokenised on its own.
        end: the token behind each document, if any.
    """

    name: str
    train: Callable[[Iterable[str], int], Tokenizer]
    pieces: Callable[[str], Iterable[str]]
    end: str | None


@dataclass(frozen=True)
class Tokens:
    """A text in tokens, on disk.

    Attributes:
        fingerprint: of the text and the tokenizer.
        values: [tokens], uint16 or uint32.
        pieces: [pieces+1] int64, the token that each piece starts with, and the end.
        documents: [documents+1] int64, the piece that each document starts with, and the end.
    """

    fingerprint: str
    values: np.ndarray[Any, Any]
    pieces: np.ndarray[Any, Any]
    documents: np.ndarray[Any, Any]

    def __str__(self) -> str:
        return f"{len(self.values):,} tokens in {len(self.documents) - 1:,} documents"


def byte_pairs(documents: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens, as GPT-2's: every text has tokens, and they give it back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def word_pieces(documents: Iterable[str], size: int) -> Tokenizer:
    """A WordPiece of at most `size` tokens, as that of uncased BERT: lower case, `##` within words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def passages(document: str) -> Iterator[str]:
    """The document in parts of whole lines, of PASSAGE characters and more: a tokenizer takes no gigabyte at once."""
    start = 0
    while start < len(document):
        end = document.find("\n", start + PASSAGE) + 1 or len(document)
        yield document[start:end]
        start = end


def sentences(document: str) -> list[str]:
    """The document's lines that have any text: BERT's own files have a sentence in each."""
    return [line for line in document.splitlines() if line.strip()]


GPT = Kind("gpt", byte_pairs, passages, END)
BERT = Kind("bert", word_pieces, sentences, None)


def prepare(cache: Path, kind: Kind, documents: Documents, size: int) -> tuple[Tokenizer, Tokens]:
    """A tokenizer of at most `size` tokens and the documents in its tokens: those in `cache`, or now made there.

    Args:
        documents: called for each reading, as nothing but one document is held.

    Raises:
        ValueError: a file in the cache is not whole.
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
    """The tokenizer in a file. A text that has the name of a special token in it is text, no such token."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.encode_special_tokens = True
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The number of a token.

    Raises:
        ValueError: the tokenizer has no such token.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}: it is another model's")
    return found


def fingerprint(texts: Iterable[str]) -> str:
    """16 hexadecimal digits, others for other texts or another division into texts."""
    found = hashlib.sha256()
    for text in texts:
        data = text.encode(errors="surrogatepass")
        found.update(f"{len(data)} ".encode())
        found.update(data)
    return found.hexdigest()[:16]


def load(folder: Path, tokenizer: Tokenizer) -> Tokens:
    """The tokens in a folder, mapped into memory.

    Raises:
        ValueError: a file is missing or not whole.
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
    """The smaller of two types that holds every token."""
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
    """Writes a file or folder that is there whole or not at all."""
    partial = path.with_name(f"{path.name}.part")
    if partial.is_dir():
        shutil.rmtree(partial)
    write(partial)
    os.replace(partial, path)
