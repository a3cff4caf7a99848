"""The grid of ranks: shares of parameters, also uneven ones, blocks and memory of each pipeline rank."""

from __future__ import annotations

import re

import pytest

import autotp
from autotp.passes.lower.local_sizes import cut_lengths
from autotp.tools.page.axes import PageAxes
from autotp.tools.page.blocks import block_data
from autotp.tools.page.ranks import rank_data
from autotp.tools.page.subject import Subject, subject_of


def test_rank_data_has_the_grid_and_the_blocks(subject: Subject, estimate: autotp.Estimate) -> None:
    axes = PageAxes(subject)
    found = rank_data(subject, axes, block_data(subject, axes))
    assert [found[name] for name in ("tp", "dp", "pp", "zero", "node", "even")] == [2, 2, 2, 1, 8, True]
    assert [sum(stage["counts"].values()) for stage in found["stages"]] == [3, 3]
    assert "wte.weight" in found["stages"][0]["outside"] and "ln_f.weight" in found["stages"][1]["outside"]
    for stage, memory in zip(found["stages"], estimate.memory, strict=True):
        assert sum(stage["memory"].values()) == pytest.approx(memory.total, abs=8)


def test_parameters_have_the_models_own_dtype(subject: Subject) -> None:
    axes = PageAxes(subject)
    rows = rank_data(subject, axes, block_data(subject, axes))["parameters"]
    assert {row["itemsize"] for row in rows} == {4}
    assert [(row["name"], row["whole"], row["shapes"]) for row in rows if row["name"] == "mlp.c_fc.weight"] == [
        ("mlp.c_fc.weight", [256, 64], [[128, 64]])
    ]


def test_rank_data_has_the_parts_of_sequences(in_sequence: autotp.Estimate) -> None:
    """The part of a sequence has its own length, and is written as such."""
    subject = subject_of(in_sequence)
    axes = PageAxes(subject)
    blocks = block_data(subject, axes)
    found = rank_data(subject, axes, blocks)
    assert [found[name] for name in ("tp", "cp", "dp", "pp")] == [2, 2, 2, 1]
    assert [subject.sizes[part] for part in cut_lengths(subject.program.graph)] == [16]
    texts = set(re.findall(r"'text': '([^']*)'", str(blocks)))
    assert "s@cp" in texts and not any(re.fullmatch(r"s\d+", text) for text in texts)


def test_uneven_shares_are_listed_for_each_rank(uneven: autotp.Plan) -> None:
    subject = subject_of(uneven)
    axes = PageAxes(subject)
    found = rank_data(subject, axes, block_data(subject, axes))
    (row,) = (row for row in found["parameters"] if row["name"] == "attn.c_proj.weight")
    assert row["shapes"] == [[48, 32], [48, 16]] and row["elements"] == [1536, 768] and not found["even"]
    assert found["limit"] is None and found["stages"][0]["memory"] == {}
