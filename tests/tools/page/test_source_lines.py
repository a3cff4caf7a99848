"""The model's lines: as they stand in the file, each with the weights it reads and the shapes it makes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from autotp.models import gpt
from autotp.tools.page.axes import PageAxes
from autotp.tools.page.blocks import block_data
from autotp.tools.page.source_lines import source_data
from autotp.tools.page.subject import Subject


@pytest.fixture(scope="module")
def functions(subject: Subject) -> dict[str, Any]:
    axes = PageAxes(subject)
    return {each["name"]: each for each in source_data(subject, axes, block_data(subject, axes))}


def test_the_functions_are_those_that_compute(functions: dict[str, Any]) -> None:
    assert [*functions] == ["CausalSelfAttention.forward", "MLP.forward", "Block.forward", "GPT.forward"]
    assert {each["file"] for each in functions.values()} == {"gpt.py"}


def test_lines_are_those_of_the_file(functions: dict[str, Any]) -> None:
    lines = inspect.getsource(gpt).splitlines()
    for each in functions.values():
        for line in each["lines"]:
            assert lines[line["number"] - 1].strip() == line["text"].strip()
        assert '"""' not in "".join(line["text"] for line in each["lines"]), "a docstring is left out"


def test_a_line_has_its_weights_values_and_collectives(functions: dict[str, Any]) -> None:
    (line,) = (x for x in functions["MLP.forward"]["lines"] if "self.c_fc" in x["text"])
    assert [weight["name"] for weight in line["weights"]] == ["mlp.c_fc.weight", "mlp.c_fc.bias"]
    assert [sent["name"] for sent in line["sent"]] == ["all_gather"]
    (value,) = line["values"]
    assert [[cell["text"] for cell in dim] for dim in value["dims"]] == [["b"], ["s"], ["256"]]
    assert value["dims"][2][0]["cut"] and set(value["axes"]) <= set(line["axes"])


def test_a_sum_that_leaves_the_line_is_shown(functions: dict[str, Any]) -> None:
    (line,) = (x for x in functions["CausalSelfAttention.forward"]["lines"] if "self.c_proj" in x["text"])
    assert [sent["name"] for sent in line["sent"]][-1] == "reduce_scatter"
