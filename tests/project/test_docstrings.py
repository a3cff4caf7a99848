"""What is exported says what it does, takes and raises, and shows an example that runs."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp

CLASSES = [name for name in autotp.__all__ if inspect.isclass(getattr(autotp, name))]
FUNCTIONS = [name for name in autotp.__all__ if name not in CLASSES]
MEMBERS = [
    f"{name}.{member}"
    for name in CLASSES
    for member, value in vars(getattr(autotp, name)).items()
    if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
]
SECTIONS = ("Args", "Attributes", "Raises", "Example")
FINDER = doctest.DocTestFinder()


class Regression(nn.Module):
    """A model that returns its loss, for the examples of trainers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(x), y)


def found(path: str) -> Any:
    """The object of a name such as `Trainer.step`; of a property what computes it."""
    value: Any = autotp
    for part in path.split("."):
        value = inspect.getattr_static(value, part)
    return value.fget if isinstance(value, property) else value


def section(path: str, name: str) -> str:
    """A section of a docstring; nothing if there is none."""
    headings = "|".join(SECTIONS)
    text = inspect.getdoc(found(path)) or ""
    match = re.search(rf"^{name}:\n(.*?)(?=^(?:{headings}):|\Z)", text, re.MULTILINE | re.DOTALL)
    return textwrap.dedent(match[1]) if match else ""


def labels(text: str) -> set[str]:
    """The names that a section explains: `tp: ...`, or `args, kwargs: ...`, which may be two lines long."""
    heads = re.findall(r"^(\w+(?:,\s+\w+)*):", text, re.MULTILINE)
    return {name for head in heads for name in re.split(r",\s+", head)}


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: None) -> None:
    """The test is in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


@pytest.mark.parametrize("path", [*autotp.__all__, *MEMBERS])
def test_the_first_line_is_one_sentence(path: str) -> None:
    first = (inspect.getdoc(found(path)) or "").partition("\n")[0]
    assert re.fullmatch(r"[A-Z].*[^.]\.", first) and not re.search(r"\. [A-Z]", first), first


@pytest.mark.parametrize("path", [*FUNCTIONS, *MEMBERS])
def test_docstrings_explain_arguments(path: str) -> None:
    assert labels(section(path, "Args")) == parameters(found(path))


@pytest.mark.parametrize("name", CLASSES)
def test_docstrings_explain_attributes(name: str) -> None:
    """Those of a dataclass are its arguments; a class that a user makes has arguments of its own."""
    kind = found(name)
    declared = {key for key in vars(kind).get("__annotations__", {}) if not key.startswith("_")}
    assert declared <= labels(section(name, "Attributes"))
    made_by_users = "__init__" in vars(kind) and not hasattr(kind, "__dataclass_fields__") and name != "Trainer"
    if made_by_users:
        assert labels(section(name, "Args")) == parameters(kind)


@pytest.mark.parametrize("path", [*FUNCTIONS, *MEMBERS, *CLASSES])
def test_docstrings_say_what_is_raised(path: str) -> None:
    """A public function raises Error for bad input; of the rest those whose code says `raise`."""
    source = found(path)
    if path in CLASSES:
        source = None if hasattr(source, "__dataclass_fields__") else vars(source).get("__init__")
    code = ast.parse(textwrap.dedent(inspect.getsource(source))) if inspect.isfunction(source) else ast.Module([], [])
    raises = any(isinstance(node, ast.Raise) for node in ast.walk(code)) or path in FUNCTIONS
    assert bool(section(path, "Raises")) >= raises


@pytest.mark.parametrize("name", autotp.__all__)
def test_docstrings_have_examples_that_run(name: str, own_folder: None) -> None:
    names = {"autotp": autotp, "torch": torch, "nn": nn, "Regression": Regression}
    tests = [test for test in FINDER.find(found(name), name, module=False, globs=names) if test.examples]
    assert name in {test.name for test in tests}
    runner, said = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), list[str]()
    for test in tests:
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)
