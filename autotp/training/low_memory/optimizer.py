"""LowMemory: what `low_memory` adds to a class of optimizers.

NOTE [Steps in backward]
With `in_backward` a parameter is stepped by torch's hook on its complete gradient, which is then freed. In a loop of
one's own this is within backward, so that few gradients exist at a time. In a trainer without a pipeline it is within
the backward of the last microbatch, when a gradient is summed over the replicas: few gradients exist at a time if there
is one microbatch. The stages of a pipeline end at different times, so there all hooks run at the end of the step (NOTE
[When hooks run] in `gradient_hooks.py`). `optimizer.step()` stays in the loop: there ranks compare what they did, and
it begins a new step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotp.attached import attach
from autotp.distributed.agreement import agree
from autotp.distributed.cut_tensors.cut_parameter import StepsElements, is_elementwise
from autotp.distributed.live_models import sorted_by_model
from autotp.errors import Error, within
from autotp.ops.collectives import reduce
from autotp.runtime.holdings import holdings_of
from autotp.runtime.torch_hooks.gradient_hooks import StepsOnArrival
from autotp.runtime.torch_hooks.optimizer_state import InBackward
from autotp.runtime.torch_hooks.optimizer_trial import (
    expect_elementwise,
    expect_nothing_kept,
    plain_stepper,
    states_of,
    unhooked_step,
)
from autotp.sharding.boxes import local_of
from autotp.training.low_memory.packing import largest_by_block
from autotp.training.low_memory.parts import (
    ParameterRows,
    as_torch,
    blocks_of_parameter,
    group_of_parts,
    in_buckets,
    layout_of_parameter,
    part_of_state,
    plain_part,
    rank_of_parts,
)
from autotp.training.low_memory.stored_state import StateMemory, StoredState, room_for

MASTER = "master"
"""The key of the state that is a parameter in float32."""
ALTERNATIVE = "the class itself, without autotp.low_memory"

Brought = dict[str, tuple[Sequence[Tensor], Any]]
"""Key of a state -> the tensors of some of its rows on the device, and the event after which they are there."""


class LowMemory(StepsElements, Optimizer):
    """What `low_memory` adds to a class of optimizers, its `kind`.

    In a step, an object of the class itself gets groups with plain rows of this rank's parts, and their opened states;
    it shares all other attributes. `state` has a `StoredState` for each state that is shaped as its parameter.
    """

    kind: type[Optimizer]
    codes: torch.dtype | None
    offload: bool
    masters: bool
    in_backward: bool

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._stepped_now = set[Tensor]()
        self._keys: list[dict[str, bool]] = []
        super().__init__(params, *args, **kwargs)
        self._step_supports_amp_scaling = False  # The scaler then divides the gradients itself.
        self._stepper = plain_stepper(self, self.kind)
        self._memories: dict[torch.device, StateMemory] = {}
        self._settled: list[Any] = []
        self._buckets: list[list[ParameterRows]] = []
        self._rooms: dict[Tensor, dict[str, StoredState]] = {}
        self.register_state_dict_post_hook(_opened_states)
        if self.in_backward:
            attach(self, InBackward())
        within(f"low_memory({self.kind.__name__})", self._try)

    def _try(self) -> None:
        """Notes the states of each group; raises Error unless the optimizer steps each element by itself."""
        expect_nothing_kept(self._stepper, ALTERNATIVE)
        if not is_elementwise(self._stepper):
            expect_elementwise(self._stepper, "autotp.low_memory steps some rows at a time")
        self._keys = [self._states_of(group) for group in self.param_groups]

    def _states_of(self, group: Mapping[str, Any]) -> dict[str, bool]:
        """Returns the key of each state of a group's parameters, and whether it may be negative."""
        if group.get("differentiable"):
            raise Error("a step of low memory is not differentiable", fix="differentiable=False")
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        return states_of(self._stepper, group, device)

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters; call it on every rank.

        Args:
            closure: computes the loss and the gradients; it is called once, before the step.

        Raises:
            Error: on every rank in the first step, if a host has no memory for the states.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch._C.DisableTorchFunctionSubclass():
            within(f"{type(self).__name__}.step", self._step)
        self._stepped_now.clear()
        return loss

    # ---- NOTE [Steps in backward]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does."""
        super().add_param_group(param_group)
        if self._keys:  # Else it is a group of the first ones, which `_try` looks at.
            self._keys.append(self._states_of(self.param_groups[-1]))
        for p in self.param_groups[-1]["params"] if self.in_backward else ():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(_Steps(ref(self)))

    @torch.no_grad()
    def step_now(self, p: Tensor) -> None:
        """Steps a parameter, whose gradient is complete, and frees the gradient.

        Raises:
            Error: it was stepped since the last call of `step`.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if p in self._stepped_now:
                raise Error(
                    f"{type(self).__name__} has stepped a parameter in backward, which got another gradient before "
                    "`optimizer.step()`",
                    fix="microbatches=4 of autotp.distribute, which adds gradients before the step",
                    alternative="in_backward=False; optimizer.step() after each backward",
                )
            self._stepped_now.add(p)
            within(f"{type(self).__name__}.step", lambda: self._step(p))
            p.grad = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_stepper" not in vars(self):
            raise Error(
                f"a {type(self).__name__} of low memory cannot be copied or pickled",
                fix="a new optimizer of the copied model's parameters, and load_state_dict",
            )
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state: one that an optimizer of any `states` saved, or `kind` itself. The next step packs it."""
        super().load_state_dict(state_dict)
        saved = zip((n for group in state_dict["param_groups"] for n in group["params"]), self._parameters, strict=True)
        for number, p in saved if self.masters else ():
            # torch casts states to the dtype of the parameter.
            for key, x in state_dict["state"].get(number, {}).items():
                if isinstance(x, Tensor) and x.dim():
                    self.state[p][key] = x.to(p.device, copy=True)

    @property
    def _parameters(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    # ---- what is settled before the first step

    def _settle(self) -> None:
        """Divides the parameters into buckets, if they are others than in the last step, and takes memory for states.

        Which states there are follows from the options that are on, such as `momentum`.

        Raises:
            Error: on every rank, if a host has not enough.
        """
        identities: list[Any] = [
            (id(p), p.dtype, p.device, _is_stepped(p), layout_of_parameter(p)) for p in self._parameters
        ]
        identities += [[key for key, value in group.items() if _is_on(value)] for group in self.param_groups]
        if identities == self._settled:
            return
        self._keys = [self._states_of(group) for group in self.param_groups]
        self._buckets = self._divided()
        self._settled = identities
        if self.offload:
            models, _ = sorted_by_model(self._parameters)
            take: Callable[[], None] = self._take_memory
            for model in models:  # All its ranks settle now.
                take = partial(agree, holdings_of(model, "step").everyone, take)
            take()

    def _take_memory(self) -> None:
        for i, group in enumerate(self.param_groups):
            for p in (p for p in group["params"] if _is_stepped(p) and p.dim()):
                dtype = torch.float32 if self._has_master(p) else p.dtype
                for key in [*self._keys[i], *([MASTER] if self._has_master(p) else [])]:
                    self._room(i, p, key, dtype)

    def _divided(self) -> list[list[ParameterRows]]:
        """Returns buckets of rows: the same ones on all ranks with parts of the same parameters.

        First come those parameters whose blocks are shared, as ranks exchange the largest elements of a bucket.
        """
        pairs = [(i, p) for i, group in enumerate(self.param_groups) for p in group["params"] if _is_stepped(p)]
        shared, others = (
            [(i, p) for i, p in pairs if (self._shared_blocks(p) > 0) == is_shared] for is_shared in (True, False)
        )
        by_ranks: dict[Any, list[tuple[int, Tensor]]] = {}
        for i, p in shared:  # Parameters of two models may have other ranks.
            by_ranks.setdefault(group_of_parts(p), []).append((i, p))
        return [*(bucket for some in by_ranks.values() for bucket in in_buckets(some)), *in_buckets(others)]

    def _shared_blocks(self, p: Tensor) -> int:
        """Returns the number of blocks, in a row of the whole parameter, that several ranks have elements of."""
        blocks = None if self.codes is None else blocks_of_parameter(p)
        return blocks.shared_count if blocks is not None and p.is_floating_point() else 0

    def _has_master(self, p: Tensor) -> bool:
        return self.masters and p.dtype in (torch.bfloat16, torch.float16)

    def _memory(self, device: torch.device) -> StateMemory:
        if device not in self._memories:
            self._memories[device] = StateMemory(device, self.offload)
        return self._memories[device]

    def _room(self, group: int, p: Tensor, key: str, dtype: torch.dtype) -> StoredState:
        """Returns the place for a state of a parameter."""
        shape, layout = local_of(p).shape, layout_of_parameter(p)
        rooms = self._rooms.setdefault(p, {})
        for state in (self.state.get(p, {}).get(key), rooms.get(key)):
            if isinstance(state, StoredState) and state.fits(shape, dtype, layout):
                return state
        rooms[key] = self._new_room(group, p, key, dtype)
        return rooms[key]

    def _new_room(self, group: int, p: Tensor, key: str, dtype: torch.dtype) -> StoredState:
        codes, signed = None if key == MASTER else self.codes, self._keys[group].get(key, True)
        layout, rank = layout_of_parameter(p), rank_of_parts(p)
        return room_for(local_of(p).shape, dtype, codes, signed, layout, rank, self._memory(p.device))

    def groups_by_parameter(self) -> dict[Any, int]:
        """Returns the number of each parameter's group."""
        return {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}

    def taken(self, p: Tensor, key: str, state: Any) -> Any:
        """Returns what to keep of a state that was read: packed, if no other rank has elements of its blocks."""
        group = self.groups_by_parameter()[p]
        with torch._C.DisableTorchFunctionSubclass():
            if not (isinstance(state, Tensor) and state.dim()) or self._shared_blocks(p):
                return state  # The next step packs it: all ranks do so together.
            part = local_of(state.detach()).to(p.device).as_subclass(Tensor)
            stored = self._new_room(group, p, key, part.dtype)  # The state of now stays: another rank may fail.
            blocks = stored.blocks(part.device)
            stored.write(part, None if blocks is None else largest_by_block(part, blocks))
            return stored

    # ---- a step

    def _step(self, only: Tensor | None = None) -> None:
        """Steps all parameters with a gradient, or this one."""
        self._settle()
        buckets = self._buckets if only is None else in_buckets([(self.groups_by_parameter()[only], only)])
        stepped = [[piece for piece in bucket if piece.parameter.grad is not None] for bucket in buckets]
        options = list[dict[str, Any]](
            {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
        )
        changed = dict[int, dict[str, Any]]()
        for memory in self._memories.values():
            memory.begin()
        coming = [self._bring(piece) for piece in stepped[0]] if stepped else []
        for i, (bucket, pieces) in enumerate(zip(buckets, stepped, strict=True)):
            # The states of the next bucket come while this one is stepped.
            following = stepped[i + 1] if i + 1 < len(stepped) else []
            brought, coming = coming, [self._bring(piece) for piece in following]
            changed |= self._step_bucket(bucket, pieces, brought, options)
        for i, group in changed.items():
            self.param_groups[i].update(group)

    def _bring(self, piece: ParameterRows) -> Brought:
        """Returns the states of some rows on the device, perhaps not yet there."""
        p = piece.parameter
        stored = {key: x for key, x in self.state.get(p, {}).items() if isinstance(x, StoredState)}
        memory = self._memory(p.device)
        same = {key: x for key, x in stored.items() if x.layout == layout_of_parameter(p)}
        return {key: memory.bring(x.tensors(piece.rows)) for key, x in same.items()}

    def _step_bucket(
        self,
        bucket: list[ParameterRows],
        pieces: list[ParameterRows],
        brought: list[Brought],
        options: list[dict[str, Any]],
    ) -> dict[int, dict[str, Any]]:
        """Steps some rows, and stores their states; returns the options of their groups after the step."""
        values = [self._value(piece, tensors) for piece, tensors in zip(pieces, brought, strict=True)]
        groups = {
            i: [x for x, piece in zip(values, pieces, strict=True) if piece.group == i] for i in range(len(options))
        }
        stepper = cast(Any, self._stepper)
        stepper.param_groups = [{**options[i], "params": some} for i, some in groups.items() if some]
        if pieces:
            stepper.state.clear()
            for value, piece, tensors in zip(values, pieces, brought, strict=True):
                if state := self._opened(piece, tensors, value.dtype):
                    stepper.state[value] = state
            unhooked_step(self.kind)(stepper)
        states = {piece: dict(stepper.state[value]) for piece, value in zip(pieces, values, strict=True)}
        stepper.state.clear()
        for piece, value in zip(pieces, values, strict=True):
            if self._has_master(piece.parameter):
                piece.of(plain_part(piece.parameter)).copy_(value)
                states[piece][MASTER] = value.detach()
        self._store(bucket, states)
        numbers = [i for i, some in groups.items() if some]
        after = dict(zip(numbers, stepper.param_groups, strict=True))
        return {i: {key: value for key, value in group.items() if key != "params"} for i, group in after.items()}

    def _value(self, piece: ParameterRows, brought: Brought) -> nn.Parameter:
        """Returns the rows to step, with their gradient."""
        p, gradient = piece.parameter, piece.parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise Error("a gradient is sparse, and the states of its rows are not", fix="sparse=False in its layer")
        rows, of_rows = piece.of(plain_part(p)), piece.of(plain_part(gradient))
        if not self._has_master(p):
            value = nn.Parameter(rows, requires_grad=False)
        else:
            master = self._state(piece, MASTER, brought)
            if master is None:
                master = rows.float()
            # Where other code has written the parameter, its value counts.
            value = nn.Parameter(torch.where(master.to(rows.dtype) == rows, master, rows.float()), requires_grad=False)
            of_rows = of_rows.float()
        value.grad = of_rows
        return value

    def _state(self, piece: ParameterRows, key: str, brought: Brought) -> Tensor | None:
        """Returns some rows of a state on the device, opened; None if there is no such state."""
        p = piece.parameter
        state = self.state.get(p, {}).get(key)
        if key in brought:
            tensors, event = brought[key]
            self._memory(p.device).receive(tensors, event)
            return cast(StoredState, state).opened(tensors)
        if state is None:
            return None
        whole = state.opened() if isinstance(state, StoredState) else state  # From before a parameter was cut.
        return piece.of(part_of_state(p, key, whole)).to(p.device)

    def _opened(self, piece: ParameterRows, brought: Brought, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the states of some rows, as the class itself has them."""
        opened = dict[str, Any]()
        for key, x in self.state.get(piece.parameter, {}).items():
            if isinstance(x, StoredState) or (isinstance(x, Tensor) and x.dim()):
                part = self._state(piece, key, brought)
                assert part is not None
                opened[key] = part.to(dtype) if self._has_master(piece.parameter) else part
            else:
                # A copy, as each piece begins at the same number of steps.
                opened[key] = x.clone() if isinstance(x, Tensor) else x
        opened.pop(MASTER, None)
        return opened

    def _store(self, bucket: list[ParameterRows], states: Mapping[ParameterRows, dict[str, Any]]) -> None:
        """Stores the states of some rows. Ranks that share blocks call it together."""
        parts = {
            (piece, key): x
            for piece, state in states.items()
            for key, x in state.items()
            if isinstance(x, Tensor) and x.dim() and x.shape == piece.of(plain_part(piece.parameter)).shape
        }
        rooms = {
            (piece, key): self._room(piece.group, piece.parameter, key, x.dtype) for (piece, key), x in parts.items()
        }
        scales = dict[tuple[ParameterRows, str], Tensor]()
        for place, x in parts.items():
            blocks = rooms[place].blocks(x.device)
            if blocks is not None:
                scales[place] = largest_by_block(x, blocks)
        if bucket and self._shared_blocks(bucket[0].parameter):
            self._share(bucket, scales)
        for place, x in parts.items():
            rooms[place].write(x, scales.get(place), place[0].rows)
        for piece in (piece for piece in states if piece.last):
            self.state[piece.parameter] = {key: rooms.get((piece, key), x) for key, x in states[piece].items()}
            self._rooms.pop(piece.parameter, None)

    def _share(self, bucket: list[ParameterRows], scales: Mapping[tuple[ParameterRows, str], Tensor]) -> None:
        """Gives blocks that several ranks have elements of their largest element on any rank, in place."""
        buffers = dict[tuple[ParameterRows, str], Tensor]()
        for piece, key in ((x, key) for x in bucket for key in self._keys[x.group]):
            blocks, rows = blocks_of_parameter(piece.parameter), piece.of(plain_part(piece.parameter))
            assert blocks is not None
            # A rank without a gradient, or without elements, takes part with zeros.
            buffer = rows.new_zeros((*rows.shape[: blocks.lead], blocks.shared_count), dtype=torch.float32)
            if (piece, key) in scales:
                buffer[..., blocks.shared_places] = scales[piece, key][..., blocks.shared]
            buffers[piece, key] = buffer
        if not buffers:
            return
        flat = torch.cat([buffer.flatten() for buffer in buffers.values()])
        of_all = reduce(flat, group_of_parts(bucket[0].parameter), "max").split([x.numel() for x in buffers.values()])
        for (piece, key), every in zip(buffers, of_all, strict=True):
            blocks = blocks_of_parameter(piece.parameter)
            if blocks is not None and (piece, key) in scales:
                shared = every.view(buffers[piece, key].shape)[..., blocks.shared_places]
                scales[piece, key][..., blocks.shared] = shared


class _Steps(StepsOnArrival):
    """A hook that steps a parameter; none steps it once its optimizer is gone."""

    def __init__(self, optimizer: ref[LowMemory]) -> None:
        self.optimizer = optimizer

    def __call__(self, parameter: Tensor) -> None:
        if (owner := self.optimizer()) is not None:
            owner.step_now(parameter)


def _is_on(value: Any) -> bool:
    """True for an option of a group that is a number other than 0, or True."""
    return isinstance(value, bool | int | float) and bool(value)


def _is_stepped(p: Tensor) -> bool:
    """True for a parameter that is trained; also for a frozen one that has a gradient, as torch steps it."""
    return p.requires_grad or p.grad is not None


def _opened_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict as the class itself has it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = {
        i: {key: as_torch(parameters[i], x) for key, x in state.items()} if isinstance(state, dict) else state
        for i, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}
