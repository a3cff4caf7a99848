"""table: each family on calls made by hand, and on random shapes."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from graphs import CALLS, bools, draft, r
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autotp.ops import dropout
from autotp.ops.attention.causal_rows import causal_rows
from autotp.ops.attention.zigzag import zigzag_rows
from autotp.passes.lower.prove_rules import prove_rule
from autotp.passes.plan.infer_axes import infer_axes
from autotp.rules.call import Call
from autotp.rules.registry import RULES, rule_of
from autotp.rules.table import ROWS
from autotp.rules.traits import size_argument

aten = torch.ops.aten
TP = (2, 3, 4)


def printed(op: Any, *args: Any, **kwargs: Any) -> str:
    """The rule of a call, as it prints."""
    flat = [x for arg in [*args, *kwargs.values()] for x in (arg if isinstance(arg, list) else [arg])]
    names = [argument.name for argument in op._schema.arguments]
    defaults = {one.name: one.default_value for one in op._schema.arguments if one.has_default_value()}
    found = op(*args, **kwargs)
    outputs = tuple(found) if isinstance(found, list | tuple) else (found,)
    bound = defaults | dict(zip(names, args, strict=False)) | kwargs
    found_rule = rule_of(Call(op, bound, tuple(x for x in flat if isinstance(x, Tensor)), outputs))
    return "unknown" if found_rule is None else str(found_rule)


@pytest.mark.parametrize("name", CALLS)
def test_rule_holds_on_a_call_by_hand(name: str) -> None:
    op, *args = CALLS[name]
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    assert op in RULES
    assert [problem for tp in TP for problem in prove_rule(op, args, kwargs, tp)] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", "* i, o i -> * o"),
        ("linear-bias", "* i^, o i^, o -> * o"),
        ("embedding", "v! h, * -> * h"),
        ("sum", "a b c -> 1 b 1"),
        ("view-minus-one", "f0 f1 (f2 f3) -> f0 f1 f2 f3"),
        ("unsafe-view", "(f0 x0^) x1^ -> (f0 y0^) y1^"),
        ("slice", "a (p | q | r) -> a q"),
        ("slice-step", "a (n k^) -> a n"),
        ("split-with-sizes", "a (p0 | p1 | p2) -> a p0, a p1, a p2"),
        ("einsum-ellipsis", "* i j, j k -> * i k"),
        ("einsum-diagonal", "unknown"),
        ("index-mask", "unknown"),
        ("index", "a b^ c^, k1, k0 k1 -> a k0 k1"),
        ("index-apart", "a^ b c^, k0, k0 -> k0 b"),
        ("cat-empty", "a p0^, a p1 -> a p1"),
        ("cat-old-style", "a p0, x1_0^ -> a p0"),
        ("cross-entropy-soft", "n! c!, n! c! -> ()"),
        ("cross-entropy-mean", "n! c!, n! -> ()"),
        ("squeeze-kept", "a^ b^ c -> a^ c"),
        ("repeat", "b c d -> ra^ b rc^ (rd^ d)"),
        ("layer-norm", "* n0^, n0^, n0^ -> * n0^"),
    ],
)
def test_call_has_the_expected_rule(name: str, expected: str) -> None:
    op, *args = CALLS[name]
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    assert printed(op, *args, **kwargs) == expected


def test_rule_of_dropout_depends_on_training() -> None:
    assert printed(aten.dropout.default, r(4, 5), 0.1, True) == "a! b! -> a! b!"
    assert printed(aten.dropout.default, r(4, 5), 0.1, False) == "* -> *"
    assert printed(aten.alpha_dropout.default, r(4, 5), 0.1, True) == "x0_0^ x0_1^ -> y0_0^ y0_1^"


# ---- random shapes


@st.composite
def regrouped(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of equally many elements, sizes of one among them."""
    base = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=5))
    before, after = ([prod(group) for group in draw(st.just(base).flatmap(_groups))] for _ in range(2))
    return before, draw(st.permutations(after)) if draw(st.booleans()) else after


def _groups(base: list[int]) -> st.SearchStrategy[list[list[int]]]:
    cuts = st.lists(st.integers(0, len(base)), max_size=4).map(lambda found: [0, *sorted(found), len(base)])
    return cuts.map(lambda at: [base[a:b] for a, b in pairwise(at)])


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([5, 0, 12], [5, 0, 4, 3], "f0 f1 (f2 f3) -> f0 f1 f2 f3"),
        ([5, 0, 12], [0, 12], "f0 f1 f2 -> (f0 f1) f2"),
        ([0, 12], [5, 0, 12], "(f0 f1) f2 -> f0 f1 f2"),
        ([0, 7], [0, 4], "f0 x1^ -> f0 y1^"),
    ],
)
def test_rule_of_a_view_of_an_empty_tensor(before: list[int], after: list[int], expected: str, tp: int) -> None:
    """Dimensions beside an empty one line up as on ranks that have positions."""
    assert printed(aten.view.default, r(*before), after) == expected
    assert prove_rule(aten.view.default, (r(*before), after), {}, tp) == []


@settings(deadline=None)
@given(regrouped(), st.sampled_from(TP))
def test_rule_holds_for_any_view(shapes: tuple[list[int], list[int]], tp: int) -> None:
    before, after = shapes
    assert prove_rule(aten.view.default, (r(*before), after), {}, tp) == []
    assert prove_rule(aten.reshape.default, (r(*before).mT if len(before) > 1 else r(*before), after), {}, tp) == []


@settings(deadline=None)
@given(st.data(), st.sampled_from(TP))
def test_rule_holds_for_any_matmul(data: st.DataObject, tp: int) -> None:
    sizes = st.integers(1, 5)
    m, i, n = (data.draw(sizes) for _ in range(3))
    batch = data.draw(st.lists(sizes, max_size=2))
    shapes = []
    for matrix in ([m, i], [i, n]):
        kept = batch[data.draw(st.integers(0, len(batch))) :]
        mine = [data.draw(st.sampled_from([1, b])) for b in kept]
        shapes.append(matrix if not mine and data.draw(st.booleans()) else [*mine, *matrix])
    a, b = (r(*shape) for shape in shapes)
    a = a[0] if a.dim() == 2 and data.draw(st.booleans()) else a
    b = b[..., 0] if b.dim() == 2 and data.draw(st.booleans()) else b
    assert prove_rule(aten.matmul.default, (a, b), {}, tp) == []


@settings(deadline=None)
@given(st.data(), st.sampled_from(TP))
def test_rule_holds_for_any_einsum(data: st.DataObject, tp: int) -> None:
    length = {c: data.draw(st.integers(1, 5)) for c in "abcde"}
    terms = data.draw(st.lists(st.lists(st.sampled_from("abcde"), unique=True, max_size=3), min_size=1, max_size=3))
    used = sorted({c for term in terms for c in term})
    out = data.draw(st.permutations(used)) if used else []
    out = out[: data.draw(st.integers(0, len(out)))]
    equation = ",".join(map("".join, terms)) + "->" + "".join(out)
    assert prove_rule(aten.einsum.default, (equation, [r(*(length[c] for c in term)) for term in terms]), {}, tp) == []


@settings(deadline=None)
@given(st.data(), st.sampled_from(TP))
def test_rule_holds_for_any_attention(data: st.DataObject, tp: int) -> None:
    b, kv, group, s, t, d, e = (data.draw(st.integers(1, n)) for n in (3, 4, 3, 3, 4, 3, 4))
    grouped = data.draw(st.booleans())
    heads = kv * group if grouped else kv
    query, key, value = r(b, heads, s, d), r(b, kv, t, d), r(b, kv, t, e)
    shape = [data.draw(st.sampled_from([1, n])) for n in (b, heads)] + [s, t]
    masks = [None, r(*shape), bools(*shape) | True, r(s, t)]
    mask = data.draw(st.sampled_from(masks))
    causal = mask is None and data.draw(st.booleans())
    options = {"attn_mask": mask, "is_causal": causal, "enable_gqa": grouped}
    assert prove_rule(aten.scaled_dot_product_attention.default, (query, key, value), options, tp) == []


@pytest.mark.parametrize(
    ("operator", "more", "mark"),
    [
        (aten.scaled_dot_product_attention.default, (), ""),
        (aten.scaled_dot_product_attention.default, (None, 0.0, True), "!"),
        (aten.scaled_dot_product_attention.default, (None, 0.1, False), "!"),
        (dropout.fast_attention, (None, 0.1, False, None, False, 1), "!"),
        (causal_rows, (0, None, False), "^"),
        (zigzag_rows, (2, None, None, False), "!"),
        (zigzag_rows, (2, 1, None, False), "^"),
    ],
)
def test_rule_of_attention_marks_whether_queries_can_be_cut(operator: Any, more: tuple[Any, ...], mark: str) -> None:
    """As they are, in a parallel form, or not: those of one rank have positions of their own."""
    x = r(2, 3, 5, 4)
    graph = draft(lambda call, q, k, v: call(operator, q, k, v, *more), q=x, k=x / 2, v=x / 3)
    node = next(node for node in graph.nodes if node.target is operator)
    (rows,) = (f for f in infer_axes(graph).bound[node].factors if f.ins.get(0) == 2)
    assert rows.mark == mark


@settings(deadline=None)
@given(st.data(), st.sampled_from(TP))
def test_rule_holds_for_any_split_cat_or_slice(data: st.DataObject, tp: int) -> None:
    """Parts of any lengths, split and joined again: what they have in common is cut together."""
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    x = r(2, sum(lengths))
    assert prove_rule(aten.split_with_sizes.default, (x, lengths, 1), {}, tp) == []
    assert prove_rule(aten.cat.default, (list(x.split(lengths, 1)), 1), {}, tp) == []
    start = data.draw(st.integers(-sum(lengths) - 1, sum(lengths) + 1))
    assert prove_rule(aten.slice.Tensor, (x, 1, start, data.draw(st.integers(start, sum(lengths) + 1))), {}, tp) == []


# ---- symbolic sizes


class Symbolic(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        b, s, _ = x.shape
        y = torch.nn.functional.linear(x, w).view(b, s, 3, 2).transpose(1, 2)
        y = y[:, :, : s - 1] + torch.zeros(b, 3, s - 1, 2).repeat(1, 1, 1, 1)
        y = torch.cat([y, y[:, :, -1:]], 2).flatten(2).split([4, 2 * s - 4], -1)[0]
        return y.expand(b, 3, 4) * torch.arange(s, device=x.device).sum()


def test_rules_ask_nothing_of_symbolic_sizes() -> None:
    """What is symbolic is whole, or passes through, and asks nothing about its size."""
    sizes = {0: torch.export.Dim("b", min=2), 1: torch.export.Dim("s", min=4)}
    program = torch.export.export(Symbolic(), (torch.randn(3, 5, 4), torch.randn(6, 4)), dynamic_shapes=(sizes, None))
    axes = infer_axes(program.graph)
    heads = next(n for n in program.graph.nodes if "transpose" in n.name)
    weight = next(n for n in program.graph.nodes if n.name == "w")
    assert [str(axis) for axis in axes.of(weight)] == ["(3 2)", "4"]
    assert axes.dim_of(weight, axes.of(heads)[1]) == 0


# ---- the table as a whole


def test_rule_table_has_no_mutable_or_data_dependent_operator() -> None:
    rules = [op for op in RULES if hasattr(op, "_schema")]
    assert len({op._schema.name for op in rules}) > 350
    assert not any(op._schema.is_mutable for op in rules)
    assert aten.nonzero.default not in RULES and aten.where.default not in RULES


def test_size_arguments_are_in_their_schemas() -> None:
    sized = {op: name for op in ROWS if (name := size_argument(op))}
    assert len(sized) > 14
    for op, name in sized.items():
        assert name in [arg.name for arg in op._schema.arguments], op
