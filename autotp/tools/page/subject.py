"""subject: what a page is about: the typed graph of the first rank, and the estimate, if there is one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from autotp.compiler import expect_typed, flat_graphs, graphs_after_passes
from autotp.diagnostics.mesh_proof import MeshProof
from autotp.diagnostics.plan import Plan
from autotp.diagnostics.report import report
from autotp.diagnostics.verify import Report
from autotp.errors import Error
from autotp.passes.check.types import Typed
from autotp.passes.lower.local_sizes import Target
from autotp.passes.pipeline.stages import blocks_in_order
from autotp.passes.plan.propagate import needs_grad
from autotp.passes.program.program import Program
from autotp.sharding.axis import Size
from autotp.sharding.partition import chunk_size
from autotp.tools.estimation.price import Prices
from autotp.tools.estimation.result import Estimate
from autotp.tools.estimation.search import Search


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a page is about.

    Attributes:
        model: the name of the model's class.
        program: the plan of the model.
        graph: the lowered graph of the first rank, with collectives apart from products.
        types: the types of its values, as the checker derives them.
        order: name of a block of the whole model, and of the captured block that it is like; in order.
        plan: what is cut and what stays whole, of the captured blocks.
        sizes: symbol of a size -> its length: rows of a microbatch, tokens of a sequence.
        learning: the values of the graph that a gradient flows through.
        proof: the error of the checker; None if all ranks are proved.
        estimate: the predicted step; None for a plan and a report.
        mesh: of a report: what was proved of pipeline ranks and replicas; None if there were none.
    """

    model: str
    program: Program
    graph: fx.Graph
    types: Mapping[fx.Node, tuple[Typed, ...]]
    order: tuple[tuple[str, str], ...]
    plan: Plan
    sizes: Mapping[str, int]
    learning: frozenset[fx.Node]
    proof: Error | None
    estimate: Estimate | None
    mesh: MeshProof | None = None

    @property
    def names(self) -> Mapping[str, str]:
        """Placeholder -> name of a parameter."""
        return self.program.captured.parameters

    def length(self, size: Size) -> int:
        """Returns the length of an axis; that of an unknown symbol counts as 1."""
        return size.number * math.prod(self.sizes.get(symbol, 1) for symbol in size.symbols)


def subject_of(result: Plan | Estimate | Search | Report) -> Subject:
    """Returns what the page of a result is about; of a search it is its best layout.

    Raises:
        Error: the result is not from `explain`, `estimate`, `search` or `verify` of this process.
    """
    if isinstance(result, Report):
        return replace(_subject_of(result.plan, "Report"), mesh=result.mesh)
    return _subject_of(result, type(result).__name__)


def _subject_of(result: Plan | Estimate | Search, result_type: str) -> Subject:
    estimate = result.best[0] if isinstance(result, Search) else result if isinstance(result, Estimate) else None
    # A plan keeps its program, an estimate the prices of its captured model.
    source: Program | Prices | None = result.source if estimate is None and isinstance(result, Plan) else None
    source = estimate.source if estimate is not None else source
    if source is None:
        raise Error(
            f"this {result_type} has no model with it: it was not made by autotp in this process",
            fix="autotp.explain, autotp.estimate, autotp.search or autotp.verify, then autotp.save_page",
        )
    if isinstance(source, Program):
        return _subject(source, result.model if isinstance(result, Plan) else "", (), 0, None)
    model = source.model
    rows = estimate.layout.micro_batch if estimate is not None else 0
    return _subject(model.program, model.name, model.order, rows, estimate)


def _subject(
    program: Program, model: str, order: tuple[tuple[str, str], ...], rows: int, estimate: Estimate | None
) -> Subject:
    graph, types = typed_graph(program)
    if not order:
        order = tuple((name, name) for name in blocks_in_order(graph, list(program.captured.parameters)))
    names = program.captured.parameters
    return Subject(
        model=model, program=program, graph=graph, types=types, order=order, plan=report(program, model),
        sizes=_sizes(program, rows), proof=_proof(program), estimate=estimate,
        learning=frozenset(needs_grad(graph, frozenset(n for n in graph.nodes if n.name in names))),
    )  # fmt: skip


def typed_graph(program: Program) -> tuple[fx.Graph, Mapping[fx.Node, tuple[Typed, ...]]]:
    """Returns the lowered graph of the first rank before `overlap` joins products, and the types of its values."""
    to = Target("tp", program.tp, 0, "fast", frozenset(program.local_outputs))
    graphs = [graph for stage, graph in graphs_after_passes(program, to) if stage.name != "overlap"]
    types = expect_typed(graphs[-1], program, to, program.axes)
    return next(iter(types)).graph, types


def _proof(program: Program) -> Error | None:
    """Returns the error of the checker on any rank's graph; it infers the axes of the model anew."""
    try:
        for _ in flat_graphs(program, "fast"):
            pass
    except Error as error:
        return error
    return None


def _sizes(program: Program, rows: int) -> dict[str, int]:
    """Returns the length of each symbol in the inputs. rows: those of a microbatch; 0: as they were captured"""
    lengths: dict[str, int] = {}
    batch = {str(n.meta["val"].shape[0]) for n in _inputs(program) if n.name in program.rows and n.meta["val"].dim()}
    for node in _inputs(program):
        for size in node.meta["val"].shape:
            if not isinstance(size, int):
                lengths[str(size)] = rows if rows and str(size) in batch else int(size.node.hint or 0)
    for node in program.graph.nodes:  # The lengths of this rank's parts of sequences.
        if node.target is chunk_size and (whole_length := str(node.args[0].meta["val"])) in lengths:
            lengths[str(node.meta["val"])] = chunk_size(lengths[whole_length], *node.args[1:])
    return lengths


def _inputs(program: Program) -> list[fx.Node]:
    nodes: Any = program.graph.nodes
    return [n for n in nodes if n.op == "placeholder" and isinstance(n.meta.get("val"), Tensor)]
