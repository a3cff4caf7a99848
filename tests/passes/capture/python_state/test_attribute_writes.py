"""What forward does to a model's attributes: on two ranks as on one device, call after call; and in `verify`."""

import copy
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from errors import message
from ranks import Checks, run_ranks
from small_models import Mlp, as_gathered, expect_same, twins, x
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autotp
from autotp.passes.capture.python_state.attribute_writes import flatten_new_value
from autotp.runtime.module import executable_of

checks = Checks()
CALLS = 5


class Previous(Mlp):
    """The last output, a tensor from the second call on."""

    prev: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x) if self.prev is None else self.mlp(x) + self.prev
        self.prev = y.detach()
        return y


class WithGradient(Mlp):
    """The state's gradient reaches the call that made it, as in truncated backpropagation through time."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(3, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.state = torch.tanh(self.mlp(x) + self.state)
        return self.state * 2


class Memory(Mlp):
    """Transformer-XL's: a list of what each layer computed, longer at first."""

    def __init__(self) -> None:
        super().__init__()
        self.mems: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(torch.cat([*self.mems, x])).sum(0) + x
        self.mems = [*self.mems, y.detach()][-2:]
        return y


class Counter(Mlp):
    """A number that is read and set, and decides now and then."""

    n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.mlp(x) * 2 if self.n % 3 == 0 else self.mlp(x)


class Multiplied(Mlp):
    """A number that operators are given: a graph for each."""

    n = 1

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.mlp(x) * self.n


class Cut(Mlp):
    """A state that is cut by the width, and stays so."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.zeros(3, 30, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.inside = self.inner(x).detach() + self.inside
        return self.down(self.inside) + self.mlp(x)


class InPlace(Mlp):
    """A plain tensor that forward writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.rows = torch.zeros(8, dtype=torch.float64), torch.zeros(4, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x) + self.average
        self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.rows[1:] = y.detach()
        return y + self.rows.sum(0)


class Places(Mlp):
    """All kinds of places: a dict, an object, a deque, a set, a tuple, a submodule; deleted ones, sizes and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[str, Any] = {"h": None, "calls": 0}
        self.note, self.last, self.seen = SimpleNamespace(h=None), deque[Tensor](maxlen=2), set[str]()
        self.pair: Any = (None, "nothing")

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        for h in (self.memo["h"], self.note.h, *self.last, self.pair[0]):
            y = y if h is None else y + h
        self.memo["h"], self.note.h, self.pair = y.detach(), y.detach() / 2, (y.detach() * 2, "pair")
        self.memo["calls"] += 1
        self.memo["rows"] = x.shape[0]
        self.memo["even"], self.memo["long"] = x.shape[0] % 2 == 0, x.shape[0] > 2
        self.memo["half"], self.memo["scale"] = x.shape[0] / 3, x.shape[0] ** -0.5
        self.last.append(y.detach().mean(0))
        self.seen.add("called")
        self.up.stats = y.detach().mean()
        self.__dict__.pop("gone", None)
        return y


class Buffers(Mlp):
    """A buffer that is set to another shape, and one that is none at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, 8))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.cache.shape[0] < x.shape[0]:
            self.cache = torch.arange(x.shape[0], dtype=x.dtype)[:, None].expand(-1, 8) * 1.0
        self.late = x.detach().mean(0)
        return self.mlp(x) + self.cache[: x.shape[0]] + self.late


class Weight(Mlp):
    """An attribute that is set to a weight that is computed, which stays cut, and one to what was there."""

    prev: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.doubled, self.before = self.up.weight * 2, self.prev
        self.prev = x.detach() + 1
        return self.mlp(x)


STATES = (
    Previous, WithGradient, Memory, Counter, Multiplied, Cut, InPlace, Places, Buffers, Weight,
)  # fmt: skip


class Collected(Mlp):
    """A loss that the training loop collects: as an attribute, and in a list that two modules share."""

    def __init__(self, bag: list[Tensor]) -> None:
        super().__init__()
        self.losses, self.aux = bag, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        self.aux = h.square().mean()
        self.losses.append(h.mean() * 0.1)
        return self.down(h)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag: list[Tensor] = []
        self.layers = nn.ModuleList(Collected(self.bag) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def expect_attributes(whole: nn.Module, parallel: nn.Module) -> None:
    own = {*vars(nn.Module()), "_autotp"}
    for module, mine in zip(whole.modules(), parallel.modules(), strict=True):
        names = [name for name in vars(module) if name not in own]
        assert names == [name for name in vars(mine) if name not in own]
        for name in names:
            theirs, ours = vars(module)[name], as_gathered(vars(mine)[name])
            if isinstance(theirs, SimpleNamespace):
                theirs, ours = vars(theirs), vars(ours)
            if isinstance(theirs, Tensor) and theirs is not whole.get_parameter("up.weight"):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
            elif isinstance(theirs, dict | list | deque | tuple):
                leaves = [
                    pytree.tree_leaves(as_gathered(list(v) if isinstance(v, deque) else v)) for v in (ours, theirs)
                ]
                for our, other in zip(*leaves, strict=True):
                    assert type(our) is type(other) and (isinstance(our, Tensor) or our == other)
                    if isinstance(our, Tensor):
                        torch.testing.assert_close(our, other, rtol=1e-10, atol=1e-12)


@checks.on(2)
def states(rank: int, n: int) -> None:
    for kind in STATES:
        torch.manual_seed(0)
        whole, parallel = twins(kind(), n)
        for call in range(CALLS):
            found = []
            for model in (whole, parallel):
                model.zero_grad()
                if kind is WithGradient:
                    model.state = model.state.detach()
                out = model(x(call))
                out.square().sum().backward()
                found.append(out)
            torch.testing.assert_close(*found[::-1], rtol=1e-10, atol=1e-12, msg=lambda m, k=kind: f"{k.__name__}: {m}")
            expect_same(whole, parallel, kind.__name__)
        if kind not in (Weight, Multiplied):
            expect_attributes(whole, parallel)
        if kind not in (Memory, Multiplied, Buffers):
            assert len(executable_of(parallel).graphs.entries) <= 3, kind
    assert autotp.gather(parallel.doubled).shape == (30, 8)
    assert (parallel.before.shape, parallel.prev.shape) == ((3, 8), (3, 8))


class Items(Mlp):
    """Keeps numbers that it takes from tensors, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.log = 0.0, list[float]()
        self.at: Any = 0
        self.large: Any = False

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.mlp(x)
        mean = h.mean().item()
        self.last, self.at, self.large = mean, h.argmax().item(), (h.max() > 1).item()
        self.log.append(mean)
        return h


@checks.on(2)
def numbers_of_tensors(rank: int, n: int) -> None:
    whole, parallel = twins(Items(), n)
    for call in range(CALLS):
        for model in (whole, parallel):
            model.log.clear()
        torch.testing.assert_close(parallel(x(call)), whole(x(call)))
        assert parallel.log == pytest.approx(whole.log, rel=1e-12) and len(parallel.log) == 1
        assert [type(v) for v in (parallel.last, parallel.at, parallel.large)] == [float, int, bool]
        assert (parallel.at, parallel.large) == (whole.at, whole.large)
    assert len(executable_of(parallel).graphs.entries) <= 2


@checks.on(2)
def gradients_through_two_calls(rank: int, n: int) -> None:
    whole, parallel = twins(WithGradient(), n)
    for model in (whole, parallel):
        model(x(0))
        model(x(1)).sum().backward()
    expect_same(whole, parallel)


@checks.on(2)
def losses_that_a_loop_collects(rank: int, n: int) -> None:
    """With the gradient, whether the loop empties the list or puts another in its place."""
    torch.manual_seed(0)
    whole, parallel = twins(Both(), n)
    for call in range(CALLS):
        losses = []
        for model in (whole, parallel):
            model.zero_grad()
            if call == 2:
                model.bag = []
                for layer in model.layers:
                    layer.losses = model.bag
            else:
                model.bag.clear()
            out = model(x(call)).sum()
            assert len(model.bag) == 3
            loss = out + sum(model.bag) + sum(layer.aux for layer in model.layers)
            loss.backward()
            losses.append(loss)
        torch.testing.assert_close(*losses[::-1], rtol=1e-10, atol=0)
        expect_same(whole, parallel)
    assert len(executable_of(parallel).graphs.entries) <= 2


class Cached(nn.Module):
    """Attention whose keys and values lie in plain tensors, written in place from a position on, as in Meta's Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.keys, self.values = (torch.zeros(2, 8, 4, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor, start: int) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (part(x).view(rows, length, 4, 4) for part in (self.q, self.k, self.v))
        self.keys, self.values = self.keys.to(q), self.values.to(q)
        self.keys[:rows, start : start + length] = k
        self.values[:rows, start : start + length] = v
        scores = torch.einsum("bthd,bshd->bhts", q, self.keys[:rows, : start + length])
        found = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), self.values[:rows, : start + length])
        return self.o(found.reshape(rows, length, 16))


@checks.on(2)
def a_cache_in_plain_tensors(rank: int, n: int) -> None:
    whole = Cached().double().eval()
    tokens = torch.linspace(-1, 1, 2 * 6 * 16, dtype=torch.float64).view(2, 6, 16)
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=(tokens[:, :4], 0))
    with torch.no_grad():
        for start, stop in ((0, 4), (4, 5), (5, 6)):
            found, expected = (model(tokens[:, start:stop], start) for model in (parallel, whole))
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(as_gathered(parallel.keys), whole.keys)
    other = copy.deepcopy(parallel)
    assert not parallel.keys.requires_grad and other.keys is not parallel.keys


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


# ---- one process


@pytest.mark.parametrize("kind", [*STATES, Both, Items], ids=lambda kind: kind.__name__)
def test_verify_sees_two_calls(kind: Callable[[], nn.Module]) -> None:
    report = autotp.verify(kind().double(), 2, example_inputs=(x(),))
    assert report.ok, report
    assert any("second call" in row.name for row in report.outputs)


class Hidden(Mlp):
    """A list that nothing but a function holds."""

    def __init__(self, how: str, seen: list[Tensor]) -> None:
        super().__init__()
        if how == "hook":
            self.up.register_forward_hook(lambda module, args, output: seen.append(output))
        else:
            self.note = {"function": lambda y: seen.append(y), "partial": functools.partial(noted, seen)}[how]
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        if self.how != "hook":
            self.note(y)
        return y


def noted(seen: list[Tensor], y: Tensor) -> None:
    seen.append(y)


@pytest.mark.parametrize(
    ("how", "where"), [("hook", "a hook on `up`"), ("function", "`note`"), ("partial", "`note`")], ids=str
)
def test_what_a_function_holds_is_refused(how: str, where: str) -> None:
    seen: list[Tensor] = []
    model = Hidden(how, seen)
    assert message(lambda: autotp.parallelize(model, 1, example_inputs=(x().float(),))) == (
        f"parallelize(Hidden, tp=1): forward changes a list that {where} holds, which a graph cannot do\n"
        "  try      set an attribute of the module (`self.name = value`), which is put back after each call"
    )
    assert seen == [] and not isinstance(model, autotp.ParallelModule)


class HooksItself(Mlp):
    """Registers a hook in the first call, for good or for this call; or removes one that was there."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.is_hooked = how, False
        self.handle = self.up.register_forward_hook(lambda module, args, y: y + 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "removed":
            self.handle.remove()
        elif not self.is_hooked or self.how == "for the call":
            handle = self.up.register_forward_hook(lambda module, args, y: y * 2)
            self.is_hooked = True
            y = self.mlp(x)
            if self.how == "for the call":
                handle.remove()
            return y
        return self.mlp(x)


@pytest.mark.parametrize("how", ["for good", "removed"])
def test_a_hook_that_forward_registers_is_refused(how: str) -> None:
    """A later capture would not find it."""
    assert message(lambda: autotp.verify(HooksItself(how).double(), 2, example_inputs=(x(),))) == (
        "verify(HooksItself, tp=2): forward registers or removes a hook on `up`: later calls would not do so\n"
        "  try      register the hook before autotp.parallelize"
    )
    assert autotp.verify(HooksItself("for the call").double(), 2, example_inputs=(x(),)).ok


class Lazily(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(8, 8)
        return self.late(self.mlp(x))


class Holder:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Opaque(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        self.holder = Holder(y)
        return y


def test_what_cannot_be_put_back_is_refused() -> None:
    with pytest.raises(autotp.Error, match=r"forward changes `late`, a parameter or module, which a graph cannot do"):
        autotp.parallelize(Lazily(), 1, example_inputs=(x().float(),))
    with pytest.raises(
        autotp.Error, match=r"forward sets `holder`, and a later call could not: a Holder holds tensors"
    ):
        autotp.parallelize(Opaque(), 1, example_inputs=(x().float(),))
    for model in (Lazily(), Opaque()):
        with pytest.raises(autotp.Error):
            autotp.verify(model, 2, example_inputs=(x().float(),))


class Kept(Mlp):
    """Keeps a function or an object, and calls it where it can."""

    keeps: Callable[[Any, Tensor], Any]
    kept: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def own(self, x: Tensor) -> Tensor:
        return self.mlp(x)

    def forward(self, x: Tensor) -> Tensor:
        y = self.own(x)
        self.kept = self.keeps(y)
        return y


def twice(model: Kept, x: Tensor) -> Tensor:
    return 2 * model.own(x)


METHODS: dict[str, Callable[[Any, Tensor], Any]] = {
    "own": lambda self, y: self.own,
    "of a submodule": lambda self, y: self.up.forward,
    "a function": lambda self, y: types.MethodType(twice, self),
    "of a list": lambda self, y: self.seen.count,
}


@pytest.mark.parametrize("how", METHODS)
def test_a_method_that_forward_keeps_is_of_the_users_own_model(how: str) -> None:
    """The model that is captured is a copy, with tensors that have no values."""
    kind = type("Kept", (Kept,), {"keeps": METHODS[how]})
    whole, model = kind().float(), kind().float()
    model.load_state_dict(whole.state_dict())
    parallel = autotp.parallelize(model, 1, example_inputs=(x().float(),))
    for _ in range(3):
        whole(x().float()), parallel(x().float())
        kept = parallel.kept
        assert kept.__self__ in (parallel, parallel.up) or kept.__self__ is parallel.seen
        found, expected = (one.kept(1 if how == "of a list" else x().float()) for one in (parallel, whole))
        torch.testing.assert_close(found, expected)


def test_a_module_whose_own_forward_is_put_back() -> None:
    """transformers 5.0 collects hidden states so: another forward for the call, then the module's own as attribute."""

    class Wrapped(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            own, seen = self.up.forward, []
            self.up.forward = lambda x: seen.append(own(x)) or seen[0]
            y = self.mlp(x)
            self.up.forward = own
            return y + seen[0].sum()

    whole = Wrapped()
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=(x().float(),))
    for rows in (x().float(), x().float()[:2]):
        torch.testing.assert_close(parallel(rows), whole(rows))
    assert "forward" not in vars(parallel.up)
    assert autotp.verify(Wrapped().double(), 2, example_inputs=(x(),)).ok


HOLDING: dict[str, Callable[[Any, Tensor], Any]] = {
    "a function holds the model": lambda self, y: lambda: self.up,
    "a function holds a tensor of this call": lambda self, y: lambda: y,
    "a partial holds the model": lambda self, y: functools.partial(self.own),
    "a ReferenceType holds `up`": lambda self, y: weakref.ref(self.up),
    "a builtin_function_or_method holds a tensor of this call": lambda self, y: y.sum,
    "a SimpleNamespace holds `up`": lambda self, y: SimpleNamespace(of=[self.up]),
}


@pytest.mark.parametrize("what", HOLDING)
def test_what_would_keep_the_captured_copy_is_refused(what: str) -> None:
    model = type("Kept", (Kept,), {"keeps": HOLDING[what]})()
    assert message(lambda: autotp.parallelize(model, 1, example_inputs=(x().float(),))) == (
        f"parallelize(Kept, tp=1): forward sets `kept`, and a later call could not: {what}, which is there only while "
        "the model is captured\n"
        "  try      a method of the module (`self.name = self.method`), or make the function where it is called"
    )
    assert model.kept is None


def test_an_object_that_forward_keeps_may_share_plain_values_with_the_model() -> None:
    class Configured(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(names=["a"])

    model = type("Kept", (Configured,), {"keeps": lambda self, y: SimpleNamespace(config=self.config)})()
    parallel = autotp.parallelize(model, 1, example_inputs=(x().float(),))
    parallel(x().float())
    assert parallel.kept.config.names == ["a"]


def refused(rank: int, n: int) -> None:
    assert message(lambda: autotp.distribute(WithLoss(), tp=1, example_inputs=(x().float(), x(1).float()))) == (
        "distribute(WithLoss, tp=1, pp=1, dp=1): the model sets `prev` in forward, which parts of a batch cannot "
        "share\n"
        "  try      return it as a part of the loss, or compute it in the training loop (trainer.steps counts)\n"
        "  or       autotp.parallelize(model, tp), which keeps attributes"
    )


def test_a_size_stays_a_size() -> None:
    """`pytree.tree_map` would make a tuple of it."""
    leaves, spec = flatten_new_value({"of": torch.Size([2, 3])}, {})
    again = pytree.tree_unflatten(leaves, spec)["of"]
    assert type(again) is torch.Size and again == (2, 3)


def test_a_trainer_refuses_what_forward_sets() -> None:
    run_ranks(refused, 1, timeout=60)


class WithLoss(Mlp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.prev = self.mlp(x)
        return (self.prev - y).square().mean()


class Sizes(nn.Module):
    """What Python reads of a tensor that the call before has set: sizes only."""

    def __init__(self, scale: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(12, 24), nn.Linear(24, 12), scale
        self.last = torch.zeros(2, 3, 12)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        scale, self.last = self.scale(self.last), x.detach()
        return self.down(self.up(x).tanh()) * scale


SCALES: dict[str, Callable[[Tensor], Any]] = {
    "branch": lambda last: 2 if last.shape[1] > 5 else 1,
    "is-one": lambda last: 3 if last.shape[1] == 1 else 1,
    "len": len,
    "numel": lambda last: last.numel(),
    "size": lambda last: last.shape[1] + 1,
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_sizes_of_an_attribute_that_the_call_before_has_set(scale: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    whole = Sizes(scale)
    parallel = autotp.parallelize(copy.deepcopy(whole), 1)
    for size in ((2, 5), (2, 7), (2, 4), (3, 7), (3, 1), (3, 6), (2, 9), (2, 9)):
        x = torch.randn(*size, 12)
        torch.testing.assert_close(parallel(x), whole(x))
