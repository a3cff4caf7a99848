"""plain_data: values as JSON has them, and results that list what it has of them."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from autotp.display.plain_data import as_plain_data
from autotp.display.sheet import Shown


class Sides(NamedTuple):
    forward: int
    backward: int


@dataclass(frozen=True)
class Row:
    name: str
    error: float


@dataclass(frozen=True, repr=False)
class Result(Shown):
    rows: tuple[Row, ...]
    source: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Listed:
    DATA = ("second", "total", "line")

    first: int
    second: int

    @property
    def total(self) -> int:
        return self.first + self.second

    def line(self) -> str:
        return f"{self.first} + {self.second}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, 2.5, True, None, "x"), [1, 2.5, True, None, "x"]),
        ({3: (torch.bfloat16,)}, {"3": ["bfloat16"]}),
        ([float("inf"), -float("inf"), float("nan")], ["inf", "-inf", "nan"]),
        (Sides(1, 2), {"forward": 1, "backward": 2}),
        (Row("w", 1e-9), {"name": "w", "error": 1e-9}),
        (Listed(1, 2), {"second": 2, "total": 3, "line": "1 + 2"}),
    ],
    ids=["plain", "dtype", "no-number", "named-tuple", "dataclass", "listed"],
)
def test_plain_is_numbers_texts_lists_and_dicts(value: Any, expected: Any) -> None:
    assert as_plain_data(value) == expected
    assert json.loads(json.dumps(as_plain_data(value), allow_nan=False)) == expected


def test_source_of_a_result_is_in_no_data_and_in_no_pickle() -> None:
    result = Result((Row("w", 0.0),), source=object())
    assert result.to_dict() == {"rows": [{"name": "w", "error": 0.0}]}
    assert pickle.loads(pickle.dumps(result)) == result and pickle.loads(pickle.dumps(result)).source is None
