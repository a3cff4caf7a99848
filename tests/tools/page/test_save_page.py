"""The page as a file: alone, small, whole or not there; in a browser it runs without errors, and axes light up."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import autotp
from autotp.diagnostics.differences import Difference
from autotp.models.gpt import GPT, GPTConfig
from autotp.tools.bisect import Blame
from autotp.tools.cli.model_argument import ModelArgument, on_meta
from autotp.tools.page import save_page as module
from autotp.tools.page.page_data import page_data
from autotp.tools.page.save_page import page_text

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FETCHED = re.compile(
    r"""(?:src|href|action|poster)\s*=\s*(?:["'](?!#)|[^"'#\s])|url\(|@import|\bfetch\(|XMLHttp|import\("""
)
"""What would load something: an address in an attribute, a style or a script."""


class Tags(HTMLParser):
    """Counts opened and closed tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "input", "col", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_it_is_one_file_that_loads_nothing(
    estimate: autotp.Estimate, uneven: autotp.Plan, report: autotp.Report, tmp_path: Path
) -> None:
    for found in (estimate, uneven, report):
        autotp.save_page(found, tmp_path / "plan.html")
        text = (tmp_path / "plan.html").read_text()
        assert FETCHED.findall(text) == [] and "default-src 'none'" in text
        tags = Tags()
        tags.feed(text)
        assert tags.open == [] and tags.wrong == []
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]
    assert (tmp_path / "plan.html").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_page_of_eighty_layers_is_small(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = on_meta(ModelArgument("llama-3-70b", {}))
    how: dict[str, Any] = {"tp": 8, "pp": 16, "dp": 8, "batch": 2048, "schedule": "interleaved", "interleave": 5}
    est = autotp.estimate(model, gpu="h100-80gb", sequence_parallel=True, **how)
    autotp.save_page(est, tmp_path / "plan.html")
    assert (tmp_path / "plan.html").stat().st_size <= 500_000


def test_page_escapes_texts(uneven: autotp.Plan) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    data = page_data(replace(uneven, model=evil))
    data["ranks"]["parameters"][0]["name"] = evil
    data["whole"].append(dict.fromkeys(("name", "shape", "why", "at", "change"), evil))
    text = page_text(data)
    assert evil not in text and html.escape(evil) in text


def test_an_error_leaves_the_page_before(
    estimate: autotp.Estimate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.html"
    path.write_text("before")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "replace", fails)
    with pytest.raises(autotp.Error, match=r"save_page: .*plan.html cannot be written: No space left on device"):
        autotp.save_page(estimate, path)
    assert path.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["plan.html"]
    with pytest.raises(autotp.Error, match="cannot be written: No such file"):
        autotp.save_page(estimate, tmp_path / "nowhere" / "plan.html")


def test_save_page_refuses_a_wrong_argument(estimate: autotp.Estimate, uneven: autotp.Plan, tmp_path: Path) -> None:
    with pytest.raises(autotp.Error, match="save_page: found is 'plan'"):
        autotp.save_page("plan", tmp_path / "x")  # type: ignore[arg-type]
    with pytest.raises(autotp.Error, match="save_trace: estimate is a Plan"):
        autotp.save_trace(uneven, tmp_path / "x")  # type: ignore[arg-type]
    autotp.save_trace(estimate, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


# ---- in a browser

WATCH = "<script>window.wrong=[];addEventListener('error',e=>wrong.push(e.message));</script>"
ASK = """<script>
addEventListener('load', () => {
  const $ = (s) => document.querySelector(s), all = (s) => [...document.querySelectorAll(s)], found = {};
  const enter = (node) => node.dispatchEvent(new MouseEvent('mouseover', {bubbles: true}));
  const lit = (s) => all(s + '.on').length;
  const axis = (label) => all('.legend [data-axis]').find((n) => n.textContent.trim().startsWith(label));
  found.axes = all('.legend [data-axis]').map((n) => n.textContent.trim().replace(/\\s+/g, ' '));
  enter(axis('width'));
  found.width = {
    weights: all('.flow tr.on').map((n) => n.textContent).filter((t) => /c_fc|gate_proj/.test(t)).length,
    sent: all('.pair.on').map((n) => n.querySelector('.conj span').textContent), lines: lit('.code tr'),
    heads: axis('heads').classList.contains('on'), dim: getComputedStyle(axis('heads')).opacity,
  };
  enter(document.body);
  found.after = lit('[data-axes]');
  axis('hidden').click();
  enter(document.body);
  found.kept = [lit('[data-axes]') > 0, axis('hidden').getAttribute('aria-pressed')];
  document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}));
  found.escaped = lit('[data-axes]');
  const cells = all('.grids b');
  cells.at(-1).click();
  found.cells = cells.length;
  found.rank = $('#rank h3').textContent;
  found.peers = ['tp', 'dp', 'pp'].map((k) => all('.grids b.' + k).length);
  found.shares = all('#rank tr').map((n) => [...n.cells].map((c) => c.textContent.replaceAll('\\u00d7', 'x')));
  const canvas = $('#timeline');
  if (canvas) {
    const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    found.colours = new Set(Array.from({length: pixels.length / 4}, (_, i) => pixels.slice(4 * i, 4 * i + 3).join()));
    found.colours = found.colours.size;
    canvas.dispatchEvent(new MouseEvent('mousemove', {clientX: canvas.getBoundingClientRect().left + 50,
      clientY: canvas.getBoundingClientRect().top + 5, bubbles: true}));
    found.when = $('#when').textContent;
    $('[data-zoom=end]').click();
    found.zoom = $('.tools .now').textContent;
  }
  $('#theme').click();
  found.theme = [document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor];
  found.folded = all('.fold').length;
  found.overflow = document.documentElement.scrollWidth - innerWidth;
  found.ready = document.body.dataset.ready;
  found.wrong = window.wrong;
  Object.assign(found, window.more);
  document.body.innerHTML = '<pre id="found"></pre>';
  $('#found').textContent = JSON.stringify(found);
});
</script>"""


BARS = """<script>
addEventListener('load', () => {
  const all = (s) => [...document.querySelectorAll(s)], place = (node) => node.getBoundingClientRect();
  const wide = place(document.querySelector('.power')).width, line = document.querySelector('.power i');
  window.more = {
    bars: [...all('.far').at(-1).querySelectorAll('.power span')].map((node) => place(node).width / wide),
    tolerance: (place(line).left - place(line.parentNode).left) / wide,
    roles: all('.role').map((node) => node.textContent),
    outcome: getComputedStyle(document.querySelector('.outcome')).color,
  };
}, {capture: true});
</script>"""
"""Runs before ASK, which takes along what it found."""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no browser: apt-get install chromium")
    return found


def asked(browser: str, text: str, folder: Path, width: int) -> dict[str, Any]:
    """Opens a page, points, clicks, and returns what was seen."""
    path = folder / "plan.html"
    path.write_text(text.replace("<title>", f"{WATCH}<title>").replace("</body>", f"{ASK}</body>"))
    command = [
        browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom",
        "--virtual-time-budget=5000", f"--user-data-dir={folder / 'profile'}", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    answers: dict[str, Any] = json.loads(html.unescape(found[1]))
    return answers


@pytest.mark.parametrize("width", [1400, 500])
def test_page_of_an_estimate_runs_in_a_browser(
    browser: str, estimate: autotp.Estimate, tmp_path: Path, width: int
) -> None:
    found = asked(browser, page_text(page_data(estimate)), tmp_path, width)
    assert found["wrong"] == [] and found["ready"] == "yes"
    assert found["width"]["weights"] == 1 and found["width"]["sent"] == ["all_gather", "reduce_scatter"]
    assert found["width"]["lines"] >= 2 and not found["width"]["heads"] and float(found["width"]["dim"]) < 0.5
    assert found["after"] == 0 and found["kept"] == [True, "true"] and found["escaped"] == 0
    assert found["cells"] == 8 and found["rank"].startswith("rank 7: tensor 1 of 2, replica 1 of 2, pipeline 1 of 2")
    assert found["peers"] == [1, 1, 1]
    assert found["colours"] >= 4 and "forward of microbatch 0" in found["when"] and found["zoom"] == "end"
    assert found["theme"] == ["dark", "rgb(18, 21, 27)"] and found["folded"] >= 0
    assert found["overflow"] <= 0, "the page is not wider than the window"


def test_page_of_a_plan_runs_in_a_browser(browser: str, uneven: autotp.Plan, tmp_path: Path) -> None:
    found = asked(browser, page_text(page_data(uneven)), tmp_path, 1200)
    assert found["wrong"] == [] and found["ready"] == "yes" and found["cells"] == 2
    assert found["width"]["sent"] == ["copy", "reduce"]
    (row,) = (row for row in found["shares"] if row[0] == "attn.c_proj.weight")
    assert row == ["attn.c_proj.weight", "48 x 48", "48 x 16", "33.3 %", "3.1 KB x 2"]


def test_page_of_a_report_runs_in_a_browser(browser: str, tmp_path: Path) -> None:
    """The axes light up as on the page of a plan, and a bar is as long as its power of ten says."""
    report = autotp.verify(GPT(GPTConfig(block_size=64, vocab_size=512, n_layer=2, n_head=4, n_embd=64)), 2)
    name = "h.0.mlp.c_fc.weight"
    others = tuple(row for row in report.gradients if row.name != name)
    spoilt = replace(report, gradients=(Difference(name, 1e-4), *others))
    blame = Blame((name, "h.0.mlp.c_fc.bias"), "linear -> activation -> linear", ("bucket",), "", 12)
    text = page_text(page_data(spoilt, blame=blame)).replace("</body>", f"{BARS}</body>")
    found = asked(browser, text, tmp_path, 1200)
    assert found["wrong"] == [] and found["ready"] == "yes" and found["cells"] == 2 and found["overflow"] <= 0
    assert found["width"]["sent"] == ["copy", "reduce"]
    assert found["bars"][0] == pytest.approx(1 - 4 / 17, abs=0.01) and max(found["bars"][1:]) < 0.2
    assert found["tolerance"] == pytest.approx(1 - 9 / 17, abs=0.02)
    assert sorted(found["roles"]) == ["cut with it", "guilty"] and found["outcome"] == "rgb(192, 54, 44)"


def test_a_pipeline_of_many_ranks_in_a_browser(browser: str, make_gpt: Callable[..., GPT], tmp_path: Path) -> None:
    est = autotp.estimate(make_gpt(24), gpu="a100-80gb", pp=24, batch=24)
    found = asked(browser, page_text(page_data(est)), tmp_path, 1200)
    assert found["wrong"] == [] and found["cells"] == 24 and found["colours"] >= 4
