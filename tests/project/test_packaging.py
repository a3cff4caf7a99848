"""What is installed is the whole of autotp: as a wheel, and as a checkout that nobody installed."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autotp

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
SITE = Path(torch.__file__).parent.parent  # Where torch is installed, and what it needs.
BESIDE = ("models", "passes")  # Folders of the checkout that are installed inside autotp.


SCRIPT = """
import importlib
import sys
from pathlib import Path

import torch

import autotp
import autotp.models.gpt
import autotp.passes

home, packages = Path(sys.argv[1]), sys.argv[2:]
for name in packages:
    folder = Path(importlib.import_module(name).__file__).parent
    assert home in folder.parents, f"{name} is from {folder}"
    for file in sorted(set(folder.glob("*.py")) - {folder / "__init__.py"}):
        importlib.import_module(f"{name}.{file.stem}")
config = autotp.models.gpt.GPTConfig(block_size=8, vocab_size=31, n_layer=1, n_head=2, n_embd=8)
with torch.device("meta"):
    model = autotp.models.gpt.GPT(config)
assert autotp.explain(model, 2).cuts
assert "reduce" in autotp.stages(model, 2)["emit"]
print(autotp.__version__)
"""


def listed() -> list[str]:
    """The packages that setup.cfg lists."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["options"]["packages"].split()


def copied(to: Path) -> Path:
    """A copy of what a wheel is built from: a build writes beside it."""
    to.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    for name in ("autotp", *BESIDE):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def run(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def used(home: Path) -> str:
    """What SCRIPT prints in a new process that finds autotp in `home` alone: -S leaves out editable installations."""
    path = os.pathsep.join(map(str, (home, SITE)))
    done = subprocess.run(
        [sys.executable, "-S", "-W", "error::DeprecationWarning:autotp", "-c", SCRIPT, str(home), *listed()],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=home,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_each_folder_is_a_package_that_setup_cfg_lists() -> None:
    folders = {file.parent for name in ("autotp", *BESIDE) for file in (ROOT / name).rglob("*.py")}
    parts = (folder.relative_to(ROOT).parts for folder in folders)
    assert listed() == sorted(".".join(("autotp", *(p[1:] if p[0] == "autotp" else p))) for p in parts)
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_a_wheel_is_all_that_is_needed(tmp_path: Path) -> None:
    source, target, offline = copied(tmp_path / "source"), tmp_path / "target", ("--no-deps", "--no-index", "--quiet")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", source, *offline, "--no-build-isolation", "--wheel-dir", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    run(*pip, "install", wheel, *offline, "--target", target)
    assert wheel.name.split("-")[1] == used(target) == autotp.__version__
    assert (target / "autotp" / "py.typed").is_file()
    assert {path.name.partition("-")[0] for path in target.iterdir()} == {"autotp"}


def test_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    assert used(copied(tmp_path / "source")) == autotp.__version__
