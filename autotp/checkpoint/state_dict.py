"""Converts between the shards of a parallel model and the state dict of the original model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp.arguments import expect_arguments
from autotp.distributed.agreement import Fact, agree
from autotp.distributed.mesh import broadcast_from_first, group_of
from autotp.errors import Error, within
from autotp.groups.one_thread import in_collective
from autotp.runtime.holdings import Holdings, expect_nothing_beside, holdings_of
from autotp.runtime.torch_hooks.loading import own_loading
from autotp.sharding.boxes import Box, all_rows

OWN_NAMES = "a state_dict() of the modules' own tensors, under their own names"


def full_state_dict(model: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Returns the original model's state dict on the CPU of the first rank, and an empty dict on the other ranks.

    Tensors have the original names and shapes. They are gathered one at a time, so a device holds no more than its
    shards and the largest tensor. `load_full_state_dict` is the inverse, bit for bit. Call it on every rank.

    Args:
        model: what `parallelize` or `distribute` returned.
        wanted: returns whether the tensor of this name is gathered; the same on all ranks. For the adapters of a LoRA
            model: `lambda name: "lora_" in name`.

    Raises:
        Error: on every rank: `wanted` differs between ranks, or `model` is not parallel, or its state dict has more
            than its parameters and buffers.

    Example:
        >>> model = autotp.parallelize(nn.Linear(4, 6), tp=1, example_inputs=torch.ones(2, 4))
        >>> state = autotp.full_state_dict(model)
        >>> {name: list(tensor.shape) for name, tensor in state.items()}
        {'weight': [6, 4], 'bias': [6]}
    """
    return within("full_state_dict", lambda: _gather_state(model, wanted))


def _gather_state(model: nn.Module, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    parts = holdings_of(model, "full_state_dict")
    whole: dict[str, Tensor | None] = {}

    def first_names() -> dict[str, str]:
        expect_nothing_beside(parts, OWN_NAMES)
        expect_arguments(full_state_dict, wanted=wanted)
        return {saved: first for saved, first in parts.saved.items() if wanted(saved)}

    def same_names(selected: dict[str, str]) -> list[Fact]:
        names = list(dict.fromkeys(selected.values()))
        return [Fact("names", names, "wants other names", "the same `wanted` on all ranks")]

    selected = agree(parts.everyone, first_names, same_names)
    # A tied tensor has several names, and is gathered once.
    for name in dict.fromkeys(selected.values()):
        whole[name] = gather_like(parts, name, parts.held.get(name))
    if parts.everyone.rank:
        return {}
    return {name: cast(Tensor, whole[first]) for name, first in selected.items()}


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fills the shards of `model` from the original model's state dict, which only the first rank needs to hold.

    Call it on every rank; on the other ranks `state` is ignored.

    Args:
        model: what `parallelize` or `distribute` returned.
        state: name -> tensor, in the original names and shapes.

    Raises:
        Error: on every rank, before anything is changed: names are missing or unexpected, or shapes differ.

    Example:
        >>> model = autotp.parallelize(nn.Linear(4, 6), tp=1, example_inputs=torch.ones(2, 4))
        >>> autotp.load_full_state_dict(model, nn.Linear(4, 6).state_dict())
    """
    within("load_full_state_dict", lambda: _fill(model, state))


def _fill(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    parts = holdings_of(model, "load_full_state_dict")
    expect_nothing_beside(parts, OWN_NAMES)
    if code := own_loading(model):
        raise Error(
            f"`{code}` changes what the model loads, and load_full_state_dict writes tensors as they are",
            fix="model.load_state_dict(state), on all ranks, each with the whole",
        )
    first = parts.everyone.rank == 0

    def expect_match() -> None:
        if not first:
            return
        expect_arguments(load_full_state_dict, state=state)
        if problem := _mismatch(parts, state):
            raise Error(problem, fix="the state dict of the model that was parallelized")

    agree(parts.everyone, expect_match)
    for name, saved in {first: saved for saved, first in parts.saved.items()}.items():
        # Sent in the dtype of the state dict; `fill` casts, as `load_state_dict` does on one device.
        dtypes = [state[saved].dtype if first else None]
        if parts.everyone.size > 1:
            with in_collective("load_full_state_dict", str(parts.everyone.group)):
                dist.broadcast_object_list(dtypes, group=group_of(parts.everyone), group_src=0)
        whole_tensor = torch.empty(parts.shapes[name], dtype=dtypes[0], device=parts.place.device)
        if first:
            whole_tensor.copy_(state[saved])
        broadcast_from_first(whole_tensor, parts.everyone)
        if name in parts.held:
            parts.fill(name, whole_tensor)


def gather_like(parts: Holdings, name: str, tensor: Tensor | None) -> Tensor | None:
    """Gathers a tensor that is cut as the parameter `name`: returns it on the first rank's CPU, None on the others.

    Args:
        tensor: this rank's part; None if the rank does not hold the parameter.
    """
    own_parts: list[tuple[Box, Tensor]] = []
    # All replicas take part in this gather, also those that give nothing below.
    tensor = all_rows(tensor) if isinstance(tensor, DTensor) else tensor
    # Of the ranks that hold the same tensors only the first gives its part.
    if tensor is not None and not parts.replica:
        own_parts = [(box, part.detach().cpu()) for box, part in parts.counts(name, tensor)]
    if parts.everyone.size == 1:
        parts_by_rank = [own_parts]
    else:
        parts_by_rank = [[] for _ in range(parts.everyone.size)]
        every, first = parts.everyone, parts.everyone.rank == 0
        with in_collective("full_state_dict", str(every.group)):
            # Objects, as the numbers and sizes of boxes differ between ranks.
            dist.gather_object(own_parts, parts_by_rank if first else None, group=group_of(every), group_dst=0)
    if parts.everyone.rank:
        return None
    boxes = [pair for some in parts_by_rank for pair in some]
    whole = torch.empty(parts.shapes[name], dtype=boxes[0][1].dtype if boxes else parts.held[name].dtype)
    for box, tensor in boxes:
        whole[box.place] = tensor
    return whole


def _mismatch(parts: Holdings, state: Mapping[str, Tensor]) -> str:
    missing, unexpected = [n for n in parts.saved if n not in state], [n for n in state if n not in parts.saved]
    if missing or unexpected:
        lines = [
            f"{label}: {', '.join(names)}"
            for label, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        return "the state dict is another model's; " + "; ".join(lines)
    for name, first in parts.saved.items():
        shape, tensor = parts.shapes[first], state[name]
        if not isinstance(tensor, Tensor):
            return f"`{name}` is a {type(tensor).__name__} in the state dict, and no tensor"
        if tuple(tensor.shape) != shape:
            return f"`{name}` is {list(tensor.shape)} in the state dict and {list(shape)} in the model"
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
            reason = "on meta: it has no values" if tensor.is_meta else "not dense, or quantized"
            return f"`{name}` in the state dict is {reason}"
    return ""
