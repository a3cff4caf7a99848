"""The data of a page: plain, and the same as the result's own numbers."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autotp
from autotp.models.gpt import GPT, GPTConfig
from autotp.tools.page.page_data import page_data

Make = Callable[..., GPT]


def test_page_data_is_plain_data(estimate: autotp.Estimate, uneven: autotp.Plan) -> None:
    for found in (estimate, uneven):
        data = page_data(found)
        assert json.loads(json.dumps(data, allow_nan=False)) == data and data["version"] == 1


def test_the_row_of_the_layout_has_error_bars(estimate: autotp.Estimate) -> None:
    cells = {cell["name"]: cell for cell in page_data(estimate)["layout"]}
    assert [cells[name]["value"] for name in ("GPUs", "tensor", "pipeline", "data", "ZeRO")] == [
        "8",
        "2",
        "2",
        "2",
        "1",
    ]
    assert cells["seconds a step"]["value"] == f"{estimate.seconds:.3g}"
    for name in ("seconds a step", "TFLOP/s a GPU", "of peak", "GiB"):
        assert cells[name]["error"].startswith("± ")


def test_the_page_shows_what_a_budget_does(estimate: autotp.Estimate, tmp_path: Path) -> None:
    assert page_data(estimate)["budget"] is None
    with torch.device("meta"):
        gpt = GPT(GPTConfig(vocab_size=512, block_size=64, n_layer=4, n_head=4, n_embd=64))
    est = autotp.estimate(gpt, gpu="a100-80gb", batch=8, pp=2, memory="50%")
    data = page_data(est)
    cells = {cell["name"]: cell["value"] for cell in data["layout"]}
    assert cells["budget"] == "50%" and "recompute" not in cells
    assert len(data["budget"]["table"]["rows"]) == len(est.budget_table()[0].rows) > 3
    autotp.save_page(est, tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert "under a budget of memory" in text and "the next gigabyte would save" in text and "gpt.py:79" in text


def test_axes_that_are_cut_have_colours_of_their_own(estimate: autotp.Estimate) -> None:
    axes = page_data(estimate)["axes"]
    cut = [axis["colour"] for axis in axes if axis["cut"]]
    assert len(set(cut)) == len(cut) == 4 and all(colour.startswith("c") for colour in cut)
    assert {axis["label"] for axis in axes if axis["listed"]} >= {
        "batch",
        "sequence",
        "hidden",
        "heads",
        "width",
        "vocab",
    }


def test_cut_sequences_are_in_the_row_of_the_layout(in_sequence: autotp.Estimate, make_gpt: Make) -> None:
    cells = {cell["name"]: cell["value"] for cell in page_data(in_sequence)["layout"]}
    assert [cells[name] for name in ("GPUs", "tensor", "context", "data")] == ["8", "2", "2", "2"]
    assert page_data(autotp.explain(make_gpt(2), tp=2, cp=2))["title"] == "GPT on tp=2, cp=2"


def test_a_search_shows_its_best_layout_and_why_others_lost(make_gpt: Make) -> None:
    found = autotp.search(make_gpt(), gpus=4, gpu="a100-80gb", batch=16, dtype=torch.bfloat16)
    data = page_data(found)
    assert data["title"] == "GPT on 4 x a100-80gb"
    best, lost = data["others"]
    assert [row[0] for row in best["rows"]] == [str(est.layout) for est in found.best]
    assert lost["rows"] == [[loser.layout, loser.why] for loser in found.lost]


def test_a_result_of_another_process_is_refused(estimate: autotp.Estimate, uneven: autotp.Plan) -> None:
    for found in (estimate, uneven):
        with pytest.raises(autotp.Error, match=f"this {type(found).__name__} has no model with it"):
            page_data(pickle.loads(pickle.dumps(found)))
    with pytest.raises(autotp.Error, match="has no model"):
        page_data(replace(uneven, source=None))
