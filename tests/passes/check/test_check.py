"""Every way of breaking a rank's graph is refused, or changes no number and no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from faults import CASES, KINDS, PARTS, RARE, WAYS, Case, NodeChange, case, changed, graphs_of, refusal, regroup
from torch import Tensor, fx

from autotp import compiler
from autotp.compiler import rank_graph
from autotp.diagnostics.lockstep import run_lockstep
from autotp.errors import Error
from autotp.ops import collectives, dropout, lookup, placement_moves
from autotp.ops.coalesced import together
from autotp.ops.experts import rows as routing
from autotp.ops.losses import cross_entropy
from autotp.passes.emit.bind import bind
from autotp.passes.lower.bucket import bucket
from autotp.passes.program.program import Program

# ---- what is asked


def results(found: Case, analysis: Program, graphs: list[fx.Graph]) -> list[Tensor]:
    """Outputs of every rank in lockstep, and the gradients of every rank's parameters and floating inputs."""
    captured, queue = analysis.captured, list(found.inputs.values())
    own, buffers = dict(found.model.named_parameters()), dict(found.model.named_buffers())
    rows = []
    for rank, graph in enumerate(graphs):
        row: list[Tensor] = []
        for name in [node.name for node in graph.nodes if node.op == "placeholder"]:
            if name in captured.parameters:
                name = captured.parameters[name]
                row.append(analysis.layouts[name].take(own[name].detach(), rank).requires_grad_())
            elif name in captured.buffers:
                row.append(buffers[captured.buffers[name]])
            elif name in captured.constants:
                row.append(captured.constants[name])
            else:
                given = queue[captured.inputs.index(name)].clone()
                row.append(given.requires_grad_(given.is_floating_point()))
        rows.append(row)
    torch.manual_seed(0)
    outputs = run_lockstep([bind(graph, torch.device("cpu"), {}) for graph in graphs], rows)
    weights = [[torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape) for y in row] for row in outputs]
    torch.autograd.backward(
        [sum((y * w).sum() for y, w in zip(*both, strict=True)) for both in zip(outputs, weights, strict=True)]
    )
    leaves = [x for row in rows for x in row if x.requires_grad]
    return [y.detach() for row in outputs for y in row] + [
        x.new_zeros(x.shape) if x.grad is None else x.grad for x in leaves
    ]


def harmless(found: Case, analysis: Program, graphs: list[fx.Graph]) -> bool:
    """True if these graphs give the outputs and the gradients that the right ones do."""
    expected = results(found, analysis, graphs_of(found, analysis))
    try:
        got = results(found, analysis, graphs)
    except Exception:
        return False
    scale = max(float(x.abs().max()) for x in expected if x.numel())
    return all(
        x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=1e-10 * scale, equal_nan=False)
        for x, y in zip(expected, got, strict=True)
    )


# ---- tests


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.rare) for i in range(1, PARTS))])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.rare] * (n in RARE)) for n in CASES])
def test_check_refuses_every_harmful_change_of_a_graph(
    name: str, way: Callable[[fx.Node], Iterator[NodeChange]], part: int
) -> None:
    found, analysis = case(name)
    graphs = graphs_of(found, analysis)
    passed = []
    for at, node in list(enumerate(graphs[0].nodes))[part::PARTS]:
        for i, change in enumerate(way(node)):
            broken = [changed(graph, at, change) for graph in graphs]
            if refusal(found, analysis, iter(broken)) is None and not harmless(found, analysis, broken):
                passed.append(f"{node.format_node()} #{i}")
    assert passed == []


@pytest.mark.parametrize("name", ["decoder", "sequence", pytest.param("encoder", marks=pytest.mark.rare)])
def test_check_refuses_every_harmful_change_of_grouped_products(name: str) -> None:
    """Another axis, dimension, length, weight or bias of products that are one operator; one result for another."""
    found, analysis = case(name)
    graphs = graphs_of(found, analysis, apart=False)
    passed, tried = [], 0
    for at, node in enumerate(graphs[0].nodes):
        for i, change in enumerate(regroup(node)):
            tried += 1
            broken = [changed(graph, at, change) for graph in graphs]
            if refusal(found, analysis, iter(broken)) is None and not harmless(found, analysis, broken):
                passed.append(f"{node.format_node()} #{i}")
    assert passed == [] and tried > 20


@pytest.mark.rare
def test_check_cases_contain_every_conjugate() -> None:
    seen = {node.target for name in CASES for node in graphs_of(*case(name))[0].nodes}
    assert seen > set(KINDS)
    forms = {
        lookup.embedding,
        lookup.gather,
        cross_entropy.class_terms,
        dropout.exact_dropout,
        dropout.fast_attention,
    }
    assert seen > forms
    assert seen > {together, placement_moves.place, placement_moves.first, routing.dispatch, routing.combine}


def test_check_names_the_pass_that_broke_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bundle`, with a reduction that it loses; the passes before it, and behind, are not to blame."""

    def without_a_sum(graph: fx.Graph) -> fx.Graph:
        graph = bucket(graph)
        lost = next(node for node in graph.nodes if node.target is collectives.reduce)
        lost.replace_all_uses_with(lost.args[0])
        graph.erase_node(lost)
        return graph

    found, analysis = case("decoder")
    rows = [
        replace(row, run=lambda program, to, graph: without_a_sum(graph)) if row.name == "bucket" else row
        for row in compiler.LOWER
    ]
    monkeypatch.setattr(compiler, "LOWER", rows)
    with pytest.raises(Error) as raised:
        rank_graph(analysis, 0, found.randomness)
    assert raised.value.facts["after"] == "bucket"
