"""suggest_rule: what runs on slices say of an operator; a reference in plain torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from errors import message
from graphs import r
from torch import Tensor, nn

import autotp

aten = torch.ops.aten
NUMBERS = itertools.count()

SUGGESTED: list[tuple[Any, tuple[Any, ...], str]] = [
    (aten.mul.Tensor, (r(4, 6), r(6)), "a b, b -> a b"),
    (aten.mm, (r(3, 4), r(4, 5)), "a b, b c -> a c"),
    (aten.linear, (r(2, 3, 4), r(5, 4), r(5)), "a b c^, d e^, d -> a b d"),
    (aten.softmax.int, (r(3, 4), 1), "a b^ -> a c^"),
    (aten.sum.dim_IntList, (r(3, 4), [1]), "a b -> a"),
    (aten.embedding, (r(7, 5), torch.tensor([[0, 2, 6], [1, 1, 3]])), "a^ b, c d -> c d b"),
    (aten.scaled_dot_product_attention, (r(2, 3, 4, 8), r(2, 3, 5, 8), r(2, 3, 5, 6)),
     "a b c d^, a b e^ f^, a b g^ h -> a b c h"),
    (aten.transpose.int, (r(3, 4), 0, 1), "a b -> b a"),
    (aten.split.Tensor, (r(3, 4), 2, 1), "a b^ -> a c^, a d^"),
    (aten.layer_norm, (r(3, 4), [4], r(4), r(4)), "a b^, c^, d^ -> a e^"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "args", "rule"), SUGGESTED, ids=lambda x: str(x) if isinstance(x, str) else "")
def test_a_rule_is_what_runs_on_slices_say(op: Any, args: tuple[Any, ...], rule: str) -> None:
    assert autotp.suggest_rule(op, *args) == rule


def test_what_is_suggested_can_be_registered(registry: None) -> None:
    @torch.library.custom_op(f"suggested::gated{next(NUMBERS)}", mutates_args=())
    def gated(x: Tensor, gate: Tensor, scale: Tensor) -> Tensor:
        return x * gate.sigmoid() * scale

    gated.register_fake(lambda x, gate, scale: torch.empty_like(x))
    op = getattr(torch.ops.suggested, gated._name)
    rule = autotp.suggest_rule(op, r(2, 3, 8), r(2, 3, 8), r(8))
    assert rule == "a b c, a b c, c -> a b c"
    autotp.rule(op, rule)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
            self.scale = nn.Buffer(torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.down(op(self.up(x), self.gate(x), self.scale))

    with torch.no_grad():
        report = autotp.verify(Model().requires_grad_(False), 2, example_inputs=torch.rand(5, 3, 4))
    assert report.ok and "has no rule" not in str(report.plan)


def test_terms_have_the_order_of_the_schema() -> None:
    rule = "a b c^, d e^, d -> a b d"
    assert autotp.suggest_rule(aten.linear, bias=r(5), weight=r(5, 4), input=r(2, 3, 4)) == rule


def test_the_overload_is_one_that_runs() -> None:
    """The default of `aten.mul` is of numbers, and `aten.remainder` has none."""
    assert autotp.suggest_rule(aten.mul, r(4, 6), r(6)) == "a b, b -> a b"
    assert autotp.suggest_rule(aten.remainder, r(4, 6), 2.0) == "a b -> a b"


def test_an_operator_that_writes_is_refused_before_it_runs() -> None:
    x = torch.zeros(4, 6)
    for op in (aten.add_, aten.add_.Tensor):
        assert message(lambda op=op: autotp.suggest_rule(op, x, r(4, 6))) == (
            f"suggest_rule: {op} writes into its operands\n  try      an operator that returns a new tensor"
        )
    assert not x.any()


def test_what_nobody_can_cut_is_an_error() -> None:
    assert "no dimension of aten.cumsum.default can be cut" in message(
        lambda: autotp.suggest_rule(aten.cumsum, r(4), 0)
    )
    assert "on the same numbers differ" in message(lambda: autotp.suggest_rule(aten.rand_like, r(4, 4)))
    assert "torch.ops.mylib.myop" in message(lambda: autotp.suggest_rule(torch.relu, r(4)))


def test_an_operator_without_a_rule_is_listed_with_what_proposes_one() -> None:
    @torch.library.custom_op(f"suggested::shifted{next(NUMBERS)}", mutates_args=())
    def shifted(x: Tensor) -> Tensor:
        return x + 1

    shifted.register_fake(torch.empty_like)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return shifted(self.up(x))

    plan = autotp.explain(Model().requires_grad_(False), tp=2, example_inputs=torch.rand(5, 4))
    assert "autotp.suggest_rule" in str(plan)


def test_an_operator_of_triton_is_cut_by_its_rule(registry: None) -> None:
    """`triton_op`, whose body calls a kernel by `wrap_triton` on a GPU; here it is plain torch. With gradients."""
    name = f"triton_stand_in::gated{next(NUMBERS)}"

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.silu(gate) * up

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        gate, up = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            return torch.autograd.grad(gated(gate, up), (gate, up), gradient)

    op: Any = torch.library.triton_op(name, gated, mutates_args={})
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    autotp.rule(getattr(torch.ops.triton_stand_in, name.partition("::")[2]), "* h, * h -> * h")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.down(op(self.gate(x), self.up(x)))
            return result

    report = autotp.verify(Model().double(), 3, example_inputs=torch.rand(5, 3, 4).double())
    assert report.ok and {"gate.weight", "up.weight", "down.weight"} <= set(report.plan.cut), report


def test_a_reference_runs_where_an_operator_has_no_kernel_for_cpus(registry: None) -> None:
    """A second one takes the place of the first, as in a notebook; a kernel of the operator's own stays."""
    name = f"kernels{next(NUMBERS)}"
    library = torch.library.Library(name, "DEF")
    library.define("scale(Tensor x, Tensor by) -> Tensor")
    library.define("own(Tensor x) -> Tensor")
    library.define("shift(Tensor x, float by=2.0, *, int times=3) -> Tensor")
    torch.library.impl(f"{name}::own", "CPU", lambda x: x + 1, lib=library)
    torch.library.register_fake(f"{name}::scale", lambda x, by: torch.empty_like(x), lib=library)
    op = getattr(torch.ops, name).scale
    with pytest.raises(NotImplementedError):
        op(torch.ones(2), torch.ones(2))
    for factor in (2, 3):
        autotp.rule(op, "* h, h -> * h", reference=lambda x, by, factor=factor: factor * x * by)
        assert torch.equal(op(torch.ones(2), torch.ones(2)), torch.full((2,), float(factor)))
    shift = getattr(torch.ops, name).shift
    autotp.rule(shift, "* -> *", reference=lambda x, by, *, times: x + by * times)
    assert [shift(torch.zeros(())).item(), shift(torch.zeros(()), 2.0, times=1).item()] == [6.0, 2.0]
    autotp.rule(getattr(torch.ops, name).own, "* -> *", reference=lambda x: x)
    assert torch.equal(getattr(torch.ops, name).own(torch.ones(2)), torch.full((2,), 2.0))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
            self.by = nn.Buffer(torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.down(op(self.up(x), self.by))

    with torch.no_grad():
        report = autotp.verify(Model().requires_grad_(False), 2, example_inputs=torch.rand(5, 4))
    assert report.ok and "no rule" not in str(report.plan)
