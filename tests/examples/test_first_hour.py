"""examples/first_hour.ipynb runs as it is, and its stored outputs are those of today."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("accelerate")
NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"


def shown(cell: Any) -> str:
    """What a cell shows: its result as HTML, and what it prints, with numbers as far as they are the same each time."""
    texts = [output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]
    texts += [output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout"]
    text = re.sub(r"\d\.\d(e-\d\d|e\+00)  [\w.]+", "ROUND-OFF", "".join(texts))
    return re.sub(r"\d+\.\d+(?=\n)", lambda number: f"{float(number[0]):.1f}", text)


def test_the_notebook_shows_what_its_cells_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own: a plan, a proof, two ranks that `notebook_launcher` starts, a page."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    stored, book = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (launch,) = (cell for cell in book.cells if "num_processes=2" in cell.source)
    launch.source = launch.source.replace("num_processes=2", f'num_processes=2, use_port="{port}"')
    nbclient.NotebookClient(book, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pairs = [(old, new) for old, new in zip(stored.cells, book.cells, strict=True) if old.cell_type == "code"]
    assert [shown(new) for _, new in pairs] == [shown(old) for old, _ in pairs]
    assert "step 40: loss" in shown(launch) and "<!doctype html>" in (tmp_path / "plan.html").read_text()
    assert [old.execution_count for old, _ in pairs] == [*range(1, len(pairs) + 1)]
