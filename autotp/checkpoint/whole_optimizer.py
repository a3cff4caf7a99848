"""The whole state of an optimizer: what its `state_dict()` would be on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from autotp.checkpoint.state_dict import gather_like
from autotp.distributed.consistency import agree
from autotp.distributed.live_models import sorted_by_model
from autotp.distributed.mesh import expect_alike, group_of
from autotp.errors import Error
from autotp.groups.one_thread import in_collective
from autotp.runtime.holdings import Holdings, holdings_of
from autotp.runtime.optim.whole_matrices import OF_RANK, WholeMatrices
from autotp.runtime.torch_hooks.optimizer_state import not_watched

State = dict[str, Any]


@contextmanager
def whole_state_dicts(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """A region in which `state_dict()` of these optimizers returns the whole state. Enter it on every rank.

    The state is gathered at the beginning, on the first rank's CPU. On other ranks `state_dict()` has no state.

    Raises:
        Error: on every rank: as `whole_state_dict`.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            whole = whole_state_dict(optimizer)
            if whole is not None:
                stack.callback(optimizer.register_state_dict_post_hook(_returning(whole)).remove)
                stack.enter_context(not_watched(optimizer))
        yield


def _returning(state: State) -> Callable[[Optimizer, State], State]:
    return lambda *_: state


def whole_state_dict(optimizer: Optimizer) -> State | None:
    """Returns the whole state of an optimizer on the first rank, and one without state on the others.

    It is in the form of torch's `state_dict()`. `load_state_dict` takes it on one device and on any number of ranks.
    None if the optimizer has no parameters of a parallel model. Call it on every rank.

    Raises:
        Error: on every rank: a state has another shape than its cut parameter, so its place in the whole is unknown.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {id(p): i for i, p in enumerate(parameters)}
    held, _ = sorted_by_model(parameters)
    if not held:
        return None
    whole = optimizer.state_dict()
    whole.pop(OF_RANK, None)
    whole["state"] = {i: dict(values) for i, values in whole["state"].items()}
    for model, named in held.items():
        parts = holdings_of(model, "state_dict")
        if isinstance(optimizer, WholeMatrices):
            states = _of_owners(parts, {name: optimizer.state.get(p, {}) for name, p in named.items()})
            ours = {numbers[id(p)] for p in named.values()}
            whole["state"] = {i: values for i, values in whole["state"].items() if i not in ours}
            whole["state"] |= {numbers[id(named[name])]: values for name, values in states.items()}
            continue
        kept = {name: optimizer.state.get(p, {}) for name, p in named.items()}
        cut = agree(parts.everyone, partial(_cut_states, optimizer, parts, kept))
        expect_alike(cut, parts.everyone, "has another state of the optimizer", "the same steps of the optimizer")
        for name, key in cut:
            gathered = gather_like(parts, name, kept[name][key])
            if gathered is not None:
                whole["state"][numbers[id(named[name])]][key] = gathered
        if parts.everyone.rank:
            whole["state"] = {}
    return whole


def _of_owners(parts: Holdings, kept: Mapping[str, State]) -> dict[str, State]:
    """Returns the state of each parameter on the first rank, on the CPU, and nothing on the others.

    Args:
        kept: this rank's states, of the parameters that it owns.
    """
    expect_alike(sorted(kept), parts.everyone, "has other parameters in the optimizer", "the same parameters")
    first = parts.everyone.rank == 0
    found, group = dict[str, State](), None if parts.everyone.size == 1 else group_of(parts.everyone)
    for name in sorted(kept):
        mine = {key: x.detach().cpu() if isinstance(x, Tensor) else x for key, x in kept[name].items()}
        every: list[Any] = [None] * parts.everyone.size if first else []
        if group is None:
            every = [mine]
        else:
            with in_collective("state_dict", str(parts.everyone.group)):
                dist.gather_object(mine, every if first else None, group=group, group_dst=0)
        if values := next(filter(None, every), None):
            found[name] = values
    return found


def _cut_states(optimizer: Optimizer, parts: Holdings, kept: dict[str, State]) -> list[tuple[str, str]]:
    """Returns the parameter and the key of each state that is cut as its parameter is.

    Raises:
        Error: one has a shape of its own.
    """
    found = []
    for name, key in ((name, key) for name, values in kept.items() for key in values):
        value = kept[name][key]
        if parts.layout(name).dim is None or not isinstance(value, Tensor) or not value.dim():
            continue
        if value.shape == parts.layout(name).shape:  # Loaded whole, and not cut before the next step.
            continue
        if value.shape != parts.held[name].shape:
            raise Error(
                f"`{key}` of `{name}` is {list(value.shape)} in {type(optimizer).__name__}, and the parameter "
                f"{list(parts.held[name].shape)}: its place in the whole tensor is unknown",
                fix="an optimizer whose state is shaped as the parameters are, such as AdamW",
            )
        found.append((name, key))
    return found
