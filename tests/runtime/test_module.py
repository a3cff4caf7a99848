"""The parallel model as an nn.Module: names, attributes, copies, its state, and what was made before it."""

import copy
import pickle
from abc import ABC, ABCMeta
from types import new_class
from typing import Any, Generic, Protocol, TypeVar
from unittest.mock import patch

import pytest
import torch
from errors import message
from ranks import Checks
from small_models import VOCAB, both, expect_gradients, gpt, signatures_met, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import autotp
from autotp.passes.capture.repeats.blocks import patched
from autotp.runtime.module import Part

checks = Checks()


@checks.on(2)
def parallel_model_has_the_model_s_names_and_attributes(rank: int, n: int) -> None:
    whole, other = gpt().double(), gpt().double()
    other.ln_f.weight.mark = "no decay"
    parallel = autotp.parallelize(other, n)
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert [name for name, _ in parallel.named_modules()] == [name for name, _ in whole.named_modules()]
    assert list(parallel.state_dict()) == list(whole.state_dict())
    assert parallel.config is not None and parallel.config == whole.config
    assert (parallel.h[0].attn.n_head, len(parallel.h)) == (3, 2)
    assert parallel.ln_f.weight.mark == "no decay"
    assert parallel.dummy_inputs.keys() == whole.dummy_inputs.keys()
    assert not hasattr(parallel, "no_such_thing") and not hasattr(parallel.h[0], "no_such_thing")
    seen: list[Any] = []
    parallel.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    parallel.ln_f.weight.register_hook(lambda grad: seen.append(grad.shape))
    parallel(*tokens()).backward()
    assert seen == [(), (48,)]


class Headed(nn.Module):
    """A network, and a head that may be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.down(self.up(x).relu())), torch.arange(len(x)))


class Scaled(nn.Module):
    """A part with a setting that its forward reads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = model, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner(x)


@checks.on(2)
def a_changed_part_is_called_alone(rank: int, n: int) -> None:
    """Before the whole model is called: what is new in the part is known."""
    torch.manual_seed(0)
    whole = nn.Sequential(Scaled(nn.Linear(8, 32)), nn.ReLU(), Scaled(nn.Linear(32, 8)))
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=torch.ones(3, 8))
    new = nn.Linear(32, 8)
    for model in (whole, parallel):
        model[2].inner = copy.deepcopy(new)
    x = torch.randn(3, 32)
    torch.testing.assert_close(parallel[2](x), whole[2](x))


class Fused(nn.Module):
    """Its layers see one axis where the model has several: queries, keys and values of three heads, two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.up, self.down = (nn.Linear(a, b) for a, b in ((12, 36), (12, 12), (12, 32), (16, 12)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
        x = x + self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(gate.sigmoid() * up)


@checks.on(2)
def layers_of_fused_weights_are_called_alone(rank: int, n: int) -> None:
    torch.manual_seed(0)
    whole = Fused().double()
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=torch.ones(2, 5, 12).double())
    assert not any(layout.dim is None for name, layout in parallel.layouts.items() if name.endswith("weight"))
    for name in ("qkv", "proj", "up", "down"):
        one, mine = getattr(whole, name), getattr(parallel, name)
        x = torch.randn(2, 5, one.in_features, dtype=torch.float64)
        found, expected = autotp.gather(mine(x)), one(x)
        torch.testing.assert_close(found, expected)
        for y in (found, expected):
            y.square().sum().backward()
        for p, q in zip(mine.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(autotp.gather(p.grad), q.grad)


@checks.on(2)
def a_deep_copied_part_stays_a_part(rank: int, n: int) -> None:
    """The model sees later changes of it, as those of other parts."""
    torch.manual_seed(0)
    whole = nn.Sequential(Scaled(nn.Linear(8, 32)), nn.ReLU(), Scaled(nn.Linear(32, 8)))
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=torch.ones(3, 8))
    x = torch.randn(3, 8)
    for model in (whole, parallel):
        model[2] = copy.deepcopy(model[2])
    torch.testing.assert_close(parallel(x), whole(x))
    for model in (whole, parallel):
        model[2].inner = nn.Identity()
    torch.testing.assert_close(parallel(x), whole(x))


class Watching(nn.Module):
    """A base class that lists the classes derived from it, and wraps their `forward`, as transformers' layers do."""

    derived: list[str] = []  # noqa: RUF012
    calls = 0

    def __init_subclass__(cls, *, mark: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Watching.derived.append(mark)
        inner = cls.forward

        def forward(self: Any, x: Tensor) -> Tensor:
            Watching.calls += 1
            return inner(self, x)

        cls.forward = forward  # type: ignore[method-assign]


class Watched(Watching, mark="mine"):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


@checks.on(2)
def init_subclass_of_a_base_is_not_called(rank: int, n: int) -> None:
    """Neither for the whole model nor for a submodule; the original's `forward` stays, and works afterwards."""
    x, before = torch.randn(3, 8), Watched.forward
    for model in (Watched(), nn.Sequential(Watched())):
        whole, parallel = both(n, model)
        torch.testing.assert_close(parallel(x), whole(x))
        assert Watched.forward is before and Watching.derived == ["mine"]

    class Derived(type(autotp.parallelize(Watched(), n)), mark="derived"):  # type: ignore[misc]
        """As torch derives classes from those of parallel models."""

    assert Watching.derived.pop() == "derived" and Derived.forward is not before


class Empty:
    """A base class that adds no `__dict__`, as `abc.ABC`, `Generic` and `Protocol` do."""

    __slots__ = ()


class Named(type):
    """A metaclass with an argument of its own, which lists its classes and allows none that is derived from them."""

    made: list[str] = []  # noqa: RUF012

    def __new__(meta, name: str, bases: Any, names: Any, *, mark: str) -> Any:
        if any(isinstance(base, Named) for base in bases):
            raise TypeError(f"{name} is derived")
        Named.made.append(mark)
        return super().__new__(meta, name, bases, names)

    def __init__(cls, name: str, bases: Any, names: Any, *, mark: str) -> None:
        super().__init__(name, bases, names)


class Abstractly(Named, ABCMeta):
    """Two metaclasses."""


class Has(Protocol):
    up: nn.Module


class Frozen(nn.Module):
    """Its attributes stay as they are."""

    def __setattr__(self, name: str, value: Any) -> None:
        if "down" in vars(self).get("_modules", {}):
            raise AttributeError(f"{name} is set already")
        super().__setattr__(name, value)


class Mixin:
    """A base class that is no module."""


Unknown = TypeVar("Unknown")
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ABC first": ((ABC, nn.Module), {}),
    "ABC last": ((nn.Module, ABC), {}),
    "Generic first": ((Generic[Unknown], nn.Module), {}),
    "Protocol first": ((Has, nn.Module), {}),
    "mixins": ((Empty, Mixin, nn.Module, ABC), {}),
    "a container": ((ABC, nn.ModuleDict), {}),
    "a metaclass": ((nn.Module,), {"metaclass": Named, "mark": "one"}),
    "two metaclasses": ((ABC, nn.Module), {"metaclass": Abstractly, "mark": "two"}),
    "frozen": ((Frozen,), {}),
}
"""Bases of a model's class, and the keyword arguments of the class."""


def model_with(kind: str) -> nn.Module:
    def start(self: Any) -> None:
        nn.Module.__init__(self)
        self.up, self._modules["down"] = nn.Linear(8, 32), nn.Linear(32, 8)

    bases, given = BASES[kind]
    made: nn.Module = new_class(kind, bases, given, lambda names: names.update(__init__=start, forward=forward))()
    return made.double()


def forward(self: Any, x: Tensor) -> Tensor:
    return torch.as_tensor(self.down(self.up(x).relu()))


@checks.on(2)
def classes_with_any_bases_become_parallel(rank: int, n: int) -> None:
    """The whole model, a submodule, and copies. A metaclass is not asked about our class."""
    x, before = torch.randn(3, 8, dtype=torch.float64), list(Named.made)
    for kind, (bases, given) in BASES.items():
        for whole in (model_with(kind), nn.Sequential(model_with(kind))):
            parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=x)
            for model in (whole, parallel):
                model(x).square().sum().backward()
            expect_gradients(whole, parallel)
            torch.testing.assert_close(copy.deepcopy(parallel)(x), whole(x), rtol=1e-12, atol=0)
            net = list(parallel.modules())[isinstance(whole, nn.Sequential)]
            assert type(net).__name__ == kind and isinstance(net, Part)
            assert all(isinstance(net, base) for base in bases if base not in (Has, Generic[Unknown]))
        before += [given["mark"]] * 2 if given else []
    assert Named.made == before


def in_plan(model: Any) -> dict[str, str]:
    """How the plan says that parameters are held."""
    cut = {row.name: str(row.layout) for row in model.plan.cuts}
    return cut | {row.name: str(list(row.shape)) for row in model.plan.whole}


@checks.on(2)
def plan_after_a_replaced_head_is_current_or_an_error(rank: int, n: int) -> None:
    """A head is exchanged, and put back: the plan is that of what the model has, or an error, never that of before."""
    x = torch.randn(3, 8)
    parallel = autotp.parallelize(Headed(), n, example_inputs=x)
    first, code, old = str(parallel.plan), parallel.code, parallel.head
    assert in_plan(parallel) == {name: str(layout) for name, layout in parallel.layouts.items()}
    assert parallel.layouts["head.weight"].dim is not None
    parallel.head = nn.Linear(8, 7)
    for name in ("plan", "code"):
        with pytest.raises(autotp.Error, match="was not called since its modules or parameters were replaced"):
            getattr(parallel, name)
    parallel(x)
    held = {name: str(layout) for name, layout in parallel.layouts.items()}
    assert in_plan(parallel) == held and (held["head.weight"], held["head.bias"]) == ("[7, 8]", "[7]")
    assert parallel.code != code
    parallel.head = old
    parallel(x)
    assert (str(parallel.plan), parallel.code) == (first, code)


class LearnsMore(nn.Module):
    """Reads an MLP in training only, as models with auxiliary heads do. x: [rows, 8]"""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.more = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.more(self.mlp(x)) if self.training else self.mlp(x)


@checks.on(2)
def plan_keeps_parameters_that_eval_does_not_read(rank: int, n: int) -> None:
    """In eval mode a part of the model is not called. Its parameters are stored as before."""
    x = torch.randn(3, 8)
    parallel = autotp.parallelize(LearnsMore(), n, example_inputs=x)
    parallel(x)
    before = in_plan(parallel)
    parallel.eval()(x)
    assert in_plan(parallel) == before and parallel.layouts["more.0.weight"].dim is not None


class Tokens(nn.Module):
    """An embedding that is cut by its rows, and a head of the same shape, which stays whole beside full logits."""

    def __init__(self, rows: int = 24) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(rows, 12), nn.Linear(12, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.emb(x)))


def pair_of_tokens(n: int) -> tuple[Tokens, Any]:
    torch.manual_seed(0)
    whole, other = Tokens().double(), Tokens().double()
    other.load_state_dict(whole.state_dict())
    parallel = autotp.parallelize(other, n, outputs="full")
    layouts = parallel.layouts["emb.weight"], parallel.layouts["head.weight"]
    assert (layouts[0].dim, layouts[1].dim) == (0, None) and layouts[0].shape == layouts[1].shape
    return whole, parallel


@checks.on(2)
def a_part_put_in_place_of_a_whole_parameter_works(rank: int, n: int) -> None:
    """Weights are tied, or copied, when the model is parallel already: a part stays a part wherever it is put."""
    x = torch.arange(24).view(4, 6)
    for put in (
        lambda m: setattr(m.head, "weight", m.emb.weight),
        lambda m: setattr(m.head, "weight", copy.deepcopy(m.emb.weight)),
        lambda m: setattr(m.head, "weight", nn.Parameter(m.emb.weight.detach().clone())),
    ):
        whole, parallel = pair_of_tokens(n)
        parallel(x)
        for model in (whole, parallel):
            put(model)
        result = [model(x).log_softmax(-1)[..., 3].sum() for model in (whole, parallel)]
        torch.testing.assert_close(result[1], result[0])
        for loss in result:
            loss.backward()
        gradient = autotp.gather(parallel.head.weight.grad)
        torch.testing.assert_close(gradient, whole.head.weight.grad)


@checks.on(2)
def a_part_cut_over_other_ranks_is_refused(rank: int, n: int) -> None:
    """A model that each rank has for itself is given a part that two ranks hold."""
    _, parallel = pair_of_tokens(n)
    alone = autotp.parallelize(
        Tokens().double(), mesh=init_device_mesh("cpu", (n, 1), mesh_dim_names=("dp", "tp"))["tp"]
    )
    alone.emb.weight = parallel.emb.weight
    assert message(lambda: alone(torch.zeros(2, 3, dtype=torch.long))) == (
        "`emb.weight` was replaced by `emb.weight` of a model that is cut over other ranks\n"
        "  try      autotp.full_state_dict of one model, autotp.load_full_state_dict of the other one"
    )


def parts_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """Plain copies of this rank's parts, as files of ranks have them."""
    return {name: (x.to_local() if hasattr(x, "to_local") else x).clone() for name, x in state.items()}


@checks.on(2)
def state_dict_of_shards_loads_into_another_parallel_model(rank: int, n: int) -> None:
    """The state dict of one rank's shards into another parallel model, and back."""
    _, first = both(n, gpt().double())
    torch.manual_seed(5)
    _, second = both(n, gpt().double())
    saved = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    assert saved["wte.weight"].shape == (97, 48) and saved["wte.weight"].to_local().shape == (49 - rank, 48)
    assert not torch.equal(second.wte.weight, saved["wte.weight"])
    second.load_state_dict(saved)
    torch.testing.assert_close(second(*tokens()), first(*tokens()), rtol=0, atol=0)


@checks.on(2)
def loading_another_rank_s_shards_is_an_error(rank: int, n: int) -> None:
    """A file of one rank, as a loop of replicas writes it, on all ranks: an error, in the next call of any kind."""
    parallel = autotp.parallelize(Headed().double(), n, example_inputs=torch.randn(3, 8, dtype=torch.float64))
    x = torch.ones(3, 8, dtype=torch.float64)
    own = parts_of(parallel.state_dict())
    of_first = [own if rank == 0 else None]
    torch.distributed.broadcast_object_list(of_first)
    expected = parallel(x)
    for _ in range(3):  # Ranks compare the first calls in any case.
        parallel(x)
    parallel.load_state_dict(of_first[0])
    assert message(lambda: parallel(x)) == (
        "Headed.forward: tp ranks 0, 1 loaded the same state_dict, which is of one rank's parts\n"
        "  try      a file for each rank: save and load model.state_dict() on every rank\n"
        "  or       autotp.full_state_dict and autotp.load_full_state_dict, for one file of the whole model"
    )
    parallel.load_state_dict(own)
    assert torch.equal(parallel(x), expected)
    parallel.up.load_state_dict({name: torch.ones_like(value) for name, value in parallel.up.state_dict().items()})
    parallel(x)  # Initial values may be the same on all ranks.


@checks.on(3)
def state_dict_of_a_wrapping_module_is_cut_or_refused(rank: int, n: int) -> None:
    """Each rank takes its parts of the whole; the parts of one rank are refused on all ranks."""
    torch.manual_seed(5)
    whole = AveragedModel(Headed().double())
    parallel = autotp.parallelize(Headed().double(), n, example_inputs=torch.randn(3, 8, dtype=torch.float64))
    around = AveragedModel(parallel)
    x = torch.ones(3, 8, dtype=torch.float64)
    for _ in range(3):
        around(x)
    around.load_state_dict(whole.state_dict())
    torch.testing.assert_close(around(x), whole(x), rtol=1e-12, atol=0)
    own = parts_of(around.state_dict())
    around.load_state_dict(own)
    torch.testing.assert_close(around(x), whole(x), rtol=1e-12, atol=0)
    of_first = [own if rank == 0 else None]
    torch.distributed.broadcast_object_list(of_first)
    with pytest.raises(autotp.Error, match=r"neither the whole, .*, nor the part"):
        around.load_state_dict(of_first[0])
    alike = nn.ModuleDict({"a": autotp.parallelize(nn.Linear(8, 9).double(), n, example_inputs=x)})
    of_first = [parts_of(alike.state_dict()) if rank == 0 else None]
    torch.distributed.broadcast_object_list(of_first)
    alike["a"](x)
    alike.load_state_dict(of_first[0])
    with pytest.raises(autotp.Error, match="ranks 0, 1, 2 loaded the same state_dict, which is of one rank's parts"):
        alike["a"](x)


@checks.on(2)
def a_deep_copy_is_a_model_of_its_own(rank: int, n: int) -> None:
    """A deep copy is a model of its own, whose further captures are its own; pickling says what to do instead."""
    whole, parallel = both(n, gpt().double().train())
    other = copy.deepcopy(parallel)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.01)
    torch.testing.assert_close(parallel(*tokens()), whole(*tokens()))
    with torch.no_grad():
        for p in whole.parameters():
            p.add_(0.01)
    other(*tokens()).backward()
    whole(*tokens()).backward()
    expect_gradients(whole, other)
    assert parallel.wte.weight.grad is None
    torch.testing.assert_close(other.eval()(tokens()[0]), whole.eval()(tokens()[0]))
    assert (signatures_met(parallel), signatures_met(other), parallel.training) == (1, 2, True)
    assert message(lambda: pickle.dumps(parallel)) == (
        "a parallel model cannot be pickled: it is tied to its process group\n"
        "  try      save model.state_dict() on each rank, or autotp.full_state_dict(model)"
    )


@checks.on(2)
def generate_draws_one_device_s_tokens(rank: int, n: int) -> None:
    """The model's own `generate` draws the tokens that one device draws, past the block size."""
    torch.manual_seed(0)
    whole = gpt().double().eval()
    for p in whole.parameters():
        nn.init.normal_(p, std=0.3)
    parallel = autotp.parallelize(copy.deepcopy(whole), n)
    drawn = []
    for model in (whole, parallel):
        torch.manual_seed(3)
        drawn.append(model.generate(tokens(2, 1)[0], 20, temperature=0.8, top_k=20))
    assert torch.equal(*drawn)


@checks.on(2)
def optimizers_and_hooks_made_before_keep_working(rank: int, n: int) -> None:
    """An optimizer and hooks on parameters that were there first go on working: parameters stay the same objects."""
    whole, model = gpt().double().train(), gpt().double().train()
    model.load_state_dict(whole.state_dict())
    before = list(model.parameters())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (whole, model)]
    for one in (whole, model):
        one.ln_f.weight.register_hook(lambda grad: 2 * grad)
        one.wte.weight.grad = torch.ones_like(one.wte.weight)
    parallel = autotp.parallelize(model, n)
    assert all(now is then for now, then in zip(parallel.parameters(), before, strict=True))
    assert torch.equal(autotp.gather(parallel.wte.weight.grad), whole.wte.weight.grad)
    for _ in range(3):
        for one, optimizer in zip((whole, parallel), optimizers, strict=True):
            one(*tokens()).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(parallel(*tokens()), whole(*tokens()), rtol=1e-12, atol=0)


class Counted(Headed):
    """A model with a `zero_grad` of its own, which takes other arguments and returns something."""

    zeroed = 0

    def zero_grad(self, *, times: int = 1) -> int:  # type: ignore[override]
        super().zero_grad()
        self.zeroed += times
        return self.zeroed


@checks.on(2)
def zero_grad_removes_gradients_or_calls_the_model_s_own(rank: int, n: int) -> None:
    x = torch.randn(3, 8)
    plain, own = (autotp.parallelize(kind(), n, example_inputs=x) for kind in (Headed, Counted))
    plain(x).backward()
    plain.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in plain.parameters())
    plain.zero_grad()
    own(x).backward()
    assert own.zero_grad() == 1 and own.zero_grad(times=2) == 3, "the model's own method"
    assert all(p.grad is None for model in (plain, own) for p in model.parameters())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


# ---- one process


class Shared(nn.Module):
    """One module under two names, a tied weight, a parameter that is None, and a submodule called as ours are."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = nn.Linear(8, 8, bias=False)
        self.again = self.plan
        self.head = nn.Linear(8, 8)
        self.head.weight = self.plan.weight
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.plan(x)))

    @classmethod
    def made(cls) -> str:
        return cls.__name__

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x


def test_parallel_model_keeps_shared_modules_and_methods() -> None:
    whole, parallel = both(1, Shared(), example_inputs=torch.randn(2, 8))
    assert parallel.again is parallel._modules["plan"]
    assert parallel.head.weight is parallel.again.weight
    assert parallel.nothing is None
    assert (parallel.made(), parallel.twice(4)) == ("Shared", 8)
    for duplicates in (True, False):
        theirs = [n for n, _ in whole.named_parameters(remove_duplicate=duplicates)]
        assert [n for n, _ in parallel.named_parameters(remove_duplicate=duplicates)] == theirs
    x = torch.randn(3, 8)
    torch.testing.assert_close(parallel(x), whole(x))


def mocked(kind: Any, names: Any) -> Any:
    return patch.multiple(kind, **names)


@pytest.mark.parametrize("region", [patched, mocked])
def test_patching_a_part_s_class_is_undone_on_the_original(region: Any) -> None:
    """The class of a part passes on to the original's what is set on it: a wrapped forward that is put back there, too,
    would call itself without end, in this model and in all of its class."""
    parallel, kind = autotp.parallelize(gpt().double(), 1), type(gpt().double().h[0])
    part, before = type(parallel.h[0]), (kind.forward, dict(vars(type(parallel.h[0]))))
    assert part is not kind
    with region(part, {"forward": None}):
        assert part.forward is None or kind.forward is None
    assert (kind.forward, dict(vars(part))) == before
    whole, parallel = both(1, gpt().double())
    torch.testing.assert_close(parallel(*tokens()), whole(*tokens()))


def test_plan_of_a_copy_or_part_needs_a_call() -> None:
    parallel = autotp.parallelize(gpt().double(), 1)
    assert str(parallel.plan).startswith("GPT on tp=1\n")
    other = copy.deepcopy(parallel)
    for model, reason in ((other, "by itself"), (parallel.h[0], "by itself")):
        with pytest.raises(autotp.Error, match=f"the {type(model).__name__} was not called {reason}, and its plan"):
            str(model.plan)
    assert parallel.layout_of("wte.weight").shape == (VOCAB, 48)


def test_refused_parametrization_leaves_torch_s_classes_alone() -> None:
    """torch puts a property on the class that it derives for a parametrized module: not on `nn.Linear`."""
    model: Any = autotp.parallelize(nn.Sequential(nn.Linear(4, 4)), 1, example_inputs=(torch.zeros(2, 4),))
    before = dict(vars(nn.Linear))
    nn.utils.parametrizations.weight_norm(model[0])
    assert dict(vars(nn.Linear)) == before
    with pytest.raises(autotp.Error, match="was parametrized when its model was parallel already"):
        model(torch.zeros(2, 4))
    assert dict(vars(nn.Linear)) == before
    nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


def test_pruning_is_refused() -> None:
    """torch puts the whole parameter aside, and a hook computes the weight: the error leaves the model as it was."""
    model: Any = autotp.parallelize(nn.Sequential(nn.Linear(4, 4)), 1, example_inputs=(torch.zeros(2, 4),))
    for name in ("weight", "bias"):
        with pytest.raises(autotp.Error, match=f"`{name}` of a Linear becomes `{name}_orig`"):
            prune.l1_unstructured(model[0], name, 0.5)
    model(torch.zeros(2, 4))


def test_part_classes_compare_equal_to_their_originals() -> None:
    """`type(module) == nn.Linear` and `type(module) in (...)`, as loops choose parameters to decay or to freeze."""
    parallel = autotp.parallelize(Headed(), 1, example_inputs=(torch.randn(3, 8),))
    assert type(parallel.up) == nn.Linear and nn.Linear == type(parallel.up) and type(parallel) == Headed  # noqa: E721
    assert type(parallel.up) in (nn.Embedding, nn.Linear) and type(parallel.up) not in (nn.Embedding, Headed)
    assert type(parallel.up) != Headed and type(parallel) != nn.Module  # noqa: E721
    by_class = {nn.Linear: "torch's", type(parallel.up): "of a parallel model"}
    assert by_class[nn.Linear] == "torch's" and by_class[type(parallel.down)] == "of a parallel model"


def test_swapping_module_parameters_is_refused() -> None:
    """torch would put plain parameters in place of parts, in the same objects."""
    parallel = autotp.parallelize(Headed(), 1, example_inputs=(torch.randn(3, 8),))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for call in (parallel.double, lambda: parallel.load_state_dict(parallel.state_dict())):
            with pytest.raises(autotp.Error, match=r"set_swap_module_params_on_conversion\(False\)"):
                call()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert parallel.double().up.weight.dtype == torch.float64
