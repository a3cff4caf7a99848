"""app: the commands as one program, its errors and its exit statuses."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated

import typer

import autotp
from autotp.errors import Error, full_tracebacks
from autotp.tools.cli.calibrate import calibrate_command
from autotp.tools.cli.convert import convert
from autotp.tools.cli.doctor import doctor
from autotp.tools.cli.estimate import estimate_command, search_command
from autotp.tools.cli.flags import Command
from autotp.tools.cli.output import (
    DIFFERENT,
    INTERRUPTED,
    RIGHT,
    WRONG_USE,
    WrongUse,
    complain,
    error_text,
    warnings_on_stderr,
)
from autotp.tools.cli.plan import plan, stages_command
from autotp.tools.cli.verify import verify_command
from autotp.tools.new_training.init import init

app = typer.Typer(
    name="autotp", add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command("plan", cls=Command)(plan)
app.command("verify", cls=Command)(verify_command)
app.command("estimate")(estimate_command)
app.command("search")(search_command)
app.command("stages", cls=Command)(stages_command)
app.command("calibrate")(calibrate_command)
app.command("doctor")(doctor)
app.command("convert")(convert)
app.command("init")(init)


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
            # In standalone mode typer would print errors in its own way, and end the process.
            status = app(args=list(args) or ["--help"], prog_name="autotp", standalone_mode=False)
        if status == INTERRUPTED:  # typer has caught it.
            raise KeyboardInterrupt
    except (Exception, KeyboardInterrupt) as error:
        return _failed(error, args)
    finally:
        logging.disable(before)
    # Without a command the help was printed, and nothing was done.
    return (status if isinstance(status, int) else RIGHT) if args else WRONG_USE


def _failed(error: BaseException, args: Sequence[str]) -> int:
    """Prints an error, in JSON as well if that was asked for; returns the exit status."""
    # Where an Error was wrong use, JSON still has its call and its facts, and not one text of all.
    cause = error.__cause__ if isinstance(error, WrongUse) and isinstance(error.__cause__, Error) else error
    # Errors of the command line's parser have this method; their class is typer's own copy of click's.
    expected = isinstance(error, Error | WrongUse | KeyboardInterrupt) or hasattr(error, "format_message")
    if "--debug" in args or not expected:
        traceback.print_exception(error)
    if isinstance(cause, Error):
        complain(str(cause))
        text, status = error_text(cause.problem, cause.call, cause.facts), DIFFERENT if cause is error else WRONG_USE
    elif isinstance(error, KeyboardInterrupt):
        complain("interrupted")
        text, status = error_text("interrupted"), INTERRUPTED
    elif expected:
        problem = str(error) if isinstance(error, WrongUse) else error.format_message()  # type: ignore[attr-defined]
        command = [arg for arg in args[:1] if arg.isalpha()]
        complain(f"{' '.join(problem.split()).rstrip('.')}; see {' '.join(['autotp', *command, '--help'])}")
        text, status = error_text(problem), WRONG_USE
    else:
        text, status = error_text(f"{type(error).__name__}: {error}"), DIFFERENT
    if "--json" in args:
        print(text)
    return status
