"""user_cuts: what the user chooses is cut so, is proved like our own choice, or is one Error that says what can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from errors import message
from ranks import run_ranks
from small_models import both, gpt, step_differences, tokens
from torch import nn

import autotp
from autotp.diagnostics.plan import Plan
from autotp.options import UserCut
from autotp.passes.plan.user_cuts import resolved

NAMES = ("wte.weight", "h.0.attn.q.weight", "h.1.attn.q.weight", "h.1.mlp.up.weight", "h.1.mlp.up.bias", "head.weight")


def plan(cut: Mapping[str, Any] | None, model: nn.Module | None = None, **how: Any) -> Plan:
    return autotp.explain(gpt() if model is None else model, 2, cut=cut, **how)


def along(of: Plan) -> dict[str, Any]:
    """Parameter -> what it is cut along, for those that are cut."""
    return {row.name: row.layout.axis or row.layout.dim for row in of.cuts}


# ---- which parameters a pattern names


@pytest.mark.parametrize(
    ("pattern", "fitting"),
    [
        ("wte", ["wte.weight"]),
        ("h.*.attn", ["h.0.attn.q.weight", "h.1.attn.q.weight"]),
        ("attn.q", ["h.0.attn.q.weight", "h.1.attn.q.weight"]),
        ("h.1", ["h.1.attn.q.weight", "h.1.mlp.up.weight", "h.1.mlp.up.bias"]),
        ("up.weight", ["h.1.mlp.up.weight"]),
        ("*.bias", ["h.1.mlp.up.bias"]),
        ("w*e", ["wte.weight"]),
    ],
)
def test_resolved_finds_segments_anywhere_in_a_name(pattern: str, fitting: list[str]) -> None:
    (choice,) = resolved([UserCut(pattern, "whole")], {name: name for name in NAMES})
    assert list(choice.parameters) == fitting


def test_resolved_lets_the_last_pattern_count() -> None:
    cuts = [UserCut("h", "whole"), UserCut("mlp", "width"), UserCut("h.1.mlp.up.bias", 0)]
    parameters = [choice.parameters for choice in resolved(cuts, {name: name for name in NAMES})]
    assert parameters == [
        ("h.0.attn.q.weight", "h.1.attn.q.weight"), ("h.1.mlp.up.weight",), ("h.1.mlp.up.bias",),
    ]  # fmt: skip


def test_resolved_takes_each_name_of_a_tied_parameter() -> None:
    (choice,) = resolved([UserCut("head", "whole")], {"wte.weight": "wte.weight", "head.weight": "wte.weight"})
    assert choice.parameters == ("wte.weight",)


def test_resolved_proposes_names_that_come_close() -> None:
    text = message(lambda: resolved([UserCut("h.*.atn", "heads")], {name: name for name in NAMES}))
    assert text.startswith("cut={'h.*.atn': 'heads'}: no parameter has this name")
    assert "try      cut={'h.*.attn': 'heads'}" in text


def test_resolved_warns_of_a_plan_of_a_library_for_other_sizes() -> None:
    with pytest.warns(UserWarning, match="no parameter has this name"):
        (choice,) = resolved([UserCut("h.*.mlp.gate", "colwise")], {name: name for name in NAMES})
    assert choice.parameters == ()


# ---- what is cut


def test_no_choice_changes_nothing() -> None:
    assert plan({}) == plan(None)


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ({"wte": "whole"}, {"wte.weight": None, "h.0.mlp.c_fc.weight": "width"}),
        ({"h.0.attn": "whole"}, {"h.0.attn.c_attn.weight": None, "h.1.attn.c_attn.weight": "heads"}),
        ({"h.*.mlp": "whole", "h.1.mlp": "width"}, {"h.0.mlp.c_fc.weight": None, "h.1.mlp.c_fc.weight": "width"}),
        ({"wpe": 0}, {"wpe.weight": 0, "wte.weight": "vocab"}),
        ({"wte": 1}, {"wte.weight": 1, "h.0.attn.c_attn.weight": "heads", "h.0.mlp.c_fc.weight": "width"}),
        ({"h.0.mlp.c_fc": "rowwise"}, {"h.0.mlp.c_fc.weight": 1, "h.0.mlp.c_proj.weight": "width"}),
        ({"h.0.mlp.c_fc": "colwise"}, {"h.0.mlp.c_fc.weight": "width", "h.0.mlp.c_fc.bias": "width"}),
        ({"h.0.attn.c_attn.weight": -2}, {"h.0.attn.c_attn.weight": "heads"}),
    ],
    ids=str,
)
def test_explain_cuts_as_the_user_says(cut: dict[str, Any], expected: dict[str, Any]) -> None:
    found = plan(cut)
    assert {name: along(found).get(name) for name in expected} == expected
    report = autotp.verify(gpt(), 2, cut=cut)
    assert report.ok, report


def test_explain_says_that_the_user_chose_it() -> None:
    found = plan({"h.0.attn": "whole", "wte": 1})
    assert {row.reason for row in found.whole if row.name.startswith("h.0.attn")} == {"cut={'h.0.attn': 'whole'}"}
    assert [row.why for row in found.cuts if row.name == "wte.weight"] == ["cut={'wte': 1}"]


@pytest.mark.parametrize("cut", [None, {"h.0.attn": "whole", "h.1.mlp": "width"}, {"wte": 1}, {"wpe": 0}], ids=str)
def test_plan_cut_gives_the_same_plan_again(cut: dict[str, Any] | None) -> None:
    found = plan(cut)
    again = plan(found.cut)
    assert along(again) == along(found) and again.traffic == found.traffic
    if cut is None:
        assert found.cut["h.*.mlp.c_fc.weight"] == "width"  # one entry for all layers


class Nested(nn.Module):
    """A whole `fc` at the top, and blocks whose `fc` is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"fc": nn.Linear(64, 256), "o": nn.Linear(256, 64)}) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch 8]"""
        x = self.fc(x)
        for block in self.blocks:
            x = x + block["o"](torch.relu(block["fc"](x)))
        return x


def test_plan_cut_puts_the_most_exact_names_last() -> None:
    """`fc.weight` fits within `blocks.0.fc.weight`, too."""
    found = plan(None, Nested(), example_inputs=torch.ones(2, 8))
    assert "blocks.0.fc.weight" in along(found) and "fc.weight" not in along(found)
    assert along(plan(found.cut, Nested(), example_inputs=torch.ones(2, 8))) == along(found)


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ({"h.0.ln_1": "width"}, ["`h.0.ln_1.weight`", "no such axis", "cut={'h.0.ln_1.weight': 'whole'}"]),
        ({"wpe": "vocab"}, ["`wpe.weight` [", "no such axis", "cut={'wpe.weight': 0}"]),
        ({"wte": 7}, ["no such axis", "'vocab'"]),
        ({"wte": "columns"}, ["cut={'wte': 'columns'}", "'whole', or a dimension"]),
        ({"mpl": "width"}, ["no parameter has this name", "cut={'mlp': 'width'}"]),
        ({1: "width"}, ["cut is", "lm_head"]),
        ("whole", ["cut is 'whole'"]),
        (("wte", "whole"), ["cut is"]),
    ],
    ids=str,
)
def test_choices_that_cannot_be_are_one_error(cut: Any, words: list[str]) -> None:
    text = message(lambda: plan(cut))
    assert all(word in text for word in words), text


class Normed(nn.Module):
    """A product whose width a norm needs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch 8]"""
        return self.down(self.norm(self.up(x)))


def test_error_names_the_operator_that_needs_the_whole() -> None:
    text = message(lambda: plan({"norm": 0}, Normed(), example_inputs=torch.ones(2, 8)))
    assert "`aten::layer_norm` reads `norm.weight` and needs the whole of this axis" in text
    assert "test_user_cuts.py" in text and "cut={'norm.weight': 'whole'}" in text


# ---- on ranks


def _train(rank: int, n: int, cut: dict[str, Any]) -> None:
    whole, parallel = both(n, gpt(seed=3).double(), cut=cut)
    assert max(step_differences(whole, parallel, [(3, 7), (2, 5), (3, 7)])) < 1e-10


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("cut", [{"h.0.attn": "whole", "wte": 1}, {"h.*.mlp.c_fc": "rowwise", "wpe": 0}], ids=str)
def test_training_equals_one_device(cut: dict[str, Any], n: int) -> None:
    run_ranks(_train, n, cut)


def _stages(rank: int, n: int) -> tuple[float, dict[str, int | None]]:
    trainer = autotp.distribute(gpt(seed=3).double(), tp=2, pp=2, microbatches=2, cut={"h.1.mlp": "whole", "wpe": 0})
    inputs, labels = tokens(4)
    dims = {name: layout.dim for name, layout in trainer.layouts.items()}
    return trainer.step(inputs, labels=labels).item(), dims


def test_stages_of_a_pipeline_are_cut_as_the_user_says() -> None:
    """Each stage has its part of the choice."""
    results = run_ranks(_stages, 4)
    dims = {name: dim for _, layouts in results for name, dim in layouts.items()}
    chosen = {name: dims[name] for name in ("h.0.mlp.c_fc.weight", "h.1.mlp.c_fc.weight", "wpe.weight")}
    assert chosen == {"h.0.mlp.c_fc.weight": 0, "h.1.mlp.c_fc.weight": None, "wpe.weight": 0}
    inputs, labels = tokens(4)
    assert {round(loss, 10) for loss, _ in results} == {round(gpt(seed=3).double()(inputs, labels).item(), 10)}


def test_verify_of_a_training_proves_the_choice() -> None:
    """A proof of another layout would say nothing."""
    assert "no parameter has this name" in message(lambda: autotp.verify(gpt(), 2, pp=2, cut={"no_such": "whole"}))
    report = autotp.verify(gpt(), 2, pp=2, cut={"h.1.mlp": "whole"})
    assert report.ok, report
    assert "h.1.mlp.c_fc.weight" in {row.name for row in report.plan.whole}


def _differ(rank: int, n: int) -> str:
    return message(lambda: both(n, gpt(), cut={"wte": "whole" if rank else "vocab"}))


def test_ranks_that_choose_otherwise_are_an_error() -> None:
    first, second = run_ranks(_differ, 2)
    assert first == second and "other" in first
