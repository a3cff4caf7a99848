"""Models too big for one device: a model built on `meta` -> one rank's shards, as if it had been built whole and cut.

    Before: Linear on meta, its weight's layout [8@tp, 4], the random state
    After:  this rank's rows of what nn.Linear(4, 8) would have drawn; the random state after drawing it
"""

from __future__ import annotations

import inspect
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
# event a function mode puts stand-ins in the place of its tensors, and cuts them when the event is over.

OWN = ("reset_parameters", "_reset_parameters", "_init_weights")  # a module's own initialiser, if it takes no argument
APPLIES = {"_init_weights", "init_weights", "post_init"}  # in a constructor: it ends in applying _init_weights
UNSEEN = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal", "bernoulli", "multinomial"}
UNSEEN |= {"trunc_normal_", "orthogonal_", "sparse_"}  # draws that a constructor on meta leaves no trace of
LOOKS = {"shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "data"}
LOOKS |= {"size", "dim", "ndimension", "numel", "is_floating_point", "is_complex", "is_contiguous", "stride", "detach"}
OVERWRITES = {"normal_", "uniform_", "fill_", "zero_", "copy_", "constant_", "exponential_", "random_", "data="}
OVERWRITES |= {"trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_"}


@dataclass(frozen=True)
class Event:
    """One call of an initialiser.

    Attributes:
        module: whose tensors it is for.
        call: the method; `__init__` for a module that has none, but can be made again.
        owner: the model whose `_init_weights` is applied to `module`, or None.
        copy_of: the event whose random numbers it has: `nn.TransformerEncoder` copies its first layer.
    """

    module: nn.Module
    call: str
    owner: nn.Module | None = None
    copy_of: int | None = None

    def __str__(self) -> str:
        own = type(self.module).__name__
        return f"{own}.{self.call}()" if self.owner is None else f"{type(self.owner).__name__}._init_weights({own})"


@dataclass(eq=False)
class Slot:
    """One parameter or buffer of the model.

    Attributes:
        homes: the modules that hold it, the first registered first.
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
    """A real tensor in the place of one on meta. state: "empty", "written" over, or "recalled" from earlier events."""

    tensor: Tensor
    state: str = "empty"


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
    slots, events = slots_of(model), events_of(model)
    found: dict[str, Tensor] = {}

    def cut(event: Event | None, slot: Slot, full: Tensor) -> None:
        found.pop(slot.name, None)  # first, so that the earlier shard and the new one are never both there
        layout = layouts.get(slot.name)
        found[slot.name] = full.detach() if layout is None or layout.dim is None else layout.take(full.detach(), rank)

    _check(model, slots, events)
    Replay(slots, events, device, cut).run()
    for slot in slots.values():
        if not slot.tensor.is_meta:
            cut(None, slot, slot.tensor.to(device))
    _expect_all(model, slots, found)
    return {slot.name: found[slot.name] for slot in slots.values()}


# ---- what the construction ran


def slots_of(model: nn.Module) -> dict[int, Slot]:
    """Every parameter and buffer once, by the id of its tensor."""
    found: dict[int, Slot] = {}
    for prefix, module in model.named_modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                slot = found.setdefault(id(tensor), Slot(f"{prefix}.{key}" if prefix else key, tensor))
                slot.homes += [module] if module not in slot.homes else []
    return found


def events_of(model: nn.Module) -> list[Event]:
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
                _copy_first(events, start, module.num_layers)
        if call := _own_initialiser(module):
            events.append(Event(module, call))
        if _arguments(module, "_init_weights") == 1 and (module is model or APPLIES & set(_mentioned(module))):
            apply(module, module)

    def apply(module: nn.Module, owner: nn.Module) -> None:
        for child in module.children():
            apply(child, child if _once(owner) and _once(child) else owner)
        if not (_once(owner) and module in applied):
            events.append(Event(module, "_init_weights", owner))
            applied.add(module)

    with torch.device("meta"):
        build(model)
    return events


def _once(owner: nn.Module) -> bool:
    """Whether `owner` applies `_init_weights` to each module once, and not at all on meta, as Hugging Face's do."""
    return hasattr(owner, "_initialize_weights")


def _copy_first(events: list[Event], start: int, layers: int) -> None:
    """Marks the events from `start` on, those of equal layers, as copies of the first layer's."""
    each = (len(events) - start) // layers
    for i in range(start + each, len(events)):
        events[i] = replace(events[i], copy_of=i - each)


def _own_initialiser(module: nn.Module) -> str | None:
    for name in OWN:
        if _arguments(module, name) == 0:
            return name
    return "__init__" if made_again(module) is not None else None


def _arguments(module: nn.Module, method: str) -> int | None:
    """How many arguments the module's method needs; None if there is no such method."""
    found = getattr(module, method, None)
    if not callable(found):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in inspect.signature(found).parameters.values())


def made_again(module: nn.Module) -> nn.Module | None:
    """A second `module`, built from its attributes named as its constructor's arguments; None where that fails."""
    tensors = {**module._parameters, **module._buffers}
    needed = [name for name in inspect.signature(type(module)).parameters if name not in ("device", "dtype")]
    if not tensors or any(module.children()) or not all(hasattr(module, name) for name in needed):
        return None
    given = {n: tensors[n] is not None if n in tensors else getattr(module, n) for n in needed}  # bias=True -> a tensor
    try:
        again = type(module)(**given)
    except Exception:  # an attribute that means something else than the argument of its name
        return None
    return again if _kinds(again) == _kinds(module) else None


def _kinds(module: nn.Module) -> list[Any]:
    held = {**module._parameters, **module._buffers}
    return [(name, t if t is None else (t.shape, t.dtype)) for name, t in held.items()]


def _mentioned(module: nn.Module) -> Iterator[str]:
    """The names in the code of the module's constructors, torch's own left out."""

    def names(code: CodeType) -> Iterator[str]:
        yield from code.co_names
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from names(inner)

    for cls in type(module).__mro__:
        init = inspect.unwrap(vars(cls)["__init__"]) if "__init__" in vars(cls) else None
        if hasattr(init, "__code__") and not cls.__module__.startswith("torch."):
            yield from names(init.__code__)


# ---- running it again

Sink = Callable[[Event, Slot, Tensor], None]


class Replay(TorchFunctionMode):
    """Runs events on stand-ins on `device` and hands each that was written to `sink`, last write last."""

    def __init__(self, slots: dict[int, Slot], events: Sequence[Event], device: torch.device, sink: Sink) -> None:
        super().__init__()
        self.slots, self.events, self.device, self.sink = slots, events, device, sink
        self.states: list[Any] = []  # the random state before each event
        self.history: dict[int, list[int]] = defaultdict(list)  # for each slot the events that its value follows from
        self.live: dict[int, StandIn] = {}
        self.aliases: dict[int, tuple[Tensor, int]] = {}  # `p.data`
        self.pinned: int | None = None

    def run(self) -> None:
        """All events, in order."""
        for event in self.events:
            now = _random_state(self.device)
            self.states.append(now if event.copy_of is None else self.states[event.copy_of])
            _set_random_state(self.device, self.states[-1])
            self._call(event)
            if event.copy_of is not None:
                _set_random_state(self.device, now)

    def _call(self, event: Event) -> None:
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
        again = made_again(module)
        held, made = {**module._parameters, **module._buffers}, {**again._parameters, **again._buffers}
        for name, tensor in held.items():
            if id(tensor) == self.pinned:
                self.live[id(tensor)].tensor.data = made[name].data
            elif tensor is not None:
                self.live[id(tensor)] = StandIn(made[name], "written")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, target = _function_name(func), args[0] if args else kwargs.get("tensor")
        real: dict[int, Tensor] = {}
        for x in pytree.tree_leaves((args, kwargs)):
            if id(x) in self.slots:
                real[id(x)] = self._stand_in(id(x), name, x is target)
            elif id(x) in self.aliases:
                self._stand_in(self.aliases[id(x)][1], name, x is target)
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: real.get(id(x), x), (args, kwargs))
        result = func(*args, **kwargs)
        if name in ("data", "detach") and id(target) in self.slots:
            self.aliases[id(result)] = (result, id(target))
        return result

    def _stand_in(self, key: int, function: str, target: bool) -> Tensor:
        """The tensor in the place of slot `key`, with the slot's value unless `function` does not need it."""
        if key not in self.live:
            self._make_room(self.slots[key])
            self.live[key] = StandIn(_empty_like(self.slots[key].tensor, self.device))
        it = self.live[key]
        if it.state == "empty" and function not in LOOKS:
            it.state = "written" if target and function in OVERWRITES else "recalled"
            if it.state == "recalled" and self.device.type != "meta":
                self._recall(key, it.tensor)
        return it.tensor

    def _make_room(self, slot: Slot) -> None:
        """Cuts what is live of other modules than the event's, before one more of them comes to life."""
        if not self._is_own(slot):
            for key in [k for k in self.live if k != self.pinned and not self._is_own(self.slots[k])]:
                self._release(key)

    def _is_own(self, slot: Slot) -> bool:
        return any(h is self.event.module or isinstance(h, nn.ParameterList | nn.ParameterDict) for h in slot.homes)

    def _recall(self, key: int, tensor: Tensor) -> None:
        """Fills `tensor` with the slot's value, by running what wrote it again; with nan if nothing did."""
        past, now = self.history[key], _random_state(self.device)
        if past and past[-1] == len(self.states) - 1:
            raise Error(f"{self.event} comes back to `{self.slots[key].name}` after other parameters", **COME_BACK)
        if tensor.is_floating_point():
            tensor.data.fill_(torch.nan)
        for i in past:
            again = Replay(self.slots, self.events, self.device, lambda event, slot, full: None)
            again.pinned, again.live = key, {key: StandIn(tensor, "written")}
            _set_random_state(self.device, self.states[i])
            again._call(self.events[i])
        _set_random_state(self.device, now)

    def _release(self, key: int) -> None:
        it, slot = self.live.pop(key), self.slots[key]
        self.aliases = {i: a for i, a in self.aliases.items() if a[1] != key}
        if it.state == "empty" or not slot.keeps(self.event):
            return
        if it.state == "recalled" and self.device.type != "meta" and bool(it.tensor.detach().sum().isnan()):
            raise Error(f"{self.event} reads `{slot.name}`, which nothing has filled before", **_advice(slot))
        before = self.history[key] if it.state == "recalled" else []
        self.history[key] = [*before, len(self.states) - 1]
        self.sink(self.event, slot, it.tensor)


COME_BACK = {"try": "initialise the parameters one after the other, each in one go"}


def _function_name(func: Any) -> str:
    """`normal_`; for a property its name, `shape`, and for its setter `data=`."""
    name = getattr(func, "__name__", "")
    if name not in ("__get__", "__set__"):
        return name
    return getattr(func.__self__, "__name__", "") + ("=" if name == "__set__" else "")


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(tensor, device=device, requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Of the CPU, and of `device` if it has one of its own."""
    own = device.type not in ("cpu", "meta")
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device) if own else None


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(state[1], device)


# ---- whether the events are what the construction ran


def _check(model: nn.Module, slots: dict[int, Slot], events: Sequence[Event]) -> None:
    """Replays on meta, where nothing is drawn or stored, and compares the writes; finds out which ties came when."""
    _expect_traces(model, events)
    writes: dict[int, list[tuple[Event, int]]] = {key: [] for key in slots}

    def count(event: Event, slot: Slot, full: Tensor) -> None:
        unseen = event.copy_of is not None or (event.owner is not None and _once(event.owner))
        writes[id(slot.tensor)].append((event, 0 if unseen else full._version))

    now = torch.get_rng_state()
    Replay(slots, events, torch.device("meta"), count).run()
    torch.set_rng_state(now)
    _expect_all(model, slots, {slots[key].name for key in slots if writes[key]})
    for key, slot in slots.items():
        if isinstance(slot.tensor, nn.Parameter) and slot.tensor.is_meta:
            _settle(slot, writes[key], not _once(model))


def _settle(slot: Slot, writes: list[tuple[Event, int]], shared_first: bool) -> None:
    """Finds what was tied to what, and when, such that the writes add up to those that the tensor has seen."""
    seen: list[int] = []
    for shared in (shared_first, not shared_first):
        for home in slot.homes:
            slot.origin, slot.shared = home, shared
            seen.append(sum(n for event, n in writes if slot.keeps(event)))
            if seen[-1] == slot.tensor._version:
                return
    raise Error(
        f"the constructors wrote `{slot.name}` otherwise than its initialisers do",
        expected=f"{seen[0]} writes: {', '.join(str(event) for event, n in writes if n)}",
        got=f"{slot.tensor._version} writes" + ("" if slot.tensor._version else ", as in a copy of a model"),
        **_advice(slot),
    )


def _expect_traces(model: nn.Module, events: Sequence[Event]) -> None:
    """No constructor draws random numbers that a replay would miss."""
    again = {event.module for event in events if event.call == "__init__"}
    for name, module in model.named_modules():
        draws = sorted(UNSEEN.intersection(_mentioned(module)))
        if draws and module not in again:
            raise Error(
                f"the constructor of `{name or 'the model'}` ({type(module).__name__}) draws random numbers: {draws[0]}",
                **{"try": f"draw them in {type(module).__name__}.reset_parameters(), and call that in the constructor"},
            )


def _expect_all(model: nn.Module, slots: dict[int, Slot], found: Collection[str]) -> None:
    for slot in slots.values():
        if slot.tensor.is_meta and slot.name not in found:
            raise Error(f"nothing initialises the {_kind(slot)} `{slot.name}` of a model on meta", **_advice(slot))


def _kind(slot: Slot) -> str:
    return "parameter" if isinstance(slot.tensor, nn.Parameter) else "buffer"


def _advice(slot: Slot) -> dict[str, str]:
    own, name = type(slot.homes[0]).__name__, slot.name.rpartition(".")[2]
    return {"try": f"fill self.{name} in {own}.reset_parameters(), ...or"}
