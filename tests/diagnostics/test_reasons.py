"""reasons: a reader that is not cut is named with its line, and so is the cause, behind any number of steps."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from errors import line_of
from hugging_face import tiny
from torch import Tensor, nn

import autotp
from autotp.diagnostics.plan import Cause, WholeRow
from autotp.display.sheet import Table

X = torch.ones(2, 5, 8)


def row_of(model: nn.Module, name: str, x: Tensor = X, **options: object) -> WholeRow:
    plan = autotp.explain(model, 2, example_inputs=x, **options)  # type: ignore[arg-type]
    (row,) = (row for row in plan.whole if row.name == name)
    return row


def at(text: str) -> str:
    return line_of(__file__, text).split()[0]


class Scale(nn.Module):
    """A scale of each channel, as of LayerScale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x  # of the scale


class Norm(nn.Module):
    """A norm as transformers write it: in operators of its own, with a weight beside 1 if it is Gemma's."""

    def __init__(self, beside: float) -> None:
        super().__init__()
        self.beside, self.weight = beside, nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return (self.beside + self.weight.float() if self.beside else self.weight) * x


class Blocks(nn.Module):
    """MLPs behind scales, and a small head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        parts = (nn.Sequential(Scale(), nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)) for _ in range(2))
        self.h, self.head = nn.ModuleList(parts), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = x + block(x)
        return x if self.h[0][1].out_features == 16 else self.head(x)


def test_its_weights_are_cut_along_other_axes() -> None:
    """The plan's row is one for both blocks, and proposes what divides the work."""
    row = row_of(Blocks(), "h.1.0.weight")
    place = at("return self.weight * x  # of the scale")
    assert row.reason == (
        f"its reader `mul` ({place}) is not cut: the weights that have this axis of 8 are cut along their other one: "
        "16 width"
    )
    assert row.at.startswith(f"{place}  return self.weight * x") and row.at == row.because[0].at
    assert row.because == (
        Cause("mul", row.at, "is not cut"),
        Cause("", "", "the weights that have this axis of 8 are cut along their other one: 16 width"),
    )
    plan = autotp.explain(Blocks(), 2, example_inputs=X)
    table = plan.sheet().parts[1]
    assert isinstance(table, Table)
    told = "its reader `mul` is not cut: the weights that have this axis of 8 are cut along their other one: 16 width"
    assert ("h.{0-1}.0.weight", "[8]", told, place) in table.rows, "the place has a column of its own"
    (data,) = (row for row in plan.to_dict()["whole"] if row["name"] == "h.0.0.weight")
    assert data["because"][0] == {"operator": "mul", "at": row.at, "why": "is not cut"} and len(data["because"]) == 2
    assert all(row["because"] == [] for row in plan.to_dict()["whole"] if row["name"].endswith("bias"))


@pytest.mark.parametrize("beside", [0.0, 1.0])
def test_a_norm_of_operators_is_a_norm(beside: float) -> None:
    model = nn.Sequential(Norm(beside), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    assert row_of(model, "0.weight").reason == "the norm needs the whole width"


def test_what_other_axes_leave_is_small() -> None:
    """The head is whole, but it is less than half a percent of all."""
    assert row_of(Blocks(1600), "h.1.0.weight").because[-1].why == (
        "the weights that have this axis of 8 are cut along their other one: 1600 width"
    )


class Gamma(nn.Module):
    """Scales what operators make of the input; some of them have no rule."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more, self.gamma = more, nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.linalg.matrix_exp(x)  # no rule
        for _ in range(self.more):
            x = x.relu()  # between
        return self.gamma * x  # the reader


@pytest.mark.parametrize(("more", "shown"), [(0, 0), (1, 1), (2, 2), (5, 2)])
def test_the_cause_is_found_through_the_operators_between(more: int, shown: int) -> None:
    """The text has the first of them, the data has all."""
    row = row_of(Gamma(more), "gamma", torch.ones(2, 8, 8))
    reader, between, last = at("return self.gamma * x"), at("x = x.relu()"), at("x = torch.linalg.matrix_exp(x)")
    steps = [f"`relu` ({between}) is not cut"] * shown + ["..."] * (more > shown)
    assert row.reason == ": ".join(
        [f"its reader `mul` ({reader}) is not cut", *steps, f"`linalg_matrix_exp` ({last}) has no rule"]
    )
    assert [cause.operator for cause in row.because] == ["mul", *["relu"] * more, "linalg_matrix_exp"]


class Read(nn.Module):
    """A scale whose axis is that of a weight with a reader that cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.s = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.w) * self.s  # scaled
        return y.sum(-1) + torch.linalg.matrix_exp(self.w).sum()  # of the weight


def test_another_reader_of_a_weight_cannot_be_cut() -> None:
    row = row_of(Read(), "s")
    assert row.reason == (
        f"its reader `mul` ({at('* self.s  # scaled')}) is not cut: a weight with its axis of 8 has another reader: "
        f"`linalg_matrix_exp` ({at('# of the weight')}) has no rule"
    )


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.b  # the views' input
        z = y.view(-1, 3, 4).softmax(-1).flatten(1)
        return z + y.view(-1, 4, 3).softmax(-1).flatten(1)  # another way


def test_an_operator_divides_the_axis_in_another_way() -> None:
    row = row_of(Views(), "b", torch.ones(2, 12))
    assert row.reason == (
        f"its reader `add` ({at('# the views')}) is not cut: "
        f"`reshape` ({at('# another way')}) divides its axis of 12 in another way"
    )


class One(nn.Module):
    """Reads its parameter with one operator."""

    def __init__(self, kind: str, *shape: int) -> None:
        super().__init__()
        self.kind, self.p = kind, nn.Parameter(torch.ones(shape))
        self.w, self.table = (
            nn.Parameter(torch.ones(8, 8)),
            nn.Parameter(torch.ones(100, 600 if kind == "small" else 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "cumsum":
            return x + torch.cumsum(self.p, 0)
        if self.kind in ("sent", "small"):
            y = F.linear(x + self.p, self.w)
            return y + self.table[: x.shape[1]].sum() if self.kind == "small" else y
        return x * self.p


@pytest.mark.parametrize(
    ("kind", "shape", "told"),
    [
        ("cumsum", (8,), r"`cumsum` \(.*\) is not cut: it needs the whole of its axis of 8"),
        ("mul", (), r"`mul` \(.*\) is not cut: one element cannot be divided"),
        ("mul", (1, 1), r"`mul` \(.*\) is not cut: one element cannot be divided"),
        ("mul", (8,), r"`mul` \(.*\) is not cut: no product has its axis of 8"),
        ("sent", (8,), r"`add` \(.*\) is not cut: a cut of its axis of 8 would send .* saves, most at `linear` \(.*\)"),
        ("small", (8,), r"`add` \(.*\) is not cut: a cut of its axis of 8 would divide less than half a percent .*"),
    ],
    ids=["whole", "element", "elements", "unweighed", "sent", "small"],
)
def test_reasons_name_the_other_causes(kind: str, shape: tuple[int, ...], told: str) -> None:
    row = row_of(One(kind, *shape), "p")
    assert re.fullmatch(f"its reader {told}", row.reason), row.reason
    assert row.reason.count("test_reasons.py:") == 1 + (kind == "sent")


def test_over_cp_the_reader_is_behind_a_copy() -> None:
    """The reason is that of a plan without cp."""
    pytest.importorskip("transformers")
    model, inputs = tiny("llama")
    plans = [autotp.explain(model, 2, cp=cp, example_inputs=inputs) for cp in (1, 2)]
    first, second = ({row.name: row.reason for row in plan.whole} for plan in plans)
    assert first == second and len(first) == 5
    assert first["model.norm.weight"] == "the norm needs the whole width"
