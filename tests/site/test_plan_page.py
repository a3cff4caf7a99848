"""The page of Llama-3-70B on 1,024 GPUs is the one that its script writes, and the pages name its command."""

from __future__ import annotations

import re
import runpy
import shlex
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("typer")
from autotp.tools.environment import TESTED
from autotp.tools.page.page_data import page_data
from autotp.tools.page.save_page import page_text

ROOT = Path(__file__).resolve().parents[2]
PROOF = re.compile(r'<section id="proof">.*?</section>', re.DOTALL)
SCRIPT = ROOT / "docs" / "figures" / "plan_page.py"


def test_the_page_is_that_of_today() -> None:
    """`python docs/figures/plan_page.py` writes it."""
    pytest.importorskip("transformers")
    if version("transformers") != TESTED["transformers"]:
        pytest.skip("the page has source lines of the tested version of transformers")
    figure = runpy.run_path(str(SCRIPT))
    estimate = figure["estimate"]()
    page, today = figure["PAGE"].read_text(), page_text(page_data(estimate))
    assert PROOF.sub("", page) == PROOF.sub("", today)
    given = dict(
        zip(
            *[iter(shlex.split(figure["COMMAND"].replace("--sequence-parallel ", "").replace("--prove ", ""))[3:])] * 2,
            strict=True,
        )
    )
    assert {name: str(getattr(estimate.layout, name)) for name in ("tp", "pp", "dp", "batch", "schedule", "zero")} == {
        name: given[f"--{name}"] for name in ("tp", "pp", "dp", "batch", "schedule", "zero")
    }


@pytest.mark.rare
def test_the_proof_is_that_of_today() -> None:
    pytest.importorskip("transformers")
    figure = runpy.run_path(str(SCRIPT))
    today = page_text(page_data(figure["estimate"](), figure["proof"]()))
    found, expected = (PROOF.findall(text) for text in (figure["PAGE"].read_text(), today))
    assert len(found) == 1 and found == expected


@pytest.mark.parametrize("page", ["README.md", "docs/estimate.md"])
def test_the_command_stands_beside_the_picture(page: str) -> None:
    text = (ROOT / page).read_text()
    figure = runpy.run_path(str(SCRIPT))
    assert f"\n{figure['COMMAND']}\n" in text and "figures/plan_page.png" in text and "figures/plan_page.html" in text
