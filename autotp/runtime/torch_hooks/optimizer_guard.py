"""Raises Error before an optimizer's step that would be wrong on parts, or where ranks differ.

Each rank steps its own parameters. That is one device's step if the optimizer works element by element, and if what
several ranks hold alike, its gradients and the optimizer's settings are the same on all of them: what tensor-parallel
ranks hold whole, all that replicas hold, and what several ranks of a pipeline read. What replicas shard is each one's
own, and compared by its settings.

NOTE [When ranks are compared]
Before the first steps of an optimizer and every `EVERY`-th after, ranks tell each other one number of what must be the
same, through the store (`store_gather.py`): a rank that does not come to a step is waited for by name.
Sums over replicas may be taken in another order on each rank (their buckets differ where parts do): a difference of
round-off is not an Error. The first rank's numbers are everybody's then, and a warning says so once.
"""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autotp.distributed.consistency import checksum
from autotp.distributed.live_models import Undo, sorted_by_model
from autotp.distributed.mesh import Mesh, broadcast_from_first
from autotp.distributed.store_gather import store_gather
from autotp.errors import Error, within
from autotp.ops.collectives import reduce
from autotp.runtime.holdings import Holdings, holdings_of
from autotp.sharding.boxes import local_of
from autotp.sharding.layout import Layout

CHECKED_STEPS, EVERY = 4, 64
"""How many first steps are compared, and which later ones."""

OF_A_MATRIX = re.compile(
    "muon|scion|dion|shampoo|soap|kron|kfac|galore|apollo|fira|adafactor|adalomo|adammini|came$|sm3|lamb(?!da)|lars"
    "|novograd|stableadam|adamp$|sgdp$|ranger"
)
OF_ALL = re.compile("lbfgs|dadapt|prodigy")
"""Names of optimizers that look at a whole matrix or at its norm, and of those that look at all gradients at once."""


@dataclass
class Watched:
    """An optimizer: how often it stepped, with how many parameters, and which state; if each is compared; if warned."""

    steps: int = 0
    size: int = -1
    state: int = 0
    always: bool = False
    warned: bool = False


_watched: WeakKeyDictionary[Optimizer, Watched] = WeakKeyDictionary()


def install() -> Undo:
    """Looks at every optimizer before it steps; what it returns ends that."""
    return register_optimizer_step_pre_hook(torch.compiler.disable(_before_step)).remove


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    watched = _watched.setdefault(optimizer, Watched())
    step, size = watched.steps, sum(len(group["params"]) for group in optimizer.param_groups)
    due = watched.always or step < CHECKED_STEPS or step % EVERY == 0
    watched.steps += 1
    known = (watched.size, watched.state) == (size, id(optimizer.state))
    if (not due and known) or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    watched.size, watched.state = size, id(optimizer.state)
    held, _ = sorted_by_model(p for group in optimizer.param_groups for p in group["params"])
    for model, parameters in held.items():
        parts = holdings_of(model, "step")
        if parts.everyone.size > 1:
            watched.always |= parts.check == "always"
            compared = due and parts.check != "never"
            apart = within(
                f"{type(optimizer).__name__}.step", partial(_checked, optimizer, parts, parameters, step, compared)
            )
            if apart and not watched.warned:
                watched.warned = True
                warnings.warn(apart, stacklevel=3)


def _checked(optimizer: Optimizer, parts: Holdings, parameters: Mapping[str, Tensor], step: int, compared: bool) -> str:
    """What is to be warned of before a step. Raises Error if it would be another than one device's."""
    cut = [name for name in parameters if parts.layout(name).dim is not None and parts.place.size > 1]
    if parts.pipeline is not None and _is(OF_ALL, optimizer):
        raise Error(
            "a rank of the pipeline has some of the parameters, and this optimizer uses the gradients of all",
            fix="AdamW, SGD, Lion or their like; or pp=1",
        )
    if cut and (_is(OF_A_MATRIX, optimizer) or _is(OF_ALL, optimizer)):
        raise Error(
            f"each rank has a part of `{cut[0]}`, and this optimizer does not work element by element",
            fix="AdamW, SGD, Lion or their like for parameters that are cut (`model.layouts` tells which)",
        )
    for name in cut:
        _cut_state(optimizer, parameters[name], parts.layout(name), parts.place.rank)
    if not compared:
        return ""
    apart = ""
    for place, names in parts.alike:
        same = {name: p for name, p in parameters.items() if name in names and not p.is_meta}
        if place.size > 1 and (same or place is parts.place):
            apart = apart or _differing(optimizer, same, place, step)
    return apart


def _cut_state(optimizer: Optimizer, parameter: Tensor, layout: Layout, rank: int) -> None:
    """Of what an optimizer keeps of the whole, from before its parameter was cut or from a file, takes this part."""
    kept = optimizer.state.get(parameter, {}) if parameter.shape != layout.shape else {}
    whole = [key for key, x in kept.items() if type(x) is Tensor and x.shape == layout.shape]
    kept.update({key: layout.take(kept[key], rank).to(parameter.device) for key in whole})


def _is(kind: re.Pattern[str], optimizer: Optimizer) -> bool:
    names = (each.__name__.lower().replace("_", "") for each in type(optimizer).__mro__)
    return any(kind.search(name) for name in names)


# ---- NOTE [When ranks are compared]


def _differing(optimizer: Optimizer, same: Mapping[str, Tensor], place: Mesh, step: int) -> str:
    """What differed by round-off between ranks, and does no more; nothing, if all was the same.

    Raises:
        Error: on every rank: what these hold whole, or the optimizer, is not the same on all.
    """
    sharded = {name for name, p in same.items() if _is_sharded(p, place)}
    mine = {
        "step": step,
        "settings": _settings_of(optimizer, same),
        "values": {name: 0 if name in sharded else _number(p) for name, p in same.items()},
        "gradients": {
            name: None if p.grad is None else 0 if name in sharded else _number(p.grad) for name, p in same.items()
        },
    }
    text = json.dumps(mine)
    try:
        if len(set(store_gather(str(zlib.crc32(text.encode())), place))) == 1:
            return ""
        every = [json.loads(one) for one in store_gather(text, place)]
    except Error as error:
        raise Error(
            f"step {step} is not taken by all ranks: {error.problem}",
            fix="call step on all ranks: decide by a value that is the same on all whether to step",
        ) from error
    _expect_same_calls(every, place)
    return _expect_close(same, every, place)


def _is_sharded(tensor: Tensor, place: Mesh) -> bool:
    """Whether ranks of this axis have each a part of what `fully_shard` has sharded."""
    if not isinstance(tensor, DTensor) or place.group is None:
        return False
    # By ranks: torch takes meshes of the same ranks for one, so a group may have the name it had in an earlier one.
    mine = dist.get_process_group_ranks(_resolve_process_group(place.group))  # type: ignore[arg-type]
    mesh = tensor.device_mesh
    return any(dist.get_process_group_ranks(mesh.get_group(dim)) == mine for dim in range(mesh.ndim))


def _number(tensor: Tensor) -> int:
    local = local_of(tensor.detach())
    if local.layout is torch.strided:
        return checksum(local)
    return checksum(local.to_dense())


def _settings_of(optimizer: Optimizer, same: Mapping[str, Tensor]) -> list[str]:
    """The settings of the groups that these are in; one that has none counts where it may hold what was left out."""
    wanted = {id(p) for p in same.values()}
    groups = [group for group in optimizer.param_groups if any(id(p) in wanted for p in group["params"])]
    return [_settings(group) for group in groups or optimizer.param_groups]


def _settings(group: Mapping[str, Any]) -> str:
    """The settings of a group of parameters, but what is no plain number or text."""
    plain = {key: float(x) if isinstance(x, Tensor) and x.numel() == 1 else x for key, x in group.items()}
    return repr({key: x for key, x in plain.items() if isinstance(x, bool | int | float | str | tuple | None)})


def _expect_same_calls(every: list[dict[str, Any]], place: Mesh) -> None:
    """Raises Error if the ranks step different parameters, another number of times, or with other settings."""
    steps, settings = [one["step"] for one in every], [one["settings"] for one in every]
    alike = {"fix": "whatever decides it must be the same on all ranks: a loss, not what a rank has of its own"}
    _same(steps, place, "the steps taken so far differ", alike)
    _same(settings, place, "the settings differ", alike)
    for name in dict.fromkeys(name for one in every for name in one["values"]):
        where = ["stepped" if name in one["values"] else "left out" for one in every]
        _same(
            where, place, f"`{name}` is not stepped on all ranks", {"fix": "give all ranks' optimizers all parameters"}
        )
        where = ["none" if one["gradients"][name] is None else "one" for one in every]
        _same(where, place, f"`{name}` does not have a gradient on all ranks", {"fix": "one backward for all ranks"})


def _same(values: list[Any], place: Mesh, problem: str, facts: dict[str, str]) -> None:
    other = [rank for rank, value in enumerate(values) if value != values[0]]
    if other:
        expected = {"expected": f"{values[0]}, as on {place.named([0])}"}
        raise Error(problem, **expected, got=f"{values[other[0]]} on {place.named(other)}", **facts)


def _expect_close(same: Mapping[str, Tensor], every: list[dict[str, Any]], place: Mesh) -> str:
    """Gives all ranks the first one's values and gradients where they differ by round-off; Raises Error else."""
    found = []
    for kind, what in (("values", ""), ("gradients", "the gradient of ")):
        for name in (name for name in same if len({one[kind][name] for one in every}) > 1):
            tensor = same[name] if kind == "values" else same[name].grad
            assert tensor is not None
            off, first = _off(local_of(tensor.detach()), place)
            if not off <= torch.finfo(tensor.dtype).eps ** 0.5:
                raise Error(
                    f"{what}`{name}` differs between ranks by {off:.1e} of its largest element: they would drift apart",
                    likely="each rank changed it by a number of its own: a norm of its own gradients, a batch, noise",
                    fix="autotp.clip_grad_norm_(model, ...); a number that all ranks share, from one all_reduce",
                )
            if not tensor.is_sparse:
                local_of(tensor.detach()).copy_(first)
            found.append(f"{what}`{name}` differed between ranks by {off:.1e} of its largest element")
    if not found:
        return ""
    return f"{found[0]}, which is round-off (sums over replicas in another order): all took the first rank's numbers"


def _off(tensor: Tensor, place: Mesh) -> tuple[float, Tensor]:
    """By how much of its largest element some rank's tensor is not the first rank's, which comes, too."""
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    first = broadcast_from_first(dense.clone(), place)
    wide = torch.float64 if dense.device.type != "mps" else torch.float32
    largest = first.to(wide).abs().max().clamp(min=torch.finfo(wide).tiny)
    apart = (dense.to(wide) - first.to(wide)).abs().max() / largest
    return reduce(torch.nan_to_num(apart, nan=torch.inf), place.group, "max").item(), first
