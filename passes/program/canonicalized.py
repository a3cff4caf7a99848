"""The passes of the stage canonicalize that take more of a program than its graph."""

from __future__ import annotations

from dataclasses import replace

from autotp.passes.canonicalize import autocast as autocasts
from autotp.passes.canonicalize.canonical_order import canonical_order
from autotp.passes.canonicalize.constant_index import constant_index
from autotp.passes.canonicalize.functionalize import functionalize
from autotp.passes.canonicalize.only_loss import only_loss
from autotp.passes.canonicalize.relocate import relocate
from autotp.passes.canonicalize.value_reads import value_reads
from autotp.passes.program.program import CapturedProgram


def relocated(p: CapturedProgram) -> CapturedProgram:
    """Returns the program on the device of its call."""
    return replace(p, graph=relocate(p.graph, p.call.autocast.device))


def autocasted(p: CapturedProgram) -> CapturedProgram:
    """Returns the program in the dtypes of autocast."""
    return replace(p, graph=autocasts.autocast(p.graph, p.call.autocast))


def functionalized(p: CapturedProgram) -> CapturedProgram:
    """Returns the program without writes, and with the names of the buffers whose new values it returns."""
    graph, updated = functionalize(p.graph, p.captured.buffers, p.captured.owned, p.captured.constants)
    return replace(p, graph=graph, updated=[*p.captured.outputs.assigned, *updated])


def with_value_reads(p: CapturedProgram) -> CapturedProgram:
    """Returns the program with what Python reads of inputs in a graph of its own."""
    if not p.captured.asked:
        return p
    graph, captured = value_reads(p.graph, p.captured, len(p.updated), p.cut_inputs)
    return replace(p, graph=graph, captured=captured)


def with_constant_indices(p: CapturedProgram) -> CapturedProgram:
    """Returns the program with slices in place of constant indices."""
    return replace(p, graph=constant_index(p.graph, p.captured.constants))


def with_only_loss(p: CapturedProgram) -> CapturedProgram:
    """Returns the program of a training call that returns no more than its loss."""
    if not p.call.training:
        return p
    graph, captured = only_loss(p.graph, p.captured)
    omitted = len(captured.outputs.omitted)
    note = {"outputs": f'{omitted} not computed beside the loss (outputs="loss")'} if omitted else {}
    return replace(p, graph=graph, captured=captured, notes={**p.notes, **note})


def in_canonical_order(p: CapturedProgram) -> CapturedProgram:
    """Returns the program with its operators in an order that all ranks share."""
    return replace(p, graph=canonical_order(p.graph, p.captured.constants, p.captured.inputs))
