"""integrations, tools and experimental can be deleted: the tests of the kernel pass without them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from ranks import ROOT

import autotp

FOLDERS = tuple(name for name in ("integrations", "tools", "experimental") if (ROOT / "autotp" / name).is_dir())
LIBRARIES = r"\b(transformers|accelerate|peft|trl|lightning|datasets|hugging_face|trainers)\b"
"""Models of these libraries, and helpers of tests that build them: without `integrations` they are not known."""
SAMPLE = ("tests/sharding", "tests/rules/test_traits.py", "tests/passes/lower/test_lower.py", "tests/test_options.py")
NO_KERNEL = ("system", "examples", "benchmarks", "site", "project", "cards", "support", *FOLDERS)
"""Folders of tests that are of the whole, or of what is deleted."""
SCRIPT = """
import torch, autotp
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
x = torch.randn(3, 4)
assert autotp.verify(model, 2, example_inputs=x).ok
print(autotp.explain(model, 2, example_inputs=x))
autotp.parallelize(model, 1)(x).sum().backward()
"""
CHOOSING = """
import torch, autotp
try:
    autotp.explain(torch.nn.Linear(2, 2), 2, example_inputs=torch.ones(1, 2), overlap="batch")
except autotp.Error as error:
    print(error)
"""

NAMED = """
import autotp
try:
    autotp.{}
except AttributeError as error:
    print(error)
"""


def files_without(folders: Iterable[str]) -> list[str]:
    """The test files of the kernel that use nothing of these folders, in their text."""
    names = [name for name, home in autotp._HOMES.items() if home.partition(".")[0] in folders]
    uses = [rf"autotp\.({'|'.join(names)})\b", *(rf"autotp[./]{folder}\b" for folder in folders)]
    used = re.compile("|".join([*uses, LIBRARIES] if "integrations" in folders else uses))
    tests = ROOT / "tests"
    files = [path for path in tests.rglob("test_*.py") if path.relative_to(tests).parts[0] not in NO_KERNEL]
    return sorted(str(path.relative_to(ROOT)) for path in files if not used.search(path.read_text()))


def copy_without(folders: Iterable[str], target: Path) -> Path:
    """Returns a copy of the tree that lacks these folders and their tests."""
    for name in ("autotp", "passes", "models", "tests", "examples", "benchmarks", "setup.cfg", "setup.py", "src"):
        source = ROOT / name
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    for folder in folders:
        shutil.rmtree(target / "autotp" / folder)
        shutil.rmtree(target / "tests" / folder, ignore_errors=True)
    return target


def run(tree: Path, *arguments: str) -> str:
    """Runs Python in a tree; returns what it prints."""
    path = os.pathsep.join([str(tree / "src"), str(tree)])
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("folders", [*((folder,) for folder in FOLDERS), FOLDERS], ids="-".join)
def test_kernel_needs_no_optional_folder(folders: tuple[str, ...], tmp_path: Path) -> None:
    """Every test file of the kernel can be imported, and some pass."""
    tree, files = copy_without(folders, tmp_path), files_without(folders)
    assert len(files) > 150
    assert "Sequential on tp=2" in run(tree, "-c", SCRIPT)
    if "experimental" in folders:
        assert "overlap='batch' is not one of its values\n  expected 'none'\n" in run(tree, "-c", CHOOSING)
    gone = {name: home.partition(".")[0] for name, home in autotp._HOMES.items() if home.partition(".")[0] in folders}
    for name, folder in gone.items():
        text = f"autotp.{name} is in autotp/{folder}, and this copy of autotp is without it"
        assert run(tree, "-c", NAMED.format(name)) == f"{text}\n"
    pytest_of = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    run(tree, *pytest_of, "--collect-only", *files)
    run(tree, *pytest_of, *(file for file in files if file.startswith(SAMPLE)))


@pytest.mark.rare
@pytest.mark.timeout(7200)
def test_all_tests_of_the_kernel_pass_without_optional_folders(tmp_path: Path) -> None:
    tree = copy_without(FOLDERS, tmp_path)
    run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not system", *files_without(FOLDERS))
