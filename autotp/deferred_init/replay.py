"""Runs initialisers again on stand-ins for tensors: draws every random number, module by module.

Before: Linear.reset_parameters(), its weight on meta
After:  the same call on a real weight, which is passed on after the event
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autotp.deferred_init.events import Event, TensorPlace, Tied, empty_like, how_to_fill, made_again, own_tensors
from autotp.errors import Error
from autotp.ops.random_state import random_state_of, set_random_state

LOOKS = {"shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "data", "detach"}
LOOKS |= {"size", "dim", "ndimension", "numel", "is_floating_point", "is_complex", "is_contiguous", "stride"}
OVERWRITES = {"normal_", "uniform_", "fill_", "zero_", "copy_", "constant_", "exponential_", "random_", "data="}
OVERWRITES |= {"trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_"}


@dataclass
class StandIn:
    """A real tensor in the place of a tensor on meta: "empty", "written", or "recalled" from earlier events."""

    tensor: Tensor
    state: str = "empty"


Sink = Callable[[int, TensorPlace, StandIn], None]  # Its first argument is the number of the event.


class Replay(TorchFunctionMode):
    """Runs events on stand-ins on `device`, and passes each written stand-in to `sink` as soon as possible."""

    def __init__(self, tied: Tied, events: Sequence[Event], device: torch.device, sink: Sink) -> None:
        super().__init__()
        self.tied, self.events, self.device, self.sink = tied, events, device, sink
        # Of places that share a tensor the first one stays.
        self.places = {id(place.tensor): place for places in tied for place in reversed(places)}
        self.states = torch.empty(0)  # The random state before each event: [events bytes].
        self.history: dict[int, list[int]] = {}  # Tensor -> the events that its value depends on.
        self.live: dict[int, StandIn] = {}
        self.aliases: dict[int, tuple[Tensor, int]] = {}  # `p.data`, and the id of `p`.
        self.pinned: int | None = None

    def run(self) -> None:
        """Runs all events in order."""
        self.states = random_state_of(self.device).repeat(len(self.events), 1)
        for i, event in enumerate(self.events):
            self.states[i] = random_state_of(self.device) if event.copy_of is None else self.states[event.copy_of]
            self.call(i)  # The random state after the last copy is that after the first layer.

    def call(self, i: int) -> None:
        """Runs an event from its random state; afterwards no stand-in is alive."""
        self.at, event = i, self.events[i]
        set_random_state(self.device, self.states[i])
        with torch.no_grad(), self.device:
            if event.call == "__init__":
                self._adopt(event.module)
            else:
                self._run(event)
        for key in list(self.live):
            self._release(key)

    def _run(self, event: Event) -> None:
        try:
            with self:
                if event.owner is None:
                    getattr(event.module, event.call)()
                else:
                    getattr(event.owner, event.call)(event.module)
        except Error:
            raise
        except Exception as error:
            problem = f"{event} failed on {self.device}: {type(error).__name__}: {error}"
            raise Error(problem, fix="an initialiser that runs on this device, for this module alone") from error

    def _adopt(self, module: nn.Module) -> None:
        """Builds a second `module`, and takes its tensors as stand-ins."""
        made = own_tensors(made_again(module) or module)
        for name, tensor in own_tensors(module).items():
            if id(tensor) == self.pinned:
                self.live[id(tensor)].tensor.data = made[name].data
            else:
                self.live[id(tensor)] = StandIn(made[name], "written")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, target = _function_name(func), args[0] if args else kwargs.get("tensor")
        real: dict[int, Tensor] = {}
        for x in pytree.tree_leaves((args, kwargs)):
            key = self.aliases[id(x)][1] if id(x) in self.aliases else id(x)
            if key in self.places:
                stand_in = self._stand_in(key, name, x is target)
                real[id(x)] = stand_in.tensor if key == id(x) else x
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: real.get(id(x), x), (args, kwargs))
        result = func(*args, **kwargs)
        if name in ("data", "detach") and id(target) in self.places:
            self.aliases[id(result)] = (result, id(target))
        return target if result is real.get(id(target)) else result  # For `module.weight *= 2`, which also assigns.

    def _stand_in(self, key: int, function: str, target: bool) -> StandIn:
        """Returns the stand-in of a tensor, with its present value if `function` needs it."""
        if key not in self.live:
            self._make_room(self.places[key].module)
            self.live[key] = StandIn(empty_like(self.places[key].tensor, self.device))
        stand_in = self.live[key]
        if stand_in.state == "empty" and function not in LOOKS:
            stand_in.state = "written" if target and function in OVERWRITES else "recalled"
            if stand_in.state == "recalled" and self.device.type != "meta":
                self._recall(key, stand_in.tensor)
        return stand_in

    def _make_room(self, module: nn.Module) -> None:
        """Releases the stand-ins of other modules, before tensors of `module` are allocated."""
        for key in [key for key in self.live if key != self.pinned and self.places[key].module is not module]:
            self._release(key)

    def _recall(self, key: int, tensor: Tensor) -> None:
        """Fills `tensor` with its present value, by running the events that wrote it again; with nan without events."""
        past, now = self.history.get(key, []), random_state_of(self.device)
        if self.at in past:
            raise Error(
                f"{self.events[self.at]} returns to `{self.places[key].name}` after another module's tensors",
                fix="initialise the modules one after the other",
            )
        if tensor.is_floating_point():
            # What is still NaN at the end was written by no event: `_release` sees it.
            tensor.data.fill_(torch.nan)
        for i in past:
            again = Replay(self.tied, self.events, self.device, lambda i, place, stand_in: None)
            again.states, again.pinned, again.live = self.states, key, {key: StandIn(tensor, "written")}
            again.call(i)
        set_random_state(self.device, now)

    def _release(self, key: int) -> None:
        stand_in, place = self.live.pop(key), self.places[key]
        self.aliases = {i: alias for i, alias in self.aliases.items() if alias[1] != key}
        if stand_in.state == "empty":
            return
        if stand_in.state == "recalled" and _has_nan(stand_in.tensor.detach()):
            raise Error(f"{self.events[self.at]} leaves `{place.name}` or a part of it empty", **how_to_fill(place))
        self.history[key] = [*(self.history.get(key, []) if stand_in.state == "recalled" else []), self.at]
        self.sink(self.at, place, stand_in)


def _has_nan(tensor: Tensor) -> bool:
    """Returns whether an element is no number. No mask is made, which needs memory; a sum of two infinities is NaN."""
    looks = tensor.is_floating_point() and tensor.numel() > 0 and not tensor.is_meta
    return looks and bool(tensor.min().isnan())


def _function_name(func: Any) -> str:
    """Returns a function's name, `normal_`; for a property its name, `shape`; for a setter `data=`."""
    name = getattr(func, "__name__", "")
    if name not in ("__get__", "__set__"):
        return name
    return getattr(func.__self__, "__name__", "") + ("=" if name == "__set__" else "")
