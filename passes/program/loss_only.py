"""loss_only: keeps only the loss of a model, as a sum over the batch; refuses a model of which there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import fx

from autotp.errors import Error
from autotp.passes.capture.guards.values import place_text
from autotp.passes.pipeline.loss_totals import loss_totals
from autotp.passes.pipeline.row_independence import one_batch
from autotp.passes.program.program import CapturedProgram
from autotp.rules.call import is_loss, operator_name, returned
from autotp.rules.traits import sparse_argument
from autotp.source_location import line_of

T = TypeVar("T")
BALANCED = "over the whole batch: with microbatches or stages, forward runs once more before each step, for its sums"


def with_loss_only(p: CapturedProgram) -> CapturedProgram:
    """Returns the program of the loss alone, as a sum over the batch, and the totals that divide it."""
    graph, rows = p.graph, p.rows
    loss = _loss_of(p)
    _expect_one_batch(p, loss)
    assert loss is not None
    one_batch(graph, rows)
    totals = loss_totals(graph, loss, rows, p.options.balance, p.call.sums)
    # Only the loss is returned now, and what functions of sums read. So no cache and no new value of an attribute is.
    of_loss = replace(p.captured.outputs, kept=frozenset(), stays=frozenset(), results=1)
    alone = replace(p.captured, outputs=of_loss)
    note = {"balance": BALANCED} if totals.functions is not None else {}
    return replace(p, captured=alone, graph=totals.graph, totals=totals, notes={**p.notes, **note})


def _loss_of(p: CapturedProgram) -> fx.Node | None:
    outputs = returned(p.graph)
    # Behind the results stand new values of attributes and of buffers, which are no loss.
    numbers = [node for node in outputs[: p.captured.outputs.results] if isinstance(node, fx.Node) and is_loss(node)]
    return loss_among(numbers, p.captured.outputs(outputs, ()) if numbers[1:] else None)


def loss_among(numbers: Sequence[T], result: Any) -> T | None:
    """Returns the loss among a model's outputs: the one that is named "loss", or the first number.

    Args:
        numbers: the outputs that are floating tensors without dimensions.
        result: what the model returns, with these outputs in it.

    Raises:
        Error: the outputs have names, there are several numbers, and none is named "loss".
    """
    if len(numbers) < 2:
        return numbers[0] if numbers else None
    named_tuple = result._asdict() if hasattr(result, "_asdict") else {}
    names = result if isinstance(result, Mapping) else named_tuple or getattr(result, "__dict__", {})
    if not names:
        return numbers[0]
    # `is`, because `==` of tensors is a tensor.
    named = [number for number in numbers if number is names.get("loss")]
    if not named:
        raise Error("the model returns several numbers, and none is named `loss`", fix='{"loss": loss, ...}')
    return named[0]


def _expect_one_batch(p: CapturedProgram, loss: fx.Node | None) -> None:
    """Raises Error for a model with side effects, without a loss, or without a batch."""
    captured = p.captured
    if reads := [read for read in captured.asked if not (read.look and read.of_inputs)]:
        raise Error(
            "Python reads values of tensors in forward, which may be others in each part of a batch",
            at=place_text(reads[0].outcome.place),
            fix="torch.where, or a mask",
            alternative="autotp.parallelize(model, tp), which takes the whole batch at once",
        )
    if captured.outputs.into:
        raise Error(
            "the model writes into its inputs, and each part of a batch has other inputs",
            fix="write the new value to a new tensor",
        )
    if written := captured.changes_of_model:
        names = ", ".join(sorted({f"`{change}`" for change in written}))
        raise Error(
            f"the model sets {names} in forward, which parts of a batch cannot share",
            fix="return it as a part of the loss, or compute it in the training loop (trainer.steps counts)",
            alternative="autotp.parallelize(model, tp), which keeps attributes",
        )
    if p.updated:
        names = ", ".join(captured.buffers[place] for place in p.updated)
        raise Error(
            f"the model changes its buffers ({names}), which parts of a batch cannot share",
            fix="a norm without running statistics; a bias of experts that the loop updates, alike on every rank",
            alternative="autotp.parallelize(model, tp), which takes the whole batch at once",
        )
    if (sparse := next(filter(sparse_argument, p.graph.nodes), None)) is not None:
        raise Error(
            f"`{operator_name(sparse)}` has a sparse gradient, which replicas and stages cannot sum",
            fix=f"{sparse_argument(sparse)}=False: the gradient has the same numbers",
            alternative="autotp.parallelize(model, tp)",
            at=line_of(sparse),
        )
    if loss is None:
        raise Error(
            "the model returns no loss (a tensor without dimensions)",
            fix="a model that takes labels, and returns its loss",
        )
    if not captured.example or not captured.example[0]:
        raise Error(
            "the model's first input has no rows, and so there is no batch",
            fix="the batch as the first dimension of the first argument",
        )
