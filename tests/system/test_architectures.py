"""Whatever an ordinary transformer is made of, its ranks compute what one device does, and its weights are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

import pytest
from architectures import Architecture, architectures, arguments, model
from graphs import CUTS, PASSES, only
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.diagnostics.plan import Plan
from autotp.diagnostics.verify import Trial, make_trial, run_and_compare
from autotp.options import DEFAULTS, Options

TOLERANCE = 1e-10
RANKS = (2, 3, 4, 8)
EXAMPLES = 16 if settings.get_current_profile_name() == "default" else settings().max_examples
"""16, with --all 200, with --deep 5,000; each number of ranks has its share of its own."""

slow = pytest.mark.timeout(10 * EXAMPLES)
on_ranks = pytest.mark.parametrize(
    "tp", [pytest.param(tp, marks=[pytest.mark.rare] * (tp > 3)) for tp in RANKS], ids=lambda tp: f"tp{tp}"
)


def trial(arch: Architecture, tp: int, choices: Options = DEFAULTS) -> Trial:
    return make_trial(model(arch), (), arguments(arch), tp, choices)


@slow
@on_ranks
@settings(max_examples=EXAMPLES // len(RANKS))
@given(arch=architectures(), names=st.just(tuple(CUTS)) | st.sets(st.sampled_from(PASSES)))
def test_any_architecture_equals_one_device_and_is_cut(arch: Architecture, tp: int, names: Collection[str]) -> None:
    report = replace(run_and_compare(trial(arch, tp, Options(**only(names)))), tolerance=TOLERANCE)
    assert report.ok, str(report)
    assert not uncut(arch, report.plan), str(report.plan)


def uncut(arch: Architecture, plan: Plan) -> set[str]:
    """What stayed whole for no good reason: weights with an axis to cut, operators without a rule."""
    weights = {f"blocks.{i}.{name}" for i in range(arch.layers) for name in divisible(arch)}
    return {entry.name for entry in plan.whole if entry.name in weights or entry.reason.startswith("no rule")}


def divisible(arch: Architecture) -> Iterator[str]:
    """The weights in a block that have heads or a width to cut."""
    if arch.width > 1:
        yield from ("mlp.up.weight", "mlp.down.weight", "mlp.gated.weight")
    if arch.qk_norm == "full" and arch.norm != "rms_by_hand":
        return  # A norm in one operator takes all heads together.
    if arch.kv_heads > 1:
        yield from (f"attention.qkv.{name}.weight" for name in ("q", "k", "v", "qkv"))
        yield from ("attention.attention.in_proj_weight", "attention.attention.out_proj.weight", "attention.out.weight")
    elif arch.heads > 1 and arch.qkv == "separate":  # The one key head is every rank's.
        yield from ("attention.qkv.q.weight", "attention.out.weight")


@st.composite
def plain(draw: st.DrawFn) -> Architecture:
    """Blocks that need no collective but their own.

    No norm of cut heads, no heads that all ranks share, and no dropout of either of two branches before they are added.
    """
    arch = draw(architectures())
    residual = draw(st.sampled_from(("serial", "parallel")))
    heads = max(arch.heads, 2)
    return replace(
        arch,
        heads=heads,
        kv_heads=heads,
        hidden=heads * arch.head_dim,
        width=max(arch.width, 2),
        qk_norm="none",
        residual=residual,
        dropout=arch.dropout if residual == "serial" else (*arch.dropout[:2], 0.0),
        layers=1,
    )


@slow
@on_ranks
@settings(max_examples=max(EXAMPLES // len(RANKS) // 10, 2))
@given(arch=plain())
def test_a_layer_has_the_expected_all_reduces(arch: Architecture, tp: int) -> None:
    """Two forward and two backward; one each where both branches read one value and are added."""
    one, two = (trial(replace(arch, layers=n), tp).plan for n in (1, 2))
    count = {"all-reduce": 2 if arch.residual == "serial" else 1}
    assert added(one, two) == (count, count)


def added(one: Plan, two: Plan) -> tuple[Counter[str], ...]:
    """The collectives, forward and backward, that `two` has and `one` has not."""
    sides = ((one.traffic.forward, two.traffic.forward), (one.traffic.backward, two.traffic.backward))
    return tuple(Counter(more) - Counter(less) for less, more in sides)
