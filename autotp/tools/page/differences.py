"""differences: what `verify` found: the outcome, the difference of each weight, and what a difference comes from.

Before: Report(gradients=(Difference("0.weight", 2e-16), ...), steps=(Difference("0.weight", 1e-16), ...), ...)
After:  [{"name": "0.weight", "cut": "[16@tp, 4]", "gradient": "2.0e-16", "step": "1.0e-16", "ok": True, ...}, ...]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autotp.diagnostics.differences import descending
from autotp.diagnostics.verify import Report
from autotp.display.plain_data import as_plain_data
from autotp.tools.bisect import Blame

LEAST = -17
"""The power of ten at which the bar of a difference begins; it ends at 1."""


def difference_data(report: Report, blame: Blame | None) -> dict[str, Any]:
    """Returns the outcome and the rows of a report as plain data, the largest difference first.

    Args:
        blame: what a difference comes from, if it was looked for.
    """
    steps, roles = {row.name: row.error for row in report.steps}, _roles(blame)
    layouts = {row.name: str(row.layout) for row in report.plan.cuts}
    layouts |= {row.name: str(list(row.shape)) for row in report.plan.whole if not row.operator}
    return {
        "title": report.sheet().title,
        "ok": report.ok,
        "mesh": report.mesh is not None,
        "computed": report.computed,
        "tolerance": f"{report.tolerance:.0e}",
        "limit": _bar(report.tolerance),
        "outputs": [_row(row.name, {"error": row.error}, report) for row in sorted(report.outputs, key=descending)],
        "weights": [
            {
                **_row(row.name, {"gradient": row.error, "step": steps.get(row.name)}, report),
                "cut": layouts.get(row.name, ""),
                "role": roles.get(row.name, ""),
            }
            for row in sorted(report.gradients, key=descending)
        ],
        "guilty": None if blame is None else as_plain_data(blame.table()),
    }


def _row(name: str, errors: Mapping[str, float | None], report: Report) -> dict[str, Any]:
    """Returns a name with its errors as texts, the bar of the worst one, and whether all are within the tolerance."""
    numbers = [error for error in errors.values() if error is not None]
    texts = {label: "" if error is None else f"{error:.1e}" for label, error in errors.items()}
    ok = all(error <= report.tolerance for error in numbers)
    return {"name": name, **texts, "bar": max(map(_bar, numbers)), "ok": ok, "role": ""}


def _bar(error: float) -> float:
    """Returns the length of a bar for a difference, from 0 to 1, by its power of ten."""
    # It has no logarithm.
    if error == 0:
        return 0.0
    return min(max(1 - math.log10(error) / LEAST, 0.0), 1.0) if math.isfinite(error) else 1.0


def _roles(blame: Blame | None) -> dict[str, str]:
    """Returns the name of a weight -> its part in a difference."""
    weights = () if blame is None else blame.weights
    return {name: "guilty" if i == 0 else "cut with it" for i, name in enumerate(weights)}
