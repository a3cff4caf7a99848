"""The pages of the repository as the site has them: links between files, and nothing that is fetched from elsewhere."""

from __future__ import annotations

import json
import os
import re
import runpy
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("mkdocs")
import yaml
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[2]
HOOKS = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
TITLES = {"limits.md": "Limits", "start.md": "Start here", "CONTRIBUTING.md": "Contributing"}


@pytest.mark.parametrize(
    ("text", "page", "shown"),
    [
        ("[a](limits.md#x)", "docs/start.md", "[a](limits.md#x)"),
        ("[a](docs/limits.md)", "CONTRIBUTING.md", "[a](limits.md)"),
        ("![a](../benchmarks/growth.png)", "docs/performance.md", "![a](benchmarks/growth.png)"),
        ("[a](../docs/limits.md)", "benchmarks/README.md", "[a](../limits.md)"),
        ("see `docs/limits.md`.", "docs/start.md", "see [Limits](limits.md)."),
        ("see docs/limits.md and CONTRIBUTING.md", "docs/start.md",
         "see [Limits](limits.md) and [Contributing](CONTRIBUTING.md)"),
        ("[limits.md](limits.md#a), [the limits](limits.md)", "docs/start.md",
         "[Limits](limits.md#a), [the limits](limits.md)"),
        ("`docs/limits.md`", "docs/limits.md", "`docs/limits.md`"),
        ("`docs/other.md`, [docs/limits.md](limits.md)", "docs/start.md",
         "`docs/other.md`, [Limits](limits.md)"),
        ("```\n[a](docs/limits.md) docs/limits.md\n```", "CHANGELOG.md",
         "```\n[a](docs/limits.md) docs/limits.md\n```"),
        ("[a](https://x/y.md) [b](#c)", "CHANGELOG.md", "[a](https://x/y.md) [b](#c)"),
    ],
)  # fmt: skip
def test_links_on_the_site(text: str, page: str, shown: str) -> None:
    assert HOOKS["with_links"](text, page, TITLES) == shown


@pytest.mark.parametrize(
    "content",
    [
        '<script src="https://cdn/x.js"></script>', '<img src="//cdn/x.png">', '<link rel="stylesheet" href="http://x">',
        '<iframe src="https://x">',
    ],
)  # fmt: skip
def test_nothing_is_fetched_from_elsewhere(content: str, tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text('<a href="https://x">x</a><link rel="canonical" href="https://x"><img src="x.png">')
    HOOKS["on_post_build"](SimpleNamespace(site_dir=tmp_path))
    page.write_text(content)
    with pytest.raises(PluginError, match=r"a\.html: "):
        HOOKS["on_post_build"](SimpleNamespace(site_dir=tmp_path))


@pytest.mark.parametrize(
    ("html", "short"),
    [
        ("<code>--json</code> and <code>a is b</code>", 2), (f"<code>{'x' * 25}</code>", 0),
        ("<pre><code>a\n</code></pre>", 0), ("<code><span>a</span></code>", 0),
    ],
)  # fmt: skip
def test_short_code_stays_in_one_line(html: str, short: int) -> None:
    shown = HOOKS["on_page_content"](html, None, None, None)
    assert shown.count('<code class="short">') == short and shown.replace(' class="short"', "") == html


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n\n> [!WARNING]\n> **B.** c\n> d\n\ne\n", 'a\n\n!!! warning ""\n\n    **B.** c\n    d\n\ne\n'),
        ("> a quotation\n", "> a quotation\n"),
    ],
)
def test_alerts_are_boxes(text: str, shown: str) -> None:
    assert HOOKS["with_boxes"](text) == shown


def test_nor_by_a_style_sheet(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text('@font-face {src: url("https://x/y.woff")}')
    with pytest.raises(PluginError, match=r"a\.css: https://x"):
        HOOKS["on_post_build"](SimpleNamespace(site_dir=tmp_path))


class Loader(yaml.SafeLoader):
    """Reads tags of mkdocs' own as nothing."""


def navigation() -> dict[str, str]:
    """The pages of mkdocs.yml, and their titles there."""
    Loader.add_multi_constructor("", lambda *_: None)
    config: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    return dict(HOOKS["named"](config["nav"]))


def sources() -> set[str]:
    """The pages of the site, by the names of their files there."""
    return {path.name for path in (ROOT / "docs").glob("*.md")} | {
        name for name in HOOKS["OTHERS"] if name.endswith(".md")
    }


def test_the_navigation_is_short() -> None:
    assert set(navigation()) < sources() and len(navigation()) <= 16


def test_the_search_leaves_out_pages_that_exist() -> None:
    assert {*HOOKS["LISTS"], *HOOKS["ANSWERS"]} < sources()


def test_links_of_the_pages_lead_to_files() -> None:
    """On a code host, too."""
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in HOOKS["OTHERS"] if name.endswith(".md"))]:
        text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", page.read_text())
        for to in re.findall(r"\]\((?!\w+:|#)([^)\s#]+)", text):
            assert (page.parent / to).exists(), f"{page.name}: {to}"


# ---- the pages as mkdocs has built them


class Page(HTMLParser):
    """What a page has: its anchors, its heads, what it links to, and the features of its scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.anchors: set[str] = set()
        self.heads: list[str] = []
        self.links: list[str] = []
        self.sheets: list[Path] = []
        self.code: list[bool] = []  # of each block, whether it is one that the theme adds its button to
        self.features: list[str] = []
        self.opened: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given[name] or "" for name in ("id", "name") if name in given}
        if tag == "h1":
            self.heads.append("")
        if tag == "link" and given.get("rel") == "stylesheet":
            self.sheets.append(self.path.parent / (given["href"] or ""))
        for name in ("href", "src"):
            address = given.get(name)
            if address is not None and not re.match(r"\w+:|//", address):
                self.links.append(address)
        if tag not in ("meta", "link", "input", "img", "br", "hr", "path", "col", "wbr"):
            self.opened.append(f"{tag} {given.get('class') or ''} {given.get('id') or ''}")
        if tag == "pre":
            self.code.append("highlight" in self.opened[-2].split())

    def handle_endtag(self, tag: str) -> None:
        if self.opened and self.opened[-1].startswith(f"{tag} "):
            self.opened.pop()

    def handle_data(self, data: str) -> None:
        if self.opened and self.opened[-1].split() == ["script", "__config"]:
            self.features = json.loads(data)["features"]
        if any(each.startswith("h1 ") for each in self.opened):
            self.heads[-1] += data


@pytest.fixture(scope="module")
def built(site: Path) -> dict[Path, Page]:
    """All pages but 404.html, whose links begin at the root of a server."""
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def of_sources(site: Path, built: dict[Path, Page]) -> dict[str, Page]:
    names = {name: site / re.sub(r"README\.md$", "index.md", name) for name in sources()}
    return {name: built[path.with_suffix(".html")] for name, path in names.items()}


def test_home_leads_to_each_page() -> None:
    """Its table has them all: the navigation has only those that are read first."""
    _, _, tables = (ROOT / "docs" / "index.md").read_text().partition("| you want to | read |")
    rows = "".join(re.findall(r"^\|.*", tables, re.MULTILINE))
    assert sources() - {to.removeprefix("../") for to in re.findall(r"\]\(([^)#]+)", rows)} == {"index.md"}


@pytest.mark.system
def test_each_page_has_one_head(site: Path, built: dict[Path, Page]) -> None:
    pages = of_sources(site, built)
    assert {name: len(page.heads) for name, page in pages.items()} == dict.fromkeys(pages, 1)
    assert all(page.heads[0].removesuffix("¶").strip() for page in pages.values())


@pytest.mark.system
def test_each_link_has_its_target(built: dict[Path, Page]) -> None:
    """Strict mkdocs looks at the links of Markdown only: not at those of HTML, of the theme and of the reference."""
    dead, count = [], 0
    for path, page in built.items():
        for link in page.links:
            to, _, anchor = unquote(link).partition("#")
            target = Path(os.path.normpath(path.parent / to.partition("?")[0])) if to else path
            found = target in built and anchor in built[target].anchors if anchor else target.is_file()
            count += 1
            if not found:
                dead.append(f"{path.name}: {link}")
    assert dead == [] and count > 40 * len(built)


@pytest.mark.system
def test_code_can_be_copied_and_pages_can_be_printed(site: Path, built: dict[Path, Page]) -> None:
    """The theme's script adds its button to each block; the theme's style hides menus on paper, and wraps code."""
    pages = of_sources(site, built)
    assert {name for name, page in pages.items() if "content.code.copy" not in page.features} == set()
    assert {name for name, page in pages.items() if not all(page.code)} == set()
    assert sum(len(page.code) for page in pages.values()) > 300
    styles = {sheet: sheet.read_text() for page in pages.values() for sheet in page.sheets}
    for page in pages.values():
        rules = "".join(part for sheet in page.sheets for part in styles[sheet].split("@media print")[1:])
        assert re.search(r"\.md-header[^{}]*{[^{}]*display:none", rules) and "white-space:pre-wrap" in rules
