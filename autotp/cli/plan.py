"""plan: the command that prints `autotp.explain` of a model."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Annotated, Any

import typer
from rich.text import Text

from autotp.api import explain
from autotp.cli.flags import (
    Attention,
    Debug,
    Evaluation,
    InputsOf,
    Json,
    Kwargs,
    Layers,
    Model,
    ModelClass,
    with_options_of,
)
from autotp.cli.model_argument import ModelArgument, dtype_named, on_meta, settings_of
from autotp.cli.output import columns, console, print_json
from autotp.diagnostics.plan import CUT_HEAD, WHOLE_HEAD, Plan, cut_rows, totals, whole_rows


@with_options_of(explain)
def plan(
    model: Model,
    tp: Annotated[int, typer.Option("--tp", min=1, help="The number of ranks")],
    layers: Layers = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="The dtype of the parameters: bfloat16, ...")] = None,
    attention: Attention = None,
    model_class: ModelClass = None,
    kwargs: Kwargs = None,
    inputs: InputsOf = None,
    evaluation: Evaluation = False,
    json: Json = False,
    debug: Debug = False,
    *,
    chosen: dict[str, Any],
) -> None:
    """Prints what would be cut on TP ranks, what that sends, and what stays whole. Needs no GPU, weights or ranks."""
    argument = ModelArgument(
        model, settings_of(kwargs), layers, dtype_named(dtype), attention, model_class, inputs, evaluation
    )
    found = explain(on_meta(argument), tp, example_inputs=argument.example_inputs(), **chosen)
    if json:
        print_json(found.to_dict())
    elif (to := console()).is_terminal:
        to.print(*coloured(found, to.width), sep="\n", soft_wrap=True)
    else:
        print(found)


def coloured(found: Plan, width: int) -> Iterator[Text]:
    """Yields the lines of a plan as a terminal shows them: green is cut, yellow is whole, cyan is sent."""
    yield Text(f"{found.model} on tp={found.tp}\n", style="bold")
    if found.cuts:
        yield from columns(CUT_HEAD, cut_rows(found), ("green", "", "cyan", "cyan", "dim"), width)
        yield Text()
    if found.whole:
        yield from columns(WHOLE_HEAD, whole_rows(found), ("yellow", "", "dim", "dim"), width)
        yield Text()
    for line in totals(found):
        label, _, rest = line.partition("  ")
        lines = wrap(rest.strip(), max(width, 40), initial_indent=f"{label:<12}", subsequent_indent=" " * 12)
        yield from map(Text, lines)
