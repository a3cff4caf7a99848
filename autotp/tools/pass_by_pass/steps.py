"""steps: runs a model through the compiler pass by pass, and times each; its graph before and after it, as text."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from textwrap import indent
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn

from autotp.compiler import (
    Pass,
    captured_program,
    emitted_operators,
    expect_typed,
    graphs_after_passes,
    programs_after_passes,
)
from autotp.diagnostics.node_text import size_text, sizes_of
from autotp.options import Options
from autotp.passes.capture.example_inputs import example_inputs as find_inputs
from autotp.passes.capture.pytree import named_leaves, signature_of, states
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.kept_values.recomputed import Recomputed
from autotp.passes.lower.local_sizes import Target
from autotp.passes.program.program import CapturedProgram, Program
from autotp.source_location import block_of
from autotp.tools.pass_by_pass.graph_text import INDENT, graph_text

T = TypeVar("T")


@dataclass(frozen=True)
class Names:
    """The names of placeholders in texts. held: parameters and buffers; given: inputs"""

    held: Mapping[str, str]
    given: Mapping[str, str]

    def text(self, graph: fx.Graph, types: Callable[[fx.Node], str] | None = None) -> str:
        """Returns the text of a graph. types: as for `graph_text`"""
        return graph_text(graph, self.held, self.given, types)


@dataclass(frozen=True)
class PassRun:
    """A pass that has run.

    Attributes:
        stage: the folder of `passes/` with its file.
        name: its name.
        seconds: that it took.
        before: the program that it got; None for the capture.
        program: the program after it.
        graphs: the graphs before it and after it: from the pass `lower` on those of the first rank, after `emit` also
            those of its blocks. There is none before the capture.
        names: the names of the graphs' placeholders.
        was, became: return the text of what it got, and of what it returned.
        types: the values that the check has typed.
    """

    stage: str
    name: str
    seconds: float
    before: CapturedProgram | None
    program: CapturedProgram
    graphs: tuple[tuple[fx.Graph, ...], tuple[fx.Graph, ...]]
    names: Names
    was: Callable[[], str]
    became: Callable[[], str]
    types: Collection[fx.Node] = ()


def run_steps(model: nn.Module, tp: int, options: Options, example_inputs: Any) -> Iterator[PassRun]:
    """Yields the capture, each pass, the check and the emission for the first of `tp` ranks, in order.

    Args:
        example_inputs: as for `autotp.stages`.
    """
    args, kwargs = find_inputs(model, example_inputs)
    args, kwargs = signature_of(model).by_name(args, kwargs)
    skeleton = skeleton_of(model)
    seconds, program = _timed(lambda: captured_program(skeleton, args, kwargs, tp, options))
    captured = program.captured
    names = Names(captured.parameters | captured.buffers, _names_of_inputs((args, kwargs), program))
    first = partial(names.text, program.graph)
    yield PassRun(
        "capture", "capture", seconds, None, program, ((), (program.graph,)), names, partial(str, model), first
    )
    for seconds, (pass_, later) in _each_timed(programs_after_passes(program)):
        graphs = program.graph, later.graph
        yield _step(pass_, seconds, program, later, graphs, names)
        program = later
    assert isinstance(program, Program)  # All passes of the stage plan have run.
    to = Target("tp", program.tp, 0, "fast", frozenset(program.local_outputs))
    graph = program.graph
    for seconds, (pass_, lowered) in _each_timed(graphs_after_passes(program, to)):
        yield _step(pass_, seconds, program, program, (graph, lowered), names)
        graph = lowered
    yield _check(program, graph, to, names)
    yield _emit(program, graph, names)


def _step(
    pass_: Pass,
    seconds: float,
    before: CapturedProgram,
    after: CapturedProgram,
    graphs: tuple[fx.Graph, fx.Graph],
    names: Names,
) -> PassRun:
    # Texts are made when they are asked for: most are not.
    was, became = (partial(names.text, graph) for graph in graphs)
    return PassRun(pass_.stage, pass_.name, seconds, before, after, ((graphs[0],), (graphs[1],)), names, was, became)


def _check(program: Program, graph: fx.Graph, to: Target, names: Names) -> PassRun:
    seconds, types = _timed(lambda: expect_typed(graph, program, to))
    proved, letters = next(iter(types)).graph, sizes_of(program.graph)

    def type_of(node: fx.Node) -> str:
        return ", ".join(size_text(typed, letters) for typed in types.get(node, ()))

    was, became = partial(names.text, graph), partial(names.text, proved, type_of)
    return PassRun("check", "check", seconds, program, program, ((graph,), (graph,)), names, was, became, types)


def _emit(program: Program, graph: fx.Graph, names: Names) -> PassRun:
    seconds, module = _timed(lambda: emitted_operators(graph, program, program.options, torch.device("cpu"), {}))
    graphs = (module.graph, *(part.graph for _, part, _ in _blocks(module)))

    def became() -> str:
        return "\n\n".join(_modules(module, names))

    return PassRun(
        "emit", "emit", seconds, program, program, ((graph,), graphs), names, partial(names.text, graph), became
    )


def _timed(run: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = run()
    return time.perf_counter() - began, result


def _each_timed(rows: Iterable[T]) -> Iterator[tuple[float, T]]:
    """Yields what an iterator yields, with the seconds that each row took."""
    queue, end = iter(rows), object()
    while True:
        # The pass runs in the generator, when its result is asked for.
        seconds, row = _timed(lambda: next(queue, end))
        if row is end:
            return
        yield seconds, cast(T, row)


def _names_of_inputs(call: Any, program: CapturedProgram) -> dict[str, str]:
    """Placeholder -> the caller's name of the input: `tokens`, `batch.mask`. Empty for a call with a cache."""
    if states(call):
        return {}
    names = [".".join(path[1:]) for path, leaf in named_leaves(call) if isinstance(leaf, torch.Tensor)]
    # Further inputs are attributes of the model.
    return dict(zip(program.captured.inputs, names, strict=False))


def _blocks(module: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule, bool]]:
    """Yields the blocks that a graph calls: name, graph, and whether backward computes it again."""
    for name, part in module.named_children():
        again = isinstance(part, Recomputed)
        yield name, cast(fx.GraphModule, part.inner if again else part), again


def _modules(module: fx.GraphModule, names: Names) -> Iterator[str]:
    """Yields the text of the graph, and of each block that it calls."""
    yield names.text(module.graph)
    for name, inner, again in _blocks(module):
        block = next(block_of(node) for node in inner.graph.nodes if block_of(node))
        text = graph_text(inner.graph, names.held, block=block)
        yield f"{name}{', computed again in backward' * again}:\n" + indent(text, INDENT)
