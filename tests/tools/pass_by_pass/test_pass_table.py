"""pass_table: operators, rewrites and collectives of each pass; the code before and after one."""

from __future__ import annotations

import json

import pytest
import torch
from small_models import gpt
from torch import Tensor, nn

import autotp
from autotp.options import Options
from autotp.tools.pass_by_pass.pass_table import PassRow, PassTable, names_of_passes, pass_table

X = torch.ones(2, 5, 8)


class Twice(nn.Module):
    """Two blocks; each computes a value twice."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = x + block(x.square() + x.square())
        return x


@pytest.fixture(scope="module")
def table() -> PassTable:
    return pass_table(Twice(), 2, Options(), X, "cse")


@pytest.fixture(scope="module")
def rows(table: PassTable) -> dict[str, PassRow]:
    return {row.name: row for row in table.passes}


def test_pass_table_has_a_row_for_each_pass(table: PassTable) -> None:
    assert [row.name for row in table.passes] == names_of_passes(Options())
    assert [row.name for row in table.passes][:2] == ["capture", "relocate"]
    assert "cse" not in names_of_passes(Options(without=("cse",)))
    for before, after in zip(table.passes, table.passes[1:], strict=False):
        assert before.operators[1] == after.operators[0]
        assert after.collectives is None or before.collectives is None or before.collectives[1] == after.collectives[0]
    assert all(row.seconds >= 0 for row in table.passes) and table.passes[0].seconds > 0


def test_pass_table_counts_operators_and_rewrites(rows: dict[str, PassRow]) -> None:
    """Two blocks of seven operators each; canonicalize makes two additions of biases, cse takes out one square."""
    assert rows["capture"].operators == (0, 14) and rows["capture"].rewrites == (14, 0)
    assert rows["canonicalize"].operators == (14, 18)
    assert rows["cse"].operators == (18, 16) and rows["cse"].rewrites == (0, 2)
    assert rows["custom_vjp"].operators == (18, 18) and rows["custom_vjp"].rewrites == (0, 0)
    (before, after), (new, gone) = rows["lower"].operators, rows["lower"].rewrites or (0, 0)
    assert after - before == new - gone > 0
    assert rows["emit"].rewrites is None and rows["emit"].found == "2 blocks of 1 kind"


def test_collectives_are_those_of_the_plan(rows: dict[str, PassRow]) -> None:
    plan = autotp.explain(Twice(), 2, example_inputs=X)
    wanted = sum(plan.traffic.forward.values()), sum(plan.traffic.backward.values())
    assert wanted == (2, 1)
    assert rows["outputs"].collectives == ((0, 0), (0, 0)) and rows["lower"].collectives == ((0, 0), wanted)
    assert rows["check"].collectives == (wanted, wanted) and rows["emit"].collectives is None


def test_pass_table_counts_collectives_that_a_pass_joins() -> None:
    """Along the sequence the gradients of norms are summed; `bucket` sums several at once."""
    rows = {row.name: row for row in pass_table(gpt(n_layer=2), 2, Options(sequence_parallel=True)).passes}
    sends = rows["bucket"].collectives
    assert sends is not None and sends[0][0] == sends[1][0] and sends[0][1] > sends[1][1]


def test_pass_table_says_what_was_found(rows: dict[str, PassRow]) -> None:
    found = {name: row.found for name, row in rows.items() if row.found}
    assert found["capture"] == "1 input, 2 sizes that may change"
    assert found["choose"] == "8 operators cut along 2 axes" and found["outputs"] == "6 of 8 parameters cut"
    assert found["match"].endswith("axes that may be cut") and found["check"].startswith("types of ")
    assert "cse" not in found and "hoist" not in found


def test_pass_table_has_the_code_around_a_pass(table: PassTable) -> None:
    before, after = table.code["cse"]
    assert before.count("square(x)") == 2 and after.count("square(x)") == 1 and "h.1 is as h.0" in after
    assert pass_table(Twice(), 2, Options(), X).code == {}


def test_pass_table_is_text_and_plain_data(table: PassTable) -> None:
    lines = f"{table}".partition("before cse")[0].splitlines()
    assert lines[0].startswith(f"Twice on tp=2: {len(table.passes)} passes, ") and max(map(len, lines)) <= 100
    (cse,) = (line.split() for line in lines if line.startswith("canonicalize  cse "))
    assert cse[:-1] == ["canonicalize", "cse", "18", "->", "16", "+0", "-2", "0"]
    (lower,) = (line for line in lines if line.startswith("lower         lower "))
    assert "0 -> 2 + 1" in lower
    data = table.to_dict()
    assert json.loads(json.dumps(data)) == data and data["code"]["cse"]["before"].count("square(x)") == 2
    (row,) = (row for row in data["passes"] if row["name"] == "cse")
    assert row["operators"] == {"before": 18, "after": 16} and row["rewrites"] == {"new": 0, "gone": 2}
    (row,) = (row for row in data["passes"] if row["name"] == "lower")
    assert row["collectives"]["after"] == {"forward": 2, "backward": 1}


def test_pass_table_refuses_wrong_arguments() -> None:
    with pytest.raises(autotp.Error, match=r"^stages\(Linear, tp=0\): "):
        pass_table(nn.Linear(4, 4), 0, Options(), torch.ones(2, 4))
