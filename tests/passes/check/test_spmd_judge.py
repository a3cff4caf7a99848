"""A judge from outside, Meta's spmd_types, accepts our graphs and refuses what is broken in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from faults import (
    CASES,
    PARTS,
    RARE,
    Case,
    NodeChange,
    another,
    bypass,
    case,
    changed,
    expose,
    graphs_of,
    insert,
    is_item,
    late,
    omit,
    refusal,
    twice,
)
from torch import fx

from autotp.ops import collectives
from autotp.passes.program.program import Program

pytest.importorskip("spmd_types", reason="its checker judges our graphs: pip install spmd_types")
import spmd_types as spmd
from spmd_judge import given_to, judge

aten = torch.ops.aten
PLACEMENTS = (omit, twice, another, bypass, late, insert, expose)
"""The ways of breaking a graph that change placements. The others change numbers, sizes and operands."""
Way = Callable[[fx.Node], Iterator[NodeChange]]


def verdict(found: Case, program: Program, graphs: Sequence[fx.Graph]) -> Exception | None:
    """Why the judge refuses the graphs, or they cannot be called; None if it accepts them."""
    try:
        judge(graphs, program, given_to(program, found.model, list(found.inputs.values())))
    except Exception as error:
        return error
    return None


def is_beyond_it(program: Program, node: fx.Node) -> bool:
    """True where the judge's language has no word for what is broken: docs/design.md says which."""
    if node.target is collectives.reduce and node.args[2:] == ("max",):
        return True  # It knows no reduction but the sum.
    source = node.args[0] if node.target is collectives.reduce else None
    if isinstance(source, fx.Node) and source.target is aten.sum.dim_IntList:
        return True  # A sum along a dimension that is cut is V for it, and not P.
    captured = program.captured
    return _places(node).isdisjoint({*captured.parameters, *captured.inputs})  # It sums any V that has no gradient.


def _places(node: fx.Node) -> set[str]:
    """Returns the names of the placeholders that a value depends on."""
    found, queue = {node}, [node]
    while queue:
        for operand in queue.pop().all_input_nodes:
            if operand not in found:
                found.add(operand)
                queue.append(operand)
    return {one.name for one in found if one.op == "placeholder"}


# ---- faults by name

MIXED = "Invariant type on axis MeshAxis(2:1) cannot mix with other types. Found types: "
IN_PRODUCT = f"rules.einsum: '...k,nk->...n': {MIXED}"


def expects(kind: str, src: str, dst: str, want: str, got: str) -> str:
    said = f"rules.{kind}(MeshAxis(2:1), src={src}, dst={dst}) expects its input to be"
    return f"{said} {want} on axis MeshAxis(2:1), but it is {got}"


def is_read_by(node: fx.Node, target: Any) -> bool:
    """True for one of several parameters that are read together, if an operator reads it."""
    return is_item(node) and any(user.target is target for user in node.users)


@dataclass(frozen=True)
class Fault:
    """The first node that `picks` takes, broken in the way's change number `change`; what both judges say."""

    case: str
    way: Way
    picks: Callable[[fx.Node], bool]
    change: int
    expected: str
    got: str
    message: str


def is_call(target: Any) -> Callable[[fx.Node], bool]:
    return lambda node: node.target is target


OF_ATTENTION = lambda node: node.name == "reduce_1"  # noqa: E731
FAULTS = {
    "a reduce is left out": Fault("decoder", omit, OF_ATTENTION, 0, "Replicate", "Partial", f"{MIXED}[P, I]"),
    "a reduce is done twice": Fault(
        "decoder", twice, OF_ATTENTION, 1, "Partial", "Replicate", expects("all_reduce", "P", "I", "P", "I")
    ),
    "a copy is left out": Fault(
        "decoder", omit, is_call(collectives.copy), 0, "Copied", "Replicate", f"{IN_PRODUCT}[I, V]"
    ),
    "a copy is done twice": Fault(
        "decoder", twice, is_call(collectives.copy), 0, "Replicate", "Copied", expects("convert", "I", "R", "I", "R")
    ),
    "a reduce in place of a copy": Fault(
        "decoder", another, is_call(collectives.copy), 0, "Partial", "Replicate",
        expects("all_reduce", "P", "I", "P", "I"),
    ),
    "a copy in place of a reduce": Fault(
        "decoder", another, OF_ATTENTION, 0, "Replicate", "Partial", expects("convert", "I", "R", "I", "P")
    ),
    "the bias is added before the reduce": Fault(
        "decoder", late, OF_ATTENTION, 0, "Replicate", "Partial", f"{MIXED}[P, I]"
    ),
    "one reader reads before the copy": Fault(
        "decoder", bypass, is_call(collectives.copy), 0, "Copied", "Replicate", f"{IN_PRODUCT}[I, V]"
    ),
    "an output is copied": Fault(
        "decoder", expose, lambda node: node.op == "output", 0, "Replicate", "Copied",
        "output 0 is R, and should be I",
    ),
    "the gradient of a norm's weight is not summed": Fault(
        "sequence", omit, lambda node: is_read_by(node, aten.layer_norm.default), 0, "Copied", "Replicate",
        f"{MIXED}[V, I, R]",
    ),
    "a gather in place of an all_gather": Fault(
        "sequence", another, is_call(collectives.all_gather), 1, "Copied", "Replicate", f"{IN_PRODUCT}[I, V]"
    ),
    "a scatter in place of a reduce_scatter": Fault(
        "sequence", another, is_call(collectives.reduce_scatter), 0, "Replicate", "Partial",
        expects("convert", "I", "S(1)", "I", "P"),
    ),
    "an all_gather is left out": Fault(
        "sequence", omit, is_call(collectives.all_gather), 0, "Copied", "Shard",
        "rules.einsum: axis MeshAxis(2:1) shards both '...1' and 'n' in '...k,nk->...n'; "
        "an axis may shard only one dim",
    ),
    "a gradient of a router is not summed": Fault(
        "experts", omit, is_call(collectives.copy), 0, "Copied", "Replicate", f"{IN_PRODUCT}[I, V]"
    ),
    "the gradient of a shared head is not summed": Fault(
        "grouped-local", omit, is_item, 0, "Copied", "Replicate", f"{MIXED}[I, V]"
    ),
}  # fmt: skip


# ---- tests


@pytest.mark.parametrize("name", FAULTS)
def test_check_and_spmd_types_name_the_same_fault(name: str) -> None:
    fault = FAULTS[name]
    found, program = case(fault.case)
    graphs = graphs_of(found, program)
    at = next(i for i, node in enumerate(graphs[0].nodes) if fault.picks(node))
    change = list(fault.way(list(graphs[0].nodes)[at]))[fault.change]
    broken = [changed(graph, at, change) for graph in graphs]
    ours, its = refusal(found, program, broken), verdict(found, program, broken)
    assert ours is not None and isinstance(its, spmd.SpmdTypeError)
    assert (ours.facts["expected"].split()[0], ours.facts["got"].split()[0]) == (fault.expected, fault.got)
    assert str(its).splitlines()[0] == fault.message


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.rare] * (n in RARE)) for n in CASES])
def test_spmd_types_accepts_every_case(name: str) -> None:
    found, program = case(name)
    assert verdict(found, program, graphs_of(found, program)) is None


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.rare) for i in range(1, PARTS))])
@pytest.mark.parametrize("way", PLACEMENTS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.rare] * (n in RARE)) for n in CASES])
def test_spmd_types_refuses_what_check_refuses(name: str, way: Way, part: int) -> None:
    """By the judge wherever `check` refuses it, but for what its language has no word for."""
    found, program = case(name)
    graphs = graphs_of(found, program)
    passed = []
    for at, node in list(enumerate(graphs[0].nodes))[part::PARTS]:
        for i, change in enumerate(way(node)):
            broken = [changed(graph, at, change) for graph in graphs]
            beyond = is_beyond_it(program, node) or is_beyond_it(program, list(broken[0].nodes)[at])
            if not beyond and refusal(found, program, broken) and verdict(found, program, broken) is None:
                passed.append(f"{node.format_node()} #{i}")
    assert passed == []
