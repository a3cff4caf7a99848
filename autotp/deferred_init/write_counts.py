"""Checks that the initialisers write as often as the constructors did, and finds which tied tensor keeps its value.

Before: writes of a replay on meta: Linear.reset_parameters() one, GPT._init_weights(Linear) one
After:  `_version` of the weight is 2, as expected; for tied tensors, the tensor that was written last
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from autotp.deferred_init.events import Event, TensorPlace, Tied, how_to_fill, is_hugging_face, mentioned, users_classes
from autotp.deferred_init.replay import Replay, StandIn
from autotp.errors import Error

UNSEEN = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal", "bernoulli", "multinomial"}
UNSEEN |= {"trunc_normal_", "orthogonal_", "sparse_"}  # Random draws without trace in a constructor on meta.
Tie = tuple[int, bool]  # The place of the tied tensor; whether it was tied before `_init_weights` wrote.
CountedWrite = tuple[int, StandIn]  # The number of the event, and the stand-in that it wrote to.


def check_traces(model: nn.Module, tied: Tied, events: Sequence[Event]) -> dict[int, str]:
    """Replays on meta, which draws and stores nothing, and compares the writes with those of the constructors.

    Returns:
        id of a tensor -> first name, for the tensors that keep their values: of tied tensors the one written last.
    """
    _expect_traces(model, events)
    writes: dict[int, list[CountedWrite]] = {id(place.tensor): [] for places in tied for place in places}
    now = torch.get_rng_state()
    Replay(
        tied, events, torch.device("meta"), lambda i, place, stand_in: writes[id(place.tensor)].append((i, stand_in))
    ).run()
    torch.set_rng_state(now)
    names_by_id: dict[int, str] = {}
    for places in [places for places in tied if places[0].tensor.is_meta]:
        by_place = [writes[id(place.tensor)] for place in places]
        expect_all([places], {places[0].name} if any(by_place) else ())
        names_by_id[id(places[_settle(places, by_place, events, _ways(model, places))].tensor)] = places[0].name
    return names_by_id


def _settle(
    places: list[TensorPlace], by_place: list[list[CountedWrite]], events: Sequence[Event], ways: list[Tie]
) -> int:
    """Returns the place whose tensor has the value of the tied tensor: then the writes are as many as it has counted.

    Args:
        by_place: for each place the writes to its separate tensor.
    """
    counts: list[int] = []
    fitting: dict[tuple[int, ...], int] = {}  # Events that the value depends on -> place.
    for origin, shared in ways:
        # Only writes to the origin count, and those of `_init_weights` to any place, if it came after the tie.
        writes = [w for k, row in enumerate(by_place) for w in row if k == origin or (shared and events[w[0]].owner)]
        writes.sort(key=lambda write: write[0])
        counts.append(sum(stand_in.tensor._version for i, stand_in in writes if events[i].counted))
        # A write that overwrites makes the earlier ones void.
        last = max((n for n, (_, stand_in) in enumerate(writes) if stand_in.state == "written"), default=0)
        value = tuple(i for i, _ in writes[last:])
        holders = [k for k, row in enumerate(by_place) if value and set(value) <= {i for i, _ in row}]
        if holders and (counts[-1] == places[0].tensor._version or not isinstance(places[0].tensor, nn.Parameter)):
            fitting[value] = holders[0]
    if len(fitting) > 1:
        raise Error(
            f"`{places[0].name}` is tied to `{places[1].name}`, and it is not clear which was initialised last",
            fix="tie them in the constructor that has both: self.head.weight = self.embedding.weight",
        )
    if not fitting:
        raise _other_writes(places[0], counts[0], [str(events[i]) for row in by_place for i, _ in row])
    return next(iter(fitting.values()))


def _ways(model: nn.Module, places: list[TensorPlace]) -> list[Tie]:
    """Returns how the places may have been tied: as the source says; if it does not say, all possibilities."""
    if len(places) == 1 or not isinstance(places[0].tensor, nn.Parameter):
        return [(0, False)]
    homes, ties = [place.module for place in places], []
    above = [module for module in model.modules() if set(homes) <= set(module.modules())]
    if any(map(is_hugging_face, above)):
        return [(0, False)]
    for module in above:
        for source in [source for cls in users_classes(module) for source in _sources(cls)]:
            body = ast.parse(textwrap.dedent(source))
            applied = [n.lineno for n in ast.walk(body) if isinstance(n, ast.Attribute) and n.attr == "apply"]
            for line, to, origin in _ties(body, module):
                if to in homes and origin in homes:
                    times = [line < applied[0]] if applied else [True, False]
                    ties += [(homes.index(origin), shared) for shared in times]
    return ties or [(k, shared) for shared in (True, False) for k in range(len(homes))]


def _ties(body: ast.Module, module: nn.Module) -> Iterator[tuple[int, nn.Module | None, nn.Module | None]]:
    """Yields assignments of a submodule's attribute to another's, also through a local name: (line, target, source)."""
    names: dict[str, nn.Module | None] = {}
    for node in ast.walk(body):
        if not isinstance(node, ast.Assign):
            continue
        value = node.value
        origin = names.get(value.id) if isinstance(value, ast.Name) else _home(value, module)
        for target in node.targets:
            if isinstance(target, ast.Name):
                names[target.id] = origin
            elif origin is not None:
                yield node.lineno, _home(target, module), origin


def _home(node: ast.expr, module: nn.Module) -> nn.Module | None:
    """Returns the submodule that has the attribute `self.a.b.weight`."""
    first, *path = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else [""]
    return _submodule(module, ".".join(path[:-1])) if first == "self" else None


def _sources(cls: type) -> Iterator[str]:
    """Yields the source of each method, if it is known."""
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
    """Raises Error if a constructor draws random numbers that a replay would miss."""
    again = {event.module for event in events if event.call == "__init__"}
    for name, module in model.named_modules():
        draws, class_name = sorted(UNSEEN.intersection(mentioned(module))), type(module).__name__
        if draws and module not in again:
            raise Error(
                f"the constructor of {class_name}, `{name or 'the model'}`, draws random numbers itself: {draws[0]}",
                fix=f"draw them in {class_name}.reset_parameters(self), and call that in the constructor",
            )


def expect_all(tied: Tied, initialised: Collection[str]) -> None:
    """Raises Error for the first tensor whose name is not among those `initialised`."""
    for place in [places[0] for places in tied if places[0].name not in initialised]:
        role = "parameter" if isinstance(place.tensor, nn.Parameter) else "buffer"
        problem = f"nothing initialises the {role} `{place.name}`, whose values are lost on meta"
        raise Error(problem, **how_to_fill(place))


def _other_writes(place: TensorPlace, count: int, events: list[str]) -> Error:
    version = place.tensor._version
    not_a_copy = {"fix": 'the model built under torch.device("meta") itself, not a copy of it'}
    return Error(
        f"the constructors wrote `{place.name}` differently from its initialisers",
        expected=f"{count} writes: {', '.join(events)}",
        got=f"{version} writes",
        **(how_to_fill(place) if version else not_a_copy),
    )
