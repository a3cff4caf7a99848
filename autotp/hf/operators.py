"""The rules of transformers' own operators, which are there once it is imported."""

from __future__ import annotations

from autotp import families as f

NAMED: dict[str, f.RuleFunction] = {
    "transformers::grouped_mm_fallback": f.grouped_mm,
}
"""Name -> rule function, as in `autotp/operators.py`."""
