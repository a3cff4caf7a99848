"""plan: the commands that print the plan of a model, and what each pass of the compiler does to it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from autotp.api import explain
from autotp.options import Options
from autotp.tools.cli.flags import Debug, Html, Json, with_model, with_options_of
from autotp.tools.cli.model_argument import ModelArgument, on_meta
from autotp.tools.cli.output import WrongUse, expect_writable, show
from autotp.tools.page.save_page import save_page, save_sheet
from autotp.tools.pass_by_pass.pass_table import names_of_passes, pass_table
from autotp.tools.pass_by_pass.stages import stages


@with_model()
@with_options_of(explain)
def plan(
    tp: Annotated[int, typer.Option("--tp", min=1, help="The number of ranks")],
    html: Html = None,
    json: Json = False,
    debug: Debug = False,
    *,
    argument: ModelArgument,
    chosen: dict[str, Any],
) -> None:
    """Prints what would be cut on TP ranks, what that sends, and what stays whole. Needs no GPU, weights or ranks.

    Example: autotp plan file.py:factory --tp 2
    """
    expect_writable(html)
    result = explain(on_meta(argument), tp, example_inputs=argument.example_inputs(), **chosen)
    if html is not None:
        save_page(result, html)
    show(result, json)


@with_model()
@with_options_of(stages)
def stages_command(
    tp: Annotated[int, typer.Option("--tp", min=1, help="The number of ranks")],
    shown: Annotated[
        str | None, typer.Option("--pass", metavar="NAME", help="Print the code before and after this pass, too")
    ] = None,
    html: Html = None,
    json: Json = False,
    debug: Debug = False,
    *,
    argument: ModelArgument,
    chosen: dict[str, Any],
) -> None:
    """Prints what each pass does, from the model to what the first of TP ranks runs. Needs no GPU, weights or ranks.

    Example: autotp stages file.py:factory --tp 2 --pass fuse_bias
    """
    expect_writable(html)
    options = Options(**chosen)
    # Before the model is built, which may take long.
    if shown is not None and shown not in (names := names_of_passes(options)):
        raise WrongUse(f"--pass {shown}: no such pass runs with these options; they are {', '.join(names)}")
    table = pass_table(on_meta(argument), tp, options, argument.example_inputs(), shown or "")
    if html is not None:
        save_sheet(table.sheet(), html)
    show(table, json)
