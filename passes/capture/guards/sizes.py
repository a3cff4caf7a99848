"""sizes: a graph's assumptions about the shapes of its inputs, as a Python function.

Before: x [s0, 8] of a model that takes int(s0 ** 0.5) ** 2 for s0
After:  fits([[9, 8]]) is True, fits([[10, 8]]) is False
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from sympy.printing.precedence import PRECEDENCE
from torch.export import ExportedProgram
from torch.utils._sympy.printers import PythonPrinter

from autotp.errors import REPORT, Error

Shapes = Sequence[Sequence[int]]
Functions = tuple[tuple[str, "OnNumbers"], ...]


class SizeAssumptions:
    """The exporter's assumptions about the shapes of a call, as plain Python functions of shapes.

    Every size is the number or the symbol of the capture, symbols are in their ranges, and the comparisons that the
    model made have the same outcome.
    """

    def __init__(self, example: Sequence[Sequence[Any]], environment: Any, program: ExportedProgram) -> None:
        self.symbols: dict[str, str] = {}
        self.tests: list[str] = []
        self.printer = Printer()
        for i, shape in enumerate(example):
            for d, size in enumerate(shape):
                expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
                place = f"shapes[{i}][{d}]"
                # The first dimension of a symbol gives its value. All others are compared with what is computed of it.
                if expr.is_Symbol and str(expr) not in self.symbols:
                    self.symbols[str(expr)] = place
                else:
                    self.tests.append(f"{place} == {self.printer.doprint(expr)}")
        for symbol, bounds in program.range_constraints.items():
            if str(symbol) in self.symbols:
                # A range without an end has torch's infinity there, which is no Integer.
                self.tests += [f"{symbol} >= {bounds.lower}"] if bounds.lower.is_Integer else []
                self.tests += [f"{symbol} <= {bounds.upper}"] if bounds.upper.is_Integer else []
        expressions = [g.expr for g in environment.guards] if environment is not None else []
        # A symbol that no shape gives is a number of a tensor's values: nothing can test it before the call.
        expressions = [expr for expr in expressions if {str(s) for s in expr.free_symbols} <= set(self.symbols)]
        self.tests += map(self.printer.doprint, expressions)

    def fits(self) -> Fits:
        """Returns a function that is True for shapes that meet all assumptions."""
        functions = tuple(self.printer.functions.items())
        return Fits(tuple(self.symbols.items()), tuple(self.tests), functions)

    def value(self, expression: sympy.Basic) -> OfShapes:
        """Returns an expression of symbols as a function of shapes."""
        return self._function(self.printer.doprint(expression))

    def _function(self, text: str) -> OfShapes:
        return _function(text, tuple(self.symbols.items()), tuple(self.printer.functions.items()))


def _function(text: str, symbols: tuple[tuple[str, str], ...], functions: Functions) -> OfShapes:
    head = "".join(f"    {name} = {place}\n" for name, place in symbols)
    return OfShapes(f"def value(shapes):\n{head}    return {text}\n", functions)


class OfShapes:
    """A function of shapes, as Python. It can be pickled.

    Args:
        source: defines the function `value`.
        functions: names in it, and what they stand for.
    """

    def __init__(self, source: str, functions: Functions) -> None:
        scope: dict[str, Any] = {"math": math, "torch": torch, **dict(functions)}
        exec(source, scope)
        self.source, self.functions, self.value = source, functions, scope["value"]

    def __call__(self, shapes: Shapes) -> Any:
        return self.value(shapes)

    def __reduce__(self) -> tuple[Any, ...]:
        return OfShapes, (self.source, self.functions)


@dataclass(frozen=True)
class Fits:
    """Whether shapes meet assumptions.

    An assumption that cannot be evaluated (a root of a negative number, a division by zero) is not met.

    Attributes:
        symbols: name of a symbol -> where its value is among the shapes.
        tests: the assumptions, as Python.
        functions: names in the tests, and what they stand for.
        holds: True for shapes that meet all of them. Made at once: torch.compile traces no cached property.
    """

    symbols: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]
    functions: Functions
    holds: OfShapes = field(init=False)

    def __post_init__(self) -> None:
        text = " and ".join(f"({test})" for test in self.tests) or "True"
        object.__setattr__(self, "holds", _function(text, self.symbols, self.functions))

    def __call__(self, shapes: Shapes) -> bool:
        try:
            return bool(self.holds(shapes))
        except (ArithmeticError, ValueError):
            return False

    def narrowed(self, assumed: Sequence[sympy.Basic]) -> Fits:
        """Returns these assumptions with further ones, which passes made of the same symbols.

        Raises:
            Error: an assumption is about a symbol that no input has.
        """
        printer, symbol_names = Printer(), {name for name, _ in self.symbols}
        for assumption in assumed:
            if not {str(symbol) for symbol in assumption.free_symbols} <= symbol_names:
                raise Error(f"a pass assumes {assumption} of all calls", fix=REPORT)
        tests = tuple(map(printer.doprint, assumed))
        return replace(self, tests=self.tests + tests, functions=self.functions + tuple(printer.functions.items()))


class Printer(PythonPrinter):
    """Prints expressions of sizes, and comparisons of sizes, as Python.

    A sympy function that torch's printer does not know is printed as a call of the function itself.

    Attributes:
        functions: names in the printed Python that are sympy's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[str, OnNumbers] = {}

    def _print_Function(self, expr: Any) -> str:
        name = type(expr).__name__
        self.functions[name] = OnNumbers(expr.func)
        return f"{name}({', '.join(map(self._print, expr.args))})"

    _print_TruncToFloat = _print_Function

    # torch's printer raises for powers that are roots or fractions.
    def _print_Pow(self, expr: Any) -> str:
        return self.stringify(expr.args, " ** ", PRECEDENCE["Pow"])


@dataclass(frozen=True)
class OnNumbers:
    """A sympy function, as a function of Python numbers."""

    function: Callable[..., Any]

    def __call__(self, *numbers: Any) -> Any:
        result = self.function(*map(sympy.sympify, numbers))
        if result in (sympy.true, sympy.false):
            return bool(result)
        return int(result) if result.is_Integer else float(result)
