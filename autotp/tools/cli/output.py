"""output: what a command prints. Results go to stdout, as text or JSON; all else goes to stderr.

What every command prints with `--json` has the versions of the format and of autotp before its data.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import autotp
from autotp.display.plain_data import DATA_VERSION
from autotp.display.sheet import Shown
from autotp.errors import Error
from autotp.torch_internals import SHOW_WARNING

RIGHT, DIFFERENT, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
"""The exit statuses."""


class WrongUse(Exception):
    """The command line is not one that autotp understands; the exit status is 2."""


@contextmanager
def arguments_in_use() -> Iterator[None]:
    """A region that only reads what the command line gives: an Error of it is wrong use, with the same text."""
    try:
        yield
    except Error as error:
        raise WrongUse(str(error)) from error


def json_text(data: Mapping[str, Any]) -> str:
    """Returns plain data as JSON, with `version` and `autotp` before it."""
    # NaN is no JSON, and strict readers refuse it.
    return json.dumps({"version": DATA_VERSION, "autotp": autotp.__version__, **data}, indent=2, allow_nan=False)


def error_text(problem: str, call: str = "", facts: Mapping[str, str] | None = None) -> str:
    """Returns the JSON of an error: the public call that raised it, the problem, and the lines below it."""
    return json_text({"ok": False, "error": {"call": call, "problem": problem, "facts": dict(facts or {})}})


def print_json(data: Mapping[str, Any]) -> None:
    """Prints plain data as JSON, with the versions of the format and of autotp."""
    print(json_text(data))


def show(result: Shown, json: bool = False) -> None:
    """Prints a result: as JSON, in colour on a terminal (unless NO_COLOR is set), else as text."""
    if json:
        print_json(result.to_dict())
        return
    from rich.console import Console  # `main` says that it is missing with what stands here.

    if (console := Console(highlight=False)).is_terminal:
        console.print(result, soft_wrap=True)
    else:
        print(result)


def expect_writable(*paths: Path | None) -> None:
    """Raises WrongUse if a file that a command is to write has no folder, or is a folder."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise WrongUse(f"{path} cannot be written: it is a folder")
        if not (folder := path.resolve().parent).is_dir():
            raise WrongUse(f"{path} cannot be written: there is no folder {folder}")


def complain(text: str) -> None:
    """Prints a text on stderr, behind the name of the program."""
    print(f"autotp: {text}", file=sys.stderr)


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """A region in which a warning to the user is one line on stderr, and those to developers are left out."""
    with warnings.catch_warnings(), SHOW_WARNING.replaced_by(lambda message, *_, **__: complain(f"warning: {message}")):
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=UserWarning, message=".*example_inputs")
        yield
