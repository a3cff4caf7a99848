"""Writes docs/complaints.md from the scripts in examples/complaints: their docstrings, and the end of their code.

python docs/complaints.py
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_suffix(".md")
SCRIPTS = "examples/complaints"
SECTIONS = {
    "Sizes that do not divide": ("heads", "kv_heads", "vocabulary", "experts", "sequence"),
    "Layers": ("fused_qkv", "tied_head", "qk_norm", "row_bias", "label_smoothing", "lora", "replication"),
    "What ranks must agree on": ("batches", "dropout", "initialization", "generation"),
    "Training": ("clipping", "muon", "token_mean", "pipeline", "resharding", "trainer"),
}
"""Heading -> names of scripts, in the order of the page."""
COMMANDS = {"one_process": "python", "two_processes": "torchrun --nproc-per-node 2"}
"""Folder -> what runs its scripts."""
OPENING = (
    """Here are {count} things that people who train with tensor and pipeline parallelism complain about in the trackers
of many projects. Each has a script of a few lines, whose end is shown here: an assertion that the result is that of one
device, or the error that autotp raises. The tests run all of them. `python docs/complaints.py` makes the page.""",
    """**Elsewhere** says in our words what the threads say, as of September 2026. A thread is one version of a library
on one day, and much of it is mended by now. What torch and transformers do now is in the
[last section](#torch-and-transformers-tried); the other libraries were not run. **Here** says what autotp does, and
where it falls short.""",
    """The scripts prove arithmetic, on small models and a CPU. Nothing here is about speed
([performance.md](performance.md)).""",
)
TRIED = "## torch and transformers, tried"
THREAD = re.compile(r"\b([\w-]+)/([\w.-]+)#(\d+)")


@dataclass(frozen=True)
class Complaint:
    """A script of SCRIPTS.

    Attributes:
        path: the script.
        title: the complaint, in a line.
        elsewhere: what threads say about it, each named as owner/repository#number.
        here: what autotp does.
        code: the script without its docstring.
    """

    path: Path
    title: str
    elsewhere: str
    here: str
    code: str

    @classmethod
    def read(cls, path: Path) -> Complaint:
        """Reads a script: its docstring is a title and two paragraphs."""
        text = path.read_text()
        first = ast.parse(text).body[0]
        title, elsewhere, here = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")
        code = "\n".join(text.splitlines()[first.end_lineno :]).strip("\n")
        return cls(path, title, elsewhere, here, code)

    @property
    def end(self) -> str:
        """The last lines of the code, behind an empty line: what is asserted."""
        return self.code.rpartition("\n\n")[2].strip("\n")

    @property
    def command(self) -> str:
        """What a reader types."""
        return f"{COMMANDS[self.path.parent.name]} {self.path.relative_to(ROOT).as_posix()}"


def complaints() -> dict[str, list[Complaint]]:
    """Heading -> its complaints."""
    paths = {path.stem: path for folder in COMMANDS for path in (ROOT / SCRIPTS / folder).glob("[a-z]*.py")}
    return {heading: [Complaint.read(paths[name]) for name in names] for heading, names in SECTIONS.items()}


def paragraph(*texts: str) -> str:
    """The texts as lines, with threads named as markdown's links are: [vllm#440]."""
    text = THREAD.sub(r"[\2#\3]", " ".join(" ".join(texts).split()))
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def links(found: list[Complaint]) -> str:
    """Where each thread is. (GitHub leads from an issue's address to a pull request of this number.)"""
    threads = {thread for one in found for thread in THREAD.findall(f"{one.elsewhere} {one.here}")}
    lines = {f"[{name}#{number}]: https://github.com/{owner}/{name}/issues/{number}" for owner, name, number in threads}
    return "\n".join(sorted(lines, key=str.lower))


def tried() -> list[str]:
    """The last section of the page as it is: benchmarks/peers/complaints.py writes it."""
    text = PAGE.read_text() if PAGE.exists() else ""
    return [found.strip() for found in re.findall(rf"^{TRIED}$.*?(?=^\[)", text, re.MULTILINE | re.DOTALL)]


def page() -> str:
    """The page as text."""
    found = complaints()
    every = [one for section in found.values() for one in section]
    parts = ["# Complaints", *(paragraph(text).format(count=len(every)) for text in OPENING)]
    for heading, section in found.items():
        parts.append(f"## {heading}")
        for one in section:
            parts += [f"### {one.title}", paragraph("**Elsewhere.**", one.elsewhere), paragraph("**Here.**", one.here)]
            parts += [f"```\n{one.command}\n```", f"```python\n{one.end}\n```"]
    return "\n\n".join([*parts, *tried(), links(every)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
