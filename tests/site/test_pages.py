"""What the pages of the site show is what happens: each block of Python runs, and prints what the page says.

- A block without a title is a part of one script for the page, in one process.
- A block with a title (`python title="train.py"`) is a file. A line `torchrun --nproc-per-node 2 train.py ...` of a
  later block runs it on two ranks. A file that is not run must be imported by another.
- A block of plain text directly behind a block of Python, or behind a command, is what that prints: of a command what
  its first rank prints. Of what MEASURED names, the numbers may be others.
- A block whose title ends in "(not run)" needs a library that is not here; it has to be Python, no more.
- GIVEN says what else a page needs: files of the reader's own, GPUs.

Other commands are looked at: their files, options and targets have to exist.
"""

from __future__ import annotations

import ast
import configparser
import contextlib
import inspect
import io
import linecache
import os
import re
import shlex
import subprocess
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import as_on_gpus
from ranks import LAUNCHERS, put, run_ranks

import autotp

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "index",
    "start",
    "errors",
    "long_runs",
    "from_others",
    "options",
    "long_sequences",
    "memory",
    "attention",
    "questions",
    "works_with",
    "hugging_face",
    "distributed",
    "estimate",
    "performance",
)
MADE = ("complaints", "stages")
"""Scripts write these: tests/site/test_complaints_page.py and tests/diagnostics/test_stages.py compare them."""
ELSEWHERE = ("README", "command_line")
"""tests/project/test_readme.py and tests/project/test_command_line.py run the blocks of these."""
SHELL = sorted({*PAGES, *ELSEWHERE, "complaints"})
MEASURED = ("watch.py", "accumulate.py", "throughput.py")
TYPED = "Once upon a time\nThe end\nstop\n"
"""What is typed for a script that asks."""
BLOCK = re.compile(r"^```(?P<language>\w*)(?P<options>[^\n]*)\n(?P<code>.*?)^```\n", re.MULTILINE | re.DOTALL)
NOT_RUN = "(not run)"
STARTERS = ("torchrun", "python", "srun", "mpirun")
BEGINNINGS = (*STARTERS, "make", "autotp", "pip", "git", "vllm")
"""How a block of commands begins."""
NOTATION = ("Before: ", "model -> capture", "linear  ", "files -> lazy tensors")
"""How the blocks begin that are neither code nor printed: of Performance and of Design."""
COMMAND = "torchrun --nproc-per-node 2 "


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    code: str
    line: int
    shown: str | None  # what the page says that it prints

    @property
    def commands(self) -> list[list[str]]:
        """The words of the commands of a block without a language; a line may go on behind a backslash."""
        if self.language != "sh" and (self.language or not self.code.startswith(tuple(f"{s} " for s in BEGINNINGS))):
            return []
        lines = self.code.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def source(page: str) -> Path:
    """The file of a page, in `docs/` or above it."""
    return next(path for path in (ROOT / "docs" / f"{page}.md", ROOT / f"{page}.md") if path.is_file())


def blocks(page: str) -> list[Block]:
    text = source(page).read_text()
    found, matches = [], list(BLOCK.finditer(text))
    for match, after in zip_longest(matches, matches[1:]):
        behind = after is not None and not text[match.end() : after.start()].strip()
        shown = after["code"] if after is not None and behind and not after["language"] else None
        title = re.search(r'title="(.*?)"', match["options"])
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(match["language"], title[1] if title else "", match["code"], line, shown))
    return found


def is_run(block: Block) -> bool:
    return block.language == "python" and not block.title.endswith(NOT_RUN)


def without_round_off(text: str) -> str:
    """Losses are compared in their first digits."""
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}", text)


def without_numbers(text: str) -> str:
    return " ".join(re.sub(r"[-+]?\d+(\.\d+)?(e[-+]\d+)?", "N", text).split())


def alike(file: str, text: str) -> str:
    """What a file has printed, as far as it is the same each time."""
    return without_numbers(text) if file in MEASURED else without_round_off(text)


def files_of(page: str, folder: Path) -> None:
    for block in blocks(page):
        if is_run(block) and block.title:
            (folder / block.title).write_text(block.code)


@contextlib.contextmanager
def with_a_model() -> Iterator[None]:
    """In a folder with a model and a tokenizer of the reader's own."""
    from hugging_face import write_llama  # It needs transformers, which other pages do not.

    if dist.get_rank() == 0:
        write_llama(Path("path/to/model"))
    dist.barrier()
    yield


GIVEN: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "hugging_face": with_a_model,
    "performance": as_on_gpus,
}
"""Page -> the region in which its commands run."""


class Script:
    """The blocks of a page that are one script; a line of it is that of the script, as if it were a file."""

    def __init__(self, page: str) -> None:
        self.name, self.source = f"{page}.py", ""
        self.names: dict[str, Any] = {"__name__": page}

    def run(self, code: str) -> str:
        self.source += code
        linecache.cache[self.name] = (len(self.source), None, self.source.splitlines(True), self.name)
        above = "\n" * (self.source.count("\n") - code.count("\n"))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(above + code, self.name, "exec"), self.names)
        return out.getvalue()


@contextlib.contextmanager
def within(folder: Path) -> Any:
    """A region in a folder, from which modules can be imported; they are forgotten afterwards."""
    before, loaded = os.getcwd(), set(sys.modules)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
        for name in set(sys.modules) - loaded:
            if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(folder)):
                del sys.modules[name]


def run_commands(rank: int, n: int, page: str, folder: str, commands: list[list[str]], by: str) -> list[str]:
    """What this rank prints in each command, under the variables of a launcher."""
    put(LAUNCHERS[by](rank, n))
    warnings.filterwarnings("ignore", "'pin_memory' argument is set", UserWarning)  # of torch, where no GPU is
    with within(Path(folder)), GIVEN.get(page, contextlib.nullcontext)():
        return [printed(folder, command) for command in commands]


def printed(folder: str, command: list[str]) -> str:
    file, *words = command
    code = Path(folder, file).read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [file, *words])
        patch.setattr(sys, "stdin", io.StringIO(TYPED))
        with within(Path(folder)), contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, file, "exec"), {"__name__": "__main__"})
    return out.getvalue()


def on_two_ranks(page: str) -> list[tuple[Block, list[str]]]:
    """The commands of a page that run a file of it, with their blocks."""
    files = {block.title for block in blocks(page) if is_run(block)}
    words = len(COMMAND.split())
    return [
        (block, command[words:])
        for block in blocks(page)
        for command in block.commands
        if command[:words] == COMMAND.split() and command[words] in files
    ]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_scripts_print_what_is_shown(page: str, tmp_path: Path, registry: None) -> None:
    """The launchers take turns; with `--all` each page runs under each (`test_pages_under_each_launcher`)."""
    files_of(page, tmp_path)
    commands = on_two_ranks(page)
    said: list[str] = []
    if commands:
        given = [command for _, command in commands]
        by = (*LAUNCHERS,)[PAGES.index(page) % len(LAUNCHERS)]
        said = run_ranks(run_commands, 2, page, str(tmp_path), given, by, timeout=110)[0]
    for (block, command), text in zip(commands, said, strict=True):
        assert alike(command[0], text) == alike(command[0], block.shown or text), command
    script = Script(page)
    torch.manual_seed(0)
    for block in blocks(page):
        if is_run(block) and not block.title:
            with within(tmp_path):
                text = script.run(block.code)
            assert without_round_off(text) == without_round_off(block.shown or ""), f"{page}.md:{block.line}"


@pytest.mark.rare
@pytest.mark.parametrize("by", LAUNCHERS)
@pytest.mark.parametrize("page", [page for page in PAGES if on_two_ranks(page)])
def test_pages_under_each_launcher(page: str, by: str, tmp_path: Path, registry: None) -> None:
    files_of(page, tmp_path)
    commands = on_two_ranks(page)
    printed = run_ranks(run_commands, 2, page, str(tmp_path), [command for _, command in commands], by, timeout=110)[0]
    for (block, command), text in zip(commands, printed, strict=True):
        assert alike(command[0], text) == alike(command[0], block.shown or text), command


@pytest.mark.parametrize("page", PAGES)
def test_each_file_is_run_or_imported(page: str) -> None:
    run = {command[0] for _, command in on_two_ranks(page)}
    code = [ast.parse(block.code) for block in blocks(page) if block.language == "python"]
    imported = {node.module for tree in code for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    files = {block.title for block in blocks(page) if is_run(block) and block.title.endswith(".py")}
    assert {name for name in files if name not in run and name[:-3] not in imported} == set()


def test_no_block_is_left_out() -> None:
    """Each is Python that runs, a command, what one of these prints, or a notation."""
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"README"}
    assert pages >= {*PAGES, *ELSEWHERE, *MADE}
    for page in sorted(pages - {*MADE}):
        before: Block | None = None
        for block in blocks(page):
            runs = block.language == "python" and page in (*PAGES, *ELSEWHERE)
            printed = before is not None and before.shown == block.code and (before.language or before.commands)
            assert runs or printed or block.commands or block.code.startswith(NOTATION), (page, block.line)
            before = block


def test_what_is_not_run() -> None:
    """Two libraries that need GPUs, on one page."""
    found = {(page, block.title) for page in SHELL for block in blocks(page) if block.title.endswith(NOT_RUN)}
    assert found == {("from_others", "Megatron-LM (not run)"), ("from_others", "DeepSpeed (not run)")}


YOURS = "train.py"
"""A script of the reader's own, which a page need not show."""
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
EXTRAS = set(SETUP["options.extras_require"])


def scripts(words: list[str]) -> list[tuple[str, list[str]]]:
    """The files of Python among the words of a command, with the words behind each."""
    return [(word, words[i + 1 :]) for i, word in enumerate(words) if word.endswith(".py")]


@pytest.mark.parametrize("page", SHELL)
def test_files_and_options_of_commands_exist(page: str) -> None:
    own = {block.title: block.code for block in blocks(page)}
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks(page):
        for words in block.commands:
            for file, rest in scripts(words) if words[0] in STARTERS else []:
                text = own.get(file) or code_of(ROOT / file)
                if file != YOURS:
                    assert text, f"{page}.md:{block.line}: {file}"
                    assert all(word.partition("=")[0] in text for word in rest if word.startswith("--")), words
            if words[0] == "make":
                assert f"\n{words[1]}:" in makefile, words
            if words[0] == "torchrun":
                known(words[words.index("torchrun") + 1 :])
            if words[0] == "pip":
                assert (ROOT / words[words.index("-c") + 1]).is_file(), words
                extras = re.fullmatch(r"\.\[([\w,]+)\]", words[words.index("-e") + 1])
                assert extras is not None and {*extras[1].split(",")} <= EXTRAS, words


def code_of(file: Path) -> str:
    """A script of the repository, and what it imports of the folders beside it; "" if there is none."""
    if not file.is_file():
        return ""
    folders = {file.parent / name for name in re.findall(r"^from (\w+)", file.read_text(), re.MULTILINE)}
    return "".join(path.read_text() for path in [file, *(path for each in folders for path in each.glob("*.py"))])


def known(words: list[str]) -> None:
    """Fails if torchrun does not know an option."""
    from torch.distributed.run import get_args_parser

    parser: ArgumentParser = get_args_parser()
    parser.parse_args([re.sub(r"\$\{?\w+\}?", "1", word) for word in words])


@pytest.mark.parametrize("block", [b for page in SHELL for b in blocks(page) if b.title.endswith(".sbatch")])
def test_a_job_script_is_bash(block: Block, tmp_path: Path) -> None:
    (tmp_path / "job").write_text(block.code)
    subprocess.run(["bash", "-n", tmp_path / "job"], check=True)


OPTION = re.compile(r"^\| `(?P<name>\w+)` \| (?:`(?P<default>.*?)`)? ?\| \S", re.MULTILINE)
CALLS = {"parallelize": (), "distribute": (), "from_pretrained": ("parallelize",)}
"""Section of docs/options.md -> the sections whose options it does not repeat."""


@pytest.mark.parametrize("name", CALLS)
def test_options_and_their_defaults(name: str) -> None:
    text = (ROOT / "docs" / "options.md").read_text()
    tables = {part.split("\n", 1)[0]: dict(OPTION.findall(part)) for part in text.split("\n## ")}
    signature = inspect.signature(getattr(autotp, name)).parameters
    known = {option for other in CALLS[name] for option in tables[other]}
    assert set(tables[name]) == {option for option in signature if option not in known - {"path"}}
    for option, shown in tables[name].items():
        default = signature[option].default
        assert (eval(shown, {"timedelta": timedelta}) if shown else inspect.Parameter.empty) == default, option


def test_options_of_other_calls() -> None:
    text = (ROOT / "docs" / "options.md").read_text()
    rows = re.findall(r"^\| `(\w+)\((\w+)=\)` \| `(.*?)` \|", text, re.MULTILINE)
    assert rows
    for name, option, shown in rows:
        assert inspect.signature(getattr(autotp, name)).parameters[option].default == eval(shown)


def test_the_reference_has_all_public_names() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"^::: autotp\.(\w+)$", text, re.MULTILINE)) == sorted(autotp.__all__)
