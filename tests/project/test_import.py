"""`import autotp` loads nothing that a program does not ask for, and every public name is there all the same."""

from __future__ import annotations

import ast
import importlib
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import autotp

LIMIT = 0.3  # seconds of processor time that `import autotp` may take beside torch
RUNS = 3
SCRIPT = """
import sys, time

import torch

before, start = {*sys.modules}, time.process_time()
import autotp

print(time.process_time() - start, *sorted({*sys.modules} - before))
"""


def printed(script: str) -> list[str]:
    """The words that a script prints in a new process."""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()


def test_torch_is_all_that_takes_time() -> None:
    """And torch is loaded where it is used: not by `import autotp` alone."""
    seconds, modules = zip(*((float(s), m) for s, *m in (printed(SCRIPT) for _ in range(RUNS))), strict=True)
    assert {"autotp", "autotp.extensions", "autotp.model_library"} == {
        name for name in modules[0] if name.partition(".")[0] not in sys.stdlib_module_names
    }
    assert statistics.median(seconds) < LIMIT
    assert printed("import sys, autotp; print('torch' in sys.modules, autotp.__version__)") == [
        "False", autotp.__version__,
    ]  # fmt: skip


def test_editors_see_the_names_that_are_loaded() -> None:
    """What `if TYPE_CHECKING:` imports is the table, name by name."""
    code = ast.parse(Path(autotp.__file__).read_text())
    shown = {
        alias.asname: node.module
        for block in code.body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert shown == {name: f"autotp.{home}" for name, home in autotp._HOMES.items()}
    assert autotp.__all__ == sorted(autotp._HOMES, key=lambda name: (not name[0].isupper(), name))


@pytest.mark.parametrize("name", autotp.__all__)
def test_a_public_name_is_what_its_module_defines(name: str) -> None:
    home = importlib.import_module(f"autotp.{autotp._HOMES[name]}")
    value = getattr(autotp, name)
    assert value is vars(home)[name] and value.__module__ in (home.__name__, "autotp")
    assert name in dir(autotp) and vars(autotp)[name] is value


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'autotp' has no attribute 'paralelize'"):
        autotp.paralelize  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'paralelize'"):
        from autotp import paralelize  # type: ignore[attr-defined]  # noqa: F401


def test_what_a_program_may_do_after_the_import() -> None:
    """Modules are attributes, and transformers is registered at the first question."""
    script = (
        "import sys, autotp; name = 'autotp.integrations.transformers.library'; "
        "print(autotp.errors.Error is autotp.Error, name in sys.modules, "
        "autotp.model_library.library().has_models_in('transformers'), name in sys.modules)"
    )
    assert printed(script) == ["True", "False", "True", "True"]
    names: dict[str, object] = {}
    exec("from autotp import *", names)
    assert names.keys() >= set(autotp.__all__)
