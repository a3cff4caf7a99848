"""pass_table: what each pass did to a model: operators, rewrites, collectives, seconds; and the code around one pass.

A rewrite is an operator that is new or gone. An operator with other arguments, or whose operands come from other
operators, counts as both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from autotp.compiler import CANONICALIZE, LOWER, PLAN, UNKNOWN, Program, passes_of
from autotp.diagnostics.graph_text import operator_text, operators_of, sizes_of
from autotp.diagnostics.report import traffic
from autotp.display.sheet import DATA_VERSION, Code, Kind, Sheet, Shown, Table
from autotp.display.text_table import bytes_text
from autotp.errors import within
from autotp.ops.eager_mode import uncollected
from autotp.options import Options
from autotp.passes.emit.bind import COMMUNICATING
from autotp.runtime.build import expect_usable
from autotp.tools.pass_by_pass.steps import Step, run_steps

Sends = tuple[int, int]
"""The number of collectives in forward and in backward."""
FOUND: dict[str, Callable[[Program], str]] = {
    "counts": lambda p: "the totals of the loss",
    "in_sequence": lambda p: f"{_many(p.in_sequence, 'operator')} cut over cp",
    "notes": lambda p: ", ".join(p.notes.values()),
    "axes": lambda p: f"axes of {_many(len(p.axes.dims), 'value')}",
    "candidates": lambda p: f"{_many(len(p.candidates), 'axis', 'axes')} that may be cut",
    "decision": lambda p: (
        f"{_many(len(p.decision.cuts), 'operator')} cut along {_many(len(p.decision.chosen), 'axis', 'axes')}"
    ),
    "have": lambda p: f"placements of {_many(len(p.have), 'value')}",
    "hoisted": lambda p: f"{_many(len(p.hoisted), 'operator')} on copies",
    "layouts": lambda p: (
        f"{sum(layout.dim is not None for layout in p.layouts.values())} of {len(p.layouts)} parameters cut"
    ),
}
"""A fact about a program -> what is said of it after the pass that finds it."""


@dataclass(frozen=True)
class PassRow:
    """What a pass did.

    Attributes:
        stage: the folder of `passes/` with its file.
        name: its name.
        seconds: that it took.
        operators: the number of operators before it and after it; parameters, inputs, sizes and items of tuples do not
            count.
        rewrites: the number of operators that are new, and of those that are gone; None for `emit`, which makes modules
            of blocks.
        collectives: those of a step before it and after it; None for `emit`.
        found: the facts that it found, in words.
    """

    stage: str
    name: str
    seconds: float
    operators: tuple[int, int]
    rewrites: tuple[int, int] | None
    collectives: tuple[Sends, Sends] | None
    found: str

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of the table."""
        sends = "" if self.collectives is None else _change(*(_sends(pair) for pair in self.collectives))
        rewrites = "" if self.rewrites is None or not any(self.rewrites) else "+{} -{}".format(*self.rewrites)
        return self.stage, self.name, _change(*self.operators), rewrites, sends, f"{self.seconds:.3f}", self.found

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as plain data."""
        sends = None if self.collectives is None else [dict(zip(SIDES, pair, strict=True)) for pair in self.collectives]
        return {
            "stage": self.stage,
            "pass": self.name,
            "seconds": self.seconds,
            "operators": dict(zip(TIMES, self.operators, strict=True)),
            "rewrites": None if self.rewrites is None else dict(zip(("new", "gone"), self.rewrites, strict=True)),
            "collectives": None if sends is None else dict(zip(TIMES, sends, strict=True)),
            "found": self.found,
        }


TIMES, SIDES = ("before", "after"), ("forward", "backward")


@dataclass(frozen=True, repr=False)
class PassTable(Shown):
    """What the passes did to a model.

    Attributes:
        model: the name of the model's class.
        tp, cp: the numbers of ranks.
        size: what the model has, in words.
        rows: the capture, each pass, the check and the emission, in order.
        code: the code before and after the pass that was asked for, by its name.
    """

    model: str
    tp: int
    cp: int
    size: str
    rows: tuple[PassRow, ...]
    code: dict[str, tuple[str, str]]

    def summary(self) -> str:
        """Returns the number of passes and their seconds."""
        sizes = f"tp={self.tp}" + f", cp={self.cp}" * (self.cp > 1)
        return f"{self.model} on {sizes}: {len(self.rows)} passes, {sum(row.seconds for row in self.rows):.2f} s"

    def sheet(self) -> Sheet:
        """Returns the table of the passes."""
        head = ("stage", "pass", "operators", "rewrites", "collectives", "seconds", "found")
        rows = (("model", "", "", "", "", "", self.size), *(row.cells() for row in self.rows))
        kinds = ("note", "", "", "whole", "sent", "note", "note")
        lines = ("collectives  of a step: forward + backward", "one pass     --pass NAME: the code before and after it")
        return Sheet(self.summary(), (Table(head, rows, kinds), lines))  # type: ignore[arg-type]

    def code_sheets(self) -> Iterator[Sheet]:
        """Yields the code before and after the pass that was asked for, or once, if the pass does not change it."""
        for name, (before, after) in self.code.items():
            if before == after:
                yield _code_sheet(f"before and after {name}", before, before, "")
            else:
                yield _code_sheet(f"before {name}", before, after, "gone")
                yield _code_sheet(f"after {name}", after, before, "new")

    def to_dict(self) -> dict[str, Any]:
        """Returns the table as plain data, for JSON."""
        code = [{"pass": name, **dict(zip(TIMES, texts, strict=True))} for name, texts in self.code.items()]
        return {
            "version": DATA_VERSION,
            "model": self.model,
            "tp": self.tp,
            "cp": self.cp,
            "passes": [row.to_dict() for row in self.rows],
            "code": code[0] if code else None,
        }


def _code_sheet(title: str, code: str, other_code: str, mark: Kind) -> Sheet:
    """Returns a sheet of code. mark: of its lines that `other_code` does not have"""
    other_lines = set(other_code.splitlines())
    return Sheet(
        title, (Code(tuple((line, "" if line in other_lines else mark) for line in code.splitlines())),), apart=False
    )


def _many(count: int, singular: str, plural: str = "") -> str:
    return f"{count} {singular if count == 1 else plural or f'{singular}s'}"


def _change(before: Any, after: Any) -> str:
    return f"{after}" if before == after else f"{before} -> {after}"


def _sends(sends: Sends) -> str:
    return " + ".join(map(str, sends)) if any(sends) else "0"


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
                    code[chosen] = step.was(), step.became()
        return PassTable(type(model).__name__, tp, options.cp, _size_of(model), tuple(rows), code)

    return within(f"stages({type(model).__name__}, tp={tp}{f', cp={options.cp}' * (options.cp != 1)})", run)


def _size_of(model: nn.Module) -> str:
    parameters = list(model.parameters())
    size = bytes_text(sum(p.nbytes for p in parameters))
    return f"{_many(len(list(model.modules())), 'module')}, {_many(len(parameters), 'parameter')} of {size}"


def _row(step: Step) -> PassRow:
    before, after = ([node for graph in graphs for node in operators_of(graph)] for graphs in step.graphs)
    # As multisets: an operator that only moved is no rewrite.
    was, became = Counter(map(_kind, before)), Counter(map(_kind, after))
    emits = step.name == "emit"
    return PassRow(
        step.stage,
        step.name,
        step.seconds,
        (len(before), len(after)),
        None if emits else ((became - was).total(), (was - became).total()),
        None if emits else (_sent(step.graphs[0], step), _sent(step.graphs[1], step)),
        ", ".join(_facts(step)),
    )


def _facts(step: Step) -> Iterator[str]:
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
        was, now = (getattr(program, name, UNKNOWN) for program in (step.before, step.program))
        # A fact that a pass has made anew, in the same words, is not told.
        if was is not now and (was is UNKNOWN or describe(step.program) != describe(step.before)):
            yield describe(step.program)


def _sent(graphs: tuple[fx.Graph, ...], step: Step) -> Sends:
    """Returns the number of collectives in graphs, forward and backward."""
    traffics = [
        traffic(graph, step.program) for graph in graphs if any(node.target in COMMUNICATING for node in graph.nodes)
    ]
    return sum(sum(t.forward.values()) for t in traffics), sum(sum(t.backward.values()) for t in traffics)


def _kind(node: fx.Node) -> tuple[str, str, str]:
    """Returns an operator with its arguments; for an operand stands the operator that makes it."""

    def named(argument: fx.Node) -> str:
        return argument.name if argument.op == "placeholder" else operator_text(argument)

    args, kwargs = (str(fx.map_arg(values, named)) for values in (node.args, node.kwargs))
    return operator_text(node), args, kwargs
