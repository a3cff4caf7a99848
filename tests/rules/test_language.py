"""language: what parses, how it prints, and what every malformed string is told."""

from __future__ import annotations

import pytest
from errors import message
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.rules.language import Group, Name, Rule, names, parse, spell
from autotp.sharding.axis import Size

PRINTED = [
    "* i, o i -> * o",
    "b h s d^, b h t^ d^, b h t^ e -> b h s e",
    "v! h, * -> * h",
    "b s (n d) -> b s n d",
    "b (q | k | v) -> b q, b k, b v",
    "a ((h d) | (k d2)) -> a (h d), a (k d2)",
    "(k | k) -> k",
    "a 1 -> a",
    "a, () -> ()",
    "-> a b",
    "-> ()",
]


@pytest.mark.parametrize("text", PRINTED)
def test_rule_prints_as_written(text: str) -> None:
    assert str(Rule.of(text)) == text


def test_parse_nests_products_and_concatenations() -> None:
    a, b, c = Name("a"), Name("b", "^"), Name("c", "!")
    both = Group("concat", (Group("product", (a, b)), c))
    assert parse("(a b^ | c!) 1, * a -> ()") == (((both, Name("1")), (Name("*"), a)), ((),))
    assert names(both) == [a, b, c]
    assert names(Name("1")) == names(Name("*")) == []


def test_parse_drops_brackets_around_one_name() -> None:
    assert parse("(a) -> ((a))") == parse("a -> a")


def test_spell_writes_rules_that_parse() -> None:
    assert spell([["a", "b"], []], [["a"], []]) == "a b, () -> a, ()"
    assert parse(spell([], [["a"]])) == parse("-> a")


def test_rule_linear_each_all_or_given_groups() -> None:
    assert Rule.of("a, a -> a", "each").linear == (frozenset({0}), frozenset({1}))
    assert Rule.of("a, a -> a", "all").linear == (frozenset({0, 1}),)
    assert Rule.of("a, a -> a", ((1,),)).linear == (frozenset({1}),)
    assert Rule.of("-> a", "all").linear == ()


def test_rule_takes_sizes_of_names() -> None:
    assert Rule.of("(a | b) -> b", a=4).sizes == {"a": Size(4)}


GROUP = "factors on both sides of `|` and inside `( )`, none of them `*` or `1`"
ARROW = "one `->` between operands and outputs"
OUTPUTS = "a term for each output behind `->`, `()` for a tensor without dimensions"
EMPTY = "a term between commas, `()` for a tensor without dimensions"


def token(at: str) -> str:
    return f"a factor name, `(`, `|`, `)`, `*` or `1` at `{at}`"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ARROW),
        ("a b", ARROW),
        ("a -> b -> c", ARROW),
        ("->", OUTPUTS),
        ("a ->", OUTPUTS),
        ("a, , b -> a", EMPTY),
        ("a -> a,", EMPTY),
        ("a & b -> a", token("& b")),
        ("2 -> a", token("2")),
        ("^ -> a", token("^")),
        ("a^^ -> a", token("^")),
        ("*^ -> *", token("^")),
        ("1! -> a", token("!")),
        ("a) -> a", "`(` before `)`"),
        ("a | b -> a", "`(` before `|`"),
        ("(a -> a", "`)` for every `(`"),
        ("((a b) c -> a", "`)` for every `(`"),
        ("(a | ) -> a", GROUP),
        ("( | a) -> a", GROUP),
        ("() a -> a", GROUP),
        ("(* a) -> a", GROUP),
        ("(1 a) -> a", GROUP),
        ("* a * -> a", "at most one `*` in a term"),
        ("a a -> a", "`a` in one dimension of a term only"),
        ("a (b a) -> b", "`a` in one dimension of a term only"),
        ("(a | b) (c | a^) -> b", "`a` in one dimension of a term only"),
    ],
)
def test_malformed_rule_says_what_was_expected(text: str, expected: str) -> None:
    assert message(lambda: Rule.of(text)) == "\n".join(
        [f'the rule "{text}" does not parse', f"  expected {expected}", '  try      for example "* i, o i -> * o"']
    )


@st.composite
def terms(draw: st.DrawFn) -> list[str]:
    """The dimensions of a random term, each name in one of them only."""
    pool = iter(draw(st.permutations(["a", "b", "c", "d", "e", "f"])))
    dims = []
    for kind in draw(st.lists(st.sampled_from(["name", "product", "concat"]), max_size=3)):
        marked = [next(pool) + draw(st.sampled_from(["", "^", "!"])) for _ in range(1 if kind == "name" else 2)]
        joined = (" | " if kind == "concat" else " ").join(marked)
        dims.append(joined if kind == "name" else f"({joined})")
    star = draw(st.integers(-1, len(dims)))
    return dims if star < 0 else [*dims[:star], "*", *dims[star:]]


@settings(deadline=None)
@given(st.lists(terms(), max_size=3), st.lists(terms(), min_size=1, max_size=2))
def test_spelled_rule_parses_to_itself(ins: list[list[str]], outs: list[list[str]]) -> None:
    rule = Rule.of(spell(ins, outs))
    assert str(rule) == spell(ins, outs).removeprefix(" ")
    assert Rule.of(str(rule)) == rule
