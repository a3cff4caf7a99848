"""app: the commands as one program, its errors and its exit statuses."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import typer

import autotp
from autotp.cli.calibrate import calibrate_command
from autotp.cli.convert import convert
from autotp.cli.doctor import doctor
from autotp.cli.estimate import estimate_command, search_command
from autotp.cli.flags import Command
from autotp.cli.output import DIFFERENT, RIGHT, WRONG_USE, WrongUse, complain, warnings_on_stderr
from autotp.cli.plan import plan
from autotp.cli.verify import verify_command
from autotp.errors import Error, full_tracebacks

app = typer.Typer(
    name="autotp", add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command("plan", cls=Command)(plan)
app.command("verify", cls=Command)(verify_command)
app.command("estimate")(estimate_command)
app.command("search")(search_command)
app.command("calibrate")(calibrate_command)
app.command("doctor")(doctor)
app.command("convert")(convert)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"autotp {autotp.__version__}")
        raise typer.Exit(RIGHT)


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version")
    ] = False,
) -> None:
    """Tensor-parallel models of ordinary torch models: what would be cut, whether it is right, checkpoints."""


def run(args: Sequence[str]) -> int:
    """Runs a command; returns the exit status: 0 right, 1 different or refused, 2 wrong use."""
    debug, before = "--debug" in args, logging.root.manager.disable
    if not debug:
        logging.disable(logging.WARNING)  # Libraries log what no user of a command can act on.
    try:
        with warnings_on_stderr(), full_tracebacks() if debug else nullcontext():
            status = app(args=list(args) or ["--help"], prog_name="autotp", standalone_mode=False)
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _failed(error, args)
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    finally:
        logging.disable(before)
    return (status if isinstance(status, int) else RIGHT) if args else WRONG_USE


def _failed(error: Exception, args: Sequence[str]) -> int:
    """Prints an error, in JSON as well if that was asked for; returns the exit status."""
    said = error.__cause__ if isinstance(error, WrongUse) and isinstance(error.__cause__, Error) else error
    if isinstance(said, Error):
        complain(str(said))
        facts: dict[str, Any] = {"call": said.call, "problem": said.problem, "facts": said.facts}
        status = DIFFERENT if said is error else WRONG_USE
    elif isinstance(error, WrongUse) or hasattr(error, "format_message"):  # The second are those of typer.
        text = str(error) if isinstance(error, WrongUse) else error.format_message()
        command = [arg for arg in args[:1] if arg.isalpha()]
        complain(f"{' '.join(text.split()).rstrip('.')}; see {' '.join(['autotp', *command, '--help'])}")
        facts, status = {"call": "", "problem": text, "facts": {}}, WRONG_USE
    elif "--debug" in args:
        return DIFFERENT
    else:
        raise error
    if "--json" in args:
        print(json.dumps({"ok": False, "error": facts}, indent=2), file=sys.stdout)
    return status
