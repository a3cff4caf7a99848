"""overlap_batch: what the option adds to the tables of the kernel, and what it cannot be combined with."""

from __future__ import annotations

from typing import Any

import pytest
from errors import message
from faults import case, graphs_of

from autotp.compiler import CANONICALIZE, EMIT, LOWER, PLAN, passes_of
from autotp.diagnostics.lockstep import COLLECTIVES
from autotp.experimental.batch_halves.halves import halves, joined
from autotp.experimental.batch_halves.turns import finish, start_copy, start_reduce, wait_in_backward
from autotp.extensions import chosen_extensions
from autotp.options import DEFAULTS, Options, expect_choices
from autotp.rules.registry import has_rule
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.training.pipeline.schedules import Training

TABLE = (*CANONICALIZE, *PLAN, *LOWER, *EMIT)
BATCH = Options(overlap="batch")


def names(options: Options) -> list[str]:
    return [row.name for row in passes_of(TABLE, options)]


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, ["equal_inputs", "unsort", "two_halves", "experts", "interleave", "weight_sums"]),
        ({"cp": 2}, ["two_halves", "interleave", "weight_sums"]),
        ({"without": "weight_sums"}, ["equal_inputs", "unsort", "two_halves", "experts", "interleave"]),
    ],
    ids=["alone", "context", "without"],
)
def test_overlap_batch_adds_its_passes(options: dict[str, Any], more: list[str]) -> None:
    """Each at its place: halves before anything is cut, turns and sums before blocks are made."""
    own, both = names(Options(**options)), names(Options(overlap="batch", **options))
    assert [name for name in both if name not in own] == more
    assert [name for name in both if name in own] == own
    places = [both.index(name) for name in ("equal_inputs", "decouple", "two_halves", "match")]
    assert places == sorted(places) and both[both.index("bind") + 1] == "interleave"


def test_operators_of_halves_are_in_the_tables() -> None:
    assert chosen_extensions(DEFAULTS) == [] and len(chosen_extensions(BATCH)) == 1
    assert has_rule(halves) and has_rule(joined) and has(joined, Trait.JOIN) and not has(halves, Trait.JOIN)
    assert {start_reduce, start_copy, finish, wait_in_backward} <= COLLECTIVES.keys()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            Options(overlap="batch", sequence_parallel=True),
            'overlap="batch" with sequence_parallel=True: no sum would run beside the other half of the batch\n'
            '  try      overlap="none"\n  or       sequence_parallel=False',
        ),
        (
            Training(overlap="batch", schedule="zero-bubble"),
            'overlap="batch" with schedule="zero-bubble", which computes the gradients of weights later\n'
            '  try      overlap="none", or schedule="1F1B"',
        ),
    ],
    ids=["sequence", "zero-bubble"],
)
def test_overlap_batch_refuses_other_options(options: Options, text: str) -> None:
    assert message(lambda: expect_choices(options)) == text
    expect_choices(BATCH)
    expect_choices(Training(overlap="batch"))


@pytest.mark.rare
def test_cases_of_the_check_contain_halves() -> None:
    """So `test_check` breaks each operator of them."""
    seen = {node.target for name in ("halves", "halves-of-a-row") for node in graphs_of(*case(name))[0].nodes}
    assert seen > {halves, joined}
