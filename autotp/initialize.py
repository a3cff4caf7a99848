"""Models too big for one device: a model built on `meta` -> one rank's shards, as if it had been built whole and cut.

Before: a model on meta, the layouts of its parameters, the random state
After:  this rank's part of what its constructors would have drawn; the random state as after drawing all of it
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
TIE = re.compile(r"^ *self\.([\w.]+)\.\w+ = self\.([\w.]+)\.\w+ *(?:#.*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Event:
    """One call of an initialiser.

    Attributes:
        module: whose tensors it is for.
        call: the method; `__init__` for a module that has none, but can be made again.
        owner: the model whose `_init_weights` is applied to `module`, or None.
        counted: whether it was run on meta, too.
        copy_of: the event whose random numbers it has: `nn.TransformerEncoder` copies one layer.

    `str` of it is `Linear.reset_parameters()`, or `GPT._init_weights(Linear)`.
    """

    module: nn.Module
    call: str
    owner: nn.Module | None = None
    counted: bool = True
    copy_of: int | None = None

    def __str__(self) -> str:
        own = type(self.module).__name__
        return f"{own}.{self.call}()" if self.owner is None else f"{type(self.owner).__name__}._init_weights({own})"


@dataclass
class Place:
    """Where a module holds a parameter or buffer; its `tensor` is one of its own while ties are undone."""

    name: str
    module: nn.Module
    key: str
    tensor: Tensor

    def put(self, tensor: Tensor) -> None:
        """Has the module hold `tensor` here."""
        self.tensor = tensor
        table: dict[str, Any] = self.module._parameters if self.key in self.module._parameters else self.module._buffers
        table[self.key] = tensor


@dataclass
class StandIn:
    """A real tensor in the place of one on meta: "empty", "written" over, or "recalled" from earlier events."""

    tensor: Tensor
    state: str = "empty"


Tied = list[list[Place]]  # the places that hold one tensor, the first registered first
Way = tuple[int, bool]  # of tying: the place the tensor comes from; whether `_init_weights` wrote through the tie
Write = tuple[int, StandIn]  # the number of the event, and what it wrote on
Sink = Callable[[int, Place, StandIn], None]  # called with the number of the event


def initialize(model: nn.Module, layouts: Mapping[str, Layout], rank: int, device: torch.device) -> dict[str, Tensor]:
    """This rank's parameters (cut) and buffers (whole) by first name: those of the model built whole on `device`.

    Bit for bit, from the random state as it is now; afterwards that is as after building the model whole. At any time
    the device holds the shards and the parameters of the one module that is being initialised. What an initialiser
    needs for itself (torch's `trunc_normal_`: up to three copies) comes on top. All is drawn in the dtype it has now:
    bit for bit under `torch.set_default_dtype`, not after `model.to(dtype)`, of which nothing can be seen.

    Args:
        model: built under `torch.device("meta")`, and left there. What is not on meta keeps its value.
        layouts: first parameter name -> how it is cut; what is not in it stays whole.

    Raises:
        Error: something has no initialiser, or the constructors did other than the initialisers do.
    """
    tied = _places(model)
    done: set[str] = set()
    with _untied(tied):
        events = _events(model)
        kept = _check(model, tied, events)
        # At once and first (as the random states): made one by one, they would sit in holes that full tensors left.
        parts = {p[0].name: _empty_part(p[0], layouts.get(p[0].name), rank, device) for p in tied}

        def keep(i: int, place: Place, it: StandIn) -> None:
            name = kept.get(id(place.tensor))
            if name is not None:
                _fill(parts[name], it.tensor.detach(), layouts.get(name), rank)
                done.add(name)

        _Replay(tied, events, device, keep).run()
    for place in [places[0] for places in tied if not places[0].tensor.is_meta]:
        _fill(parts[place.name], place.tensor.detach(), layouts.get(place.name), rank)
        done.add(place.name)
    _expect_all(tied, done)
    return parts


def _empty_part(place: Place, layout: Layout | None, rank: int, device: torch.device) -> Tensor:
    shape = place.tensor.shape if layout is None else layout.local_shape(rank)
    return torch.empty(shape, dtype=place.tensor.dtype, device=device)


def _fill(part: Tensor, full: Tensor, layout: Layout | None, rank: int) -> None:
    """`layout.take`, into memory that is there."""
    if layout is None or layout.dim is None:
        part.copy_(full)
        return
    at = 0
    for start, stop in layout.pieces[rank]:
        part.narrow(layout.dim, at, stop - start).copy_(full.narrow(layout.dim, start, stop - start))
        at += stop - start


def _places(model: nn.Module) -> Tied:
    found: dict[int, list[Place]] = {}
    for prefix, module in model.named_modules():
        for key, tensor in _tensors(module).items():
            place = Place(f"{prefix}.{key}" if prefix else key, module, key, tensor)
            found.setdefault(id(tensor), []).append(place)
    return list(found.values())


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {key: t for key, t in {**module._parameters, **module._buffers}.items() if t is not None}


@contextmanager
def _untied(tied: Tied) -> Iterator[None]:
    """Within, every module holds tensors of its own, as when it was constructed."""
    before = [places[0].tensor for places in tied]
    try:
        for places in tied:
            for place in places[1:]:
                place.put(_empty_like(place.tensor, torch.device("meta")))
        yield
    finally:
        for places, tensor in zip(tied, before, strict=True):
            for place in places:
                place.put(tensor)


# ---- what the construction ran


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

    with torch.device("meta"):
        build(model)
    return events


def _is_hugging_face(owner: nn.Module) -> bool:
    """Whether `owner` applies `_init_weights` once to each module, not at all on meta, and ties afterwards."""
    return hasattr(owner, "_initialize_weights")


def _mark_copies(events: list[Event], start: int, layers: int) -> None:
    """The events from `start` on are those of `layers` copies of one layer, which itself is not in the model."""
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


def _classes(module: nn.Module) -> list[type]:
    """The classes of `module` that have a constructor, torch's left out."""
    ours = [cls for cls in type(module).__mro__ if "__init__" in vars(cls)]
    return [cls for cls in ours if cls.__module__.partition(".")[0] not in ("torch", "builtins")]


def _mentioned(module: nn.Module) -> Iterator[str]:
    """The names in the code of the module's constructors, torch's left out."""
    codes = [getattr(inspect.unwrap(vars(cls)["__init__"]), "__code__", None) for cls in _classes(module)]
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            yield from code.co_names
            codes += code.co_consts


# ---- running it again


class _Replay(TorchFunctionMode):
    """Runs events on stand-ins on `device`, and hands each that was written to `sink` as soon as it can be cut."""

    def __init__(self, tied: Tied, events: Sequence[Event], device: torch.device, sink: Sink) -> None:
        super().__init__()
        self.tied, self.events, self.device, self.sink = tied, events, device, sink
        self.places = {id(place.tensor): place for places in tied for place in reversed(places)}
        self.states = torch.empty(0)  # the random state before each event: [events bytes], in one piece
        self.history: dict[int, list[int]] = {}  # the events that a tensor's value follows from
        self.live: dict[int, StandIn] = {}
        self.aliases: dict[int, tuple[Tensor, int]] = {}  # `p.data`, and whose it is
        self.pinned: int | None = None

    def run(self) -> None:
        """All events, in order."""
        self.states = _random_state(self.device).repeat(len(self.events), 1)
        for i, event in enumerate(self.events):
            self.states[i] = _random_state(self.device) if event.copy_of is None else self.states[event.copy_of]
            self.call(i)  # The last copy ends where the first layer did.

    def call(self, i: int) -> None:
        """One event, from the random state it had; after it no stand-in lives."""
        self.at, event = i, self.events[i]
        _set_random_state(self.device, self.states[i])
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
            raise Error(f"{event} failed on {self.device}: {type(error).__name__}: {error}") from error

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
            if key in self.places:
                it = self._stand_in(key, name, x is target)
                real[id(x)] = it.tensor if key == id(x) else x
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: real.get(id(x), x), (args, kwargs))
        result = func(*args, **kwargs)
        if name in ("data", "detach") and id(target) in self.places:
            self.aliases[id(result)] = (result, id(target))
        return target if result is real.get(id(target)) else result  # for `module.weight *= 2`, which also assigns

    def _stand_in(self, key: int, function: str, target: bool) -> StandIn:
        """What stands for a tensor, with the value that has now unless `function` does not need it."""
        if key not in self.live:
            self._make_room(self.places[key].module)
            self.live[key] = StandIn(_empty_like(self.places[key].tensor, self.device))
        it = self.live[key]
        if it.state == "empty" and function not in LOOKS:
            it.state = "written" if target and function in OVERWRITES else "recalled"
            if it.state == "recalled" and self.device.type != "meta":
                self._recall(key, it.tensor)
        return it

    def _make_room(self, module: nn.Module) -> None:
        """Cuts what lives of other modules, before tensors of `module` come to life."""
        for key in [key for key in self.live if key != self.pinned and self.places[key].module is not module]:
            self._release(key)

    def _recall(self, key: int, tensor: Tensor) -> None:
        """Fills `tensor` with the value it has now, by running what wrote it again; with nan if nothing did."""
        past, now = self.history.get(key, []), _random_state(self.device)
        if self.at in past:
            raise Error(
                f"{self.events[self.at]} comes back to `{self.places[key].name}` after another module's tensors",
                **{"try": "initialise the modules one after the other"},
            )
        if tensor.is_floating_point():
            tensor.data.fill_(torch.nan)
        for i in past:
            again = _Replay(self.tied, self.events, self.device, lambda i, place, it: None)
            again.states, again.pinned, again.live = self.states, key, {key: StandIn(tensor, "written")}
            again.call(i)
        _set_random_state(self.device, now)

    def _release(self, key: int) -> None:
        it, place = self.live.pop(key), self.places[key]
        self.aliases = {i: alias for i, alias in self.aliases.items() if alias[1] != key}
        if it.state == "empty":
            return
        if it.state == "recalled" and not it.tensor.is_meta and bool(it.tensor.detach().sum().isnan()):
            raise Error(f"{self.events[self.at]} leaves `{place.name}` or a part of it empty", **_advice(place))
        self.history[key] = [*(self.history.get(key, []) if it.state == "recalled" else []), self.at]
        self.sink(self.at, place, it)


def _random_state(device: torch.device) -> Tensor:
    """The random state of the CPU and, if it has one of its own, of `device`: uint8 [bytes]"""
    states = [torch.get_rng_state()]
    if device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states)


def _set_random_state(device: torch.device, state: Tensor) -> None:
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size].clone())
    if state.numel() > size:
        torch.get_device_module(device).set_rng_state(state[size:].clone(), device)


def _function_name(func: Any) -> str:
    """`normal_`; of a property its name, `shape`, and of its setter `data=`."""
    name = getattr(func, "__name__", "")
    if name not in ("__get__", "__set__"):
        return name
    return getattr(func.__self__, "__name__", "") + ("=" if name == "__set__" else "")


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(tensor, device=device, requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


# ---- whether that is what the construction ran


def _check(model: nn.Module, tied: Tied, events: Sequence[Event]) -> dict[int, str]:
    """Replays on meta, where nothing is drawn or stored, and compares the writes with those the model has seen.

    Returns:
        id of a tensor -> first name, for those whose values stay: of tied ones that which was written last.
    """
    _expect_traces(model, events)
    writes: dict[int, list[Write]] = {id(place.tensor): [] for places in tied for place in places}
    now = torch.get_rng_state()
    _Replay(tied, events, torch.device("meta"), lambda i, place, it: writes[id(place.tensor)].append((i, it))).run()
    torch.set_rng_state(now)
    kept: dict[int, str] = {}
    for places in [places for places in tied if places[0].tensor.is_meta]:
        own = [writes[id(place.tensor)] for place in places]
        _expect_all([places], {places[0].name} if any(own) else ())
        kept[id(places[_settle(places, own, events, _ways(model, places))].tensor)] = places[0].name
    return kept


def _settle(places: list[Place], own: list[list[Write]], events: Sequence[Event], ways: list[Way]) -> int:
    """The place whose own tensor ends as the tied one did: that with which the writes are as many as it has seen.

    Args:
        own: for each place the writes on a tensor of its own.
    """
    counts: list[int] = []
    fitting: dict[tuple[int, ...], int] = {}  # by the events that the value follows from
    for origin, shared in ways:
        writes = [w for k, mine in enumerate(own) for w in mine if k == origin or (shared and events[w[0]].owner)]
        writes.sort(key=lambda write: write[0])
        counts.append(sum(it.tensor._version for i, it in writes if events[i].counted))
        last = max((n for n, (_, it) in enumerate(writes) if it.state == "written"), default=0)
        value = tuple(i for i, _ in writes[last:])
        holders = [k for k, mine in enumerate(own) if value and set(value) <= {i for i, _ in mine}]
        if holders and (counts[-1] == places[0].tensor._version or not isinstance(places[0].tensor, nn.Parameter)):
            fitting[value] = holders[0]
    if len(fitting) > 1:
        raise Error(
            f"`{places[0].name}` is tied to `{places[1].name}`, and which was initialised last cannot be told",
            **{"try": "tie them in the constructor that has both: self.head.weight = self.embedding.weight"},
        )
    if not fitting:
        raise _other_writes(places[0], counts[0], [str(events[i]) for mine in own for i, _ in mine])
    return next(iter(fitting.values()))


def _ways(model: nn.Module, places: list[Place]) -> list[Way]:
    """How the places may have been tied: as the source says, else all ways."""
    if len(places) == 1 or not isinstance(places[0].tensor, nn.Parameter):
        return [(0, False)]
    homes, found = [place.module for place in places], []
    above = [module for module in model.modules() if set(homes) <= set(module.modules())]
    if any(map(_is_hugging_face, above)):
        return [(0, False)]
    for module in above:
        for source in [source for cls in _classes(module) for source in _sources(cls)]:
            applied = source.find(".apply(")
            for tie in TIE.finditer(source):
                to, origin = (_submodule(module, path) for path in tie.groups())
                if to in homes and origin in homes:
                    times = [True, False] if applied < 0 else [tie.start() < applied]
                    found += [(homes.index(origin), shared) for shared in times]
    return found or [(k, shared) for shared in (True, False) for k in range(len(homes))]


def _sources(cls: type) -> Iterator[str]:
    """The source of each method, where there is one."""
    for method in filter(inspect.isfunction, vars(cls).values()):
        try:
            yield inspect.getsource(method)
        except OSError:
            continue


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _expect_traces(model: nn.Module, events: Sequence[Event]) -> None:
    """No constructor draws random numbers that a replay would miss."""
    again = {event.module for event in events if event.call == "__init__"}
    for name, module in model.named_modules():
        draws, own = sorted(UNSEEN.intersection(_mentioned(module))), type(module).__name__
        if draws and module not in again:
            raise Error(
                f"the constructor of {own}, `{name or 'the model'}`, draws random numbers itself: {draws[0]}",
                **{"try": f"draw them in {own}.reset_parameters(self), and call that in the constructor"},
            )


def _expect_all(tied: Tied, found: Collection[str]) -> None:
    for place in [places[0] for places in tied if places[0].name not in found]:
        kind = "parameter" if isinstance(place.tensor, nn.Parameter) else "buffer"
        raise Error(f"nothing initialises the {kind} `{place.name}`, whose values are lost on meta", **_advice(place))


def _other_writes(place: Place, count: int, events: list[str]) -> Error:
    seen = place.tensor._version
    advice = _advice(place) if seen else {"try": 'the model built under torch.device("meta") itself, not a copy of it'}
    return Error(
        f"the constructors wrote `{place.name}` otherwise than its initialisers do",
        expected=f"{count} writes: {', '.join(events)}",
        got=f"{seen} writes",
        **advice,
    )


def _advice(place: Place) -> dict[str, str]:
    own, key = type(place.module).__name__, place.key
    advice = {"try": f"fill self.{key} in {own}.reset_parameters(self) and call that in the constructor,"}
    advice["or"] = "in _init_weights(self, module) of the model, applied at the end of its constructor"
    if not isinstance(place.tensor, nn.Parameter):
        advice["or else"] = 'make it with device="cpu": what is not on meta keeps its value'
    return advice
