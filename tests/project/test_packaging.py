"""What is installed is the whole of autotp, and nothing else: as a wheel, from its source, editable, and not at all."""

from __future__ import annotations

import configparser
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import HeaderParser
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import autotp

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(torch.__file__).parent.parent  # Where torch is installed, and what it needs.
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
FOLDERS = ("autotp", "benchmarks", "docs", "examples", "models", "passes", "tests")
BESIDE = ("models", "passes")  # Folders of the checkout that are installed inside autotp.
MADE = (".*", "__pycache__", "build", "dist", "out", "*.egg-info")
"""What a checkout has besides its files."""
SAMPLE = ("tests/project/test_tests.py", "tests/sharding/test_axis.py", "tests/passes/lower/test_dce.py")
"""Tests that are run in an unpacked source distribution."""
LINK = re.compile(r"\]\((?!\w+:|#)|<(?:img|source)\b[^>]*src(?:set)?=\"(?!\w+:)")
"""A link to a file of the repository, in Markdown."""

SCRIPT = """
import importlib
import os
import sys
import tempfile
from pathlib import Path

import torch

import autotp
import autotp.models.gpt
import autotp.passes

home, packages = Path(sys.argv[1]), sys.argv[2:]
for name in packages:
    folder = Path(importlib.import_module(name).__file__).parent
    assert home in folder.parents, f"{name} is from {folder}"
    for file in sorted(set(folder.glob("*.py")) - {folder / "__init__.py"}):
        importlib.import_module(f"{name}.{file.stem}")
config = autotp.models.gpt.GPTConfig(block_size=8, vocab_size=31, n_layer=1, n_head=2, n_embd=8)
with torch.device("meta"):
    model = autotp.models.gpt.GPT(config)
assert autotp.explain(model, 2).cuts
assert "reduce" in autotp.stages(model, 2)["emit"]
with tempfile.TemporaryDirectory() as folder:
    autotp.save_page(autotp.explain(model, 2), Path(folder, "plan.html"))
    assert "<!doctype html>" in Path(folder, "plan.html").read_text()

import models  # The user's own, beside autotp's.
import passes

assert (models.OWN, passes.OWN) == ("models", "passes")
loaded = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
paths = {name: os.path.realpath(file) for name, file in loaded.items() if file}
ours = {path for name, path in paths.items() if name.partition(".")[0] == "autotp"}
assert len(ours) == len([path for path in paths.values() if path in ours]), "a module has two names"
print(autotp.__version__)
"""


BUILD = """
import sys

from setuptools import build_meta

to = sys.argv[1]
print(build_meta.build_sdist(to), build_meta.build_wheel(to), build_meta.build_editable(f"{to}/editable"))
"""


class Built(NamedTuple):
    """What an index of packages would get, and the wheel of an editable install."""

    source: Path  # the copied checkout
    sdist: Path
    wheel: Path
    editable: Path


def listed() -> list[str]:
    """The packages that setup.cfg lists."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["options"]["packages"].split()


def copied(to: Path) -> Path:
    """A copy of the checkout: a build writes beside it."""
    shutil.copytree(ROOT, to, symlinks=True, ignore=shutil.ignore_patterns(*MADE))
    return to


def run(*command: object, cwd: Path = ROOT, path: Path | None = None) -> str:
    """The output of a command that finds autotp in `path`, if anywhere."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path or "")}
    done = subprocess.run(list(map(str, command)), env=env, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def used(home: Path, beside: Path) -> str:
    """What SCRIPT prints in a new process that finds autotp in `home` alone: -S leaves out editable installations.

    A user's folder comes first, and has modules named as autotp's folders are.
    """
    beside.mkdir()
    for name in BESIDE:
        (beside / f"{name}.py").write_text(f"OWN = {name!r}")
    start = f"import sys; sys.path[1:1] = [{str(home)!r}, {str(SITE)!r}]; sys.path[0] = {str(beside)!r}"
    strict = ("-S", "-W", "error::DeprecationWarning:autotp")
    return run(sys.executable, *strict, "-c", f"{start}\n{SCRIPT}", home, *listed(), cwd=beside)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    source, to = copied(tmp_path_factory.mktemp("source") / "autotp"), tmp_path_factory.mktemp("dist")
    (to / "editable").mkdir()
    *_, sdist, wheel, editable = run(sys.executable, "-c", BUILD, to, cwd=source).split()
    return Built(source, to / sdist, to / wheel, to / "editable" / editable)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(file.read(name).decode())


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_each_folder_is_a_package_that_setup_cfg_lists() -> None:
    folders = {file.parent for name in ("autotp", *BESIDE) for file in (ROOT / name).rglob("*.py")}
    parts = (folder.relative_to(ROOT).parts for folder in folders)
    assert listed() == sorted(".".join(("autotp", *(p[1:] if p[0] == "autotp" else p))) for p in parts)
    assert all((folder / "__init__.py").is_file() for folder in folders)


def real(package: str) -> Path:
    """The folder of a package in a checkout."""
    inside = package.removeprefix("autotp.")
    return Path(*(inside if inside.partition(".")[0] in BESIDE else package).split("."))


@pytest.mark.parametrize("path", [ROOT, ROOT / "src"], ids=["checkout", "src"])
def test_modules_are_where_editors_look_for_them(path: Path) -> None:
    """Editors run nothing: from a folder on the path they look for a package in the folder of its parent."""
    for package in listed():
        folder = path
        for name in package.split("."):
            spec = PathFinder.find_spec(name, [str(folder)])
            assert spec is not None and spec.origin is not None, package
            folder = Path(spec.origin).parent
        assert folder.resolve() == ROOT / real(package), package


def test_links_are_relative() -> None:
    """So that they hold in each checkout. What an editable install adds to the path has nothing but autotp."""
    for link in SETUP["LINKS"]:
        assert (ROOT / link).is_symlink() and not Path(os.readlink(ROOT / link)).is_absolute(), link
    assert {path.name for path in (ROOT / "src").iterdir()} - {"autotp.egg-info"} == {"autotp"}


def test_nobody_imports_the_folders_by_bare_names() -> None:
    """In a checkout `import passes` would work, and load each module a second time."""
    bare = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(BESIDE)})\b", re.MULTILINE)
    files = [file for name in FOLDERS for file in (ROOT / name).rglob("*.py")]
    ours = [file for file in files if file.parent.name != "benchmarks"]  # They have a script `passes.py`.
    assert [file for file in ours if bare.search(file.read_text()) and file.name != Path(__file__).name] == []


def test_description_has_absolute_links() -> None:
    """Links to files become absolute, or plain text; code, anchors and addresses stay."""
    page = '[a\nb](docs/a.md) ![p](p.png) [c](#c) [d](https://d/) `x[0](y)`\n```\nx[0](y)\n```\n<img src="q.svg">'
    stays = "[c](#c) [d](https://d/) `x[0](y)`\n```\nx[0](y)\n```\n"
    to = SETUP["description"]
    assert to(page, "") == f"a\nb  {stays}"
    assert to(page, "https://r") == (
        f"[a\nb](https://r/blob/main/docs/a.md) ![p](https://r/raw/main/p.png) {stays}"
        '<img src="https://r/raw/main/q.svg">'
    )


@pytest.mark.system
def test_a_wheel_is_all_that_is_needed(built: Built, tmp_path: Path) -> None:
    target = tmp_path / "target"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index", "--quiet")
    run(*pip, built.wheel, "--target", target)
    assert built.wheel.name.split("-")[1] == used(target, tmp_path / "beside") == autotp.__version__
    assert (target / "autotp" / "py.typed").is_file()
    assert {path.name.partition("-")[0] for path in target.iterdir()} == {"autotp", "bin"}
    (script,) = (target / "bin").iterdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (target, SITE)))}
    done = subprocess.run([sys.executable, "-S", script, "--version"], env=env, cwd=tmp_path, capture_output=True)
    assert (script.name, done.stdout.decode()) == ("autotp", f"autotp {autotp.__version__}\n"), done.stderr


@pytest.mark.system
def test_what_an_index_of_packages_shows(built: Built) -> None:
    shown = metadata(built.wheel)
    assert {"Author", "Keywords", "Classifier", "Requires-Python", "License-File"} <= set(shown)
    assert {"all", "cli", "hf"} <= set(shown.get_all("Provides-Extra", []))
    assert shown["Description-Content-Type"] == "text/markdown"
    description = str(shown.get_payload())
    assert description.startswith("# autotp") and not LINK.search(re.sub(r"(?s)```.*?```", "", description))
    assert bool(shown.get_all("Project-URL")) == bool(SETUP["REPOSITORY"])


@pytest.mark.system
def test_a_checkout_that_is_not_installed(built: Built, tmp_path: Path) -> None:
    assert used(built.source, tmp_path / "beside") == autotp.__version__


@pytest.mark.system
def test_editable_install_adds_one_folder_to_the_path(built: Built, tmp_path: Path) -> None:
    """It adds one folder to the path, which editors read, too, and no hook of imports, which they do not run."""
    with zipfile.ZipFile(built.editable) as file:
        (added,) = (name for name in file.namelist() if ".dist-info/" not in name)
        home = Path(file.read(added).decode().strip())
    assert added.endswith(".pth") and home == built.source / "src"
    assert used(home, tmp_path / "beside") == autotp.__version__


@pytest.mark.system
def test_a_source_distribution_is_a_checkout(built: Built) -> None:
    """Each file once, at its real place, and links as links."""
    with tarfile.open(built.sdist) as file:
        packed = {member.name.partition("/")[2]: member for member in file.getmembers() if not member.isdir()}
    links = {name for name, member in packed.items() if member.issym()}
    kept = {
        path.relative_to(ROOT).as_posix() for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()
    }
    assert links == set(SETUP["LINKS"])
    made = {name for name in kept if "__pycache__" in name}
    assert kept - made == {name for name in packed if name.partition("/")[0] in FOLDERS} - links
    assert {"Makefile", "constraints.txt", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "setup.py"} <= packed.keys()


@pytest.mark.system
def test_source_distribution_tests_and_builds_itself(built: Built, tmp_path: Path) -> None:
    """Its tests run, and a wheel built from it has the same files."""
    with tarfile.open(built.sdist) as file:
        file.extractall(tmp_path)
    (unpacked,) = tmp_path.iterdir()
    run(sys.executable, "-m", "pytest", "-q", "-n", "0", *SAMPLE, cwd=unpacked, path=unpacked)
    wheel = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    name = run(sys.executable, "-c", wheel, tmp_path, cwd=unpacked).split()[-1]
    assert names(tmp_path / name) == names(built.wheel)
