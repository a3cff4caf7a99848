"""The block, once: layers in order, conjugates between them with the bytes of both ways."""

from __future__ import annotations

from typing import Any

import pytest

import autotp
from autotp.tools.page.axes import PageAxes
from autotp.tools.page.blocks import block_data
from autotp.tools.page.subject import Subject, subject_of


@pytest.fixture(scope="module")
def blocks(subject: Subject) -> list[dict[str, Any]]:
    return block_data(subject, PageAxes(subject))


def test_blocks_that_are_alike_are_one(blocks: list[dict[str, Any]]) -> None:
    assert [(one["block"], one["count"]) for one in blocks] == [("", 0), ("h.0", 6), ("", 0)]
    assert blocks[1]["names"] == [f"h.{i}" for i in range(6)]


def test_block_has_layers_in_order_with_conjugates_between(blocks: list[dict[str, Any]]) -> None:
    rows = [row["name"] if row["kind"] == "layer" else f"({row['name']})" for row in blocks[1]["rows"]]
    assert rows[:4] == ["ln_1", "(all_gather)", "attn.c_attn", "attn"] or rows[0] == "(together)"
    assert [row for row in rows if row.startswith("(a") or row.startswith("(r")] == [
        "(all_gather)", "(reduce_scatter)", "(all_gather)", "(reduce_scatter)",
    ]  # fmt: skip
    assert rows.index("attn.c_attn") < rows.index("attn.c_proj") < rows.index("mlp.c_fc") < rows.index("mlp.c_proj")


def test_conjugates_are_pairs_with_the_bytes_of_the_whole_tensor(blocks: list[dict[str, Any]]) -> None:
    sent = [row for row in blocks[1]["rows"] if row["kind"] == "sent" and row["name"] != "together"]
    pairs = {"all_gather": ("all-gather", "reduce-scatter"), "reduce_scatter": ("reduce-scatter", "all-gather")}
    assert all((row["forward"], row["backward"]) == pairs[row["name"]] for row in sent)
    assert {row["bytes"] for row in sent} == {1 * 64 * 64 * 2}  # One row, 64 tokens, 64 wide, in bfloat16.
    totals = blocks[1]["totals"]
    assert totals["forward"] == {"kinds": {"all-gather": 2, "reduce-scatter": 2}, "bytes": 4 * 8192}


def test_a_conjugate_touches_the_axis_that_it_sums_over(subject: Subject) -> None:
    axes = PageAxes(subject)
    rows = block_data(subject, axes)[1]["rows"]
    labels = [axis["label"] for axis in axes.data()]
    sums = [{labels[n] for n in row["axes"]} for row in rows if row["name"] == "reduce_scatter"]
    assert "heads" in sums[0] and "width" in sums[1]


def test_without_sequence_parallelism_they_are_f_and_g(uneven: autotp.Plan) -> None:
    subject = subject_of(uneven)
    rows = block_data(subject, PageAxes(subject))[1]["rows"]
    sent = [(row["name"], row["forward"], row["backward"]) for row in rows if row["kind"] == "sent"]
    assert sent == [("copy", "", "all-reduce"), ("reduce", "all-reduce", "")] * 2
