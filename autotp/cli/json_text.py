"""json_text: what every command prints with `--json`: its data, behind the versions of the format and of autotp."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import autotp
from autotp.display.sheet import DATA_VERSION


def json_text(data: Mapping[str, Any]) -> str:
    """Returns plain data as JSON, with `version` and `autotp` before it."""
    return json.dumps({"version": DATA_VERSION, "autotp": autotp.__version__, **data}, indent=2, allow_nan=False)


def error_text(problem: str, call: str = "", facts: Mapping[str, str] | None = None) -> str:
    """Returns the JSON of an error: the public call that raised it, the problem, and the lines below it."""
    return json_text({"ok": False, "error": {"call": call, "problem": problem, "facts": dict(facts or {})}})
