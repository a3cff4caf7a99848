"""sizes: a graph's guard is a plain Python function, whatever a model computes of the sizes that it meets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.utils._sympy import functions as f

from autotp.passes.capture.capture import capture
from autotp.passes.capture.guards.sizes import Printer

S, T = (sympy.Symbol(name, integer=True, positive=True) for name in "st")
QUOTIENT = f.FloatTrueDiv(f.ToFloat(S), f.ToFloat(T))
SIZES = [(9, 2), (16, 3), (2, 7), (100, 9), (7, 7)]

EXPRESSIONS: dict[str, tuple[Any, Callable[[int, int], float]]] = {
    "floor": (f.FloorToInt(QUOTIENT), lambda s, t: math.floor(s / t)),
    "ceil": (f.CeilToInt(QUOTIENT), lambda s, t: math.ceil(s / t)),
    "trunc": (f.TruncToInt(QUOTIENT), lambda s, t: math.trunc(s / t)),
    "trunc-float": (f.TruncToFloat(QUOTIENT), lambda s, t: float(math.trunc(s / t))),
    "round": (f.RoundToInt(QUOTIENT), lambda s, t: round(s / t)),
    "round-decimal": (f.RoundDecimal(QUOTIENT, sympy.Integer(1)), lambda s, t: round(s / t, 1)),
    "sqrt": (f.OpaqueUnaryFn_sqrt(f.ToFloat(S)), lambda s, t: math.sqrt(s)),
    "root": (f.TruncToInt(f.FloatPow(f.ToFloat(S), sympy.Float(0.5))), lambda s, t: int(s**0.5)),
    "log": (f.OpaqueUnaryFn_log(f.ToFloat(S)), lambda s, t: math.log(s)),
    "log2": (f.OpaqueUnaryFn_log2(f.ToFloat(S)), lambda s, t: math.log2(s)),
    "exp": (f.OpaqueUnaryFn_exp(f.ToFloat(T)), lambda s, t: math.exp(t)),
    "mod": (f.Mod(S, T), lambda s, t: s % t),
    "python-mod": (f.PythonMod(S - 9, T), lambda s, t: (s - 9) % t),
    "floor-div": (f.FloorDiv(S, T), lambda s, t: s // t),
    "clean-div": (f.CleanDiv(S * T + S, S), lambda s, t: t + 1),
    "int-true-div": (f.IntTrueDiv(S, T), lambda s, t: s / t),
    "modular-indexing": (f.ModularIndexing(S, 2, T), lambda s, t: s // 2 % t),
    "power": (f.PowByNatural(S, T), lambda s, t: s**t),
    "square": (S**2 * T, lambda s, t: s * s * t),
    "inverse": (S / T, lambda s, t: s / t),
    "min": (f.Min(S, T, 4), lambda s, t: min(s, t, 4)),
    "max": (f.Max(S, T), lambda s, t: max(s, t)),
    "abs": (sympy.Abs(S - T), lambda s, t: abs(s - t)),
    "where": (f.Where(sympy.Lt(S, T), S, 2 * T), lambda s, t: s if s < t else 2 * t),
    "piecewise": (sympy.Piecewise((S, S < T), (2 * T, True)), lambda s, t: s if s < t else 2 * t),
    "and": (f.BitwiseFn_bitwise_and(S, T), lambda s, t: s & t),
    "less": (sympy.Lt(S, T), lambda s, t: s < t),
    "either": (sympy.Or(sympy.Lt(S, T), sympy.Eq(f.Mod(S, 2), 0)), lambda s, t: s < t or s % 2 == 0),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_what_sympy_computes_of_sizes_is_python(name: str) -> None:
    """Printed and run again, every function gives what Python's own does."""
    expr, expected = EXPRESSIONS[name]
    printer = Printer()
    text = printer.doprint(expr)
    for s, t in SIZES:
        found = eval(text, {"math": math, "torch": torch, **printer.functions}, {"s": s, "t": t})
        assert found == pytest.approx(expected(s, t), rel=1e-15)


class Patches(nn.Module):
    """Reads places as a square, as a vision transformer does."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        side = torch.sym_int(n**0.5)
        return x.view(b, side, side, d).mean(2)


class Part(nn.Module):
    """Sums the first seven tenths, and the first half."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return x[:, : math.ceil(length * 0.7)].sum(1) + x[:, : math.floor(length / 2)].sum(1) * length**0.5


class Rest(nn.Module):
    """Compares what is left of a division by a length less two."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] % (x.shape[1] - 2) == 0 else x


def test_sizes_guard_follows_a_root() -> None:
    captured = capture(Patches(), (torch.ones(2, 9, 8),), {})
    assert captured.fits([(5, 25, 8)])
    assert not captured.fits([(5, 10, 8)])


def test_sizes_guard_follows_a_part() -> None:
    captured = capture(Part(), (torch.ones(2, 9, 8),), {})
    assert captured.fits([(5, 11, 8)])
    assert not captured.fits([(5, 1, 8)])


def test_a_test_without_an_answer_is_not_met() -> None:
    captured = capture(Rest(), (torch.ones(8, 6),), {})
    assert captured.fits([(9, 5)])
    assert not captured.fits([(9, 2)])  # modulo zero
