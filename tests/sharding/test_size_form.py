"""size_form: equal sizes have one form, and a form has the values of its size."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import CeilToInt, FloatTrueDiv, FloorDiv, FloorToInt, IntTrueDiv, PythonMod, ToFloat

from autotp.sharding.size_form import size_form


def symbols(count: int) -> list[torch.SymInt]:
    env = ShapeEnv()
    return [env.create_unbacked_symint() for _ in range(count)]


EQUAL: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum-in-product": (lambda s, t: (4 * ((s - 1) // 2) + 4) * (t + 1), lambda s, t: 4 * ((s + 1) // 2) * (t + 1)),
    "constant": (lambda s, t: (s - 1) // 2 + 1, lambda s, t: (s + 1) // 2),
    "nested": (lambda s, t: ((s - 1) // 2 + 1 - 1) // 2 + 1, lambda s, t: (s + 3) // 4),
    "inner-sum": (lambda s, t: (s // 2 + t) // 3, lambda s, t: (s + 2 * t) // 6),
    "ceiling": (lambda s, t: -(-s // 8), lambda s, t: (s + 7) // 8),
    "padding": (lambda s, t: s + -s % 8, lambda s, t: 8 * ((s + 7) // 8)),
    "remainder": (lambda s, t: s - s % 8, lambda s, t: 8 * (s // 8)),
    "common-factor": (lambda s, t: (2 * s + 5) // 4, lambda s, t: s // 2 + 1),
    "product-inside": (lambda s, t: s * (t + 1) // 3, lambda s, t: (s * t + s) // 3),
    "exact": (lambda s, t: (s * t + s) // s, lambda s, t: t + 1),
    "float-quotient": (lambda s, t: floor(torch.sym_float(s) / 2.0), lambda s, t: s // 2),
    "float-product": (lambda s, t: ceil(torch.sym_float(s) * 0.5), lambda s, t: (s + 1) // 2),
    "whole-float": (lambda s, t: ceil((-s - 1) / -1.0), lambda s, t: s + 1),
}


@pytest.mark.parametrize("name", EQUAL)
def test_size_form_is_one_for_equal_sizes(name: str) -> None:
    one, other = EQUAL[name]
    s, t = symbols(2)
    assert size_form(one(s, t).node.expr) == size_form(other(s, t).node.expr)
    assert size_form(one(s, t).node.expr) != size_form((other(s, t) + 1).node.expr)


def test_size_form_keeps_floats_that_round() -> None:
    s, _ = symbols(2)
    expr = floor(torch.sym_float(s) * 0.1).node.expr
    assert size_form(expr) == expr
    assert floor(0.1 * 30) == floor(30 / 10) and floor(0.7 * 10) == 7 and floor(0.29 * 100) == 28  # Not 29.


def quotient(a: Any, n: Any) -> Any:
    return a // n if isinstance(a, int) else FloorDiv(a, n)


def remainder(a: Any, n: int) -> Any:
    return a % n if isinstance(a, int) else PythonMod(a, n)


def below(a: Any, n: int) -> Any:
    return floor(a / n) if isinstance(a, int) else FloorToInt(FloatTrueDiv(ToFloat(a), sympy.Float(n)))


def above(a: Any, n: int) -> Any:
    return ceil(a / n) if isinstance(a, int) else CeilToInt(IntTrueDiv(a, sympy.Integer(n)))


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> Callable[[Any, Any], Any]:
    """Functions of two sizes, for numbers and for symbols."""
    number = draw(st.integers(-5, 9))
    if depth == 0:
        return draw(st.sampled_from([lambda s, t: s, lambda s, t: t, lambda s, t: s - t + number]))
    a, b = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    n = draw(st.integers(1, 6))
    return draw(st.sampled_from([
        lambda s, t: a(s, t) + b(s, t), lambda s, t: a(s, t) - number * b(s, t), lambda s, t: a(s, t) * b(s, t),
        lambda s, t: quotient(a(s, t), n), lambda s, t: quotient(a(s, t) + number, n), lambda s, t: n * a(s, t),
        lambda s, t: remainder(a(s, t), n), lambda s, t: quotient(a(s, t), n * s),
        lambda s, t: below(a(s, t), n), lambda s, t: above(a(s, t), n),
    ]))  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(expressions(), st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=5, max_size=5))
def test_size_form_has_the_values_of_its_size(size: Callable[..., Any], at: list[tuple[int, int]]) -> None:
    s, t = sympy.symbols("s t", integer=True, positive=True)
    found = size(s, t)
    form = size_form(found)
    assert size_form(form) == form
    for values in at:
        assert form.subs(dict(zip((s, t), values, strict=True))) == size(*values), (found, form, values)
