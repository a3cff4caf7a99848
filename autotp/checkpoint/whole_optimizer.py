"""The whole state of an optimizer: what its `state_dict()` would be on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from autotp.checkpoint.state_dict import gather_like
from autotp.distributed.agreement import expect_alike
from autotp.distributed.cut_tensors.cut_parameter import steps_elements
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.distributed.cut_tensors.whole_operators import WholeView
from autotp.distributed.gather import gather
from autotp.distributed.live_models import sorted_by_model
from autotp.distributed.mesh import group_of
from autotp.groups.one_thread import in_collective
from autotp.runtime.holdings import Holdings, holdings_of
from autotp.runtime.torch_hooks.optimizer_state import OF_RANK, OwnedStates, not_watched
from autotp.training.low_memory.parts import as_torch

State = dict[str, Any]


@contextmanager
def whole_state_dicts(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """A region in which `state_dict()` of these optimizers returns the whole state. Enter it on every rank.

    The state is gathered at the beginning, on the first rank's CPU. On other ranks `state_dict()` has no state.
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
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {id(p): i for i, p in enumerate(parameters)}
    parameters_by_model, _ = sorted_by_model(parameters)
    if not parameters_by_model:
        return None
    whole = optimizer.state_dict()
    whole.pop(OF_RANK, None)
    # torch's state dict shares these dicts with the optimizer, and entries are replaced below.
    whole["state"] = {i: dict(values) for i, values in whole["state"].items()}
    is_first = True
    for model, named in parameters_by_model.items():
        parts = holdings_of(model, "state_dict")
        is_first = is_first and parts.everyone.rank == 0
        if isinstance(optimizer, OwnedStates):
            states = _of_owners(parts, {name: optimizer.state.get(p, {}) for name, p in named.items()})
            model_numbers = {numbers[id(p)] for p in named.values()}
            whole["state"] = {i: values for i, values in whole["state"].items() if i not in model_numbers}
            whole["state"] |= {numbers[id(named[name])]: values for name, values in states.items()}
            continue
        states_here = {name: (p, optimizer.state.get(p, {})) for name, p in named.items()}
        local_states = {name: {key: as_torch(p, x) for key, x in of.items()} for name, (p, of) in states_here.items()}
        cut = _cut_states(parts, local_states, steps_elements(optimizer))
        # Each of these is gathered below, so all ranks must have the same ones.
        expect_alike(cut, parts.everyone, "has another state of the optimizer", "the same steps of the optimizer")
        for name, key, as_parameter in cut:
            value = local_states[name][key]
            gathered = gather_like(parts, name, value) if as_parameter else gather(value).cpu()
            if gathered is not None:
                whole["state"][numbers[id(named[name])]][key] = gathered
    # After all models: states of the next one are gathered into this dict on every rank.
    if not is_first:
        whole["state"] = {}
    return whole


def _of_owners(parts: Holdings, local_states: Mapping[str, State]) -> dict[str, State]:
    """Returns the state of each parameter on the first rank, on the CPU, and nothing on the others.

    Args:
        local_states: this rank's states, of the parameters that it owns.
    """
    expect_alike(sorted(local_states), parts.everyone, "has other parameters in the optimizer", "the same parameters")
    first = parts.everyone.rank == 0
    states, group = dict[str, State](), None if parts.everyone.size == 1 else group_of(parts.everyone)
    # In one order on all ranks: each turn is a collective.
    for name in sorted(local_states):
        local_state = {key: x.detach().cpu() if isinstance(x, Tensor) else x for key, x in local_states[name].items()}
        every: list[Any] = [None] * parts.everyone.size if first else []
        if group is None:
            every = [local_state]
        else:
            with in_collective("state_dict", str(parts.everyone.group)):
                dist.gather_object(local_state, every if first else None, group=group, group_dst=0)
        if values := next(filter(None, every), None):
            states[name] = values
    return states


def _cut_states(parts: Holdings, local_states: dict[str, State], of_elements: bool) -> list[tuple[str, str, bool]]:
    """Returns the parameter and the key of each state that is cut, and whether it is cut as its parameter is.

    Args:
        of_elements: whether a plain state with the shape of a part is a part.
    """
    cut_states = []
    for name, key, value in ((name, key, x) for name, values in local_states.items() for key, x in values.items()):
        if isinstance(value, Sharded | WholeView):  # Computed of wholes, such as a mean of each row.
            cut_states.append((name, key, False))
            continue
        may_be_part = isinstance(value, Tensor) and value.dim() > 0 and (of_elements or type(value) is not Tensor)
        if may_be_part and value.shape == parts.held[name].shape != parts.layout(name).shape:
            cut_states.append((name, key, True))
    return cut_states
