"""What forward reads of classes and of Python's globals, what it writes there, and state in odd places."""

import argparse
import collections
import functools
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from ranks import Checks
from small_models import Mlp, expect_same, x
from torch import Tensor, nn

import autotp
from autotp.passes.capture.python_state.code_names import NamedBefore, is_library, named
from autotp.runtime.module import executable_of

checks = Checks()
CALLS = 4


class Doubled(Mlp):
    """Everything that a class may hold, read by itself, by its class and by name."""

    power, unread, memo = 2.0, 0, {"scale": 1.0}

    def helper(self, y: Tensor) -> Tensor:
        return y * 2

    @staticmethod
    def act(y: Tensor) -> Tensor:
        return torch.relu(y)

    @classmethod
    def factor(cls) -> float:
        return 1.0

    @property
    def tau(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.up(x))) * self.factor() * self.tau * type(self).power * Doubled.memo["scale"]
        return self.helper(y)


class Told(nn.Module):
    """A module that the class of another one is told of; and what lies in containers of odd kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cfg = Doubled(), Config()
        self.chain = collections.ChainMap({}, {"k": 1.0})
        self.base = {"k": 1.0}
        self.proxy, self.own = types.MappingProxyType(self.base), OwnDict()
        self.far, self.k = weakref.ref(self.cfg), 1.0
        self.held, self.plain = {"k": 1.0}, torch.ones(8, dtype=torch.float64)
        self.get = self.held.get

    def forward(self, x: Tensor, options: list[float] = [1.0]) -> Tensor:  # noqa: B006
        y = self.inner(x) * self.cfg.scale * self.cfg.tau() * self.chain["k"] * self.proxy["k"] * self.own.k
        y = y * self.get("k") * OF_TABLE("k") * HALVED() * TAU()
        y = y * float(ARRAY[0]) * ARGS.k * ORDERED["k"] * COUNTED["k"] * self.plain
        return called(y) * SCALE * TABLE["k"] * self.far().note * self.k * options[0]


class Config:
    scale = 1.0

    def __init__(self) -> None:
        self.note = 1.0

    def tau(self) -> float:
        return 1.0

    def noted(self) -> float:
        return self.note


class OwnDict(dict[str, float]):
    def __init__(self) -> None:
        super().__init__()
        self.k = 1.0


SCALE = 1.0
TABLE = {"k": 1.0}
OTHER = {"k": 1.0}
OF_TABLE = OTHER.get
HALVED = functools.partial(lambda options: options["k"] / 2, {"k": 2.0})
ARRAY, ARGS = np.ones(1), argparse.Namespace(k=1.0)
ORDERED, COUNTED = collections.OrderedDict(k=1.0), collections.defaultdict(lambda: 1.0)
CONFIG = Config()
TAU = CONFIG.noted


def called(y: Tensor) -> Tensor:
    return y


def in_globals(name: str, value: Any) -> None:
    globals()[name] = value


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda m: None,
    "a method": lambda m: setattr(Doubled, "helper", lambda self, y: y * 3),
    "a method, by the class of a module": lambda m: setattr(type(m.inner), "helper", lambda self, y: y * 5),
    "a static method": lambda m: setattr(Doubled, "act", staticmethod(torch.tanh)),
    "a class method": lambda m: setattr(Doubled, "factor", classmethod(lambda cls: 2.0)),
    "a property": lambda m: setattr(Doubled, "tau", property(lambda self: 3.0)),
    "an attribute": lambda m: setattr(Doubled, "power", 3.0),
    "a dict of a class": lambda m: Doubled.memo.update(scale=2.0),
    "an attribute of a config's class": lambda m: setattr(Config, "scale", 2.0),
    "a method of a config": lambda m: setattr(Config, "tau", lambda self: 2.0),
    "a chain of dicts": lambda m: m.chain.maps[1].update(k=2.0),
    "a dict behind a proxy": lambda m: m.base.update(k=2.0),
    "an attribute of a dict": lambda m: setattr(m.own, "k", 2.0),
    "a global": lambda m: in_globals("SCALE", 3.0),
    "a dict of the module": lambda m: TABLE.update(k=3.0),
    "a function of the module": lambda m: in_globals("called", lambda y: y * 7),
    "behind a weak reference": lambda m: setattr(m.cfg, "note", 2.0),
    "around __setattr__": lambda m: object.__setattr__(m, "k", 2.0),
    "around it all": lambda m: vars(m).update(k=3.0),
    "a default": lambda m: Told.forward.__defaults__[0].__setitem__(0, 2.0),
    "a dict whose method the module holds": lambda m: m.held.update(k=2.0),
    "a dict whose method is a global": lambda m: OTHER.update(k=2.0),
    "a dict in a partial that is a global": lambda m: HALVED.args[0].update(k=3.0),
    "an object whose method is a global": lambda m: setattr(CONFIG, "note", 3.0),
    "an array that is a global": lambda m: ARRAY.fill(2.0),
    "parsed arguments": lambda m: setattr(ARGS, "k", 3.0),
    "an ordered dict": lambda m: ORDERED.update(k=2.0),
    "a dict with defaults": lambda m: COUNTED.update(k=3.0),
    "the data of a plain tensor": lambda m: setattr(m.plain, "data", torch.full((8,), 2.0, dtype=torch.float64)),
    "torch's default dtype": lambda m: torch.set_default_dtype(torch.float64),
}


def pair(kind: Callable[[], nn.Module], n: int) -> tuple[nn.Module, Any]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind().double())
    return models[0], autotp.parallelize(models[1], n, example_inputs=(x(),))


@checks.on(2)
def what_code_names(rank: int, n: int) -> None:
    whole, parallel = pair(Told, n)
    before: Tensor | None = None
    for name, change in CHANGES.items():
        change(whole), change(parallel)
        for model in (whole, parallel):
            model.zero_grad()
        expected, found = whole(x()), parallel(x())
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
        expected.sum().backward(), found.sum().backward()
        expect_same(whole, parallel, name)
        assert before is None or name == "torch's default dtype" or not torch.equal(before, expected), name
        before = expected.detach()


FACTOR = {"k": 1.0}


def scaled(f: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A decorator that counts, in a variable of its own, and reads a dict."""
    calls, options = 0, FACTOR

    @functools.wraps(f)
    def wrapped(self: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return f(self, x) * options["k"] * calls

    return wrapped


class Kind(type):
    @property
    def size(cls) -> float:
        return cls.own_size  # type: ignore[attr-defined, no-any-return]


class Mixin:
    def act(self, x: Tensor) -> Tensor:
        return x.tanh() * type(self).size * self.late  # type: ignore[attr-defined, no-any-return]


class Base(Mlp):
    own_size, late = 1.0, 1.0


class Called:
    def __call__(self, x: Tensor) -> Tensor:
        return x


class Around(Mixin, Base, metaclass=Kind):
    """What code reads around itself: closures, defaults, a mixin before a base class, a metaclass, a partial."""

    def __init__(self) -> None:
        super().__init__()
        self.partial, self.called = functools.partial(torch.clamp, min=-1.0), Called()

    @scaled
    def forward(self, x: Tensor) -> Tensor:
        y = self.partial(self.act(self.up(x)))
        return self.times(self.called(self.down(y)))

    def times(self, x: Tensor, by: float = 1.0, *, again: float = 1.0) -> Tensor:
        return x * by * again


def doubled(self: Any, x: Tensor, by: float = 1.0, *, again: float = 1.0) -> Tensor:
    return x * by * again * 2


AROUND: dict[str, Callable[[Any], object]] = {
    "nothing but another call": lambda m: None,
    "a dict of a decorator": lambda m: FACTOR.update(k=2.0),
    "a base class": lambda m: setattr(Base, "late", 2.0),
    "a mixin before it": lambda m: setattr(Mixin, "late", 3.0),
    "the class before both": lambda m: setattr(Around, "late", 4.0),
    "what a metaclass reads": lambda m: setattr(Base, "own_size", 3.0),
    "a default": lambda m: setattr(Around.times, "__defaults__", (2.0,)),
    "a default by name": lambda m: setattr(Around.times, "__kwdefaults__", {"again": 2.0}),
    "code": lambda m: setattr(Around.times, "__code__", doubled.__code__),
    "a keyword of a partial": lambda m: m.partial.keywords.update(min=0.1),
    "how an object is called": lambda m: setattr(Called, "__call__", lambda self, x: x * 3),
}


@checks.on(2)
def what_code_reads_around_itself(rank: int, n: int) -> None:
    whole, parallel = pair(Around, n)
    decorated: Any = Around.forward
    calls = dict(zip(decorated.__code__.co_freevars, decorated.__closure__, strict=True))["calls"]
    count, before = calls.cell_contents, torch.zeros(())
    for name, change in AROUND.items():
        change(whole), change(parallel)
        calls.cell_contents = count
        whole.zero_grad(), parallel.zero_grad()
        expected = whole(x())
        assert calls.cell_contents == count + 1
        calls.cell_contents = count
        found = parallel(x())
        count += 1
        assert calls.cell_contents == count, name
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
        expected.sum().backward(), found.sum().backward()
        expect_same(whole, parallel, name)
        unscaled = expected.detach() / count
        assert not torch.equal(before, unscaled) or name.startswith("nothing"), name
        before = unscaled


@checks.on(2)
def what_no_code_names(rank: int, n: int) -> None:
    """A loop that counts in its own globals, and on classes, captures nothing anew."""
    whole, parallel = pair(Told, n)
    for step in range(3):
        in_globals("step", step)
        Doubled.unread, parallel.epoch, parallel.inner.note = step, step, step
        torch.testing.assert_close(parallel(x(step)), whole(x(step)))
    assert len(executable_of(parallel).graphs.entries) == 1


SEEN = 0


class CountsOnClass(Mlp):
    """Numbers that forward writes to its class, and to a global."""

    n = 0

    def forward(self, x: Tensor) -> Tensor:
        global SEEN
        SEEN += 1
        type(self).n += 1
        return self.mlp(x) * (2 if CountsOnClass.n % 2 == 0 else 1) * (3 if SEEN % 3 == 0 else 1)


@checks.on(2)
def what_forward_writes_to_its_class(rank: int, n: int) -> None:
    whole, parallel = pair(CountsOnClass, n)
    assert (CountsOnClass.n, SEEN) == (0, 0)
    rows = []
    for model in (whole, parallel):
        CountsOnClass.n = 0
        in_globals("SEEN", 0)
        rows.append([model(x(call)).detach() for call in range(CALLS)])
        assert (CountsOnClass.n, SEEN) == (CALLS, CALLS)
    torch.testing.assert_close(*rows[::-1], rtol=1e-10, atol=1e-12)


class OwnList(list[Tensor]):
    n = 0


class OddPlaces(Mlp):
    """State in the attributes of a list, and in a chain of dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.chain = OwnList(), collections.ChainMap[str, Any]({"n": 0, "h": torch.zeros(8).double()})

    def forward(self, x: Tensor) -> Tensor:
        self.losses.n += 1
        self.chain["n"] += 2
        y = self.mlp(x) * (2 if self.losses.n % 2 else 1) * (3 if self.chain["n"] % 4 else 1) + self.chain["h"]
        self.chain["h"] = y.detach().mean(0)
        self.losses.append(y.mean())
        return y


@checks.on(2)
def what_forward_writes_to_odd_places(rank: int, n: int) -> None:
    whole, parallel = pair(OddPlaces, n)
    for call in range(CALLS):
        for model in (whole, parallel):
            model.zero_grad()
        expected, found = whole(x(call)), parallel(x(call))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        for model, y in ((whole, expected), (parallel, found)):
            (y.sum() + sum(model.losses)).backward()
            model.losses.clear()
        expect_same(whole, parallel)
        assert type(parallel.losses) is OwnList and parallel.losses.n == whole.losses.n == call + 1
        assert parallel.chain["n"] == whole.chain["n"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


# ---- one process


class OnClass(Mlp):
    cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        OnClass.cache = self.mlp(x)
        return OnClass.cache


class InClass(Mlp):
    memo: dict[str, Tensor] = {}  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        self.memo["h"] = self.mlp(x)
        return self.memo["h"]


class View(Mlp):
    def __init__(self, of: str) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4, 8))
        self.row = {"buffer": self.table[1], "weight": self.up.weight[:1], "nothing": torch.ones(8)}[of]
        self.part = self.row[:4]

    def forward(self, x: Tensor) -> Tensor:
        self.row.mul_(2.0)
        return self.mlp(x) * self.row


class Holding(Mlp):
    """A layer that no module has: in a list, a dict, an object, a function, a global."""

    def __init__(self, how: str) -> None:
        super().__init__()
        layer = nn.Linear(8, 8)
        held: dict[str, Any] = {
            "list": [layer], "dict": {"a": layer}, "object": types.SimpleNamespace(a=layer),
            "function": lambda y: layer(y), "partial": functools.partial(layer), "global": None,
        }  # fmt: skip
        self.held, self.how = held[how], how

    def forward(self, x: Tensor) -> Tensor:
        layers: dict[str, Callable[[], Any]] = {
            "list": lambda: self.held[0], "dict": lambda: self.held["a"], "object": lambda: self.held.a,
            "global": lambda: LAYER,
        }  # fmt: skip
        return layers.get(self.how, lambda: self.held)()(self.mlp(x))  # type: ignore[no-any-return]


LAYER = nn.Linear(8, 8)
LOST = "is no submodule: what it learns would be lost\n  try      self.name = module, nn.ModuleList or nn.ModuleDict"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (OnClass, "forward changes `OnClass.cache`, an attribute of its class, which a graph cannot do"),
        (InClass, "forward changes `InClass.memo`, an attribute of its class, which a graph cannot do"),
        (
            lambda: View("buffer"),
            "`row` is a view of `table`, and would not be a view in the parallel model\n  try",
        ),
        (lambda: View("weight"), "`row` is a view of `up.weight`, and would not be a view in the parallel model"),
        (
            lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8))),
            "`0.weight` is a view of `0.weight_orig`, and would not be a view in the parallel model\n  try      "
            "torch.nn.utils.parametrizations.spectral_norm, in place of torch.nn.utils.spectral_norm",
        ),
        (lambda: View("nothing"), "forward writes into `row`, with which `part` shares memory\n  try      make"),
        (lambda: Holding("list"), f"`held.0` leads to a Linear that {LOST}"),
        (lambda: Holding("dict"), f"`held.a` leads to a Linear that {LOST}"),
        (lambda: Holding("object"), f"`held.a` leads to a Linear that {LOST}"),
        (lambda: Holding("function"), f"`held` leads to a Linear that {LOST}"),
        (lambda: Holding("partial"), f"`held` leads to a Linear that {LOST}"),
        (lambda: Holding("global"), f"`test_code_names.LAYER` leads to a Linear that {LOST}"),
    ],
    ids=[
        "class",
        "in-class",
        "buffer",
        "weight",
        "norm",
        "shared",
        "list",
        "dict",
        "object",
        "function",
        "partial",
        "global",
    ],
)
def test_refused(make: Callable[[], nn.Module], text: str) -> None:
    model = make()
    with pytest.raises(autotp.Error) as raised:
        autotp.parallelize(model, 1, example_inputs=(x().float(),))
    assert str(raised.value).startswith(f"parallelize({type(model).__name__}, tp=1): {text}")
    assert OnClass.cache is None and InClass.memo == {}
    assert not isinstance(model, autotp.ParallelModule) and LAYER.weight.grad is None


class At(Mlp):
    def forward(self, x: Tensor, start: float) -> Tensor:
        return self.mlp(x) * start


def test_a_number_that_counts_is_warned_of() -> None:
    """A number with a point. (A whole one needs no graph of its own: `test_number_arguments.py`.)"""
    parallel = autotp.parallelize(At().double(), 1, example_inputs=(x(), 0.5))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for start in range(1, 12):
            parallel(x(), start / 2)
    (warning,) = [str(one.message) for one in said if "captured" in str(one.message)]
    assert warning == (
        "At.forward is captured for the 9th time, since `start` had another value each time. "
        "A tensor (without dimensions, as `torch.tensor(3)`) may change without a new capture"
    )


def test_what_nobody_reads_compiles_nothing() -> None:
    torch.manual_seed(0)
    parallel: Any = autotp.parallelize(Told().double(), 1, example_inputs=(x(),))
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(parallel, backend=counter, fullgraph=True)
    counts = []
    for epoch in range(10):
        parallel.epoch = parallel.inner.note = epoch
        compiled(x())
        counts.append(counter.frame_count)
    assert counts[1:] == [counts[1]] * 9  # The second call finds attributes that are new.
    parallel.k = 5.0
    expected = parallel(x())
    torch.testing.assert_close(compiled(x()), expected)
    assert counter.frame_count == counts[-1] + 1


def test_which_names_are_found() -> None:
    found = {str(name) for name in named(Told(), {"inner"})}
    expected = {
        "Told.forward", "Doubled.forward", "Doubled.helper", "Doubled.act", "Doubled.factor", "Doubled.tau",
        "Doubled.power", "Doubled.memo", "Config.scale", "Config.tau", "test_code_names.SCALE", "test_code_names.TABLE",
        "test_code_names.called", "Linear.forward",
    }  # fmt: skip
    assert expected <= found
    assert not {"Doubled.unread", "test_code_names.CHANGES", "test_code_names.SEEN"} & found


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Texts(Mlp):
    """Sizes that are a text, and a key."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.tables = collections.Counter[str](), dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        self.calls[f"{rows} rows"] += 1
        if rows not in self.tables:
            self.tables[rows] = torch.arange(rows, dtype=x.dtype)[:, None]
        return self.mlp(x) + self.tables[rows]


def calls_of(run: Callable[[], object]) -> int:
    """How many functions run, a generator once for each of its values."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def test_twice_the_classes_are_twice_the_work() -> None:
    """A library has thousands of classes and names, and most classes have few of the names."""
    few, many = (
        nn.ModuleList(type(f"Kind{i}", (nn.Module,), {f"name{i}": i, "__module__": __name__})() for i in range(n))
        for n in (100, 200)
    )
    assert calls_of(lambda: NamedBefore(many)) < 2.5 * calls_of(lambda: NamedBefore(few))


def test_sizes_that_are_texts_or_keys() -> None:
    whole, parallel = pair(Texts, 1)
    for call in range(6):
        given = x(call)[: 1 + call % 3]
        torch.testing.assert_close(parallel(given), whole(given))
    assert parallel.calls == whole.calls == {"1 rows": 2, "2 rows": 2, "3 rows": 2}
    assert sorted(parallel.tables) == sorted(whole.tables) == [1, 2, 3]


def test_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a module, and a function of torch's that is another."""
    whole, parallel = pair(Doubled, 1)
    expected = whole(x())
    torch.testing.assert_close(parallel(x()), expected)
    for model in (whole, parallel):
        model.up.__class__ = Twice  # type: ignore[union-attr]
    assert isinstance(parallel.up, Twice) and type(parallel.up).__name__ == "Twice"
    torch.testing.assert_close(parallel(x()), whole(x()))
    assert not torch.equal(whole(x()), expected)
    monkeypatch.setattr(torch, "relu", torch.sigmoid)
    torch.testing.assert_close(parallel(x()), whole(x()))


def test_a_file_of_the_users_with_the_name_of_one_of_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(map(is_library, ("collections.abc", "builtins", "token", "torch.nn", "autotp.rules")))
    assert not any(map(is_library, ("__main__", "mine.models", "autotp.models.gpt")))
    mine = types.ModuleType("token")
    mine.__file__ = "/home/user/token.py"
    monkeypatch.setitem(sys.modules, "token", mine)
    assert not is_library("token")


class Compiled:
    """As the class of a function that Cython compiled: its `__module__` is a descriptor, no text."""

    def __call__(self, y: Tensor) -> Tensor:
        return y * 2


Compiled.__module__ = property(lambda self: "here")  # type: ignore[assignment]
COMPILED = Compiled()


class CallsCompiled(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return COMPILED(self.mlp(x))


def test_a_function_that_cython_compiled() -> None:
    assert not isinstance(Compiled.__module__, str)
    whole, parallel = pair(CallsCompiled, 1)
    torch.testing.assert_close(parallel(x()), whole(x()))
