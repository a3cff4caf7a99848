"""stages: prints a model at each stage of the compiler."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from textwrap import indent
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autotp.compiler import Program, captured_program, emitted, expect_typed, graphs_after_passes, programs_after_passes
from autotp.diagnostics.graph_text import INDENT, graph_text, size_text, sizes_of, type_text
from autotp.diagnostics.report import report
from autotp.errors import within
from autotp.ops.eager_mode import uncollected
from autotp.options import Experts, Options, Outputs, Overlap, Recompute
from autotp.passes.capture.example_inputs import example_inputs as find_inputs
from autotp.passes.capture.pytree import signature_of, states
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.recompute import Recomputed
from autotp.passes.lower.local_sizes import Target
from autotp.runtime.build import expect_usable
from autotp.sharding.axis import find, leaves
from autotp.source_location import block_of


@dataclass(frozen=True)
class Stages:
    """The text of a model at each stage of the compiler, returned by `stages`; `str(stages)` is all of it.

    Attributes:
        pages: stage -> text, in order: model, capture, canonicalize, axes, plan, lower, check, emit.

    Example:
        >>> found = autotp.stages(nn.Linear(4, 6), 2, example_inputs=torch.ones(3, 4))
        >>> list(found.pages)
        ['model', 'capture', 'canonicalize', 'axes', 'plan', 'lower', 'check', 'emit']
        >>> found["model"]
        'Linear(in_features=4, out_features=6, bias=True)'
    """

    pages: Mapping[str, str]

    def __getitem__(self, stage: str) -> str:
        return self.pages[stage]

    def __str__(self) -> str:
        return "\n\n".join(f"==== {stage}\n{text}" for stage, text in self.pages.items())


def stages(
    model: nn.Module,
    tp: int,
    *,
    example_inputs: Any = None,
    outputs: Outputs = "auto",
    experts: Experts = "width",
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    overlap: Overlap = "none",
    cp: int = 1,
    without: Collection[str] = (),
) -> Stages:
    """Returns the text of each stage between `model` and the graph that the first of `tp` ranks runs.

    It runs on any machine, without processes; the model may be on `meta`, and is not changed. A type is printed as
    `f32[b, s, 3072@tp]`: dtype and sizes, with `@tp` behind a size that is cut, and `s@cp` for a part of a sequence.
    `{tp}` marks a value that is the same on all ranks and read by cut operators; `{+tp}` marks a term of a sum over
    ranks. Equal blocks are printed once.

    Args:
        model: an ordinary single-device model.
        tp: the number of ranks.
        example_inputs, outputs, experts, sequence_parallel, recompute, overlap, cp, without: as for `parallelize`.

    Raises:
        Error: as `parallelize`.

    Example:
        >>> print(autotp.stages(nn.Linear(4, 6), 2, example_inputs=torch.ones(3, 4))["capture"])
        input: f32[b, 4]
        weight: f32[6, 4]
        bias: f32[6]
        linear = linear(input, weight, bias): f32[b, 6]
        return [linear]
    """

    options = Options(outputs, experts, sequence_parallel, without, recompute=recompute, overlap=overlap, cp=cp)

    def run() -> Stages:
        expect_usable("stages", model, tp, options)
        with uncollected():
            args, kwargs = find_inputs(model, example_inputs)
            args, kwargs = signature_of(model).by_name(args, kwargs)
            program = captured_program(skeleton_of(model), args, kwargs, tp, options)
            return Stages(dict(_pages(model, program, _names_of_inputs((args, kwargs), program))))

    return within(f"stages({type(model).__name__}, tp={tp}{f', cp={cp}' * (cp != 1)})", run)


def _names_of_inputs(call: Any, program: Program) -> dict[str, str]:
    """Placeholder -> the caller's name of the input: `tokens`, `batch.mask`. Empty for a call with a cache."""
    if states(call):
        return {}
    paths = [path for path, leaf in pytree.tree_flatten_with_path(call)[0] if isinstance(leaf, torch.Tensor)]
    names = [".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:]) for path in paths]
    return dict(zip(program.captured.inputs, names, strict=False))


def _pages(model: nn.Module, program: Program, given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    names = program.captured.parameters | program.captured.buffers
    yield "model", str(model)
    yield "capture", graph_text(program.graph, names, given)
    canonical = True
    for each, later in programs_after_passes(program):
        if canonical and each.stage != "canonicalize" and each.name == "decouple":
            yield "canonicalize", graph_text(program.graph, names, given)
            canonical = False
        program = later
    yield "axes", graph_text(program.graph, names, given, lambda node: _axes_of(node, program))
    yield "plan", f"{report(program, type(model).__name__)}"
    to = Target("tp", program.tp, 0, "fast", frozenset(program.local_outputs))
    *_, (_, lowered) = graphs_after_passes(program, to)
    yield "lower", graph_text(lowered, names, given)
    types = expect_typed(lowered, program, to)
    proved = next(iter(types)).graph
    letters = sizes_of(program.graph)

    def type_of(node: fx.Node) -> str:
        return ", ".join(size_text(typed, letters) for typed in types.get(node, ()))

    yield "check", graph_text(proved, names, given, type_of)
    module = emitted(lowered, program, program.options, torch.device("cpu"), {})
    yield "emit", "\n\n".join(_modules(module, names, given))


def _axes_of(node: fx.Node, program: Program) -> str:
    """Returns the type of a node with its axes as sizes; recognised axes have names."""
    names = {find(candidate.leaf): candidate.name for candidate in program.candidates}
    letters = sizes_of(program.graph)
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return ""
    sizes = []
    for axis in program.axes.of(node):
        parts = [names.get(find(leaf)) for leaf in leaves(axis)]
        size = size_text(find(axis).size, letters)
        sizes.append("*".join(f"{part}" for part in parts if part) + f":{size}" if any(parts) else size)
    return type_text(node.meta["val"].dtype, sizes)


def _modules(module: fx.GraphModule, names: Mapping[str, str], given: Mapping[str, str]) -> Iterator[str]:
    """Yields the text of the graph, and of each block that it calls."""
    yield graph_text(module.graph, names, given)
    for name, part in module.named_children():
        again = isinstance(part, Recomputed)
        inner = cast(fx.GraphModule, part.inner if again else part)
        block = next(block_of(node) for node in inner.graph.nodes if block_of(node))
        text = graph_text(inner.graph, names, block=block)
        yield f"{name}{', computed again in backward' * again}:\n" + indent(text, INDENT)
