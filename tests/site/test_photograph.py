"""docs/photograph.py: its arguments, its pages, the names of its pictures; and the site's pages in a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = spec_from_file_location("photograph", ROOT / "docs" / "photograph.py")
assert SPEC is not None and SPEC.loader is not None
photograph = module_from_spec(SPEC)
SPEC.loader.exec_module(photograph)

WRONG = """<body style="background: white; width: 2000px">x
<img src="http://127.0.0.1:9/x.png"><script>throw new Error("no such thing")</script></body>"""
"""A page that is too wide and never dark, fetches something, and has a script that fails."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A site of three pages."""
    for name in ("limits.html", "index.html", "benchmarks/index.html", "404.html", "assets/site.css"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def test_all_pages_or_those_that_are_named(folder: Path) -> None:
    assert photograph.pages(folder) == {
        name: folder / f"{name}.html" for name in ("benchmarks/index", "index", "limits")
    }
    assert list(photograph.pages(folder, ["limits"])) == ["limits"]


def test_pages_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no page limit, but benchmarks/index, index, limits"):
        photograph.pages(folder, ["limits", "limit"])
    with pytest.raises(SystemExit, match=r"none has no pages: make docs"):
        photograph.pages(tmp_path / "none")


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    args = photograph.arguments([])
    assert args.modes == ("light-wide", "light-narrow", "dark-wide", "dark-narrow") and args.pages == []
    assert (args.site, args.out) == (ROOT / "build" / "site", ROOT / "build" / "pictures")
    args = photograph.arguments(["--pages", "limits", "start", "--modes", "dark-narrow", "--parts", "2"])
    assert (args.pages, args.modes, args.parts) == (["limits", "start"], ["dark-narrow"], 2)
    with pytest.raises(SystemExit):
        photograph.arguments(["--modes", "dark"])
    assert "choose from" in capsys.readouterr().err


def test_without_a_browser(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="no browser: apt-get install chromium"):
        photograph.main(["--site", str(folder)])


class Shown:
    """Stands for a browser: pages are 7,000 high, and one is wrong when it is narrow."""

    def show(self, page: Path, mode: str) -> tuple[int, list[str]]:
        return 7000, ["is wrong"] if (page.stem, mode) == ("limits", "dark-narrow") else []

    def picture(self, width: int, top: int, height: int) -> bytes:
        return f"{width} {top} {height}".encode()


def test_pictures_and_what_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def browser(program: str) -> Iterator[Shown]:
        assert program == "/usr/bin/chromium-browser"
        yield Shown()

    which = {"chromium-browser": "/usr/bin/chromium-browser", "google-chrome": "/usr/bin/google-chrome"}
    monkeypatch.setattr(shutil, "which", which.get)
    monkeypatch.setattr(photograph, "browser", browser)
    given = ["--site", str(folder), "--out", str(folder / "made" / "pictures"), "--modes", "dark-narrow"]
    assert photograph.main([*given, "--pages", "benchmarks/index", "--parts", "3"]) == 0
    made = {path.name: path.read_text() for path in (folder / "made" / "pictures").iterdir()}
    parts = ("420 0 3000", "420 3000 3000", "420 6000 1000")
    assert made == {f"benchmarks-index-dark-narrow-{part}.png": text for part, text in enumerate(parts, 1)}
    assert photograph.main([*given, "--parts", "1"]) == 1
    assert capsys.readouterr().out == "limits, dark-narrow: is wrong\n"


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[photograph.Browser]:  # type: ignore[name-defined]
    program = next(filter(None, map(shutil.which, photograph.BROWSERS)), None)
    if program is None:
        pytest.skip("no browser: apt-get install chromium")
    with photograph.browser(program) as found:
        yield found


@pytest.mark.system
def test_what_a_picture_does_not_show(browser: photograph.Browser, tmp_path: Path) -> None:  # type: ignore[name-defined]
    (tmp_path / "wrong.html").write_text(WRONG)
    height, told = browser.show(tmp_path / "wrong.html", "dark-narrow")
    assert height >= photograph.HEIGHT
    assert told[0].startswith("is 20") and told[0].endswith("wide in a window of 420")
    assert told[1] == "has the ground rgb(255, 255, 255)"
    assert "fetches http://127.0.0.1:9/x.png" in told and any("no such thing" in line for line in told)
    (tmp_path / "right.html").write_text("<body style='background: white'>x</body>")
    assert browser.show(tmp_path / "right.html", "light-wide")[1] == []
    assert browser.picture(100, 0, 50).startswith(b"\x89PNG")


@pytest.mark.system
@pytest.mark.parametrize("mode", ["light-wide", "dark-narrow"])
def test_pages_fit_their_window_in_its_colours(browser: photograph.Browser, site: Path, mode: str) -> None:  # type: ignore[name-defined]
    """And no script of theirs fails or fetches."""
    told = {name: browser.show(page, mode)[1] for name, page in photograph.pages(site).items()}
    assert {name: lines for name, lines in told.items() if lines} == {} and len(told) > 28


SEARCHED = {
    "OOM": "questions", "out of memory": "questions", "master weights": "questions",
    "gradient accumulation": "questions", "tokens per second": "questions", "expert parallel": "questions",
    "quickstart": "start", "triton": "questions", "vLLM": "hugging_face",
}  # fmt: skip
"""What is typed into the search -> the page that it shows first."""
TYPE = """new Promise((done) => {
  const box = document.querySelector("[data-md-component=search-query]");
  box.focus();
  box.value = QUERY;
  box.dispatchEvent(new Event("input", {bubbles: true}));
  box.dispatchEvent(new Event("keyup", {bubbles: true}));
  const look = (tries) => {
    const first = document.querySelector(".md-search-result__item a");
    first || !tries ? done(first && first.getAttribute("href")) : setTimeout(look, 100, tries - 1);
  };
  look(100);
})"""


@pytest.mark.system
def test_the_search_shows_their_page_first(browser: photograph.Browser, site: Path) -> None:  # type: ignore[name-defined]
    shown = {}
    for query in SEARCHED:
        browser.show(site / "index.html", "light-wide")
        asked = {"expression": TYPE.replace("QUERY", repr(query)), "awaitPromise": True, "returnByValue": True}
        address = browser.ask("Runtime.evaluate", **asked)["result"]["value"] or ""
        shown[query] = address.split("?")[0].split("#")[0].rpartition("/")[2].removesuffix(".html")
    assert shown == SEARCHED


@pytest.mark.system
def test_tables_are_not_cut_on_paper(browser: photograph.Browser, site: Path) -> None:  # type: ignore[name-defined]
    """A4 has 718 pixels between its margins. The page of a plan has a style of its own: tests/tools/page tests it."""
    beyond = """[...document.querySelectorAll("th, td, td *")].filter(
      (each) => each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.textContent)"""
    cut: dict[str, list[str]] = {}
    for name, page in photograph.pages(site).items():
        if name == "figures/plan_page":
            continue
        browser.show(page, "light-wide")
        browser.ask("Emulation.setEmulatedMedia", media="print")
        browser.ask("Emulation.setDeviceMetricsOverride", width=718, height=1000, deviceScaleFactor=1, mobile=False)
        cut[name] = browser.ask("Runtime.evaluate", expression=beyond, returnByValue=True)["result"]["value"]
    assert {name: found[:3] for name, found in cut.items() if found} == {}
