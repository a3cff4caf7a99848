"""Models too big for one device: a model built on `meta` -> one rank's shards, as if it had been built whole and cut.

    Before: a model on meta, the layouts of its parameters, the random state
    After:  this rank's part of what its constructors would have drawn; the random state as after drawing all of it
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autotp.errors import Error
from autotp.layout import Layout

# NOTE [Replaying a construction]
# A constructor builds its children and ends in its own initialiser (`reset_parameters`); a model with `_init_weights`
# then applies that to all below it, children first (nanoGPT, Hugging Face). So the events and their order follow from
# the structure, and running them again draws every random number again, also those that are overwritten later. Whether
# the constructors really kept to this can be checked: `_version` of a parameter on meta counts the in-place writes
# since it was made, and a first replay, on meta, has to count the same. The model itself is never written: during an
# event a function mode puts stand-ins in the place of its tensors, and they are cut when the event is over.

OWN = ("reset_parameters", "_reset_parameters", "_init_weights")  # a module's own initialiser, if it takes no argument
APPLIES = {"_init_weights", "init_weights", "post_init"}  # in a constructor: it ends in applying _init_weights
UNSEEN = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal", "bernoulli", "multinomial"}
UNSEEN |= {"trunc_normal_", "orthogonal_", "sparse_"}  # draws that a constructor on meta leaves no trace of
LOOKS = {"shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "data", "detach"}
LOOKS |= {"size", "dim", "ndimension", "numel", "is_floating_point", "is_complex", "is_contiguous", "stride"}
OVERWRITES = {"normal_", "uniform_", "fill_", "zero_", "copy_", "constant_", "exponential_", "random_", "data="}
OVERWRITES |= {"trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_"}


@dataclass(frozen=True)
class Event:
    """One call of an initialiser.

    Attributes:
        module: whose tensors it is for.
        call: the method; `__init__` for a module that has none, but can be made again.
        owner: the model whose `_init_weights` is applied to `module`, or None.
        counted: whether the writes on meta tell of it.
        copy_of: the event whose random numbers it has: `nn.TransformerEncoder` copies one layer.
    """

    module: nn.Module
    call: str
    owner: nn.Module | None = None
    counted: bool = True
    copy_of: int | None = None

    def __str__(self) -> str:
        own = type(self.module).__name__
        return f"{own}.{self.call}()" if self.owner is None else f"{type(self.owner).__name__}._init_weights({own})"


@dataclass(eq=False)
class Slot:
    """One parameter or buffer of the model.

    Attributes:
        homes: the modules that hold it.
        origin: of a tied one, the module whose constructor made it.
        shared: whether it was tied before `_init_weights` was applied.
    """

    name: str
    tensor: Tensor
    homes: list[nn.Module] = field(default_factory=list)
    origin: nn.Module | None = None
    shared: bool = True

    def keeps(self, event: Event) -> bool:
        """Whether `event` wrote to this tensor, and not to one of its module's own that a tie replaced later."""
        other = self.origin is not None and event.module in self.homes and event.module is not self.origin
        return not other or (event.owner is not None and self.shared)


@dataclass
class StandIn:
    """A real tensor in the place of one on meta: "empty", "written" over, or "recalled" from earlier events."""

    tensor: Tensor
    state: str = "empty"


Sink = Callable[[Event, Slot, StandIn], None]


def initialize(model: nn.Module, layouts: Mapping[str, Layout], rank: int, device: torch.device) -> dict[str, Tensor]:
    """This rank's parameters (cut) and buffers (whole) by first name: those of the model built whole on `device`.

    Bit for bit, from the random state as it is now; afterwards that is as after building the model whole. At any time
    the device holds the shards and the parameters of the one module that is being initialised. What an initialiser
    needs for itself (torch's `trunc_normal_`: up to three copies) comes on top.

    Args:
        model: built under `torch.device("meta")`, and left there. What is not on meta keeps its value.
        layouts: first parameter name -> how it is cut; what is not in it stays whole.

    Raises:
        Error: something has no initialiser, or the constructors did other than the initialisers do.
    """
    slots, events = _slots(model), _events(model)
    found: dict[str, Tensor] = {}

    def cut(slot: Slot, full: Tensor) -> None:
        found.pop(slot.name, None)  # first, so that the earlier shard and the new one are never both there
        layout = layouts.get(slot.name)
        found[slot.name] = full if layout is None or layout.dim is None else layout.take(full, rank)

    _check(model, slots, events)
    _Replay(slots, events, device, lambda event, slot, it: cut(slot, it.tensor.detach())).run()
    for slot in slots.values():
        if not slot.tensor.is_meta:
            cut(slot, slot.tensor.detach().to(device))
    _expect_all(slots, found)
    return {slot.name: found[slot.name] for slot in slots.values()}


# ---- what the construction ran


def _slots(model: nn.Module) -> dict[int, Slot]:
    """Every parameter and buffer once, by the id of its tensor."""
    found: dict[int, Slot] = {}
    for prefix, module in model.named_modules():
        for key, tensor in _tensors(module).items():
            slot = found.setdefault(id(tensor), Slot(f"{prefix}.{key}" if prefix else key, tensor))
            slot.homes += [module] if module not in slot.homes else []
    return found


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {key: t for key, t in {**module._parameters, **module._buffers}.items() if t is not None}


@torch.device("meta")
def _events(model: nn.Module) -> list[Event]:
    """The initialisers that building `model` ran: each module after its children, these as they were registered."""
    events: list[Event] = []
    built: set[nn.Module] = set()
    applied: set[nn.Module] = set()

    def build(module: nn.Module) -> None:
        built.add(module)
        for child in module.children():
            start = len(events)
            if child not in built:
                build(child)
            if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and child is module.layers:
                _mark_copies(events, start, module.num_layers)
        if call := _own_initialiser(module):
            events.append(Event(module, call))
        if _arguments(module, "_init_weights") == 1 and (module is model or APPLIES & set(_mentioned(module))):
            apply(module, module)

    def apply(module: nn.Module, owner: nn.Module) -> None:
        for child in module.children():
            apply(child, child if _is_hugging_face(owner) and _is_hugging_face(child) else owner)
        if not (_is_hugging_face(owner) and module in applied):
            events.append(Event(module, "_init_weights", owner, counted=not _is_hugging_face(owner)))
            applied.add(module)

    build(model)
    return events


def _is_hugging_face(owner: nn.Module) -> bool:
    """Whether `owner` applies `_init_weights` once to each module, not at all on meta, and then ties."""
    return hasattr(owner, "_initialize_weights")


def _mark_copies(events: list[Event], start: int, layers: int) -> None:
    """The events from `start` on are those of `layers` copies of one layer, which is in the model no more."""
    each = (len(events) - start) // layers
    for i in range(start, len(events)):
        events[i] = replace(events[i], counted=False, copy_of=i - each if i - each >= start else None)


def _own_initialiser(module: nn.Module) -> str | None:
    own = [name for name in OWN if _arguments(module, name) == 0]
    return own[0] if own else "__init__" if _made_again(module) else None


def _arguments(module: nn.Module, method: str) -> int | None:
    """How many arguments the module's method needs; None if there is no such method."""
    found = getattr(module, method, None)
    if not callable(found):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in inspect.signature(found).parameters.values())


def _made_again(module: nn.Module) -> nn.Module | None:
    """A second `module`, built from its attributes that are named as its constructor's arguments, or None."""
    needed = set(inspect.signature(type(module)).parameters) - {"device", "dtype"}
    if not _tensors(module) or any(module.children()) or not all(hasattr(module, name) for name in needed):
        return None
    flags = {**module._parameters, **module._buffers}  # bias=True has become a tensor, bias=False None
    try:
        again = type(module)(**{n: flags[n] is not None if n in flags else getattr(module, n) for n in needed})
    except Exception:  # an attribute means something else than the argument of its name
        return None
    kinds = [[(key, t.shape, t.dtype) for key, t in _tensors(m).items()] for m in (module, again)]
    return again if kinds[0] == kinds[1] else None


def _constructors(module: nn.Module) -> Iterator[tuple[type, CodeType]]:
    """The classes of `module` that have a constructor, and its code; not torch's."""
    for cls in type(module).__mro__:
        code = getattr(inspect.unwrap(vars(cls).get("__init__", cls)), "__code__", None)
        if code is not None and not cls.__module__.startswith("torch."):
            yield cls, code


def _mentioned(module: nn.Module) -> Iterator[str]:
    """The names in the code of the module's constructors."""
    codes = [code for _, code in _constructors(module)]
    while codes:
        code = codes.pop()
        yield from code.co_names
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


# ---- running it again


class _Replay(TorchFunctionMode):
    """Runs events on stand-ins on `device`, and hands each that was written to `sink` as soon as it can be cut."""

    def __init__(self, slots: dict[int, Slot], events: Sequence[Event], device: torch.device, sink: Sink) -> None:
        super().__init__()
        self.slots, self.events, self.device, self.sink = slots, events, device, sink
        self.states: list[Any] = []  # the random state before each event
        self.history: dict[int, list[int]] = defaultdict(list)  # the events that a slot's value follows from
        self.live: dict[int, StandIn] = {}
        self.aliases: dict[int, tuple[Tensor, int]] = {}  # `p.data`, and whose it is
        self.pinned: int | None = None

    def run(self) -> None:
        """All events, in order."""
        for event in self.events:
            now = _random_state(self.device)
            self.states.append(now if event.copy_of is None else self.states[event.copy_of])
            _set_random_state(self.device, self.states[-1])
            self.call(event)
            if event.copy_of is not None:
                _set_random_state(self.device, now)

    def call(self, event: Event) -> None:
        """One event, after which no stand-in lives."""
        self.event = event
        with torch.no_grad(), self.device:
            if event.call == "__init__":
                self._adopt(event.module)
            else:
                with self:
                    event.owner._init_weights(event.module) if event.owner else getattr(event.module, event.call)()
        for key in list(self.live):
            self._release(key)

    def _adopt(self, module: nn.Module) -> None:
        """Takes the tensors of a second `module` as the stand-ins of the first one's."""
        made = _tensors(_made_again(module) or module)
        for name, tensor in _tensors(module).items():
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
            if key in self.slots:
                it = self._stand_in(key, name, x is target)
                real[id(x)] = it.tensor if key == id(x) else x
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: real.get(id(x), x), (args, kwargs))
        result = func(*args, **kwargs)
        if name in ("data", "detach") and id(target) in self.slots:
            self.aliases[id(result)] = (result, id(target))
        return result

    def _stand_in(self, key: int, function: str, target: bool) -> StandIn:
        """What stands for slot `key`, with the slot's value unless `function` does not need it."""
        if key not in self.live:
            self._make_room(self.slots[key])
            self.live[key] = StandIn(_empty_like(self.slots[key].tensor, self.device))
        it = self.live[key]
        if it.state == "empty" and function not in LOOKS:
            it.state = "written" if target and function in OVERWRITES else "recalled"
            if it.state == "recalled" and self.device.type != "meta":
                self._recall(key, it.tensor)
        return it

    def _make_room(self, slot: Slot) -> None:
        """Cuts what lives of other modules than the event's, before more of them comes to life."""
        if not self._is_own(slot):
            for key in [k for k in self.live if k != self.pinned and not self._is_own(self.slots[k])]:
                self._release(key)

    def _is_own(self, slot: Slot) -> bool:
        return any(h is self.event.module or isinstance(h, nn.ParameterList | nn.ParameterDict) for h in slot.homes)

    def _recall(self, key: int, tensor: Tensor) -> None:
        """Fills `tensor` with the slot's value, by running what wrote it again; with nan if nothing did."""
        past, now = self.history[key], _random_state(self.device)
        if past and past[-1] == len(self.states) - 1:
            raise Error(
                f"{self.event} comes back to `{self.slots[key].name}` after another module's parameters",
                **{"try": "initialise one parameter after the other, each in one go"},
            )
        if tensor.is_floating_point():
            tensor.data.fill_(torch.nan)
        for i in past:
            again = _Replay(self.slots, self.events, self.device, lambda event, slot, it: None)
            again.pinned, again.live = key, {key: StandIn(tensor, "written")}
            _set_random_state(self.device, self.states[i])
            again.call(self.events[i])
        _set_random_state(self.device, now)

    def _release(self, key: int) -> None:
        it, slot = self.live.pop(key), self.slots[key]
        self.aliases = {i: alias for i, alias in self.aliases.items() if alias[1] != key}
        if it.state == "empty" or not slot.keeps(self.event):
            return
        if it.state == "recalled" and not it.tensor.is_meta and bool(it.tensor.detach().sum().isnan()):
            raise Error(f"{self.event} leaves `{slot.name}` without a value, in part or whole", **_advice(slot))
        self.history[key] = [*(self.history[key] if it.state == "recalled" else []), len(self.states) - 1]
        self.sink(self.event, slot, it)


def _function_name(func: Any) -> str:
    """`normal_`; of a property its name, `shape`, and of its setter `data=`."""
    name = getattr(func, "__name__", "")
    if name not in ("__get__", "__set__"):
        return name
    return getattr(func.__self__, "__name__", "") + ("=" if name == "__set__" else "")


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(tensor, device=device, requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The random state of the CPU, and of `device` if it has one of its own."""
    own = device.type not in ("cpu", "meta")
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device) if own else None


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(state[1], device)


# ---- whether the events are what the construction ran

Write = tuple[Event, StandIn]


def _check(model: nn.Module, slots: dict[int, Slot], events: Sequence[Event]) -> None:
    """Replays on meta, where nothing is drawn or stored, compares the writes, and finds which ties came when."""
    _expect_traces(model, events)
    writes: dict[int, list[Write]] = {key: [] for key in slots}
    now = torch.get_rng_state()
    record: Sink = lambda event, slot, it: writes[id(slot.tensor)].append((event, it))  # noqa: E731
    _Replay(slots, events, torch.device("meta"), record).run()
    torch.set_rng_state(now)
    _expect_all(slots, {slots[key].name for key in slots if writes[key]})
    for key, slot in slots.items():
        if isinstance(slot.tensor, nn.Parameter) and slot.tensor.is_meta:
            _settle(slot, _ties(model, slot), writes[key])


def _settle(slot: Slot, ties: list[tuple[nn.Module, bool]], writes: list[Write]) -> None:
    """Picks of the possible ties, (origin, shared), the one with which the writes add up to what the tensor has seen."""
    counts, fitting = [], {}
    for slot.origin, slot.shared in ties:
        kept = [(event, it) for event, it in writes if slot.keeps(event)]
        counts.append(sum(it.tensor._version for event, it in kept if event.counted))
        last = max((i for i, (_, it) in enumerate(kept) if it.state == "written"), default=0)
        if counts[-1] == slot.tensor._version:
            fitting[tuple(event for event, _ in kept[last:])] = slot.origin, slot.shared
    if not fitting:
        raise Error(
            f"the constructors wrote `{slot.name}` otherwise than its initialisers do",
            expected=f"{counts[0]} writes: {', '.join(str(e) for e, it in writes if e.counted and it.tensor._version)}",
            got=f"{slot.tensor._version} writes" + ("" if slot.tensor._version else ": a copy of a model on meta?"),
            **_advice(slot),
        )
    if len(fitting) > 1:
        raise Error(f"`{slot.name}` is tied, and it does not show to what", **{"try": "..."})
    ((slot.origin, slot.shared),) = fitting.values()


def _ties(model: nn.Module, slot: Slot) -> list[tuple[nn.Module, bool]]:
    """How `slot` can have been tied, (origin, shared): as the source says, `self.head.weight = self.wte.weight`."""
    if len(slot.homes) == 1 or _is_hugging_face(model):
        return [(slot.homes[0], False)]
    found = []
    for module in model.modules():
        for cls, _ in _constructors(module):
            for target, source, times in _assignments(cls):
                homes = [_submodule(module, path) for path in (target, source)]
                if all(home in slot.homes for home in homes):
                    found += [(homes[1], shared) for shared in times]
    return found or [(home, shared) for shared in (True, False) for home in slot.homes]
'''
