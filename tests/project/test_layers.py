"""The order of the folders: each file imports only what stands before it."""

import ast
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import autotp

pytestmark = pytest.mark.each_time
ORDER = (
    "attached", "models", "display", "tracebacks", "errors", "torch_internals", "error_file", "arguments",
    "source_location", "model_library", "extensions", "sharding", "groups", "ops",
    "rules", "costs", "options", "distributed",
    "passes.builder", "passes.fingerprint", "passes.lower.dce", "passes.capture", "passes.canonicalize", "passes.plan",
    "passes.lower",
    "passes.check", "passes.emit", "passes.pipeline", "passes.program",
    "compiler", "deferred_init", "diagnostics.node_text", "diagnostics.attention_kernels", "diagnostics.plan",
    "diagnostics.reasons", "diagnostics.report", "runtime",
    "training", "diagnostics", "checkpoint", "api", "integrations", "experimental", "tools", "__main__",
)  # fmt: skip
ROOT = Path(autotp.__file__).resolve().parent.parent
SCRIPTS = ("examples", "benchmarks")
FILES = [*(ROOT / "autotp").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in (parts[1:] if parts[0] == "autotp" else parts) if part != "__init__")


@cache
def parsed(file: Path) -> ast.Module:
    """The syntax of a file, which each law reads."""
    return ast.parse(file.read_text())


def layer(module: str) -> int:
    """The place of a module in the order; that of `autotp` itself is behind all others."""
    found = [i for i, name in enumerate(ORDER) if f"{module}.".startswith(f"{name}.")]
    return max(found, key=lambda i: len(ORDER[i]), default=len(ORDER))


MODULES = {module_of(file) for file in FILES}


def imported(file: Path) -> set[str]:
    """The modules of autotp that a file imports, also those inside functions."""
    modules, found = MODULES, set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "autotp":
            base = (node.module or "").removeprefix("autotp").removeprefix(".")
            below = {f"{base}.{alias.name}".removeprefix(".") for alias in node.names}
            found |= (below & modules) or {base}
    return found


def test_nothing_is_imported_from_further_down():
    upwards = [
        (module_of(file), other)
        for file in FILES
        for other in imported(file)
        if layer(other) > layer(module_of(file)) and module_of(file)
    ]
    assert upwards == []
    assert layer("") == len(ORDER) and {module_of(file) for file in FILES if layer(module_of(file)) == len(ORDER)} == {
        "", "passes",
    }  # fmt: skip


def test_only_integrations_import_libraries_of_models() -> None:
    """`train` is a script that `autotp init` gives to a user."""
    for file in FILES:
        names = set()
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").partition(".")[0])
        may = module_of(file).startswith("integrations.") or module_of(file) == "tools.new_training.train"
        assert may or not names & {"transformers", "peft"}, file


def test_folders_are_small_and_say_what_they_are_for() -> None:
    scripts = [file for name in SCRIPTS for file in (ROOT / name).rglob("*.py")]
    for folder in {file.parent for file in [*FILES, *scripts]} - {ROOT / "autotp"}:
        files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(files) <= 12, folder
        if folder.parent != ROOT or folder.name not in SCRIPTS:
            door = parsed(folder / "__init__.py")
            assert len(door.body) == 1 and (ast.get_docstring(door) or "").splitlines()[0].endswith("."), folder


TESTS = ROOT / "tests"
BESIDE = {"models", "examples", "benchmarks", "system", "project", "site", "cards"}
"""Folders of tests beside those of autotp: of the folders beside it, of whole systems, of the project, of cards."""


def test_tests_lie_as_the_source_does() -> None:
    """Each folder is one of the source, or a folder for tests of the whole; none is large; names are unique."""
    folders = {module_of(file).rpartition(".")[0].replace(".", "/") for file in FILES} - {""}
    files = list(TESTS.rglob("test_*.py"))
    folders |= {str(door.parent.relative_to(ROOT)) for door in (ROOT / "examples").rglob("__init__.py")}
    assert {str(file.parent.relative_to(TESTS)) for file in files} - {"."} <= folders | BESIDE
    for folder in {file.parent for file in files}:
        assert len(list(folder.glob("*.py"))) <= 12, folder
    assert len({file.name for file in files}) == len(files), "pytest tells test files by their names"


def test_no_test_file_imports_another() -> None:
    """What several need is in `tests/support`: ten files at most, which import no test, and programs to start."""
    shared = list((TESTS / "support").glob("*.py"))
    assert len(shared) <= 10
    files = {path.stem: path for path in TESTS.rglob("test_*.py")}
    for path in [*files.values(), *shared, *(TESTS / "support" / "scripts").glob("*.py")]:
        nodes = list(ast.walk(parsed(path)))
        names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert not {(name or "").partition(".")[0] for name in names} & files.keys(), path


SAME_NAME = {
    "main": "what runs as a program: the command line, and scripts that `autotp init` gives to a user",
    "install": "what each module puts into torch while a parallel model lives: `torch_hooks/install.py` calls them",
    "register": "makes a thing known by its name: a library of models, or a backend, which users register",
    "python_line torchrun_line": "of a layout; and of what a page shows, by those of its layout",
    "attention batch_norm by_channel copy embedding gather group_norm grouped_mm scatter":
        "an operator, by torch's name or Megatron's; and its rule. `autotp.gather` is that for users",
}  # fmt: skip
"""Functions that mean the same thing in several modules, and why."""


def test_a_name_of_a_class_or_a_public_function_stands_for_one_thing() -> None:
    """A reader who searches for it finds it; private functions are read in their own file."""
    classes, functions = Counter[str](), Counter[str]()
    for tree in (parsed(file) for file in FILES if module_of(file) != "passes"):
        classes.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        functions.update(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    assert [name for name, count in classes.items() if count > 1] == []
    several = {name for name, count in functions.items() if count > 1 and not name.startswith("_")}
    assert several == {name for names in SAME_NAME for name in names.split()}


CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not (CHECKOUT / ".git").exists(), reason="needs git, which says what is in a commit")
def test_no_file_that_a_command_wrote_is_in_a_commit() -> None:
    """Commands of the documentation write pages and traces into the folder that they run in."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=CHECKOUT, capture_output=True, text=True, check=True
    ).stdout.split()
    written = [name for name in tracked if "/" not in name and name.endswith((".html", ".json", ".png", ".csv"))]
    assert written == []
