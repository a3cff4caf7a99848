"""megatron_files: reads and writes the folders of Megatron-LM.

    latest_checkpointed_iteration.txt                      the newest iteration, or `release`
    iter_0000100/mp_rank_01/model_optim_rng.pt             tensor-parallel rank 1
    iter_0000100/mp_rank_01_002/model_optim_rng.pt         the same, of the third stage of a pipeline

A file has `args`, `checkpoint_version`, `iteration`, and the tensors of one rank in nested dicts under `model` (or
`model0`, `model1`, ... for a rank with several stages).
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotp.checkpoint.conversion.content import Content
from autotp.checkpoint.conversion.megatron_arguments import arguments_of, config_of, number_of, value_of
from autotp.checkpoint.conversion.megatron_names import HEAD, LIBRARIES, SEGMENTS, WORDS, Names, Row
from autotp.checkpoint.conversion.torch_files import read_torch_file
from autotp.checkpoint.files.atomic_folder import replaced
from autotp.checkpoint.files.checksums import read_regular
from autotp.checkpoint.files.tensor_sources import Computed, Source, read_whole
from autotp.errors import Error

LATEST, FILE = "latest_checkpointed_iteration.txt", "model_optim_rng.pt"
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
LAYER = re.compile(r"(language_model\.encoder\.layers\.)(\d+)(\..*)")
AGAIN = "word_embeddings_for_head.weight"
"""The word embedding once more, on the last stage of a pipeline."""
NO_WORD = -10_000.0
"""The bias of the words that pad a vocabulary: as good as never said, and a number of float16."""
VERSION = 3.0


# ---- reading


@dataclass(frozen=True)
class Ranks:
    """The tensors of all ranks.

    Attributes:
        folder: of the iteration.
        args: of the first rank.
        version: the version of the format, which says how queries, keys and values are ordered.
        iteration: the step.
        parts: name, with the layer counted through all stages -> its part on each tensor-parallel rank.
    """

    folder: Path
    args: Namespace
    version: float
    iteration: int
    parts: Mapping[str, Sequence[Tensor]]


def read_megatron(folder: Path, vocabulary: int | None = None, library: str | None = None) -> Content:
    """Returns the model of a checkpoint of Megatron-LM, under the names of another library.

    Args:
        folder: what Megatron-LM calls `--save`, or the folder of one iteration.
        vocabulary: the number of words; the others pad it. None means that of the arguments, or else all.
        library: a key of LIBRARIES; None means transformers.

    Raises:
        Error: a rank's file is missing or cannot be read, or the model is not a GPT or a BERT of these names.
    """
    ranks = _ranks(folder)
    kind = "BERT" if "lm_head.dense.weight" in ranks.parts else "GPT"
    names = names_for(kind, library)
    layers = number_of(ranks.args, "num_layers")
    if layers > len(ranks.parts):
        raise Error(f"num_layers is {layers}, and there are {len(ranks.parts)} tensors", at=str(ranks.folder))
    rows = list(names.rows(layers))
    head = names.tied[0][0] if names.tied and kind == "GPT" else ""
    if HEAD in ranks.parts and head:
        rows.append(Row(HEAD, (head,), "vocabulary"))
    _expect_tensors(ranks, rows)
    padded = sum(part.shape[0] for part in ranks.parts[WORDS])
    words = vocabulary or value_of(ranks.args, "orig_vocab_size") or padded
    if words > padded:
        raise Error(f"the checkpoint has {padded} words, and not {words}", at=str(ranks.folder))
    note = f"the vocabulary has {padded} words, with those that pad it: cut them with --vocab-size"
    segments = ranks.parts[SEGMENTS][0].shape[0] if SEGMENTS in ranks.parts else 0
    config = config_of(ranks.args, kind, words, segments, HEAD not in ranks.parts)
    tensors = dict(pair for row in rows for pair in _merged(ranks, row, words))
    known = vocabulary is not None or value_of(ranks.args, "orig_vocab_size")
    return Content("megatron", tensors, config, step=ranks.iteration, notes=() if known else (note,))


def names_for(kind: str, library: str | None) -> Names:
    """Returns the names of a library for a kind of model; those of transformers for None."""
    found = {key: names for key, names in LIBRARIES.items() if names.kind == kind}
    if library is not None and library not in found:
        raise Error(f"{library} has no names for a {kind}", expected=", ".join(found))
    return found[library] if library is not None else next(iter(found.values()))


def _ranks(folder: Path) -> Ranks:
    """Reads the files of all ranks; their tensors are mapped into memory."""
    at = _iteration(folder)
    files = {tuple(int(n or 0) for n in match.groups()): path for path in at.iterdir()
             if (match := RANK.fullmatch(path.name))}  # fmt: skip
    tp, pp = (1 + max(key[i] for key in files) for i in (0, 1))
    lacking = next((key for key in ((t, p) for t in range(tp) for p in range(pp)) if key not in files), None)
    if lacking:
        raise Error(f"tensor-parallel rank {lacking[0]} of stage {lacking[1]} is missing", at=str(at))
    loaded = {key: _file(path / FILE) for key, path in files.items()}
    first = loaded[0, 0]
    args = first.get("args")
    if not isinstance(args, Namespace):
        raise Error("the checkpoint has no arguments (`args`), and so no sizes", at=str(at))
    for name, n in (("tensor_model_parallel_size", tp), ("pipeline_model_parallel_size", pp)):
        if value_of(args, name, n) != n:
            raise Error(f"{name} is {value_of(args, name)}, and there are files of {n}", at=str(at))
    parts: dict[str, list[Tensor]] = {}
    for t in range(tp):
        for name, tensor in _named([loaded[t, p] for p in range(pp)], at):
            parts.setdefault(name, []).append(tensor)
    if uneven := [name for name, row in parts.items() if len(row) != tp]:
        raise Error(f"`{uneven[0]}` is not on every tensor-parallel rank", at=str(at))
    version, step = first.get("checkpoint_version", 0), first.get("iteration", 0)
    if version not in (0, 1, 2, 3):
        raise Error(f"checkpoint_version is {version!r}", expected="0, 1, 2 or 3", at=str(at))
    return Ranks(at, args, float(version), step if isinstance(step, int) else 0, parts)


def is_megatron(folder: Path) -> bool:
    """Whether a folder is one of Megatron-LM."""
    return folder.is_dir() and ((folder / LATEST).is_file() or any(RANK.fullmatch(p.name) for p in folder.iterdir()))


def _iteration(folder: Path) -> Path:
    """Returns the folder of the newest iteration."""
    if any(RANK.fullmatch(path.name) for path in folder.iterdir()):
        return folder
    try:
        text = read_regular(folder / LATEST).decode(errors="replace").strip()
    except OSError as error:
        raise Error(f"{folder / LATEST} cannot be read: {error.strerror}") from error
    number = re.fullmatch(r"[0-9]{1,19}", text)
    at = folder / (f"iter_{int(text):07d}" if number else "release")
    if (text != "release" and not number) or not at.is_dir():
        raise Error(f"{LATEST} says {text[:40]!r}, and there is no such checkpoint", at=str(folder))
    if not any(RANK.fullmatch(path.name) for path in at.iterdir()):
        raise Error("no rank's folder is there (mp_rank_00, ...)", at=str(at))
    return at


def _file(path: Path) -> dict[str, Any]:
    found = read_torch_file(path)
    if not isinstance(found, dict):
        raise Error(f"{path} is no checkpoint of Megatron-LM", expected="a dict with `args` and `model`")
    return found


def _named(stages: Sequence[Mapping[str, Any]], at: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of one tensor-parallel rank; layers are counted through the stages, chunk by chunk."""
    several = sum(bool(re.fullmatch(r"model\d+", key)) for key in stages[0])
    before, seen = 0, dict[str, Tensor]()
    for chunk in [f"model{i}" for i in range(several)] or ["model"]:
        for stage in stages:
            if not isinstance(stage.get(chunk), Mapping):
                raise Error(f"a rank's file has no `{chunk}`", at=str(at))
            layers = set[int]()
            for name, tensor in _flat(stage[chunk], set()):
                name, number = _renamed(name, before)
                layers |= {number} - {-1}
                if name == AGAIN:
                    _expect_equal(name, tensor, seen.get(WORDS))
                    continue
                seen[name] = tensor
                yield name, tensor
            before += len(layers)


def _flat(tree: Mapping[str, Any], seen: set[int], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in nested dicts, with their names.

    Args:
        seen: ids of dicts; a dict that is in itself, or in many others, would have names without end.

    Raises:
        Error: a dict is there twice.
    """
    if id(tree) in seen:
        raise Error(f"the dict `{prefix[:60]}` of a rank's file is there twice")
    seen.add(id(tree))
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, seen, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", value


def _renamed(name: str, before: int) -> tuple[str, int]:
    """Returns a tensor's present name, with the layer's number in the whole model, and its number here (-1: none)."""
    name = name.removeprefix("module.").replace("language_model.transformer.", "language_model.encoder.")
    match = LAYER.fullmatch(name)
    if match is None:
        return name, -1
    rest = re.sub(r"^\.attention\.", ".self_attention.", match[3])
    return f"{match[1]}{int(match[2]) + before}{rest}", int(match[2])


def _expect_equal(name: str, tensor: Tensor, first: Tensor | None) -> None:
    if first is not None and not torch.equal(tensor, first):
        raise Error(f"`{name}` of the last stage is not the word embedding of the first")


def _expect_tensors(ranks: Ranks, rows: Sequence[Row]) -> None:
    """Raises Error if tensors are missing, or no row names them."""
    wanted = {row.theirs for row in rows}
    lines = {"missing": wanted - ranks.parts.keys(), "unknown": ranks.parts.keys() - wanted}
    if any(lines.values()):
        facts = {label: ", ".join(sorted(names)[:4]) for label, names in lines.items() if names}
        raise Error("the model is not a GPT or BERT of Megatron-LM as autotp knows them", at=str(ranks.folder), **facts)


def _merged(ranks: Ranks, row: Row, words: int) -> Iterator[tuple[str, Source]]:
    """Yields the own names of a tensor, each with its source."""
    parts, heads = ranks.parts[row.theirs], number_of(ranks.args, "num_attention_heads")
    if heads % len(parts):
        raise Error(f"{heads} heads on {len(parts)} tensor-parallel ranks", at=str(ranks.folder))
    merge = partial(_merge, row, parts, ranks.version, heads, words)
    count = len(row.ours)
    if row.cut == "heads" and any(p.shape[0] * len(parts) * 1 % (3 * heads) for p in parts):
        raise Error(f"`{row.theirs}` has {parts[0].shape[0]} rows: no queries, keys and values of {heads} heads")
    whole = merge()
    for i, name in enumerate(row.ours):
        size = whole.shape[0] // count
        shape = (size, *whole.shape[1:]) if count > 1 else tuple(whole.shape)
        run = partial(lambda merge, i, size: merge().narrow(0, i * size, size), merge, i, size) if count > 1 else merge
        yield name, Computed(run, shape, whole.dtype)


def _merge(row: Row, parts: Sequence[Tensor], version: float, heads: int, words: int) -> Tensor:
    """Returns the whole tensor of the ranks' parts, ordered and turned as others have it."""
    if row.cut == "whole":
        for part in parts[1:]:
            if not torch.equal(part, parts[0]):
                raise Error(f"the tensor-parallel ranks hold different values of `{row.theirs}`")
        whole = parts[0]
    elif row.cut == "heads":
        whole = torch.cat([by_heads(part, version, heads // len(parts)) for part in parts])
        whole = whole.transpose(0, 1).reshape(-1, *parts[0].shape[1:])  # (3 heads d)
    else:
        whole = torch.cat(list(parts), 1 if row.cut == "columns" else 0)
        whole = whole[:words] if row.cut == "vocabulary" else whole
    return whole.t() if row.turned else whole


def by_heads(part: Tensor, version: float, heads: int) -> Tensor:
    """Returns queries, keys and values of one rank by heads: [heads 3 d ...]."""
    rest = part.shape[1:]
    size = part.shape[0] // (3 * heads)
    if version >= 2:
        return part.reshape(heads, 3, size, *rest)
    if version == 1:
        return part.reshape(heads, size, 3, *rest).transpose(1, 2)
    return part.reshape(3, heads, size, *rest).transpose(0, 1)


# ---- writing


@dataclass(frozen=True)
class Target:
    """On how many ranks a checkpoint is written, and the vocabulary's padding: to a multiple of `divisible * tp`."""

    tp: int = 1
    pp: int = 1
    divisible: int = 128


def write_megatron(folder: Path, content: Content, to: Target, library: str | None = None) -> None:
    """Writes a model into a folder of Megatron-LM, in one step, as its iteration `release`.

    Args:
        content: a GPT-2 or Megatron-BERT of transformers, or a model of `autotp.models`, with its configuration.
        library: a key of LIBRARIES; None means that the tensors' names tell it.

    Raises:
        Error: the model has no counterpart in Megatron-LM, or its sizes do not divide by the ranks.
    """
    key = library or library_of(content.tensors)
    names = LIBRARIES[key]
    if content.config is None:
        raise Error("the model's configuration is not known", fix="--config, with a folder or file of transformers")
    args = arguments_of(content.config, names.kind)
    rows = _rows_to_write(names, content, args["num_layers"])
    words = content.tensors[next(row.ours[0] for row in rows if row.theirs == WORDS)].shape[0]
    multiple = to.divisible * to.tp
    padded = -(-words // multiple) * multiple
    _expect_divides(args, to)
    dtype = content.tensors[rows[0].ours[0]].dtype
    args |= {
        "orig_vocab_size": words, "padded_vocab_size": padded, "make_vocab_size_divisible_by": to.divisible,
        "tensor_model_parallel_size": to.tp, "pipeline_model_parallel_size": to.pp, "params_dtype": dtype,
        "untie_embeddings_and_output_weights": any(row.theirs == HEAD for row in rows),
    }  # fmt: skip
    with replaced(folder, lambda name: name in (LATEST, "release")) as new:
        for p in range(to.pp):
            for t in range(to.tp):
                where = f"mp_rank_{t:02d}" + (f"_{p:03d}" if to.pp > 1 else "")
                (new / "release" / where).mkdir(parents=True)
                _write_rank(new / "release" / where / FILE, content, rows, args, to, (t, p))
        (new / LATEST).write_text("release")


def library_of(tensors: Mapping[str, Source]) -> str:
    """Returns the key of LIBRARIES whose names the tensors have.

    Raises:
        Error: there is none.
    """
    for key, names in LIBRARIES.items():
        if all(ours in tensors for _, ours, _ in names.outside):
            return key
    raise Error("the model is no GPT or BERT of which autotp knows Megatron-LM's names", expected=", ".join(LIBRARIES))


def _rows_to_write(names: Names, content: Content, layers: int) -> list[Row]:
    """Returns the rows of a model's tensors. Tied tensors are left out if they are equal."""
    rows = list(names.rows(layers))
    rest = content.tensors.keys() - {name for row in rows for name in row.ours}
    for name, of in names.tied:
        if name in rest and torch.equal(read_whole(content.tensors[name]), read_whole(content.tensors[of])):
            rest -= {name}
        elif name == "lm_head.weight" and name in rest:
            rows.append(Row(HEAD, (name,), "vocabulary"))
            rest -= {name}
    rest = {name for name in rest if not re.search(r"\.attn\.(masked_)?bias$|position_ids$", name)}  # Masks.
    lacking = [name for row in rows for name in row.ours if name not in content.tensors]
    if rest or lacking:
        lines = {"missing": lacking, "too much": sorted(rest)}
        facts = {label: ", ".join(some[:4]) for label, some in lines.items() if some}
        raise Error(f"the tensors are not those of a {names.kind} of {layers} layers", **facts)
    return rows


def _expect_divides(args: Mapping[str, Any], to: Target) -> None:
    for name, n in (("num_attention_heads", to.tp), ("ffn_hidden_size", to.tp), ("num_layers", to.pp)):
        if args[name] % n:
            raise Error(f"{name}={args[name]} does not divide by {n}, as Megatron-LM needs", fix="--tp 1 --pp 1")


def _write_rank(
    file: Path, content: Content, rows: Sequence[Row], args: Mapping[str, Any], to: Target, place: tuple[int, int]
) -> None:
    """Writes the file of one rank."""
    t, p = place
    per = args["num_layers"] // to.pp
    model: dict[str, Any] = {}
    for row in rows:
        match = LAYER.fullmatch(row.theirs)
        stage = int(match[2]) // per if match else 0 if ".embedding." in row.theirs else to.pp - 1
        again = row.theirs == WORDS and to.pp > 1 and p == to.pp - 1 and not args["untie_embeddings_and_output_weights"]
        if stage != p and not again:
            continue
        name = f"{match[1]}{int(match[2]) % per}{match[3]}" if match else AGAIN if again else row.theirs
        _put(model, name, _part(row, content, args, to.tp, t))
    parallel = Namespace(**args, rank=0, world_size=to.tp * to.pp, iteration=0)
    torch.save({"args": parallel, "checkpoint_version": VERSION, "iteration": 0, "model": model}, file)


def _part(row: Row, content: Content, args: Mapping[str, Any], tp: int, rank: int) -> Tensor:
    """Returns a rank's part of a tensor, as Megatron-LM has it."""
    whole = torch.cat([read_whole(content.tensors[name]) for name in row.ours], 1 if row.turned else 0)
    whole = whole.t() if row.turned else whole
    if row.cut == "whole":
        return whole.clone()
    if row.cut == "heads":
        heads = args["num_attention_heads"]
        ordered = whole.reshape(3, heads, -1, *whole.shape[1:]).transpose(0, 1)  # [heads 3 d ...]
        return ordered.chunk(tp)[rank].reshape(-1, *whole.shape[1:]).clone()
    if row.cut == "vocabulary":
        more = args["padded_vocab_size"] - whole.shape[0]
        fill = NO_WORD if whole.dim() == 1 else 0.0
        whole = torch.cat([whole, whole.new_full((more, *whole.shape[1:]), fill)])
    return whole.chunk(tp, 1 if row.cut == "columns" else 0)[rank].clone()


def _put(tree: dict[str, Any], name: str, tensor: Tensor) -> None:
    """Puts a tensor where Megatron-LM has it: names below `encoder`, `pooler` and `lm_head` are not nested."""
    head, *path = name.split(".")
    flat = {"language_model": 2, "lm_head": 1, "binary_head": 1, "word_embeddings_for_head": 1}[head]
    parts = [head, *path]
    depth = 3 if parts[1] == "embedding" else flat
    for key in parts[:depth]:
        tree = tree.setdefault(key, {})
    tree[".".join(parts[depth:])] = tensor
