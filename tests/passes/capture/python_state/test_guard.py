"""What forward reads: settings that change between calls, gradients that are wanted or not, Python's own chance."""

import copy
import itertools
import random
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from errors import line_of, message
from ranks import Checks
from small_models import Mlp, expect_same, twins, x
from torch import Tensor, nn

import autotp
from autotp.runtime.module import executable_of

checks = Checks()


class Options:
    def __init__(self) -> None:
        self.tau, self.options, self.unread = 1.0, {"scale": 1}, [1]


class Told(Mlp):
    """Reads a config, a dict in it, a list, a plain tensor, its class, and modules that may be replaced or missing."""

    power = 2

    def __init__(self) -> None:
        super().__init__()
        self.cfg, self.act, self.drop, self.names = Options(), nn.GELU(), nn.Dropout(0.0), ["a"]
        self.scale, self.head = torch.ones(8, dtype=torch.float64), nn.Linear(8, 8)
        self.note = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.up(x))) * self.cfg.tau * self.cfg.options["scale"] * self.scale
        y = self.drop(y) * len(self.names) * self.power
        y = y + self.extra(x) if hasattr(self, "extra") else y
        return self.head(y) if hasattr(self, "head") else y


def same(y: Tensor) -> Tensor:
    return y * 2


def new(out: int = 8) -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(8, out).double()


def half(model: Any) -> None:
    model.up.weight = nn.Parameter(model.up.weight / 2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute of an object": lambda m: setattr(m.cfg, "tau", 0.8),
    "a dict in it": lambda m: m.cfg.options.update(scale=3),
    "a list": lambda m: m.names.append("b"),
    "an activation": lambda m: setattr(m, "act", nn.ReLU()),
    "the rate of a dropout": lambda m: setattr(m.drop, "p", 0.5),
    "a plain tensor, in place": lambda m: m.scale.mul_(2),
    "a plain tensor": lambda m: setattr(m, "scale", torch.arange(8.0).double()),
    "a forward": lambda m: setattr(m.act, "forward", same),
    "no forward": lambda m: delattr(m.act, "forward"),
    "a head": lambda m: setattr(m, "head", new(5)),
    "a layer that is new": lambda m: setattr(m, "extra", new(8)),
    "a buffer that is new": lambda m: m.register_buffer("late", torch.ones(3)),
    "half a weight": half,
    "nothing": lambda m: delattr(m, "extra"),
    "no head": lambda m: delattr(m, "head"),
    "back": lambda m: setattr(m.drop, "p", 0.0),
}


@checks.on(2)
def settings_that_change(rank: int, n: int) -> None:
    torch.manual_seed(0)
    whole, parallel = twins(Told(), n, randomness="exact")
    for call, (name, change) in enumerate(CHANGES.items()):
        found = []
        for model in (whole, parallel):
            change(model)
            model.zero_grad()
            torch.manual_seed(call)
            found.append(model(x(call)))
            found[-1].square().sum().backward()
        torch.testing.assert_close(*found[::-1], rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
        expect_same(whole, parallel, name)
        state = autotp.full_state_dict(parallel)
        assert list(state) == (list(whole.state_dict()) if rank == 0 else [])
        for key, value in state.items():
            torch.testing.assert_close(value, whole.state_dict()[key])
        assert [type(m).__name__ for m in parallel.modules()] == [type(m).__name__ for m in whole.modules()]


@checks.on(2)
def what_nobody_reads_changes_nothing(rank: int, n: int) -> None:
    _, parallel = twins(Told(), n)
    for call in range(3):
        parallel.note, parallel.new_note = call, call
        parallel.train().eval().train()
        parallel(x(call))
    assert len(executable_of(parallel).graphs.entries) == 1


class Recurrent(Mlp):
    """torch keeps lists of the weights of an LSTM and of weak references to them, and rebuilds these by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.rnn(x[None])[0][0]))


@checks.on(2)
def steps_of_a_recurrent_layer(rank: int, n: int) -> None:
    """One graph for all steps of an optimizer, which writes into the weights, and the steps of one device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attributes", UserWarning)  # Of the exporter.
        whole, parallel = twins(Recurrent(), n)
        for model in (whole, parallel):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in range(3):
                optimizer.zero_grad()
                model(x(step)).square().sum().backward()
                optimizer.step()
        torch.testing.assert_close(parallel(x()), whole(x()))
    assert len(executable_of(parallel).graphs.entries) == 1


class InTables(Mlp):
    """Reads its attributes through its `__dict__`, which `nn.Module` does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.tau, self.power = 1.0, 1

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) * self.__dict__["tau"] * vars(self)["power"] * self.scaled()

    def scaled(self) -> float:
        return vars(self).get("scale", 1.0) * (3 if "mark" in dir(self) else 1)


@checks.on(2)
def an_attribute_read_through_dict(rank: int, n: int) -> None:
    whole, parallel = twins(InTables(), n)
    for tau, power in ((1.0, 1), (2.5, 1), (2.5, 3)):
        for model in (whole, parallel):
            model.tau, model.power = tau, power
        torch.testing.assert_close(parallel(x()), whole(x()))
    assert len(executable_of(parallel).graphs.entries) == 3
    for model in (whole, parallel):
        vars(model)["scale"] = 2.0  # As a descriptor of the class may do.
    torch.testing.assert_close(parallel(x()), whole(x()))
    assert len(executable_of(parallel).graphs.entries) == 4
    for model in (whole, parallel):
        model.mark = True
    torch.testing.assert_close(parallel(x()), whole(x()))


@checks.on(2)
def a_class_attribute(rank: int, n: int) -> None:
    whole, parallel = twins(Told(), n)
    try:
        for power in (2, 3, 2):
            Told.power = power
            torch.testing.assert_close(parallel(x()), whole(x()))
    finally:
        Told.power = 2
    assert len(executable_of(parallel).graphs.entries) == 2


@checks.on(2)
def by_type(rank: int, n: int) -> None:
    """What people do to modules of a class reaches them: freezing, groups for decay, dropouts, `apply`."""
    whole, parallel = twins(Told(), n, randomness="exact")
    for model in (whole, parallel):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.bias.requires_grad_(False)
            if isinstance(module, nn.Dropout):
                module.p = 0.5
        model.apply(lambda m: nn.init.zeros_(m.bias) if type(m).__name__ == "Linear" else None)
        torch.manual_seed(3)
        model(x()).sum().backward()
    expect_frozen = [p.grad is None for p in whole.parameters()]
    assert [p.grad is None for p in parallel.parameters()] == expect_frozen and any(expect_frozen)
    assert isinstance(parallel, Told) and isinstance(parallel, autotp.ParallelModule)
    assert type(parallel).__name__ == "Told" and type(parallel).__qualname__ == "Told"
    with torch.no_grad():
        torch.testing.assert_close(parallel.eval()(x()), whole.eval()(x()))


class AsksMode(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * (2 if torch.is_grad_enabled() else 1)


class AsksInput(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * (2 if x.requires_grad else 1)


class AsksValue(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y * (2 if y.requires_grad else 1)


class AsksWeight(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * (2 if self.up.weight.requires_grad else 1)


class AsksInference(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * (2 if torch.is_inference_mode_enabled() else 1)


ASKING = (AsksMode, AsksInput, AsksValue, AsksWeight, AsksInference)


@checks.on(2)
def whether_gradients_are_wanted(rank: int, n: int) -> None:
    for kind in ASKING:
        whole, parallel = twins(kind(), n)
        for call in range(6):
            given = x(call).requires_grad_(call % 2 == 0)
            for model in (whole, parallel):
                model.requires_grad_(call != 3)
            mode = torch.inference_mode() if call == 5 else torch.set_grad_enabled(call not in (1, 4))
            with mode:
                torch.testing.assert_close(parallel(given), whole(given), msg=lambda m, k=kind: f"{k.__name__}: {m}")


class Dice(Mlp):
    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw, self.source, self.rng = draw, random.Random(1), np.random.default_rng(2)

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.draw() if isinstance(self.draw, types.BuiltinFunctionType) else self.draw(self)
        return self.mlp(x) * (2 if drawn < 0.5 else 1)


# ---- what functions hold


class Closed(Mlp):
    """A function that holds the model, one that holds a weight, and a hook that reads a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.k = 1.0
        weight = self.up.weight
        self.scaled, self.again = lambda y: y * self.k, lambda y: nn.functional.linear(y, weight)
        self.handle = self.down.register_forward_hook(lambda module, args, y: y + self.k)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.mlp(x)) + self.down(torch.relu(self.again(x)))


def wrapped(model: Any) -> None:
    inner = model.forward
    model.forward = lambda *args, **given: inner(*args, **given) * 2


def scaled(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
    return lambda *args: function(*args) * factor


def methodical(model: Any) -> None:
    """As accelerate does: functions around the function of the method, each bound again."""
    for factor in (0.5, 3.0):
        inner = model.forward
        is_bound = hasattr(inner, "__func__")
        model.forward = types.MethodType(scaled(inner.__func__, factor), model) if is_bound else scaled(inner, factor)


FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "nothing": lambda m: None,
    "a setting": lambda m: setattr(m, "k", 0.5),
    "forward around forward": wrapped,
    "forward around both": wrapped,
    "a method around a function": methodical,
    "forward of a part, twice": lambda m: [wrapped(m.up), methodical(m.up)],
    "a hook that goes": lambda m: m.handle.remove(),
}


@checks.on(2)
def what_functions_hold(rank: int, n: int) -> None:
    torch.manual_seed(0)
    whole, parallel = Closed().double(), autotp.parallelize(_closed(), n, example_inputs=(x(),))
    for name, change in FUNCTIONS.items():
        losses = []
        for model in (whole, parallel):
            change(model)
            model.zero_grad()
            losses.append(model(x()).square().sum())
            losses[-1].backward()
        torch.testing.assert_close(*losses[::-1], rtol=1e-10, atol=0, msg=lambda m, name=name: f"{name}: {m}")
        expect_same(whole, parallel, name)


def _closed() -> nn.Module:
    torch.manual_seed(0)
    return Closed().double()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


# ---- one process


SOURCES = {
    "Python's `random`": lambda model: random.random(),
    "Python's `numpy.random`": lambda model: np.random.rand(),
    "`draw`": random.Random(3).random,
    "`source`": lambda model: model.source.random(),
    "`rng`": lambda model: model.rng.random(),
}


@pytest.mark.parametrize(("name", "draw"), SOURCES.items(), ids=list(SOURCES))
def test_chance_of_python_is_refused(name: str, draw: Callable[[], Any]) -> None:
    """With the line that draws: that of a function of Python, or that which calls a generator itself."""
    line = line_of(__file__, "drawn = self.draw()" if name == "`draw`" else f'"{name}": lambda')
    for call in (autotp.parallelize, autotp.explain, autotp.verify):
        states = random.getstate(), np.random.get_state()[1].tolist()
        assert message(call, Dice(draw), 1, example_inputs=(x().float(),)).partition(": ")[2] == (
            f"forward draws a number from {name}, and every later call would use the same number\n"
            f"  at       {line}\n"
            "  try      torch.rand(()), and torch.where on it; or draw it outside, as an argument of forward"
        )
        assert states == (random.getstate(), np.random.get_state()[1].tolist())


class Generated(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + torch.rand(8, generator=self.generator)  # its own


def test_a_generator_of_its_own_is_refused() -> None:
    with pytest.raises(autotp.Error, match=r"draws from a torch.Generator of its own, .*\n  at .* # its own\n  try"):
        autotp.parallelize(Generated(), 1, example_inputs=(x().float(),))


@pytest.mark.parametrize("kind", ASKING, ids=lambda kind: kind.__name__)
def test_verify_of_those_that_ask(kind: Callable[[], nn.Module]) -> None:
    assert autotp.verify(kind().double(), 2, example_inputs=(x(),)).ok


class Parametrized(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Packed(nn.Parameter):
    """What a library that quantizes puts in the place of a weight."""


def refusals() -> Iterator[tuple[str, Callable[[Any], object]]]:
    yield (
        "`up` was parametrized when its model was parallel already, and its weight is cut\n"
        "  try      parametrize the original model, before autotp.parallelize",
        lambda m: nn.utils.parametrize.register_parametrization(m.up, "weight", Parametrized()),
    )
    yield (
        "`up.weight` was replaced by a Packed when its model was parallel already\n"
        "  try      the parameter as it was: quantized weights cannot be cut, before autotp.parallelize or after",
        lambda m: setattr(m.up, "weight", Packed(m.up.weight.detach())),
    )


@pytest.mark.parametrize(("text", "change"), list(refusals()), ids=["parametrized", "quantized"])
def test_what_is_done_too_late(text: str, change: Callable[[Any], object]) -> None:
    parallel = autotp.parallelize(Mlp2(), 1, example_inputs=(x(),))
    change(parallel)
    assert message(lambda: parallel(x())) == text


class Mlp2(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def test_a_copy_captures_for_itself() -> None:
    """What is set on it before its first call is what its graph has."""
    parallel = autotp.parallelize(Told().double(), 1, example_inputs=(x(),))
    other = copy.deepcopy(parallel)
    other.cfg.tau = 3.0
    torch.testing.assert_close(other(x()) - other.head.bias, 3 * (parallel(x()) - parallel.head.bias))
    assert (parallel.cfg.tau, len(executable_of(parallel).graphs.entries)) == (1.0, 1)


def test_many_captures_are_warned_of() -> None:
    parallel = autotp.parallelize(Told().double(), 1, example_inputs=(x(),))
    with pytest.warns(UserWarning, match=r"captured for the 9th time, since `cfg.tau` had another value"):
        for call in range(10):
            parallel.cfg.tau = call + 0.5
            parallel(x(call))


class Weakly(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.down.parent = weakref.ref(self)
        self.k = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.down.parent().k


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 1


class Opaque(Mlp):
    def __init__(self, what: Any, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.what, self.change = what, change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.what)
        return self.mlp(x)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Weakly(), "`down.parent` is a weak reference to the model, which a copy of it would not follow"),
        (Opaque(Slotted(), lambda what: setattr(what, "n", what.n + 1)), "forward changes `what`, a Slotted, which"),
        (Opaque(itertools.count(), next), "forward changes `what`, a count, which a graph cannot do"),
        (Opaque(np.zeros(2), lambda what: what.fill(1)), "forward changes `what`, a ndarray, which a graph cannot do"),
    ],
    ids=["weakref", "slots", "iterator", "array"],
)
def test_state_that_cannot_be_followed_is_refused(model: nn.Module, text: str) -> None:
    assert text in message(lambda: autotp.parallelize(model, 1, example_inputs=(x().float(),)))


GLOBAL: list[Tensor] = []


class Leaking(Mlp2):
    def forward(self, x: Tensor) -> Tensor:
        GLOBAL.append(self.mlp(x))
        return GLOBAL[-1]


class Remembering(nn.Module):
    """A sum with the tensors of containers, which the training loop changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.memories, self.named = nn.Linear(4, 4), list[Tensor](), dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        for memory in (*self.memories, *self.named.values()):
            x = x + memory
        return self.up(x)


def test_containers_of_inputs_may_be_changed_in_place() -> None:
    whole, given = Remembering(), torch.ones(2, 4)
    parallel = autotp.parallelize(copy.deepcopy(whole), tp=1, example_inputs=given)

    def remember(model: Any, step: int) -> None:
        if step < 2:
            model.memories.append(torch.full((4,), float(step)))
        elif step < 4:
            model.named[step] = torch.full((4,), float(step))
        elif step == 4:
            del model.memories[1:]
        else:
            model.named.popitem()

    for step in range(6):
        remember(whole, step)
        remember(parallel, step)
        assert torch.equal(parallel(given), whole(given)), step


def test_a_tensor_in_a_global_is_refused() -> None:
    with pytest.raises(autotp.Error, match=r"forward changes a list that the module of `Leaking.forward` holds"):
        autotp.parallelize(Leaking(), 1, example_inputs=(x(),))
    assert GLOBAL == []


def test_a_state_in_inference_mode() -> None:
    class Kept(Mlp2):
        def forward(self, x: Tensor) -> Tensor:
            self.mem = self.mlp(x) + getattr(self, "mem", 0)
            return self.mem

    whole = Kept()
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=(x(),))
    for call in range(3):
        with torch.inference_mode():
            torch.testing.assert_close(parallel(x(call)), whole(x(call)))


def test_parameters_in_a_plain_list() -> None:
    class Listed(Mlp2):
        def __init__(self) -> None:
            super().__init__()
            self.weights = [self.up.weight, self.down.weight]

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x @ self.weights[0].T) @ self.weights[1].T

    whole = Listed()
    assert autotp.verify(whole, 2, example_inputs=(x(),)).ok
