"""Passes that may be left out, chosen one by one."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

from autotp.options import OPTIONAL

CUTS = [name for name in OPTIONAL if name != "outline"]
"""Those that a rank's graph is made by."""
SEQUENCE = "sequence"
PASSES = [*CUTS, SEQUENCE]
PAIRS = list(itertools.combinations(PASSES, 2))


def only(names: Collection[str]) -> dict[str, Any]:
    """The choices with these passes and no others of those that may be left out."""
    return {"sequence_parallel": SEQUENCE in names, "without": tuple(name for name in CUTS if name not in names)}
