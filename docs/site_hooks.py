"""Hooks of `mkdocs build`: pages of the repository's other folders, links between files, nothing from elsewhere.

A page is written for a code host: its links lead to files of the repository. On the site a file lies where it lies in
the repository, but for those of `docs/`, which lie at the top.
"""

from __future__ import annotations

import os
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/growth.png")
"""What the site has of the repository beside `docs/`."""
LISTS = (
    "coverage_all.md",
    "coverage_libraries.md",
    "coverage_optimizers.md",
    "stages.md",
    "benchmarks/README.md",
    "CHANGELOG.md",
)
"""Pages of long lists and of many words, which would flood the search: it leaves them out."""
ANSWERS = ("questions.md", "start.md", "hugging_face.md")
"""Pages that the search shows before others that have the same words."""
CODE_OR_LINK = re.compile(
    r"^```.*?^```"  # a block of code, which stays as it is
    r"|\[(?P<text>[^]\[]*)\]\((?P<to>(?!\w+:|#)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)"
    r"|(?<!\[)(?P<tick>`?)(?P<page>(?:docs/|benchmarks/)?\w+\.md)(?P=tick)(?![\w`\]/])",
    re.DOTALL | re.MULTILINE,
)
SHORT = re.compile(r"<code>([^<\n]{1,24})</code>")
"""A name, an option or a word of code in a sentence, which stays in one line."""
ALERT = re.compile(r"^> \[!(?P<name>\w+)\]\n(?P<text>(?:>.*\n?)+)", re.MULTILINE)
"""A box as code hosts write it, which Material writes in another way."""
FETCHED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href"}
"""Tag -> the attribute whose address a browser fetches by itself."""


def place(file: str) -> str:
    """Where a file of the repository lies on the site: `docs/limits.md` -> `limits.md`."""
    return "index.md" if file == "README.md" else file.removeprefix("docs/")


def with_links(text: str, page: str, titles: dict[str, str]) -> str:
    """A page's text with its links as they are on the site; the name of a page becomes a link with the page's title.

    Args:
        page: the page's file in the repository.
        titles: the site's files -> the title of each page, "" for what is no page.
    """

    def linked(match: re.Match[str]) -> str:
        if match["page"]:
            to = place(match["page"])
            if not titles.get(to) or to == place(page):
                return match[0]
            return f"[{titles[to]}]({relpath(to, dirname(place(page)) or '.')})"
        if not match["to"]:
            return match[0]
        to = place(normpath(f"{dirname(page)}/{match['to']}".lstrip("/")))
        text = titles.get(to, "") if re.fullmatch(r"[\w/.]+\.md", match["text"]) else ""
        return f"[{text or match['text']}]({relpath(to, dirname(place(page)) or '.')}{match['anchor'] or ''})"

    return CODE_OR_LINK.sub(linked, text)


def with_boxes(text: str) -> str:
    """A page's text with its alerts (`> [!WARNING]`) as boxes of Material."""

    def box(match: re.Match[str]) -> str:
        lines = (line.removeprefix(">").removeprefix(" ") for line in match["text"].splitlines())
        return f'!!! {match["name"].lower()} ""\n\n' + "".join(f"    {line}".rstrip() + "\n" for line in lines)

    return ALERT.sub(box, text)


def named(nav: Any) -> dict[str, str]:
    """The site's pages -> their titles in the navigation."""
    if isinstance(nav, dict):
        ((title, below),) = nav.items()
        return {below: title} if isinstance(below, str) else named(below)
    return {page: title for entry in nav for page, title in named(entry).items()}


@cache
def heading(path: str) -> str:
    """The title at the top of a page."""
    return Path(path).read_text().split("\n", 1)[0].removeprefix("# ")


def on_files(files: Any, config: Any) -> Any:
    for name in OTHERS:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    file = page.file.src_uri
    page.meta["search"] = {"exclude": file in LISTS, "boost": 4 if file in ANSWERS else 1}
    titles = {each.src_uri: heading(each.abs_src_path) for each in files.documentation_pages()} | named(config.nav)
    return with_links(with_boxes(markdown), file if file in OTHERS else f"docs/{file}", titles)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    return SHORT.sub(r'<code class="short">\1</code>', html)


class Fetched(HTMLParser):
    """The addresses elsewhere that a browser fetches when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(FETCHED.get(tag, "")) or ""
        kind = dict(attrs).get("rel") or ""
        if re.match(r"(\w+:)?//", address) and kind not in ("canonical", "prev", "next"):
            self.found.append(address)


def on_post_build(config: Any) -> None:
    """Raises PluginError if a page or a style sheet would fetch something from elsewhere."""
    found = []
    for folder, _, names in os.walk(config.site_dir):
        for path in (Path(folder, name) for name in names):
            if path.suffix == ".html":
                parser = Fetched()
                parser.feed(path.read_text())
                found += [f"{path.name}: {address}" for address in parser.found]
            elif path.suffix == ".css":
                found += [
                    f"{path.name}: {address}" for address in re.findall(r"url\(\"?(\w+://[^)]+)", path.read_text())
                ]
    if found:
        raise PluginError("pages would fetch from elsewhere: " + ", ".join(sorted(set(found))))
