"""The normal form of sizes: sizes that are equal as functions of the inputs' sizes are written in the same way.

    Before: (4*((s - 1)//2) + 4)*(t + 1)        s - s % 8      ((s//2) + 1)//2       ceil(float(s) / 2)
    After:  4*((s + 1)//2)*(t + 1)              8*(s//8)       (s + 2)//4            (s + 1)//2

A size is a polynomial of symbols and of floor divisions. A polynomial is factored; floor divisions by numbers are
written with the least numbers. (Two sizes may be equal for deeper reasons, and yet have two forms. Then autotp takes
them for two sizes, which at worst refuses a model.)
"""

from __future__ import annotations

from functools import cache
from math import gcd

import sympy
from torch.utils._sympy.functions import (
    CeilToInt,
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Mod,
    PythonMod,
    RoundToInt,
    ToFloat,
    TruncToInt,
)

ROUNDED = (CeilToInt, FloorToInt, RoundToInt, TruncToInt)
EXACT = 2**20
"""Floats whose numerator and denominator are less than this are exact in sums and products of sizes."""


@cache
def size_form(expr: sympy.Expr) -> sympy.Expr:
    """Returns the normal form of a size."""
    if expr.is_Atom:
        return expr
    args = [size_form(arg) for arg in expr.args]
    if isinstance(expr, ROUNDED):
        form = _rounded(expr.func, args[0])
    elif isinstance(expr, FloorDiv):
        form = _floor(*args)
    elif isinstance(expr, Mod | PythonMod):
        form = args[0] - args[1] * _floor(*args)
    else:
        form = expr.func(*args)
    return sympy.factor(form) if (form.is_Add or form.is_Mul) and not form.has(sympy.Float) else form


def _floor(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """Returns `a // b`."""
    if isinstance(a, FloorDiv):
        # (x//m)//n = x//(m*n)
        return _floor(a.args[0], a.args[1] * b)
    a, b = sympy.cancel(a / b).as_numer_denom()
    if b == 1 or not (b.is_Integer and a.is_integer):
        return FloorDiv(a, b)
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(sympy.expand(a))]
    # (n*k + r)//n = k + r//n for whole k: multiples of the divisor leave the division.
    whole = sympy.Add(*(int(k / b) * x for k, x in terms))
    constant, rest = sympy.expand(a - whole * b).as_coeff_Add()
    if rest.could_extract_minus_sign():  # -x//n = -((x + n - 1)//n)
        return whole - _least(-rest, int(b - 1 - constant), int(b))
    return whole + _least(rest, int(constant), int(b))


def _least(x: sympy.Expr, constant: int, n: int) -> sympy.Expr:
    """Returns `(x + constant) // n` with the least constant and one division: `(2*s + 5) // 4` is `s // 2 + 1`."""
    # (g*x + c)//(g*n) = (x + c//g)//n for whole x: the rest of c by g never reaches the next multiple.
    shared = gcd(n, *(int(term.as_coeff_Mul()[0]) for term in sympy.Add.make_args(x)))
    x, constant, n = sympy.expand(x / shared), constant // shared, n // shared
    of = (term for term in sympy.Add.make_args(x) if isinstance(term, FloorDiv) and term.args[1].is_Integer)
    if (inner := next(of, None)) is not None:  # (y//m + z)//n = (y + m*z)//(m*n)
        y, m = inner.args
        return _floor(y + m * (x - inner + constant), m * n)
    return FloorDiv(x + constant % n, n) + constant // n


def _rounded(rounding: type[sympy.Function], x: sympy.Expr) -> sympy.Expr:
    """Returns a rounded float as a floor division, if floats are exact in `x`; else the rounding itself."""
    above, below = map(_exact, x.args if isinstance(x, FloatTrueDiv | IntTrueDiv) else (x, sympy.S.One))
    if above is None or below is None:
        return rounding(x)
    a, b = sympy.cancel(above / below).as_numer_denom()
    down = rounding is FloorToInt or (rounding is TruncToInt and x.is_nonnegative)
    if b == 1 or (down and b.is_Integer):
        return _floor(a, b)
    # ceil(a/b) = -(-a//b)
    return -_floor(-a, b) if rounding is CeilToInt and b.is_Integer else rounding(x)


def _exact(x: sympy.Expr) -> sympy.Expr | None:
    """Returns a polynomial of sizes without floats; None if floats may round it."""
    if x.is_Integer or x.is_Symbol or isinstance(x, FloorDiv):
        return x
    if x.is_Float:
        number = sympy.Rational(float(x))
        return number if abs(number.p) < EXACT and number.q < EXACT else None
    if isinstance(x, ToFloat):
        return _exact(x.args[0])
    if not isinstance(x, sympy.Add | sympy.Mul) and not (x.is_Pow and x.exp.is_Integer and x.exp > 0):
        return None
    parts = [_exact(arg) for arg in x.args]
    return None if None in parts else x.func(*parts)
