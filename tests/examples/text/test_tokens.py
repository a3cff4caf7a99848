"""The examples' text: documents, tokenizers, and files of tokens that are written once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock, Timeout
from ranks import run_ranks
from text import corpus, tokens

TEXT = ["The cat sat.\n\n    The dog\tran <|endoftext|> away.\r\n", "é ☃ [MASK] x" * 20, "a cat\nthe dog\n \nthe cat\n"]


def documents() -> Iterator[str]:
    return iter(TEXT)


def test_a_file_is_a_document_and_of_jsonl_a_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo")
    (tmp_path / "b.jsonl").write_text('{"text": "three\\n"}\n\n{"text": " "}\n{"id": 1, "text": "four"}\n')
    assert list(corpus.documents(corpus.files([tmp_path]))) == ["one\r\ntwo", "three\n", "four"]


@pytest.mark.parametrize("line", ["no json", '{"txt": ""}', "[1]"])
def test_a_line_that_is_no_document(tmp_path, line):
    file = tmp_path / "b.jsonl"
    file.write_text('{"text": "x"}\n' + line)
    with pytest.raises(ValueError) as error:
        list(corpus.documents([file]))
    assert str(error.value) == f'{file}, line 2: not an object with a "text": {line}'


def test_gpt_gives_its_text_back(tmp_path):
    tokenizer, text = tokens.prepare(tmp_path, tokens.GPT, documents, 300)
    end = tokenizer.token_to_id(tokens.END)
    starts = text.pieces[text.documents]
    found = [text.values[a:b].tolist() for a, b in pairwise(starts)]
    assert all(ids[-1] == end and end not in ids[:-1] for ids in found)
    assert [tokenizer.decode(ids[:-1]) for ids in found] == TEXT


def test_long_documents_are_tokenised_in_whole_lines(monkeypatch, tmp_path):
    monkeypatch.setattr(tokens, "PASSAGE", 5)
    assert list(tokens.passages("abc\nde\nfghijkl\nm")) == ["abc\nde\n", "fghijkl\n", "m"]
    tokenizer, text = tokens.prepare(tmp_path, tokens.GPT, documents, 300)
    assert len(text.pieces) - 1 > len(TEXT) == len(text.documents) - 1
    assert tokenizer.decode(text.values.tolist()) == "".join(TEXT)


def test_bert_has_a_sentence_in_each_line(tmp_path):
    tokenizer, text = tokens.prepare(tmp_path, tokens.BERT, documents, 300)
    assert text.documents.tolist() == [0, 2, 3, 6]
    last = [tokenizer.decode(text.values[text.pieces[i] : text.pieces[i + 1]].tolist()) for i in (3, 4, 5)]
    assert last == ["a cat", "the dog", "the cat"]
    assert tokenizer.token_to_id(tokens.MASK) not in text.values
    assert [tokenizer.token_to_id(name) for name in tokens.SPECIAL] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_type_holds_the_last_token(size, dtype):
    class Counted:
        def get_vocab_size(self) -> int:
            return size

    assert tokens.dtype_of(Counted()) is dtype  # type: ignore[arg-type]
    assert np.iinfo(dtype).max >= size - 1


def test_written_once(tmp_path, monkeypatch):
    first = tokens.prepare(tmp_path, tokens.GPT, documents, 300)[1]
    monkeypatch.setattr(tokens, "_whole", lambda path, write: pytest.fail(f"written again: {path}"))
    again = tokens.prepare(tmp_path, tokens.GPT, documents, 300)[1]
    assert isinstance(again.values, np.memmap) and not again.values.flags.writeable
    assert np.array_equal(first.values, again.values)


@pytest.mark.parametrize(
    ("kind", "text", "size"),
    [
        (tokens.BERT, TEXT, 300),
        (tokens.GPT, [*TEXT, "more"], 300),
        (tokens.GPT, ["".join(TEXT)], 300),
        (tokens.GPT, TEXT, 290),
    ],
    ids=["kind", "text", "documents", "size"],
)
def test_others_are_other_files(tmp_path, kind, text, size):
    tokens.prepare(tmp_path, tokens.GPT, documents, 300)
    before = set(tmp_path.iterdir())
    tokens.prepare(tmp_path, kind, lambda: iter(text), size)
    assert len(set(tmp_path.iterdir()) - before) == 2


@pytest.mark.parametrize("name", ["tokens.bin", "pieces.npy", "documents.npy"])
@pytest.mark.parametrize("left", [None, 0, -2])
def test_a_file_that_is_not_whole(tmp_path, name, left):
    tokens.prepare(tmp_path, tokens.GPT, documents, 300)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    data = (folder / name).read_bytes()
    (folder / name).unlink() if left is None else (folder / name).write_bytes(data[:left])
    with pytest.raises(ValueError) as error:
        tokens.prepare(tmp_path, tokens.GPT, documents, 300)
    assert str(error.value) == f"{folder} is not whole. Delete it, and the next run writes it anew"


def test_an_end_in_the_midst_of_writing_leaves_nothing(tmp_path, monkeypatch):
    def cut(folder: Path, *rest: object) -> None:
        folder.mkdir()
        (folder / "tokens.bin").write_bytes(b"12")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_write", cut)
        with pytest.raises(KeyboardInterrupt):
            tokens.prepare(tmp_path, tokens.GPT, documents, 300)
    assert tokens.prepare(tmp_path, tokens.GPT, documents, 300)[1].documents.tolist() == [0, 1, 2, 3]


def test_another_text_of_the_same_tokenizer(tmp_path):
    for text in (TEXT, TEXT[:2]):
        _, found = tokens.prepare(tmp_path, tokens.GPT, lambda text=text: iter(text), 257)  # No pair at all.
        assert len(found.documents) - 1 == len(text)


def test_one_process_writes(tmp_path, monkeypatch):
    def write(path: Path, make: Callable[[Path], None]) -> None:
        with pytest.raises(Timeout):
            FileLock(tmp_path / ".lock", timeout=0).acquire()
        whole(path, make)

    whole = tokens._whole
    monkeypatch.setattr(tokens, "_whole", write)
    tokens.prepare(tmp_path, tokens.GPT, documents, 300)


def prepared(rank: int, n: int, folder: Path) -> list[int]:
    return tokens.prepare(folder, tokens.GPT, documents, 300)[1].values.tolist()


def test_ranks_at_once(tmp_path):
    first, second = run_ranks(prepared, 2, tmp_path)
    assert first == second
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_a_token_of_another_model(tmp_path):
    tokenizer, _ = tokens.prepare(tmp_path, tokens.GPT, documents, 300)
    with pytest.raises(ValueError) as error:
        tokens.id_of(tokenizer, tokens.MASK)
    assert str(error.value) == "the tokenizer has no [MASK]: it is another model's"


def test_tokenizer_of_a_text_is_as_asked(tmp_path):
    tokenizer, _ = tokens.prepare(tmp_path, tokens.GPT, lambda: iter(["the cat " * 50]), 260)
    assert tokenizer.get_vocab_size() == 260
    saved = json.loads(next(tmp_path.glob("gpt-260-*.json")).read_text())
    assert len(saved["model"]["vocab"]) == 260
