"""The pages of the repository as the site has them: links between files, and nothing that is fetched from elsewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def test_nor_by_a_style_sheet(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text('@font-face {src: url("https://x/y.woff")}')
    with pytest.raises(PluginError, match=r"a\.css: https://x"):
        HOOKS["on_post_build"](SimpleNamespace(site_dir=tmp_path))


class Loader(yaml.SafeLoader):
    """Reads tags of mkdocs' own as nothing."""


def test_each_page_is_in_the_navigation() -> None:
    Loader.add_multi_constructor("", lambda *_: None)
    config: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    others = {name for name in HOOKS["OTHERS"] if name.endswith(".md")}
    assert set(HOOKS["named"](config["nav"])) == pages | others


def test_links_of_the_pages_lead_to_files() -> None:
    """On a code host, too."""
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in HOOKS["OTHERS"] if name.endswith(".md"))]:
        text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", page.read_text())
        for to in re.findall(r"\]\((?!\w+:|#)([^)\s#]+)", text):
            assert (page.parent / to).exists(), f"{page.name}: {to}"
