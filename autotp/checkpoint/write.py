"""Writes a rank's part of a training's state; renames the folder after all ranks have written."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from autotp.checkpoint.files.atomic_folder import sync_path
from autotp.checkpoint.files.checksums import WRITABLE, bytes_of, write_whole
from autotp.checkpoint.files.folder_lock import claim
from autotp.checkpoint.files.plain_json import encode
from autotp.checkpoint.files.staging import Staging
from autotp.checkpoint.files.tensor_pieces import file_of, write_pieces
from autotp.checkpoint.keys import (
    PARAMETER_ENTRIES,
    SEPARATOR,
    STEPS,
    entry_key,
    expect_states,
    names_held,
    names_of,
    path_of,
    random_states,
    sizes,
)
from autotp.checkpoint.manifest import MANIFEST, OF_FORMAT_1, Item, manifest_content
from autotp.checkpoint.optimizers import Optimizers, optimizers_of
from autotp.display.progress import progress
from autotp.distributed.agreement import Among, Fact, agree, compare, told
from autotp.distributed.background_exchange import BackgroundExchange
from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.runtime.holdings import Holdings, expect_all_saved, holdings_of
from autotp.sharding.boxes import local_of
from autotp.training.low_memory.stored_state import StoredState
from autotp.training.step_facts import StepFacts, expect_finite
from autotp.training.trainer import Trainer

T = TypeVar("T")
Holders = dict[tuple[Any, ...], list[tuple[int, int]]]
"""(key, first index, bytes) of an item -> the ranks that have it, each with the item's number on that rank."""
UNFINISHED = ".new"
SAVED_BY_NAME = (
    "saves another state by name",
    "save a state that all ranks share; the trainer's own differs as it must",
)
"""The problem of a rank that does so, and what to do."""


@dataclass(frozen=True)
class TrainingState:
    """The state that a rank writes.

    Attributes:
        about: plain data; the first rank's is written.
        more: the states of named objects, which must be the same on all ranks.
        groups: for each group of the optimizer its options, and its parameters with the names of their states.
        values: key -> a value of the optimizer's state that is not a tensor.
        items: copies of tensors, so that training may go on.
        staging: those from a card, which may not have arrived.
        late: the facts of the last steps on a card, which arrive before the copies.
    """

    about: dict[str, Any]
    more: dict[str, Any]
    groups: list[Any]
    values: dict[str, Any]
    items: list[Item]
    staging: Staging
    late: Sequence[StepFacts]


def state_to_write(
    folder: Path, trainer: Trainer, optimizer: Optimizer | Sequence[Optimizer], step: int, more: Mapping[str, Any]
) -> TrainingState:
    """Returns the state that this rank writes, and locks the folder on the first rank.

    Raises:
        Error: as `save_checkpoint`.
    """
    optimizers = optimizers_of(optimizer)
    if not optimizers.each:
        problem = f"{type(optimizer).__name__} is no optimizer"
        raise Error(problem, fix="autotp.full_state_dict(trainer) for the parameters alone")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < STEPS:
        raise Error(f"step={step!r} is not a number of steps", fix="trainer.steps")
    if "changed" in more:
        raise Error(
            "`changed` is an argument of load_checkpoint, so nothing can be saved by this name", fix="another name"
        )
    expect_states(more, ("state_dict",))
    path = path_of(folder, step)
    if _or_error(folder, path.exists):
        whole = any((path / name).exists() for name in (MANIFEST, OF_FORMAT_1))
        remedy = "another folder, or another step" if whole else "remove it: it is not whole"
        raise Error(f"{path} is there already", fix=remedy)
    # The lock is of one process: the first rank's stands for the job.
    if trainer.everyone.rank == 0:
        _or_error(folder, lambda: _claim(folder))
    _expect_nothing_beside(optimizers)
    parts = holdings_of(trainer, "save_checkpoint")
    expect_all_saved(parts)
    return _state(trainer, parts, optimizers, step, more)


def _expect_nothing_beside(optimizers: Optimizers) -> None:
    """Raises Error if an optimizer has state that is neither an option nor a parameter's."""
    for name, beside in optimizers.beside():
        key = f"a tensor of {list(beside.shape)}" if isinstance(beside, Tensor) else f"`{beside}`"
        problem = f"{name} keeps {key} beside the state of its parameters"
        remedy = "an option of a group, or save_checkpoint(..., name=thing) with a state_dict() of its own"
        raise Error(f"{problem}, which a checkpoint cannot hold", fix=remedy)


def _claim(folder: Path) -> None:
    """Locks the folder, and removes the unfinished folders of jobs that were killed."""
    if claim(folder):
        for abandoned in folder.glob(f".step-*{UNFINISHED}"):
            shutil.rmtree(abandoned, ignore_errors=True)


def _or_error(path: Path, run: Callable[[], T]) -> T:
    """Returns what `run` returns; raises Error if the file system fails."""
    try:
        return run()
    except OSError as error:
        raise Error(f"{path} cannot be written: {error}", fix=WRITABLE) from error


def same_on_all(trainer: Trainer, mark: int, step: int, more: int) -> int:
    """Returns the first rank's `mark`.

    Raises:
        Error: `step` or `more` differs between ranks.
    """
    facts = [Fact("step", step, "saves another step", "trainer.steps"), Fact("more", more, *SAVED_BY_NAME)]
    (of_first,), _ = compare(trainer.everyone, facts, counts=[mark if trainer.everyone.rank == 0 else 0])
    return of_first


def _state(
    trainer: Trainer, parts: Holdings, optimizers: Optimizers, step: int, more: Mapping[str, Any]
) -> TrainingState:
    rank, items, staging = trainer.everyone.rank, list[Item](), Staging()

    def keeper(prefix: str) -> Callable[[Tensor], str]:
        count = itertools.count()  # Numbers the tensors of one value: the keys are the same on all ranks that hold it.

        def keep(tensor: Tensor) -> str:
            key = entry_key(prefix, next(count))
            copied = staging.copy(tensor)
            items.append(Item(key, (0,) * copied.dim(), tuple(copied.shape), copied))
            return key

        return keep

    about = {
        "step": step,
        "sizes": sizes(trainer),
        "optimizer": optimizers.name,
        "model": trainer.model_settings,
    }
    # The same keys on all ranks: the tensors are compared, and one rank writes each.
    keep = keeper("more")
    shared = {
        name: encode(_state_dict(name, stateful), f"the state of `{name}`", keep) for name, stateful in more.items()
    }
    # Keys of this rank, as ranks may have groups of different parameters.
    keep = keeper(entry_key("group", rank))
    groups = [_group(group, optimizers, parts, keep) for group in optimizers.param_groups]
    for name, tensor in random_states(trainer.place.device).items():
        items.append(Item(entry_key("random", rank, name), (0,), tuple(tensor.shape), tensor))
    for name in names_held(parts):
        items += _items_of(entry_key("model", name), parts, name, parts.held[name], staging)
    values = {}
    for parameter, name, key, value in _moments(optimizers, parts):
        entry = entry_key("optimizer", name, key)
        if isinstance(value, StoredState):
            items += _items_of(entry, parts, name, value.opened(), staging)
        elif not isinstance(value, Tensor):
            values[entry] = encode(value, f"`{key}` of `{name}` in the optimizer", keeper(entry))
        # A number beside the parameter, such as a count of steps: each rank has it.
        elif value.dim() == 0 and value.shape != parts.held[name].shape:
            items.append(Item(entry, (), (), staging.copy(value)))
        elif optimizers.owner(parameter) is not None:
            items.append(Item(entry, (0,) * value.dim(), tuple(value.shape), staging.copy(value)))
        else:
            items += _items_of(entry, parts, name, _as_parameter(value, name, key, parts, optimizers), staging)
    staging.end()
    return TrainingState(about, shared, groups, values, items, staging, trainer.late.coming())


def _state_dict(name: str, stateful: Any) -> Any:
    try:
        return stateful.state_dict()
    except Exception as error:
        problem = f"the state_dict() of `{name}` raised {type(error).__name__}: {error}"
        raise Error(problem, fix=f"a state_dict() of `{name}` that returns, or no {name}=") from error


def _group(
    group: Mapping[str, Any], optimizers: Optimizers, parts: Holdings, keep: Callable[[Tensor], str]
) -> list[Any]:
    names = names_of(optimizers, parts)
    options = {key: value for key, value in group.items() if key not in PARAMETER_ENTRIES}
    owned = [p for p in group["params"] if optimizers.owner(p) in (None, parts.everyone.rank)]
    holds = {names[p]: list(optimizers.state(p)) for p in owned}
    return [encode(options, "a group of the optimizer", keep), holds]


def _items_of(key: str, parts: Holdings, name: str, tensor: Tensor, staging: Staging) -> Iterator[Item]:
    """Yields this rank's boxes of a parameter, or of a tensor cut like it, that no rank before it on the axis holds."""
    local = local_of(tensor.detach())
    # A tensor without elements has no boxes, and must be in the manifest all the same.
    if not math.prod(parts.shapes[name]):
        yield Item(key, (0,) * local.dim(), parts.shapes[name], staging.copy(local))
    for box in parts.boxes(name):
        yield Item(key, box.whole, parts.shapes[name], staging.copy(box.of(local)))


def _as_parameter(value: Tensor, name: str, key: str, parts: Holdings, optimizers: Optimizers) -> Tensor:
    """Returns `value`, which is cut like its parameter.

    Raises:
        Error: `value` has another shape than the parameter.
    """
    if value.shape == parts.held[name].shape:
        return value
    raise Error(
        f"`{key}` of `{name}` is {list(value.shape)} in {optimizers.name}, and the parameter "
        f"{list(parts.held[name].shape)}: its place in the whole tensor is unknown",
        fix="an optimizer whose state is shaped as the parameters are, such as AdamW; autotp.whole_matrices(...) of "
        "another one",
    )


def _moments(optimizers: Optimizers, parts: Holdings) -> Iterator[tuple[nn.Parameter, str, str, Any]]:
    for parameter, name in names_of(optimizers, parts).items():
        for key, value in optimizers.state(parameter).items():
            yield parameter, name, key, value


# ---- writing it, in a thread


def write_state(state: TrainingState, path: Path, unfinished: Path, exchange: BackgroundExchange) -> None:
    """Writes a checkpoint into the folder `unfinished`, and renames it to `path`.

    Raises:
        Error: on every rank; the folder is removed.
    """
    try:
        mesh, rank = exchange.mesh, exchange.mesh.rank
        choices = told(mesh, lambda: [item.choice() for item in state.items], exchange)
        holders = agree(mesh, lambda: _holders(choices), exchange=exchange)
        # Before the checksums, which read what was staged.
        agree(mesh, state.staging.wait, exchange=exchange)
        expect_finite(state.late, partial(agree, mesh, exchange=exchange))
        sums = told(mesh, lambda: [_checksums(state, holders, rank), state.values], exchange)
        agree(mesh, lambda: _expect_alike(choices, holders, sums, mesh), exchange=exchange)

        def items() -> list[Any]:
            written = [state.items[i] for i in _chosen(holders, mesh.size, rank)]
            return [_or_error(unfinished, lambda: _write_items(unfinished, rank, written)), state.groups, state.values]

        every = told(mesh, items, exchange)

        def finish() -> None:
            if rank == 0:
                _or_error(path, lambda: _finish_folder(state, every, path, unfinished))

        agree(mesh, finish, exchange=exchange)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # On every rank: the ranks' disks may differ.
        raise


def _holders(every: Sequence[Sequence[Any]]) -> Holders:
    """Returns the ranks that have each item. every: for each rank, its items' `choice()`"""
    holders: Holders = {}
    for rank, rows in enumerate(every):
        for i, (key, offsets, size, _) in enumerate(rows):
            holders.setdefault((key, *offsets, size), []).append((rank, i))
    return holders


def _several(holders: Holders) -> list[tuple[str, list[tuple[int, int]]]]:
    """Returns the key of each item that several ranks have, and these ranks, each with its number there."""
    return [(key[0], places) for key, places in holders.items() if len(places) > 1]


def _checksums(state: TrainingState, holders: Holders, rank: int) -> list[int]:
    """Returns the checksums of the items that this rank and others have."""
    indices = (i for _, places in _several(holders) for holder, i in places if holder == rank)
    return [zlib.crc32(bytes_of(state.items[i].tensor)) for i in indices]


def _expect_alike(choices: Sequence[Sequence[Any]], holders: Holders, told_by_all: Sequence[Any], mesh: Mesh) -> None:
    """Raises Error if ranks hold different values of the same part or the same number.

    Args:
        told_by_all: for each rank, its `_checksums`, and the values of the optimizer's state that are not tensors.
    """
    shared_items, every = _several(holders), [(iter(sums), values) for sums, values in told_by_all]
    values_of: dict[str, dict[int, Any]] = {}
    for number, (key, places) in enumerate(shared_items):
        for rank, _ in places:
            values_of.setdefault(f"{number}{SEPARATOR}{key}", {})[rank] = next(every[rank][0])
    for rank, (_, values) in enumerate(every):
        pairs = [*values.items(), *((key, whole) for key, _, _, whole in choices[rank])]
        for key, value in pairs:
            values_of.setdefault(f"{SEPARATOR}{key}", {})[rank] = json.dumps(value)
    for key, by_rank in values_of.items():
        entry = key.partition(SEPARATOR)[2]
        remedy = "the same steps on all ranks; of a cut parameter, state that is shaped as it is"
        by_name = entry.startswith(f"more{SEPARATOR}")
        problem = SAVED_BY_NAME if by_name else (f"has another {_entry_name(entry)}", remedy)
        Fact(key, None, *problem, among=Among([list(by_rank)])).expect(by_rank, mesh)


def _entry_name(key: str) -> str:
    """Returns the name, for an error, of the entry of a key."""
    section, name, *rest = key.split(SEPARATOR)
    return f"`{rest[0]}` of `{name}` in the optimizer" if section == "optimizer" and rest else f"`{name}`"


def _chosen(holders: Holders, ranks: int, rank: int) -> list[int]:
    """Returns the items that a rank writes; an item of several ranks is written by the rank with the least bytes."""
    load, chosen = [0] * ranks, list[int]()
    # First the items that one rank has, which have no choice: the others even out the bytes.
    for (*_, size), places in sorted(holders.items(), key=lambda pair: len(pair[1])):
        # All ranks know all holders, and so come to the same choice.
        writer, i = min(places, key=lambda place: load[place[0]])
        load[writer] += size
        if writer == rank:
            chosen.append(i)
    return sorted(chosen)


def _write_items(unfinished: Path, rank: int, items: Sequence[Item]) -> list[Any]:
    """Writes this rank's file; returns its bytes, and for each item its row and its piece's row."""
    # Any rank may be the first.
    unfinished.mkdir(parents=True, exist_ok=True)
    with progress(f"writing {unfinished.parent}", len(items)) as line:
        pieces = write_pieces(unfinished, rank, ((item.at, item.tensor) for item in items), line.count)
    rows = [[item.row(), piece.row()] for item, piece in zip(items, pieces, strict=True)]
    return [(unfinished / file_of(rank)).stat().st_size, rows]


def _finish_folder(state: TrainingState, every: Sequence[Any], path: Path, unfinished: Path) -> None:
    """Writes the manifest, and renames the folder.

    Raises:
        Error: a file is missing: a rank wrote into another folder, or on another disk.
    """
    ranks, groups, values = zip(*every, strict=True)
    for rank, (size, _) in enumerate(ranks):
        file = unfinished / file_of(rank)
        if not file.exists() or file.stat().st_size != size:
            problem = f"rank 0 does not see what rank {rank} wrote: {file.name} is not in {path.parent}"
            raise Error(problem, fix="one folder, the same on all ranks and shared by all machines")
    distinct_groups = {json.dumps(group): group for some in groups for group in some}
    about = {
        **state.about,
        "more": state.more,
        "groups": list(distinct_groups.values()),
        "values": {key: value for some in values for key, value in some.items()},
    }
    write_whole(unfinished / MANIFEST, manifest_content(about, ranks))
    # The disk has the manifest before the folder gets its name: who sees the name sees all.
    sync_path(unfinished)
    unfinished.rename(path)
    sync_path(path.parent)
