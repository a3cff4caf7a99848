"""benchmarks/estimates.py: a part of each table that a few seconds allow; the constants are those that it fits."""

import estimates
import pytest
from estimates import Row

from autotp.tools.estimation.error_bars import ERRORS


def shown(monkeypatch: pytest.MonkeyPatch, table: str) -> list[Row]:
    found: list[Row] = []
    monkeypatch.setattr(estimates, "show", lambda title, rows, goal, kind="": found.extend(rows))
    estimates.TABLES[table]()
    return found


def test_the_layer_that_the_constants_are_fitted_to(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = shown(monkeypatch, "table4")
    assert len(rows) == 10 and max(abs(row.error) for row in rows) < 2.5


def test_no_constant_near_the_fitted_ones_is_much_better() -> None:
    layers = {key: estimates.layer(*key, estimates.A100) for key in estimates.ONE_LAYER}
    best = estimates.loss(layers, estimates.A100)
    for name in estimates.FITTED:
        for factor in (0.9, 1.1):
            other = estimates.replace(estimates.A100, **{name: factor * getattr(estimates.A100, name)})
            assert estimates.loss(layers, other) > 0.9 * best


def test_activations_of_a_layer_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "KEPT", {"22B": estimates.KEPT["22B"]})
    rows = shown(monkeypatch, "fig7")
    assert len(rows) == 4 and max(abs(row.error) for row in rows) < 0.5


def test_a_step_of_22b() -> None:
    est = estimates.step5("22B", "selective", True)
    assert est.seconds == pytest.approx(1.10, rel=0.06) and est.fits


def test_search_finds_no_slower_layout_than_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small row like those of Narayanan 2021, table 1; `estimates.py search1` has the ten."""
    monkeypatch.setattr(estimates, "SCALING", ((0.1, 8, 1024, 8, 2, 2, 8, 64, 0),))
    (row,) = shown(monkeypatch, "search1")
    assert row.ours <= row.published and row.error <= 0
    assert row.note == "the published layout" or ": " in row.note


def test_an_error_is_in_percent_or_in_points() -> None:
    assert Row("", 10, 11).error == pytest.approx(10) and Row("", 77, 75, points=True).error == -2


@pytest.mark.rare
@pytest.mark.parametrize("table", ["table5", "fig1", "table1", "table2", "weak"])
def test_the_error_bars_are_those_of_the_tables(monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    """autotp/tools/estimation/error_bars.py has the errors of these rows."""
    found: dict[str, list[float]] = {}
    monkeypatch.setattr(
        estimates, "show",
        lambda title, rows, goal, kind="": found.setdefault(kind, []).extend(estimates.relative(row) for row in rows),
    )  # fmt: skip
    estimates.TABLES[table]()
    for kind, errors in found.items():
        known = ERRORS[kind]
        places = [known.index(pytest.approx(errors[0], abs=0.11))]  # type: ignore[arg-type]
        assert known[places[0] : places[0] + len(errors)] == pytest.approx(errors, abs=0.11)


@pytest.mark.rare
@pytest.mark.parametrize(("table", "most"), [("peak", 2.8), ("heads", 1.1), ("node", 3.6)])
def test_shares_are_within_points(monkeypatch: pytest.MonkeyPatch, table: str, most: float) -> None:
    rows = shown(monkeypatch, table)
    assert all(row.points for row in rows) and max(abs(row.error) for row in rows) < most


@pytest.mark.rare
def test_the_best_split_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    *best, worst = shown(monkeypatch, "splits")
    assert [row.ours for row in best] == [8, 8] and 1.2 < worst.ours <= 2
