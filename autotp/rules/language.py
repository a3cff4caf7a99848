"""The rule language: a factor string says how the dimensions of an operator correspond.

    "* i, o i -> * o"                              linear
    "b h s d^, b h t^ d^, b h t^ e -> b h s e"     attention
    "b s (n d) -> b s n d"                         a view
    "b (q | k | v) -> b q, b k, b v"               a split

One term for each tensor operand (an absent optional operand drops its term), one for each output.
A factor in inputs and outputs is passed through; one missing from the outputs is reduced; one missing from
the inputs is introduced. `name^` needs replication at this operator. `name!` can be cut, but only in the
operator's own parallel form (`passes/lower/decompose.py`, `passes/lower/lower.py`). `(a b)` is a product, major to
minor, `(a | b)` a concatenation (`(h | h)`: of two parts that are cut together), `*` the leading dimensions broadcast
as pointwise operators do, `1` a dimension without a factor, `()` a tensor without dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from autotp.errors import Error
from autotp.sharding.axis import Size
from autotp.sharding.placement import Reducer


@dataclass(frozen=True)
class Name:
    """A factor, with its mark: `^` whole, `!` parallel form, or none."""

    name: str
    mark: str = ""

    def __str__(self) -> str:
        return self.name + self.mark


@dataclass(frozen=True)
class Group:
    """A product or a concatenation of expressions."""

    kind: Literal["product", "concat"]
    parts: tuple[Expr, ...]

    def __str__(self) -> str:
        return "(" + (" " if self.kind == "product" else " | ").join(map(str, self.parts)) + ")"


Expr = Name | Group
Term = tuple[Expr, ...]

STAR = Name("*")
UNIT = Name("1")


@dataclass(frozen=True)
class Rule:
    """A parsed rule.

    Attributes:
        ins: one term for each tensor operand.
        outs: one term for each output tensor.
        sizes: lengths of factors that do not follow from shapes.
        linear: groups of operand positions; if all operands of a group are Partial, and the others Copied, the output
            is Partial.
        reducer: the reduction over factors that are missing from the outputs.
        exact: True if operands and outputs must not be Copied or held by several ranks, because some are gradients.
    """

    ins: tuple[Term, ...]
    outs: tuple[Term, ...]
    sizes: Mapping[str, Size] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    reducer: Reducer = "sum"
    exact: bool = False

    @staticmethod
    def of(
        text: str,
        linear: Literal["each", "all"] | tuple[tuple[int, ...], ...] = (),
        reducer: Reducer = "sum",
        **sizes: Any,
    ) -> Rule:
        """Returns the rule of a factor string.

        Args:
            text: the factor string; the module's docstring explains it.
            linear: `"each"` operand by itself (a product), `"all"` operands together (a sum), or groups of positions.
            reducer: the reduction over factors that are missing from the outputs.
            sizes: lengths of factors that do not follow from the operands' shapes, as in `"(a | b) -> b"` with `a=4`.

        Raises:
            Error: the string does not parse; says where.
        """
        ins, outs = parse(text)
        everyone = tuple(range(len(ins)))
        named = {"each": tuple((i,) for i in everyone), "all": (everyone,)}
        groups = named[linear] if isinstance(linear, str) else linear
        lengths = {name: Size.of(size) for name, size in sizes.items()}
        return Rule(ins, outs, lengths, tuple(frozenset(group) for group in groups if group), reducer)

    def __str__(self) -> str:
        ins, outs = (", ".join(" ".join(map(str, term)) or "()" for term in side) for side in (self.ins, self.outs))
        return f"{ins} -> {outs}" if ins else f"-> {outs}"


# Layers repeat, so most strings were parsed before.
@lru_cache(maxsize=4096)
def parse(text: str) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """Returns the input and output terms of a factor string. Raises Error if it does not parse."""
    sides = text.split("->")
    if len(sides) != 2:
        raise _malformed(text, "one `->` between operands and outputs")
    ins, outs = (side.split(",") if side.strip() else [] for side in sides)
    if not outs:
        raise _malformed(text, "a term for each output behind `->`, `()` for a tensor without dimensions")
    return tuple(_Parser(text, term).term() for term in ins), tuple(_Parser(text, term).term() for term in outs)


def spell(ins: Iterable[Sequence[str]], outs: Iterable[Sequence[str]]) -> str:
    """Returns the factor string of terms, given by dimension: `[["a", "b"], []], [["a"]]` gives `a b, () -> a`."""
    return " -> ".join(", ".join(" ".join(term) or "()" for term in side) for side in (ins, outs))


def names(expr: Expr) -> list[Name]:
    """Returns all factors in an expression, in order, without `1` and `*`."""
    if isinstance(expr, Group):
        return [name for part in expr.parts for name in names(part)]
    return [] if expr in (STAR, UNIT) else [expr]


def _spread(expr: Expr) -> list[set[str]]:
    """Returns the factor names in an expression as sets that must be disjoint; a concatenation is one set."""
    if isinstance(expr, Group) and expr.kind == "product":
        return [factors for part in expr.parts for factors in _spread(part)]
    return [{name.name for name in names(expr)}]


def _malformed(text: str, expected: str) -> Error:
    return Error(f'the rule "{text}" does not parse', expected=expected, fix='for example "* i, o i -> * o"')


_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z_0-9]*[\^!]?|[()|*1])")


class _Parser:
    """A recursive-descent parser for one term."""

    def __init__(self, text: str, term: str) -> None:
        self.text, self.tokens = text, self._tokens(text, term)

    @staticmethod
    def _tokens(text: str, term: str) -> list[str]:
        tokens, position = [], 0
        while position < len(term.rstrip()):
            match = _TOKEN.match(term, position)
            if match is None:
                raise _malformed(text, f"a factor name, `(`, `|`, `)`, `*` or `1` at `{term[position:].strip()}`")
            tokens.append(match.group(1))
            position = match.end()
        return tokens

    def term(self) -> Term:
        if self.tokens == ["(", ")"]:
            return ()
        if not self.tokens:
            raise _malformed(self.text, "a term between commas, `()` for a tensor without dimensions")
        exprs = []
        while self.tokens:
            exprs.append(self.expr())
        if sum(expr == STAR for expr in exprs) > 1:
            raise _malformed(self.text, "at most one `*` in a term")
        # One factor in two dimensions is a diagonal: cut in both, ranks would have the blocks on it only.
        self._check_distinct([part for expr in exprs for part in _spread(expr)])
        return tuple(exprs)

    def _check_distinct(self, parts: list[set[str]]) -> None:
        used_names: set[str] = set()
        for part in parts:
            if used_names & part:
                raise _malformed(self.text, f"`{min(used_names & part)}` in one dimension of a term only")
            used_names |= part

    def expr(self) -> Expr:
        token = self.tokens.pop(0)
        if token == "(":
            return self.group()
        if token in ")|":
            raise _malformed(self.text, f"`(` before `{token}`")
        return Name(token[:-1], token[-1]) if token[-1] in "^!" else Name(token)

    def group(self) -> Expr:
        parts: list[list[Expr]] = [[]]
        while self.tokens and self.tokens[0] != ")":
            if self.tokens[0] == "|":
                self.tokens.pop(0)
                parts.append([])
            else:
                parts[-1].append(self.expr())
        if not self.tokens:
            raise _malformed(self.text, "`)` for every `(`")
        self.tokens.pop(0)
        if not all(parts) or any(expr in (STAR, UNIT) for part in parts for expr in part):
            raise _malformed(self.text, "factors on both sides of `|` and inside `( )`, none of them `*` or `1`")
        joined = [part[0] if len(part) == 1 else Group("product", tuple(part)) for part in parts]
        return joined[0] if len(joined) == 1 else Group("concat", tuple(joined))
