"""stages: prints a model at each stage of the compiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from typing_extensions import Unpack

from autotp.diagnostics.node_text import size_text, sizes_of, type_text
from autotp.diagnostics.report import report
from autotp.display.sheet import Code, Sheet, Shown
from autotp.distributed.mesh import tell_errors
from autotp.errors import within
from autotp.ops.eager_mode import uncollected
from autotp.options import Options, TrialOptions, expect_options, lists_options
from autotp.passes.program.program import Program
from autotp.runtime.build import expect_usable
from autotp.sharding.axis import find, leaves
from autotp.tools.pass_by_pass.steps import PassRun, run_steps


@dataclass(frozen=True, repr=False)
class Stages(Shown):
    """The text of a model at each stage of the compiler, returned by `stages`; `print(stages)` shows all of it.

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

    def summary(self) -> str:
        """Returns the names of the stages."""
        return " -> ".join(self.pages)

    def sheet(self) -> Sheet:
        """Returns the text of each stage below its name."""
        texts = ((stage, text.splitlines()) for stage, text in self.pages.items())
        codes = (Code(((f"==== {stage}", "head"), *((line, "") for line in lines))) for stage, lines in texts)
        return Sheet(self.summary(), tuple(codes))


@lists_options
def stages(
    model: nn.Module,
    tp: int,
    *,
    example_inputs: Any = None,
    cp: int = 1,
    **options: Unpack[TrialOptions],
) -> Stages:
    """Returns the text of each stage between `model` and the graph that the first of `tp` ranks runs.

    It runs on any machine, without processes; the model may be on `meta`, and is not changed. A type is printed as
    `f32[b, s, 3072@tp]`: dtype and sizes, with `@tp` behind a size that is cut, and `s@cp` for a part of a sequence.
    `{tp}` marks a value that is the same on all ranks and read by cut operators; `{+tp}` marks a term of a sum over
    ranks. Equal blocks are printed once.

    Args:
        model: an ordinary single-device model.
        tp: the number of ranks.
        example_inputs, cp: as for `parallelize`.
        options: as for `parallelize`.

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

    def run() -> Stages:
        tell_errors()
        expect_options(stages, options)
        settings = Options(cp=cp, **options)
        expect_usable("stages", model, tp, settings)
        with uncollected():
            return Stages(dict(_pages(model, run_steps(model, tp, settings, example_inputs))))

    return within(f"stages({type(model).__name__}, tp={tp}{f', cp={cp}' * (cp != 1)})", run)


def _pages(model: nn.Module, steps: Iterable[PassRun]) -> Iterator[tuple[str, str]]:
    yield "model", str(model)
    for step in steps:
        if step.name == "capture":
            yield "capture", step.became()
        # The first pass of the plan: it gets what canonicalize has made.
        elif step.name == "decouple":
            yield "canonicalize", step.was()
        # The plan is complete here, and no rank's graph is made yet.
        elif step.name == "lower":
            yield from _decided(step, type(model).__name__)
        elif step.name == "check":
            yield "lower", step.was()
            yield "check", step.became()
        elif step.name == "emit":
            yield "emit", step.became()


def _decided(step: PassRun, model: str) -> Iterator[tuple[str, str]]:
    """Yields what was decided before the first rank's graph is made."""
    program = step.program
    assert isinstance(program, Program)
    yield "axes", step.names.text(program.graph, lambda node: _axes_of(node, program))
    yield "plan", f"{report(program, model)}"


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
