"""What the pages of the site show is what happens: each block of Python runs, and prints what the page says.

- A block without a title is a part of one script for the page, in one process.
- A block with a title (`python title="train.py"`) is a file. A line `torchrun --nproc-per-node 2 train.py ...` of a
  later block runs it on two ranks. A file that is not run must be imported by another.
- A block of plain text directly behind a block of Python, or behind a command, is what that prints: of a command what
  its first rank prints.
- A block whose title ends in "(not run)" needs a library that is not here; it has to be Python, no more.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import linecache
import os
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

import autotp
from autotp.models.gpt import GPT, GPTConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "index",
    "start",
    "which_layout",
    "refused",
    "long_runs",
    "from_others",
    "options",
    "long_sequences",
    "questions",
)
SHELL = sorted({*PAGES, "serving", "distributed"})
BLOCK = re.compile(r"^```(?P<language>\w*)(?P<options>[^\n]*)\n(?P<code>.*?)^```\n", re.MULTILINE | re.DOTALL)
NOT_RUN = "(not run)"
STARTERS = ("torchrun", "python", "srun", "mpirun")
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
        if self.language not in ("", "sh"):
            return []
        lines = self.code.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: str) -> list[Block]:
    text = (ROOT / "docs" / f"{page}.md").read_text()
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


def files_of(page: str, folder: Path) -> None:
    for block in blocks(page):
        if is_run(block) and block.title:
            (folder / block.title).write_text(block.code)


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


def run_commands(rank: int, n: int, page: str, folder: str, commands: list[list[str]]) -> list[str]:
    """What this rank prints in each command."""
    return [printed(folder, command) for command in commands]


def printed(folder: str, command: list[str]) -> str:
    file, *words = command
    code = Path(folder, file).read_text()
    before = sys.argv
    sys.argv = [file, *words]
    try:
        with within(Path(folder)), contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, file, "exec"), {"__name__": "__main__"})
    finally:
        sys.argv = before
    return out.getvalue()


def on_two_ranks(page: str) -> list[tuple[Block, list[str]]]:
    """The commands of a page that run a file of it, with their blocks."""
    files = {block.title for block in blocks(page)}
    words = len(COMMAND.split())
    return [
        (block, command[words:])
        for block in blocks(page)
        for command in block.commands
        if command[:words] == COMMAND.split() and command[words] in files
    ]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_scripts_print_what_is_shown(page: str, tmp_path: Path, registry: None) -> None:
    files_of(page, tmp_path)
    commands = on_two_ranks(page)
    said: list[str] = []
    if commands:
        given = [command for _, command in commands]
        said = run_ranks(run_commands, 2, page, str(tmp_path), given, timeout=110)[0]
    for (block, command), text in zip(commands, said, strict=True):
        assert without_round_off(text) == without_round_off(block.shown or text), command
    script = Script(page)
    torch.manual_seed(0)
    for block in blocks(page):
        if is_run(block) and not block.title:
            with within(tmp_path):
                text = script.run(block.code)
            assert without_round_off(text) == without_round_off(block.shown or ""), f"{page}.md:{block.line}"


@pytest.mark.parametrize("page", PAGES)
def test_each_file_is_run_or_imported(page: str) -> None:
    run = {command[0] for _, command in on_two_ranks(page)}
    code = [ast.parse(block.code) for block in blocks(page) if block.language == "python"]
    imported = {node.module for tree in code for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    files = {block.title for block in blocks(page) if is_run(block) and block.title.endswith(".py")}
    assert {name for name in files if name not in run and name[:-3] not in imported} == set()


def test_what_is_not_run() -> None:
    """Two libraries that need GPUs, on one page."""
    found = {(page, block.title) for page in SHELL for block in blocks(page) if block.title.endswith(NOT_RUN)}
    assert found == {("from_others", "Megatron-LM (not run)"), ("from_others", "DeepSpeed (not run)")}


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
                text = own.get(file) or ((ROOT / file).read_text() if (ROOT / file).is_file() else "")
                assert text, f"{page}.md:{block.line}: {file}"
                assert all(word.partition("=")[0] in text for word in rest if word.startswith("--")), words
            if words[0] == "make":
                assert f"\n{words[1]}:" in makefile, words
            if words[0] == "torchrun":
                known(words[words.index("torchrun") + 1 :])


def known(words: list[str]) -> None:
    """Fails if torchrun does not know an option."""
    from torch.distributed.run import get_args_parser

    parser: ArgumentParser = get_args_parser()
    parser.parse_args([re.sub(r"\$\{?\w+\}?", "1", word) for word in words])


@pytest.mark.parametrize("block", [b for page in SHELL for b in blocks(page) if b.title.endswith(".sbatch")])
def test_a_job_script_is_bash(block: Block, tmp_path: Path) -> None:
    (tmp_path / "job").write_text(block.code)
    subprocess.run(["bash", "-n", tmp_path / "job"], check=True)


class Enough(Exception):
    """The rows of a loop without end are over."""


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of a language model, for two steps of 64."""

    def __init__(self) -> None:
        self.left = 128

    def __len__(self) -> int:
        return 128

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if self.left == 0:
            raise Enough
        self.left -= 1
        tokens = (torch.arange(8) + row) % 31
        return {"tokens": tokens, "labels": tokens}


def test_the_loops_of_distributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a world of one process on the CPU, with the sizes of the layout set to 1."""
    monkeypatch.chdir(tmp_path)
    sizes = GPTConfig(block_size=8, vocab_size=31, n_layer=2, n_head=2, n_embd=16)
    loader = torch.utils.data.DataLoader
    names = {"torch": torch, "autotp": autotp, "DataLoader": loader, "dataset": Rows(), "model": GPT(sizes)}
    first, second, muon, _ = (block.code for block in blocks("distributed") if block.language == "python")
    alone = [re.sub(r"\b(tp|pp|dp)=\d", r"\1=1", code) for code in (first, second)]
    alone[1] = alone[1].replace("GradScaler()", 'GradScaler("cpu")')
    try:
        with pytest.raises(Enough):
            exec(alone[0], names)
        assert names["trainer"].steps == 2  # type: ignore[attr-defined]
        exec(alone[1], names | {"model": GPT(sizes)})
        exec(muon, {})
        assert (tmp_path / "muon").is_dir()
    finally:
        dist.destroy_process_group()


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


def test_the_server_is_shown_whole() -> None:
    (code,) = (block.code for block in blocks("serving") if block.title == "examples/serving/serve.py")
    assert code == (ROOT / "examples" / "serving" / "serve.py").read_text()
