"""build: a model becomes parallel in place, or nothing of it has changed; what is not an ordinary model is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors import line_of, message
from ranks import Checks
from small_models import Plain
from torch import Tensor, nn

import autotp
from autotp.distributed.mesh import Mesh
from autotp.options import Options
from autotp.runtime.build import build, expect_ordinary, expect_usable

checks = Checks()
X = torch.ones(3, 8)


class Blocks(nn.Module):
    """A weight in its first block has an operator without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Plain() for _ in range(2))
        self.h[0].odd = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ torch.linalg.matrix_exp(self.h[0].odd)  # no rule
        for block in self.h:
            x = block(x)
        return x


def test_build_keeps_the_model_and_its_parameter_objects() -> None:
    model, before = Plain(), Plain()
    before.load_state_dict(model.state_dict())
    parameters = dict(model.named_parameters())
    found = build(model, Mesh(), X, Options(), strict=False)
    assert found is model and isinstance(model, Plain | autotp.ParallelModule)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    torch.testing.assert_close(found(X), before(X))


def test_build_takes_parts_from_read() -> None:
    """They are asked for with the layouts, and taken in place of the model's own values."""
    model, asked = Plain(), list[str]()

    def read(layouts: Any) -> dict[str, Tensor]:
        asked.extend(layouts)
        return {"up.bias": torch.full((32,), 7.0)}

    build(model, Mesh(), X, Options(), strict=False, read=read)
    assert asked == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert model.up.bias.eq(7).all() and not model.down.bias.eq(7).any()


@pytest.mark.parametrize(
    "fails",
    [
        lambda model: build(model, Mesh(size=2), X, Options(), strict=True),
        lambda model: build(model, Mesh(), torch.ones(3, 5), Options(), strict=False),
        lambda model: build(model, Mesh(), X, Options(outputs="some"), strict=False),  # type: ignore[arg-type]
    ],
    ids=["strict", "inputs", "choice"],
)
def test_build_changes_nothing_after_an_error(fails: Callable[[nn.Module], Any]) -> None:
    model = Blocks()
    before, kinds = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    with pytest.raises(autotp.Error):
        fails(model)
    assert [type(module) for module in model.modules()] == kinds
    assert all(x.equal(before[name]) for name, x in model.state_dict().items())
    expect_ordinary(model)


def test_build_strict_names_each_uncut_weight_in_a_block() -> None:
    at = line_of(__file__, "x = x @ torch.linalg")
    assert message(lambda: build(Blocks(), Mesh(size=2), X, Options(), strict=True)) == (
        "strict=True, and weights in a block would stay whole: "
        f"h.0.odd (aten.linalg_matrix_exp.default has no rule, {at})\n  try      strict=False, or autotp.rule(...)"
    )


def taken_before() -> nn.Module:
    """The original, after `distribute` took its parameters."""
    from autotp.runtime.shard_parameters import shard_parameters

    model = Plain()
    shard_parameters(model, {}, 0, Mesh())
    return model


class Agent(nn.Module):
    """Loops call its methods, and never the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.names = nn.ModuleDict()
        self.actor = Plain()

    def act(self, x: Tensor) -> Tensor:
        return self.actor(x).argmax(-1)


class Called(Agent):
    """A policy that has `__call__` in place of `forward`."""

    def __call__(self, observed: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.actor(observed) * scale


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: "gpt2", "a str is not a torch.nn.Module\n  try      pass the model itself"),
        (
            lambda: autotp.parallelize(Plain(), 1, example_inputs=X),
            "the model is parallel already\n  try      parallelize the original model once",
        ),
        (
            lambda: nn.Sequential(autotp.parallelize(Plain(), 1, example_inputs=X)),
            "the model is parallel already\n  try      parallelize the original model once",
        ),
        (
            lambda: nn.Sequential(autotp.parallelize(Plain(), 1, example_inputs=X).up),
            "`0` is part of another parallel model\n  try      one module that holds both models and calls the one "
            "that is asked for, parallelized once\n  or       models that share nothing: copy.deepcopy",
        ),
        (
            taken_before,
            "the model was made parallel before, and its parameters are in that parallel model\n"
            "  try      use the model that autotp.parallelize or autotp.distribute returned then",
        ),
        (
            Agent,
            "the class Agent has no `forward`, and autotp cuts what a call of the model computes\n"
            "  try      model.actor = autotp.parallelize(model.actor), for each part that the methods call\n"
            "  or       `def forward(self, ...)` with what the training loop computes, and a call of the model there",
        ),
    ],
    ids=["text", "parallel", "inside", "part", "taken", "methods"],
)
def test_expect_ordinary_refuses_other_models(make: Callable[[], Any], text: str) -> None:
    keep = make()
    assert message(lambda: expect_ordinary(keep)) == text


def test_build_follows_a_model_that_overrides_call() -> None:
    model, before = Called(), Called()
    before.load_state_dict(model.state_dict())
    found: Any = build(model, Mesh(), None, Options(), strict=False)
    torch.testing.assert_close(found(X, scale=2.0), before(X, scale=2.0))


def test_expect_usable_refuses_bad_arguments() -> None:
    model = autotp.parallelize(Plain(), 1, example_inputs=X)
    for tp, given, options, text in (
        (0, Plain(), Options(), "tp=0"),
        (2, Plain(), Options(without=("all",)), "without=['all']: there is no such pass"),
        (2, model, Options(), "the model is parallel already\n  try      explain the original model, before"),
    ):
        assert message(lambda: expect_usable("explain", given, tp, options)).startswith(text)  # noqa: B023


@checks.on(2)
def expect_ordinary_refuses_another_model_s_parts(rank: int, n: int) -> None:
    """A parameter that another parallel model has as a part."""
    model, other = autotp.parallelize(Plain(), n, example_inputs=X), Plain()
    other.up.weight = model.up.weight
    assert "`up.weight` is part of another parallel model" in message(lambda: expect_ordinary(other))


@checks.on(2)
def ranks_compare_frozen_and_training_before_they_build(rank: int, n: int) -> None:
    """Before the first change, on every rank: also what is frozen, and what trains."""
    for change in (lambda m: m.up.requires_grad_(False), lambda m: m.up.train(False)):
        model = Plain()
        if rank == 1:
            change(model)
        assert "tp rank 1" in message(lambda: autotp.parallelize(model, n, example_inputs=X))  # noqa: B023
        expect_ordinary(model)


class Named(nn.Parameter):
    """A parameter of another class."""


@checks.on(2)
def a_parameter_subclass_is_refused_only_if_cut(rank: int, n: int) -> None:
    """It is refused if it would be cut, as nothing would mark its part. A whole one stays as it is."""
    model = Plain()
    model.up.weight = Named(model.up.weight.detach())
    with pytest.raises(autotp.Error, match=r"`up\.weight` is a Named, and a parameter of a class of its own cannot"):
        autotp.parallelize(model, n, example_inputs=X)
    assert type(model.up.weight) is Named and model.up.weight.shape == (32, 8)
    model = Plain()
    model.down.bias = Named(model.down.bias.detach())
    assert type(autotp.parallelize(model, n, example_inputs=X).down.bias) is Named


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


def test_expect_ordinary_refuses_a_lazy_parameter() -> None:
    with pytest.raises(autotp.Error, match=r"`0\.weight` has no size yet: its module takes it from a first call"):
        expect_ordinary(nn.Sequential(nn.LazyLinear(4)))
