"""The rules of transformers' own operators, which are there once it is imported."""

from __future__ import annotations

from autotp.rules.common import RuleFunction
from autotp.rules.products import grouped_mm

NAMED: dict[str, RuleFunction] = {
    "transformers::grouped_mm_fallback": grouped_mm,
}
"""Name -> rule function, as in `autotp/operators.py`."""
