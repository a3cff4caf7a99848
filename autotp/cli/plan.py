"""plan: the command that prints `autotp.explain` of a model."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from autotp.api import explain
from autotp.cli.flags import (
    Attention,
    Debug,
    Evaluation,
    Html,
    InputsOf,
    Json,
    Kwargs,
    Layers,
    Model,
    ModelClass,
    with_options_of,
)
from autotp.cli.model_argument import ModelArgument, dtype_named, on_meta, settings_of
from autotp.cli.output import expect_writable, show
from autotp.page.save_page import save_page


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
    html: Html = None,
    json: Json = False,
    debug: Debug = False,
    *,
    chosen: dict[str, Any],
) -> None:
    """Prints what would be cut on TP ranks, what that sends, and what stays whole. Needs no GPU, weights or ranks.

    Example: autotp plan file.py:factory --tp 2
    """
    expect_writable(html)
    argument = ModelArgument(
        model, settings_of(kwargs), layers, dtype_named(dtype), attention, model_class, inputs, evaluation
    )
    found = explain(on_meta(argument), tp, example_inputs=argument.example_inputs(), **chosen)
    if html is not None:
        save_page(found, html)
    show(found, json)
