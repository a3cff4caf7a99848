"""pass_table: what each pass did to a model: operators, rewrites, collectives, seconds; and the code around one pass.

A rewrite is an operator that is new or gone. An operator with other arguments, or whose operands come from other
operators, counts as both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx, nn

from autotp.compiler import CANONICALIZE, LOWER, PLAN, passes_of
from autotp.diagnostics.node_text import operator_text, sizes_of
from autotp.diagnostics.report import traffic
from autotp.display.sheet import Code, Kind, Sheet, Shown, Table
from autotp.display.text_table import bytes_text
from autotp.errors import within
from autotp.ops.eager_mode import uncollected
from autotp.options import Options
from autotp.passes.emit.bind import COMMUNICATING
from autotp.runtime.build import expect_usable
from autotp.tools.pass_by_pass.graph_text import operators_of
from autotp.tools.pass_by_pass.steps import PassRun, run_steps


class Sends(NamedTuple):
    """The number of collectives in forward and in backward."""

    forward: int
    backward: int

    def __str__(self) -> str:
        return f"{self.forward} + {self.backward}" if any(self) else "0"


class BeforeAfter(NamedTuple):
    """Something before a pass and after it."""

    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.after}" if self.before == self.after else f"{self.before} -> {self.after}"


class Rewrites(NamedTuple):
    """The number of operators that are new, and of those that are gone."""

    new: int
    gone: int

    def __str__(self) -> str:
        return f"+{self.new} -{self.gone}" if any(self) else ""


FOUND: dict[str, Callable[[Any], str]] = {
    "totals": lambda p: "the totals of the loss",
    "sequences": lambda p: f"{_many(p.sequences.operators, 'operator')} cut over cp",
    "notes": lambda p: ", ".join(p.notes.values()),
    "axes": lambda p: f"axes of {_many(len(p.axes.dims), 'value')}",
    "candidates": lambda p: f"{_many(len(p.candidates), 'axis', 'axes')} that may be cut",
    "decision": lambda p: (
        f"{_many(len(p.decision.cuts), 'operator')} cut along {_many(len(p.decision.chosen), 'axis', 'axes')}"
    ),
    "have": lambda p: f"placements of {_many(len(p.have), 'value')}",
    "hoisted": lambda p: f"{_many(len(p.hoisted), 'operator')} on copies" if p.hoisted else "",
    "layouts": lambda p: (
        f"{sum(layout.dim is not None for layout in p.layouts.values())} of {len(p.layouts)} parameters cut"
    ),
}
"""A fact about a program that has it -> what is said of it after the pass that finds it."""


@dataclass(frozen=True)
class PassRow:
    """What a pass did.

    Attributes:
        stage: the folder of `passes/` with its file.
        name: its name.
        seconds: that it took.
        operators: the number of operators before it and after it; parameters, inputs, sizes and items of tuples do not
            count.
        rewrites: None for `emit`, which makes modules of blocks.
        collectives: those of a step before it and after it; None for `emit`.
        found: the facts that it found, in words.
    """

    stage: str
    name: str
    seconds: float
    operators: BeforeAfter
    rewrites: Rewrites | None
    collectives: BeforeAfter | None
    found: str

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of the table."""
        counts = ("" if x is None else str(x) for x in (self.operators, self.rewrites, self.collectives))
        return self.stage, self.name, *counts, f"{self.seconds:.3f}", self.found


@dataclass(frozen=True, repr=False)
class PassTable(Shown):
    """What the passes did to a model.

    Attributes:
        model: the name of the model's class.
        tp, cp: the numbers of ranks.
        size: what the model has, in words.
        passes: the capture, each pass, the check and the emission, in order.
        code: the code before and after the pass that was asked for, by its name.
    """

    model: str
    tp: int
    cp: int
    size: str
    passes: tuple[PassRow, ...]
    code: dict[str, BeforeAfter]

    def summary(self) -> str:
        """Returns the number of passes and their seconds."""
        sizes = f"tp={self.tp}" + f", cp={self.cp}" * (self.cp > 1)
        return f"{self.model} on {sizes}: {len(self.passes)} passes, {sum(row.seconds for row in self.passes):.2f} s"

    def sheet(self) -> Sheet:
        """Returns the table of the passes."""
        head = ("stage", "pass", "operators", "rewrites", "collectives", "seconds", "found")
        rows = (("model", "", "", "", "", "", self.size), *(row.cells() for row in self.passes))
        kinds = ("note", "", "", "whole", "sent", "note", "note")
        lines = ("collectives  of a step: forward + backward", "one pass     --pass NAME: the code before and after it")
        return Sheet(self.summary(), (Table(head, rows, kinds), lines, *self._code()))  # type: ignore[arg-type]

    def _code(self) -> Iterator[Code]:
        """Yields the code before and after the pass that was asked for, or once, if the pass does not change it."""
        for name, (before, after) in self.code.items():
            if before == after:
                yield _marked(f"before and after {name}", before, before, "")
            else:
                yield _marked(f"before {name}", before, after, "gone")
                yield _marked(f"after {name}", after, before, "new")


def _marked(title: str, code: str, other_code: str, mark: Kind) -> Code:
    """Returns code below a title. mark: of its lines that `other_code` does not have"""
    other_lines = set(other_code.splitlines())
    return Code(((title, "head"), *((line, "" if line in other_lines else mark) for line in code.splitlines())))


def _many(count: int, singular: str, plural: str = "") -> str:
    return f"{count} {singular if count == 1 else plural or f'{singular}s'}"


def names_of_passes(options: Options) -> list[str]:
    """Returns the names of the passes that run with these options, in order."""
    passes = [pass_.name for pass_ in passes_of((*CANONICALIZE, *PLAN, *LOWER), options)]
    return ["capture", *passes, "check", "emit"]


def pass_table(model: nn.Module, tp: int, options: Options, example_inputs: Any = None, chosen: str = "") -> PassTable:
    """Returns what each pass does to a model on `tp` ranks; the graphs are those of the first rank.

    Args:
        example_inputs: as for `parallelize`.
        chosen: the name of a pass whose code is wanted, of `names_of_passes`.

    Raises:
        Error: as `parallelize`.
    """

    def run() -> PassTable:
        expect_usable("stages", model, tp, options)
        rows, code = [], {}
        with uncollected():
            for step in run_steps(model, tp, options, example_inputs):
                rows.append(_row(step))
                if step.name == chosen:
                    code[chosen] = BeforeAfter(step.was(), step.became())
        return PassTable(type(model).__name__, tp, options.cp, _size_of(model), tuple(rows), code)

    return within(f"stages({type(model).__name__}, tp={tp}{f', cp={options.cp}' * (options.cp != 1)})", run)


def _size_of(model: nn.Module) -> str:
    parameters = list(model.parameters())
    size = bytes_text(sum(p.nbytes for p in parameters))
    return f"{_many(len(list(model.modules())), 'module')}, {_many(len(parameters), 'parameter')} of {size}"


def _row(step: PassRun) -> PassRow:
    before, after = ([node for graph in graphs for node in operators_of(graph)] for graphs in step.graphs)
    # As multisets: an operator that only moved is no rewrite.
    was, became = Counter(map(_kind, before)), Counter(map(_kind, after))
    emits = step.name == "emit"
    return PassRow(
        step.stage,
        step.name,
        step.seconds,
        BeforeAfter(len(before), len(after)),
        None if emits else Rewrites((became - was).total(), (was - became).total()),
        None if emits else BeforeAfter(_sent(step.graphs[0], step), _sent(step.graphs[1], step)),
        ", ".join(_facts(step)),
    )


def _facts(step: PassRun) -> Iterator[str]:
    """Yields what is said of the facts that a pass found or changed."""
    if step.before is None:
        yield _many(len(step.program.captured.inputs), "input")
        yield f"{_many(len(sizes_of(step.program.graph)), 'size')} that may change"
        return
    if step.types:
        yield f"types of {_many(len(step.types), 'value')}"
    if step.name == "emit":
        module, *blocks = step.graphs[1]
        calls = sum(node.op == "call_module" for node in module.nodes)
        yield f"{_many(calls, 'block')} of {_many(len(blocks), 'kind')}" if calls else "no blocks"
    for name, describe in FOUND.items():
        was, now = (getattr(program, name, None) for program in (step.before, step.program))
        # A fact that a pass has made anew, in the same words, is not told.
        if was is not now and (was is None or describe(step.program) != describe(step.before)):
            yield from filter(None, [describe(step.program)])


def _sent(graphs: tuple[fx.Graph, ...], step: PassRun) -> Sends:
    """Returns the number of collectives in graphs, forward and backward."""
    traffics = [
        traffic(graph, step.program) for graph in graphs if any(node.target in COMMUNICATING for node in graph.nodes)
    ]
    return Sends(*(sum(sum(getattr(t, side).values()) for t in traffics) for side in Sends._fields))


def _kind(node: fx.Node) -> tuple[str, str, str]:
    """Returns an operator with its arguments; for an operand stands the operator that makes it."""

    def named(argument: fx.Node) -> str:
        # Names of other nodes change from pass to pass, though the operator is the same.
        return argument.name if argument.op == "placeholder" else operator_text(argument)

    args, kwargs = (str(fx.map_arg(values, named)) for values in (node.args, node.kwargs))
    return operator_text(node), args, kwargs
