"""opaque: modules and functions that no graph can have train on ranks as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from errors import message
from ranks import Checks, run_ranks
from small_models import MORE_ROWS, ROWS, WithLoss, assert_values_close, expect_equal_training, expect_whole, trained
from torch import Tensor, nn

import autotp
from autotp.training.distribute import distribute


class Routed(nn.Module):
    """A loop over values, with parameters, statistics and dropout. x: [rows 8]"""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Any]:
        y = torch.zeros_like(x)
        chosen = x.detach().argmax(-1) % 3
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero()[:, 0]
            y = y.index_add(0, rows, self.experts[expert](x[rows]) * scale)
        self.calls.add_(1)
        return {"y": self.dropout(self.norm(y)), "chosen": [chosen, None]}


def like_routed(x: Tensor, *, scale: float) -> dict[str, Any]:
    return {"y": torch.empty_like(x), "chosen": [x.new_empty(x.shape[0], dtype=torch.long), None]}


@autotp.opaque
def halved(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 0.5, x.abs().mean()


class Model(nn.Module):
    """Layers that are cut, before and behind opaque code."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8, bias=False)
        self.middle = autotp.opaque(Routed(), like=like_routed) if middle is None else middle
        self.out = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).relu())
        routed = self.middle(x, scale=0.7)
        half, mean = halved(routed["y"])
        result: Tensor = self.out(half) + mean + routed["chosen"][0][:, None]
        return result


class Rowwise(nn.Module):
    """Code with a branch on values; each row is made of itself. x: [rows 8]"""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * self.weight if row.sum() > 0 else row.sin() for row in x])


class Rows(nn.Module):
    """Blocks with row-wise opaque code."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([self.block() for _ in range(4)])

    @staticmethod
    def block() -> nn.Module:
        rowwise = autotp.opaque(Rowwise(), like=torch.empty_like, rows=True)
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), rowwise)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x) + x
        return x


def test_verify_runs_opaque_code_and_the_plan_lists_it() -> None:
    torch.manual_seed(0)
    report = autotp.verify(Model(), 2, example_inputs=ROWS.float())
    assert report.ok, report
    assert {"middle autotp.opaque(Routed)", "autotp.opaque(halved)"} <= {row.name for row in report.plan.whole}


class Positive(nn.Module):
    """What is positive, as often as there is some. x: [rows 8]"""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        values, squares = positive(self.down(self.up(x).relu()))
        return (values * squares).sum()


def like_positive(x: Tensor) -> tuple[Tensor, Tensor]:
    chosen = x.new_empty(x.nonzero().shape[0], 1)
    return chosen, chosen.clone()


@partial(autotp.opaque, like=like_positive)
def positive(x: Tensor) -> tuple[Tensor, Tensor]:
    chosen = x[torch.from_numpy(x.detach().numpy() > 0)][:, None]
    return chosen, chosen * chosen


def test_opaque_results_may_be_as_long_as_values_say() -> None:
    torch.manual_seed(0)
    report = autotp.verify(Positive(), 2, example_inputs=ROWS.float())
    assert report.ok, report


def test_explain_tells_the_cost_of_opaque_code() -> None:
    row = {
        row.name: row.reason for row in autotp.explain(Model(), 2, example_inputs=ROWS.float()).whole if row.operator
    }
    assert row == {
        "middle autotp.opaque(Routed)": "no rule: replicated; 0 B made whole for it, 928 B of parameters",
        "autotp.opaque(halved)": "no rule: replicated; 0 B made whole for it, 0 B of parameters, 0 FLOPs",
    }
    narrow = nn.Sequential(nn.Linear(8, 32), autotp.opaque(nn.LeakyReLU()), nn.Linear(32, 8))
    (gathered,) = [row for row in autotp.explain(narrow, 2, example_inputs=ROWS.float()).whole if row.operator]
    assert gathered.reason == "no rule: replicated; 384 B made whole for it, 0 B of parameters, 0 FLOPs"
    rows = autotp.explain(Rows(), 2, example_inputs=ROWS.float()).whole
    assert [row.name for row in rows if row.operator] == [f"h.{i}.3 autotp.opaque(Rowwise)" for i in range(4)]


def test_opaque_changes_nothing_on_one_device() -> None:
    torch.manual_seed(0)
    plain = Routed()
    marked = autotp.opaque(copy.deepcopy(plain), like=like_routed)
    assert list(marked.state_dict()) == list(plain.state_dict()) and type(marked) is Routed
    x = ROWS.float()
    assert torch.equal(marked(x, scale=2.0)["y"], plain(x, scale=2.0)["y"])
    assert torch.equal(halved(x)[0], x * 0.5)


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = 1
        return x


class Writing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)


class Half(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return x, x.shape[0] / 2


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


class Times(nn.Module):
    def forward(self, x: Tensor, n: float) -> Tensor:
        return x * n


class Before(nn.Module):
    """A layer before opaque code, which `call` runs. x: [rows 8]"""

    def __init__(self, call: Callable[[Any, Tensor], Any], code: Any = None) -> None:
        super().__init__()
        self.layer, self.code, self.call = nn.Linear(8, 8), code, call

    def forward(self, x: Tensor, n: int = 2) -> Any:
        self.n = n
        return self.call(self, self.layer(x))


SIZED: dict[str, Callable[[Any, Tensor], Any]] = {
    "a size": lambda model, x: model.code(x, x.shape[0]),
    "an argument": lambda model, x: model.code(x, model.n),
    "in a shape": lambda model, x: reshaped(x, (x.shape[0] * 2, 4)),
}


@autotp.opaque
def reshaped(x: Tensor, shape: tuple[int, int]) -> Tensor:
    return x.reshape(shape)


@pytest.mark.parametrize("call", SIZED.values(), ids=SIZED)
def test_opaque_code_gets_the_sizes_of_each_call(call: Callable[[Any, Tensor], Any]) -> None:
    one = Before(call, autotp.opaque(Times()))
    mine = autotp.parallelize(copy.deepcopy(one), 1, example_inputs=(ROWS.float(), 2))
    for x, n in ((ROWS, 2), (MORE_ROWS, 3), (ROWS, 4), (MORE_ROWS, 5)):
        assert_values_close(mine(x.float(), n), one(x.float(), n))


class Scale:
    """A callable object that holds a module."""

    def __init__(self) -> None:
        self.layer = nn.Linear(8, 8)

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(x)


def with_held(x: Tensor, held: Any) -> Tensor:
    return x if held is None else x * 2


HELD: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a module in a closure": (lambda model, x: autotp.opaque(lambda x: model.layer(x))(x), "a Before"),
    "a tensor in a closure": (lambda model, x: autotp.opaque(lambda y: x * y)(x), "a FakeTensor"),
    "a size in a closure": (lambda model, x: autotp.opaque(lambda y, n=x.shape[0]: y * n)(x), "a SymInt"),
    "a partial": (lambda model, x: autotp.opaque(partial(with_held, held=nn.ReLU()))(x), "a ReLU"),
    "a callable object": (lambda model, x: autotp.opaque(Scale())(x), "a Linear"),
    "a method of an object": (lambda model, x: autotp.opaque(Scale().__call__)(x), "a Linear"),
    "a part of a size": (lambda model, x: model.code(x, x.shape[0] / 2), "a SymFloat"),
    "a slice": (lambda model, x: autotp.opaque(with_held)(x, slice(0, x.shape[0])), "a SymInt"),
}


@pytest.mark.parametrize("call, what", HELD.values(), ids=HELD)
def test_opaque_refuses_what_its_operator_does_not_get(call: Callable[[Any, Tensor], Any], what: str) -> None:
    text = message(lambda: autotp.explain(Before(call, autotp.opaque(Times())), 2, example_inputs=ROWS.float()))
    assert f"gets {what}" in text and "which the operator cannot pass on" in text


class Averaging(nn.Module):
    """A buffer that is assigned. x: [rows 8]"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Growing(Averaging):
    def forward(self, x: Tensor) -> Tensor:
        self.mean = torch.cat([self.mean, x.detach().mean(0)])
        return x


def test_opaque_code_assigns_buffers() -> None:
    one = nn.Sequential(nn.Linear(8, 8), autotp.opaque(Averaging()), nn.Linear(8, 8))
    mine = autotp.parallelize(copy.deepcopy(one), 1, example_inputs=ROWS.float())
    for x in (ROWS, MORE_ROWS, ROWS):
        assert_values_close(mine(x.float()), one(x.float()))
    assert_values_close(mine[1].mean, one[1].mean)


def test_opaque_refuses_buffers_that_change_against_its_promise() -> None:
    code = autotp.opaque(Averaging(), like=torch.empty_like, rows=True)
    mine = autotp.parallelize(nn.Sequential(nn.Linear(8, 8), code), 1, example_inputs=ROWS.float())
    assert "`Averaging` changes its buffer `mean`, and did not without values" in message(lambda: mine(ROWS.float()))


@pytest.mark.parametrize("rows", [False, True])
def test_opaque_code_runs_in_transforms_and_inference_mode(rows: bool) -> None:
    one = nn.Sequential(nn.Linear(8, 8), autotp.opaque(nn.Linear(8, 8), rows=rows))
    mine = autotp.parallelize(copy.deepcopy(one), 1, example_inputs=ROWS.float())
    x = ROWS.float()
    with torch.inference_mode():
        assert_values_close(mine(x), one(x))
    results = [
        (torch.vmap(model)(x[None]), torch.func.grad(lambda x, model=model: model(x).sum())(x)) for model in (mine, one)
    ]
    assert_values_close(*results)
    mine(x).mul_(2).sum().backward()
    assert_values_close(autotp.gather(mine[1].bias.grad), torch.full((8,), 6.0))


def doubled(x: Tensor) -> Tensor:
    return x * 2


class Around(nn.Module):
    """Opaque code in opaque code, by an attribute that is a method and by a forward of the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = autotp.opaque(nn.Linear(8, 8))
        self.inner.forward = MethodType(lambda module, x: x * module.bias * 3, self.inner)
        self.method = autotp.opaque(self.times)
        self.function = autotp.opaque(doubled)

    def times(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.inner.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.method(x)) + self.inner(x)


@pytest.mark.parametrize("inside", [False, True])
def test_opaque_functions_and_methods_may_be_attributes(inside: bool) -> None:
    code = Around()
    one = nn.Sequential(nn.Linear(8, 8), autotp.opaque(code) if inside else code)
    mine = autotp.parallelize(copy.deepcopy(one), 1, example_inputs=ROWS.float())
    results = [model(ROWS.float()) for model in (mine, one)]
    assert_values_close(*results)
    for result in results:
        result.sum().backward()
    assert_values_close(autotp.gather(mine[1].inner.bias.grad), one[1].inner.bias.grad)


@autotp.opaque
def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return y, y


@autotp.opaque
def flat(x: Tensor) -> Tensor:
    return x.view(-1)


def writes_a_view(model: nn.Module, x: Tensor, reads: bool) -> Tensor:
    y = flat(x)
    y.add_(1)
    return y * (x.sum() if reads else 1)


def writes_an_argument(model: nn.Module, x: Tensor, reads: bool) -> Tensor:
    y = flat(x)
    x.add_(1)
    return x * (y.sum() if reads else 1)


def writes_one_of_two(model: nn.Module, x: Tensor, reads: bool) -> Tensor:
    y, z = twice(x)
    y.add_(1)
    return z if reads else y


@pytest.mark.parametrize("call", [writes_a_view, writes_an_argument, writes_one_of_two])
def test_opaque_refuses_writes_that_another_result_would_see(call: Callable[..., Any]) -> None:
    one = Before(partial(call, reads=False))
    mine = autotp.parallelize(copy.deepcopy(one), 1, example_inputs=ROWS.float())
    assert_values_close(mine(ROWS.float()), one(ROWS.float()))
    text = message(lambda: autotp.explain(Before(partial(call, reads=True)), 2, example_inputs=ROWS.float()))
    assert "shares its memory with another one that is used" in text


class Counted(nn.Module):
    """Returns its buffer. x: [rows 8]"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        return x * 2, self.calls


def test_opaque_code_returns_its_buffer() -> None:
    one = Before(lambda model, x: sum(model.code(x)), autotp.opaque(Counted()))
    mine = autotp.parallelize(copy.deepcopy(one), 1, example_inputs=ROWS.float())
    for _ in range(2):
        assert_values_close(mine(ROWS.float()), one(ROWS.float()))
    bad = Before(lambda model, x: model.code(x)[1].add_(1), autotp.opaque(Counted()))
    assert "shares its memory" in message(lambda: autotp.explain(bad, 2, example_inputs=ROWS.float()))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attributes": (Counting, "`Counting` sets `calls` of its copy of the module"),
    "writes": (Writing, "`Writing` writes into its arguments or parameters"),
    "values": (Numpy, "`Numpy` does not run without values: "),
    "tensors": (Holding, "`Holding` gets a Tensor in `table`, which the operator cannot pass on"),
    "numbers": (Half, "`Half` returns a number that it computes"),
    "shapes": (Growing, "`Growing` gives its buffer `mean` a gradient, or another shape or dtype"),
}


@pytest.mark.parametrize("make, problem", REFUSED.values(), ids=REFUSED)
def test_opaque_refuses_what_would_be_lost(make: Callable[[], nn.Module], problem: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), autotp.opaque(make()))
    assert f"autotp.opaque: {problem}" in message(lambda: autotp.explain(model, 2, example_inputs=ROWS.float()))


def test_opaque_refuses_what_is_no_code() -> None:
    assert message(lambda: autotp.opaque(3)).startswith("opaque: opaque gets 3\n")  # type: ignore[type-var]


# ---- on real ranks

checks = Checks()


@checks.on(2)
def opaque_code_trains_as_one_device(rank: int, n: int) -> None:
    expect_equal_training(Model, n)
    expect_equal_training(lambda: autotp.opaque(Model(), like=torch.empty_like), n)
    expect_equal_training(Model, n, recompute="full")
    expect_equal_training(Rows, n, sequence_parallel=True)


@checks.on(2)
def opaque_code_trains_ten_steps_with_dropout_in_both_modes(rank: int, n: int) -> None:
    torch.manual_seed(0)
    one = Model(autotp.opaque(Routed(dropout=0.3), like=like_routed)).double()
    mine = autotp.parallelize(copy.deepcopy(one), n, example_inputs=ROWS, randomness="exact")
    for mode in (True, False):
        outcomes = []
        for model in (mine, one):
            torch.manual_seed(1)
            optimizer = torch.optim.AdamW(model.train(mode).parameters(), lr=1e-3)
            for i in range(5):
                optimizer.zero_grad()
                model(ROWS.roll(i, 0)).square().mean().backward()
                optimizer.step()
            outcomes.append(model)
        expect_whole(*outcomes)


@checks.on(2)
def opaque_code_trains_in_bfloat16_and_under_autocast(rank: int, n: int) -> None:
    torch.manual_seed(0)
    for dtype, inside in ((torch.bfloat16, False), (torch.float32, True)):
        last = autotp.opaque(nn.Linear(8, 8))
        one = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), last).to(dtype)
        mine = autotp.parallelize(copy.deepcopy(one), n, example_inputs=ROWS.to(dtype))
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            results = [model(ROWS.to(dtype)) for model in (mine, one)]
        for result in results:
            result.float().square().sum().backward()
        assert results[0].dtype == results[1].dtype
        assert_values_close(*results, rtol=0.05, atol=0.05)
        for name, parameter in one.named_parameters():
            gradient = autotp.gather(dict(mine.named_parameters())[name].grad)
            assert_values_close(gradient, parameter.grad, rtol=0.1, atol=0.1, msg=lambda m, name=name: f"{name}: {m}")


@checks.on(2)
def opaque_code_follows_attributes_and_raises_its_own_exception(rank: int, n: int) -> None:
    torch.manual_seed(0)
    one = Model().double()
    mine = autotp.parallelize(copy.deepcopy(one), n, example_inputs=ROWS)
    expect_whole(trained(mine, [ROWS]), trained(one, [ROWS]))
    for model in (mine, one):
        model.middle.norm.momentum = 0.5
    expect_whole(trained(mine, [ROWS]), trained(one, [ROWS]))

    def fails(module: nn.Module, *args: Any) -> None:
        raise ValueError("my own")

    handle = one.middle.experts[0].register_forward_pre_hook(fails)
    broken = autotp.parallelize(copy.deepcopy(one), n, example_inputs=ROWS)
    with pytest.raises(ValueError, match="my own"):
        broken(ROWS)
    handle.remove()


@checks.on(2)
def opaque_code_that_returns_other_shapes_than_like_is_an_error(rank: int, n: int) -> None:
    rows = nn.Sequential(nn.Linear(8, 8), autotp.opaque(nn.ReLU(), like=lambda x: x.new_empty(x.shape[0] * 1, 8)))
    assert autotp.parallelize(rows, n, example_inputs=ROWS.float())(MORE_ROWS.float()).shape == (10, 8)
    columns = nn.Sequential(nn.Linear(8, 8), autotp.opaque(nn.Flatten(0), like=lambda x: x.new_empty(x.shape[0])))
    assert "else than" in message(lambda: autotp.parallelize(columns, n, example_inputs=ROWS.float())(ROWS.float()))
    model = nn.Sequential(nn.Linear(8, 8), autotp.opaque(Numpy(), like=lambda x: x.new_empty(x.shape[0])))
    mine = autotp.parallelize(model, n, example_inputs=ROWS.float())
    assert message(lambda: mine(ROWS.float())).endswith(
        "autotp.opaque: `Numpy` returns something else than it does without values\n"
        "  expected float32[3]\n  got      float32[3, 8]\n"
        "  try      tensors in place of other values, and `like=` that returns what the code returns"
    )


@checks.on(2)
def distribute_asks_for_the_promise_of_rows(rank: int, n: int) -> None:
    model = WithLoss(nn.Sequential(nn.Linear(8, 8), autotp.opaque(Rowwise(), like=torch.empty_like))).double()
    text = message(lambda: distribute(model, dp=2, example_inputs=(ROWS, ROWS)))
    assert "`autotp.opaque(Rowwise)` mixes the rows of the batch, which cannot be computed in parts" in text


def over_a_pipeline(rank: int, n: int, layout: tuple[int, int, int], zero: int) -> None:
    """Ten steps beside one device's."""
    tp, pp, dp = layout
    torch.manual_seed(0)
    whole = WithLoss(Rows()).double()
    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    parts = 4 // dp
    example = {"x": x[: 8 // (dp * parts)], "y": y[: 8 // (dp * parts)]}
    trainer = distribute(
        copy.deepcopy(whole), tp=tp, pp=pp, dp=dp, zero=zero, microbatches=parts, example_inputs=example
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, trainer)]
    for _ in range(10):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = whole(x, y)
        expected.backward()
        mine = slice(trainer.mesh["dp"].get_local_rank() * 8 // dp, (trainer.mesh["dp"].get_local_rank() + 1) * 8 // dp)
        assert_values_close(trainer.step(x=x[mine], y=y[mine]), expected.detach(), rtol=0, atol=1e-10)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("layout, zero", [((1, 2, 1), 0), ((1, 1, 2), 2)], ids=str)
def test_distribute_trains_row_wise_opaque_code_as_one_device(layout: tuple[int, int, int], zero: int) -> None:
    run_ranks(over_a_pipeline, 2, layout, zero)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
