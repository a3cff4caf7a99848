"""prove_rules: a rule that is wrong is found, the table's or a user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphs import r
from torch import Tensor, nn

import autotp
from autotp import Error
from autotp.passes.lower.prove_rules import prove_node, prove_rule
from autotp.passes.plan.infer_axes import infer_axes
from autotp.rules.common import fixed
from autotp.rules.language import Rule
from autotp.rules.registry import RULES, USER_RULES

aten = torch.ops.aten


def first(text: str, kind: str = "pass-through") -> str:
    """How the first problem of a factor of 4 on 2 ranks begins."""
    return f"factor {text} of 4 on 2 ranks, {kind}: "


SDPA = aten.scaled_dot_product_attention.default
WRONG: list[tuple[str, Any, str, Any, tuple[Any, ...], str]] = [
    ("softmax", aten.softmax.int, "a b -> a b", (), (r(2, 4), 1), first("b") + "output 0, rank 0: off by"),
    ("cumsum", aten.cumsum.default, "a b -> a b", (), (r(2, 4), 1), first("b") + "output 0, rank 1: off by"),
    ("layer-norm", aten.layer_norm.default, "* n -> * n", (), (r(2, 4), [4]), first("n") + "rank 0: RuntimeError"),
    ("mean", aten.mean.dim, "a b -> a", (), (r(2, 4), [1]), first("b", "reduced") + "output 0: off by"),
    ("amax", aten.amax.default, "a b -> a", (), (r(2, 4), [1]), first("b", "reduced") + "output 0: off by"),
    (
        "linear-bias", aten.linear.default, "* i, o i, o -> * o", (), (r(2, 4), r(3, 4), r(3)),
        first("i", "reduced") + "output 0: off by",
    ),
    (
        "causal", SDPA, "b h s d^, b h t^ d^, b h t^ e -> b h s e", (), (r(1, 1, 4, 2),) * 3 + (None, 0.0, True),
        first("s") + "output 0, rank 1: off by",
    ),
    (
        "transposed", aten.mm.default, "m i, i n -> n m", (), (r(4, 4), r(4, 4)),
        first("m") + "output 0, rank 0: float64[2, 4], expected float64[4, 2]",
    ),
    (
        "squeezed", aten.squeeze.default, "a b -> a b", (), (r(2, 3),),
        "factor a of 2 on 2 ranks, pass-through: output 0, rank 0: float64[3], expected float64[1, 3]",
    ),
    (
        "glued", aten.view.default, "(a b) -> b a", (), (r(4), [2, 2]),
        "factor b of 2 on 2 ranks, pass-through: output 0, rank 0: off by",
    ),
    ("unequal", aten.cat.default, "a b, a b -> a k^", (), ([r(2, 4), r(2, 2)], 1), "factor b does not line up"),
    ("terms", aten.add.Tensor, "* -> *", (), (r(2, 4), r(4)), "the rule does not fit: * -> *"),
    ("linear-gelu", aten.gelu.default, "* -> *", "all", (r(2, 4),), "linear in operands [0]: output 0: off by"),
    ("linear-add", aten.add.Tensor, "*, * -> *", "each", (r(2, 4), r(4)), "linear in operands [0]: output 0: off by"),
    ("linear-mul", aten.mul.Tensor, "*, * -> *", "all", (r(2, 4), r(4)), "linear in operands [0, 1]: output 0: off by"),
    ("linear-cast", aten.to.dtype, "* -> *", "all", (r(9) * 9, torch.int64), "linear in operands [0]: output 0: other"),
]  # fmt: skip


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets a rule, for this test alone."""
    yield lambda op, text, linear=(): monkeypatch.setitem(RULES, op, fixed(text, linear))


@pytest.mark.parametrize(
    ("op", "text", "linear", "args", "expected"), [wrong[1:] for wrong in WRONG], ids=[wrong[0] for wrong in WRONG]
)
def test_prove_finds_a_wrong_rule(
    op: Any, text: str, linear: Any, args: tuple[Any, ...], expected: str, rules: Callable[..., None]
) -> None:
    assert prove_rule(op, args, {}, 2) == []
    rules(op, text, linear)
    found = prove_rule(op, args, {}, 2)
    assert any(problem.startswith(f"{op}: {expected}") for problem in found), found


def test_prove_tries_uneven_and_empty_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A maximum is right on any slice that is not empty, and fails on one that is."""
    monkeypatch.setitem(RULES, aten.amax.default, lambda call: Rule.of("a b -> a", reducer="max"))
    assert prove_rule(aten.amax.default, (r(2, 5), [1]), {}, 3) == []
    [problem] = prove_rule(aten.amax.default, (r(2, 5), [1]), {}, 4)
    assert problem.startswith("aten.amax.default: factor b of 5 on 4 ranks, reduced: rank 3: IndexError: amax()")


# ---- a user's own


@torch.library.custom_op("autotp_test::scale", mutates_args=())
def scale(x: Tensor, weight: Tensor, causal: bool = False) -> Tensor:
    return x.cumsum(0) * weight if causal else x * weight


@scale.register_fake
def _(x: Tensor, weight: Tensor, causal: bool = False) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autotp_test::write", mutates_args=("x",))
def write(x: Tensor) -> None:
    x.zero_()


def test_prove_takes_a_user_s_rule(registry: None) -> None:
    op = torch.ops.autotp_test.scale
    autotp.rule(op, "s h, h -> s h", linear="each")
    assert {op.default} == USER_RULES
    assert prove_rule(op.default, (r(5, 4), r(4)), {}, 3) == []
    assert len(prove_rule(op.default, (r(5, 4), r(4), True), {}, 2)) == 1


class Scaled(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.autotp_test.scale(x, w, self.causal)


def scaled(causal: bool) -> Any:
    """The node of the operator in a graph with a symbolic length."""
    shapes = ({0: torch.export.Dim("s", min=2)}, None)
    program = torch.export.export(Scaled(causal), (torch.randn(4, 6), torch.randn(6)), dynamic_shapes=shapes)
    return next(n for n in program.graph.nodes if "scale" in str(n.target))


def test_prove_node_refuses_a_user_s_rule_untrue_of_the_call(registry: None) -> None:
    autotp.rule(torch.ops.autotp_test.scale, "s h, h -> s h")
    prove_node(scaled(causal=False))
    with pytest.raises(Error) as caught:
        prove_node(scaled(causal=True))
    message = str(caught.value).splitlines()
    assert message[0] == "the rule of autotp_test.scale.default is not true of this call"
    assert message[1].startswith("  found    factor s of 4 on 2 ranks, pass-through: output 0, rank 1: off by ")
    assert message[2] == "  shapes   [4, 6], [6]"
    assert message[3].startswith("  at       test_prove_rules.py:")
    assert message[3].endswith("  return torch.ops.autotp_test.scale(x, w, self.causal)")
    assert message[4:] == ["  try      mark what the operator mixes with ^, name only operands it is linear in"]


def test_prove_node_tells_that_an_operator_does_not_run(registry: None) -> None:
    autotp.rule(torch.ops.autotp_test.scale, "s h, h -> s h")
    node = scaled(causal=False)
    node.args = (node.args[0], 1.0)
    with pytest.raises(Error) as caught:
        prove_node(node)
    message = str(caught.value).splitlines()
    assert message[0] == "autotp_test.scale.default does not run on numbers like the graph's, so its rule is not proved"
    assert message[1].startswith("  got      RuntimeError: autotp_test::scale() Expected a value of type 'Tensor'")


def test_infer_axes_refuses_a_user_s_rule_that_does_not_fit(registry: None) -> None:
    autotp.rule(torch.ops.autotp_test.scale, "s h -> s h")
    node = scaled(causal=False)
    with pytest.raises(Error) as caught:
        infer_axes(node.graph)
    assert str(caught.value).splitlines()[:2] == [
        "the rule of autotp_test.scale.default does not fit",
        "  rule     s h -> s h",
    ]


@pytest.mark.parametrize(
    ("op", "text", "expected"),
    [
        ("gelu", "* -> *", ["rule: 'gelu' is not an operator", "  try      torch.ops.mylib.myop"]),
        (
            torch.ops.autotp_test.scale,
            "* -> ",
            [
                'rule(autotp_test.scale): the rule "* -> " does not parse',
                "  expected a term for each output behind `->`, `()` for a tensor without dimensions",
                '  try      for example "* i, o i -> * o"',
            ],
        ),
        (
            torch.ops.autotp_test.scale,
            "s! h, h -> s! h",
            ["rule(autotp_test.scale): `!` is for operators that autotp has a parallel form of", "  try      `^`"],
        ),
        (
            torch.ops.autotp_test.write,
            "* -> *",
            ["rule: autotp_test.write writes into its operands", "  try      an operator that returns a new tensor"],
        ),
        (
            aten.add_.Tensor,
            "*, * -> *",
            ["rule: aten.add_.Tensor writes into its operands", "  try      an operator that returns a new tensor"],
        ),
    ],
)
def test_rule_refuses_bad_operators_and_texts(op: Any, text: str, expected: list[str], registry: None) -> None:
    with pytest.raises(Error) as caught:
        autotp.rule(op, text)
    assert str(caught.value).splitlines() == expected
    assert not USER_RULES


def test_prove_takes_no_chance_repetition_for_a_fault() -> None:
    """Two runs of dropout on two numbers are the same once in four times."""
    for seed in range(40):
        torch.manual_seed(seed)
        assert prove_rule(aten.dropout.default, (r(2, 1), 0.5, True), {}, 2) == []
