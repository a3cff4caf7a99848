"""Writes the page of Llama-3-70B on 1,024 GPUs, and takes a picture of it.

`python docs/figures/plan_page.py` writes docs/figures/plan_page.html, and with Chromium docs/figures/plan_page.png.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

import autotp
from autotp.tools.cli.model_argument import ModelArgument, on_meta

PAGE = Path(__file__).with_suffix(".html")
COMMAND = (
    "autotp estimate llama-3-70b --gpu h100-80gb --batch 2048 --tp 8 --pp 4 --dp 32 --schedule interleaved "
    "--sequence-parallel --zero 1 --prove --html plan.html"
)
"""The command that writes the same page."""
LIGHT = """<script>
[...document.querySelectorAll('.legend [data-axis]')].find((axis) => axis.textContent.includes('kv heads')).click();
document.querySelector('#ranks').remove();
document.querySelector('.flow').before(document.querySelector('.flow:nth-of-type(2)'));
document.querySelector('#model').remove();
document.querySelector('#proof').remove();
</script></body>"""
"""Keeps an axis lit, and leaves out what would not be on a picture."""


def estimate() -> autotp.Estimate:
    """Returns the estimate of the page."""
    return autotp.estimate(
        on_meta(ModelArgument("llama-3-70b", {})), gpu="h100-80gb", batch=2048, tp=8, pp=4, dp=32,
        schedule="interleaved", sequence_parallel=True, zero=1, dtype=torch.bfloat16,
    )  # fmt: skip


def proof() -> autotp.Report:
    """Returns the proof of the layout: a minute."""
    model = on_meta(ModelArgument("llama-3-70b", {}))
    how: dict[str, Any] = {"schedule": "interleaved", "sequence_parallel": True, "zero": 1}
    return autotp.verify(model, tp=8, pp=4, dp=32, microbatches=64, **how)


def take_picture(browser: str, page: Path, picture: Path) -> None:
    """Takes a picture of the layout and the block, with one axis lit."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        lit = Path(folder, "page.html")
        lit.write_text(page.read_text().replace("</body>", LIGHT))
        given = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1076"]
        where = [f"--user-data-dir={folder}/profile", f"--screenshot={picture}", lit.as_uri()]
        subprocess.run([browser, *given, *where], check=True, capture_output=True, timeout=100)
    Image.open(picture).quantize(128).save(picture, optimize=True)


if __name__ == "__main__":
    autotp.save_page(estimate(), PAGE, proof=proof())
    if found := shutil.which("chromium") or shutil.which("google-chrome"):
        take_picture(found, PAGE, PAGE.with_suffix(".png"))
