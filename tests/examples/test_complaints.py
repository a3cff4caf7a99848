"""The scripts of docs/complaints.md run: those of one process here, those of two on ranks as torchrun starts them."""

from __future__ import annotations

import runpy
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from ranks import Checks

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("accelerate")

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "complaints"
checks = Checks(fresh=True)


@dataclass(frozen=True)
class Script:
    """A check that runs a script. What it writes lies in a folder that goes with it."""

    path: Path

    @property
    def __name__(self) -> str:
        return self.path.stem

    def __call__(self, rank: int, n: int) -> None:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", folder)
            runpy.run_path(str(self.path))


for path in sorted((SCRIPTS / "two_processes").glob("[a-z]*.py")):
    checks.on(2)(Script(path))


@pytest.mark.parametrize("path", sorted((SCRIPTS / "one_process").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_in_one_process(path: Path, registry: None) -> None:
    runpy.run_path(str(path))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
