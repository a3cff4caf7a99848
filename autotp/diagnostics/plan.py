"""Plan: which parameters are cut and why, what a step communicates, what stays whole; and its text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autotp.diagnostics.attention_kernels import AttentionRow, attention_lines
from autotp.display.sheet import Sheet, Shown, Table
from autotp.display.text_table import bytes_text, folded
from autotp.errors import Error
from autotp.options import WHOLE
from autotp.sharding.layout import Layout

LAYER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
"""The number of a layer in the name of a parameter."""
BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")
"""The name of a numbered block, at the beginning of the name of a module in it."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
TYPES = 4
"""The most types of values that are cut along a sequence in the text of a plan."""


@dataclass(frozen=True)
class CutRow:
    """A parameter that is cut.

    Attributes:
        name: its name in the model.
        layout: its layout.
        forward, backward: the collective that its operator causes, or "".
        why: the recognised pattern of its axis.
    """

    name: str
    layout: Layout
    forward: str
    backward: str
    why: str


@dataclass(frozen=True)
class Cause:
    """A step to the cause why a parameter stays whole. operator: "" for a step that is about an axis"""

    operator: str
    at: str
    why: str

    def __str__(self) -> str:
        place = self.at.split("  ")[0]
        return f"`{self.operator}` ({place}) {self.why}" if self.operator else self.why


@dataclass(frozen=True)
class WholeRow:
    """A parameter that every rank holds whole, or (`operator`) an operator without a rule.

    Attributes:
        at: the source line of its reader.
        because: where its reader is not cut: the reader, then the operators that lead to the last one, the cause.
    """

    name: str
    shape: tuple[int, ...]
    at: str
    reason: str
    in_block: bool = False
    operator: bool = False
    because: tuple[Cause, ...] = ()

    def cells(self) -> tuple[str, str, str]:
        """Returns shape, reason and place, for a table; the reason does not repeat the place of the reader."""
        place = self.at.split("  ")[0]
        return str(list(self.shape)).replace("'", ""), self.reason.replace(f" ({place})", "", 1), place


@dataclass(frozen=True)
class StepCollective:
    """One collective of a step.

    Attributes:
        kind: all-reduce, all-gather, reduce-scatter, all-to-all.
        module: the module that waits for it.
        bytes: the size of its tensor, in bytes.
        backward: True if it runs in backward.
        parameter: True if its tensor is the gradient of a parameter, not of an activation.
        axis: the mesh axis, tp or cp.
    """

    kind: str
    module: str
    bytes: int
    backward: bool
    parameter: bool
    axis: str = "tp"


@dataclass(frozen=True)
class Traffic:
    """The collectives of one step; their bytes are for inputs of the given `shapes`."""

    DATA = ("forward", "backward", "forward_bytes", "backward_bytes", "shapes")

    sends: tuple[StepCollective, ...]
    shapes: tuple[tuple[int, ...], ...]

    def over(self, axis: str) -> Traffic:
        """Returns the collectives over one mesh axis."""
        return replace(self, sends=tuple(sent for sent in self.sends if sent.axis == axis))

    @property
    def forward(self) -> dict[str, int]:
        """Kind -> number of collectives in forward."""
        return dict(Counter(sent.kind for sent in self.sends if not sent.backward))

    @property
    def backward(self) -> dict[str, int]:
        """Kind -> number of collectives in backward."""
        return dict(Counter(sent.kind for sent in self.sends if sent.backward))

    @property
    def forward_bytes(self) -> int:
        return sum(sent.bytes for sent in self.sends if not sent.backward)

    @property
    def backward_bytes(self) -> int:
        return sum(sent.bytes for sent in self.sends if sent.backward)


@dataclass(frozen=True)
class KeptRow:
    """Values that backward needs, of one line of the model, in all blocks that have it.

    Attributes:
        at: the source line.
        bytes: what they are together, in one call.
        staying: what of it stays on the device.
        done: what the budget did with them: "keep", "recompute", "host", "bits" -> the number of blocks.
    """

    at: str
    bytes: int
    staying: int
    done: Mapping[str, int]


@dataclass(frozen=True)
class MemoryPlan:
    """What a budget (`memory=`) did with the values of the last call.

    Attributes:
        memory: the option.
        needed: bytes of this rank at its fullest moment, as the budget counts them.
        fixed: bytes of parameters, gradients and optimizer states.
        kept: bytes that a call keeps for backward.
        kept_without: bytes that it would keep without a budget.
        seconds: how much longer backward takes, as predicted.
        collectives: line of the model -> the number of collectives that run again, in all blocks; their seconds are
            among those of backward.
        gigabyte: seconds of a call that the next gigabyte would save.
        largest: the largest kept values, by line of the model.
    """

    memory: int | str
    needed: int
    fixed: int
    kept: int
    kept_without: int
    seconds: float
    collectives: Mapping[str, int]
    gigabyte: float
    largest: tuple[KeptRow, ...]

    def table(self) -> Table:
        """Returns the table of the largest values."""
        rows = tuple((r.at, bytes_text(r.bytes), bytes_text(r.staying), _done(r)) for r in self.largest)
        return Table(("kept for backward", "bytes", "stay", "budget"), rows, ("", "", "", "note"))

    def lines(self) -> tuple[str, ...]:
        """Returns the lines about a budget."""
        nbytes, without_budget, needed = map(bytes_text, (self.kept, self.kept_without, self.needed))
        again = f", with {sum(self.collectives.values())} collectives" * bool(self.collectives)
        return (
            f"memory      {self.memory}: a call keeps {nbytes} of {without_budget}; this rank needs {needed}",
            f"budget      backward takes {self.seconds * 1e3:.3g} ms longer{again} (predicted)",
            *(f"budget      {n} collectives run again: {line}" for line, n in self.collectives.items()),
            f"budget      the next gigabyte would save {self.gigabyte * 1e3:.3g} ms",
        )


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """The plan for a model on `tp` ranks, returned by `explain`; `print(plan)` is a table of at most 100 columns.

    On a terminal it is in colour, and a notebook shows it as HTML. `f"{plan}"` is plain, for files and logs.

    Attributes:
        model: the name of the model's class.
        tp: the number of ranks that parameters are cut over.
        cuts: the parameters that are cut, with the collectives that they cause and the reason.
        whole: the parameters and operators that stay replicated, with source line and reason.
        bytes_total: bytes of all parameters.
        bytes_rank: bytes of the parameters of the rank that holds most.
        traffic: the collectives of a step, forward and backward, and their bytes.
        along_sequence: the number of operators that are cut along the sequence; None without `sequence_parallel`.
        outputs: the layouts of the outputs that stay cut.
        cp: the number of ranks that sequences are cut over; `whole` has the operators that need whole sequences.
        in_sequence: the number of operators that are cut along a sequence over these.
        balanced: the number of causal attentions in which all of them have equal work (`balance`).
        unbalanced: why other causal attentions have not.
        notes: what passes say about the plan: the beginning of a line -> the rest of it. With `overlap="batch"`,
            "overlap" -> how many operators compute the batch, or one row's sequence, in halves.
        types: the types of the values that these operators return, such as `[b, s@cp, 3072@tp]` -> how many have it.
        attention: the attentions of a rank, with the kernels that can compute each.
        memory: what a budget did with the values of the last call; None without a budget.
        source: the captured model, which `save_page` draws; only in what `explain` and `verify` return, and not a part
            of what is compared, copied by pickle or printed.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        >>> plan = autotp.explain(model, 2, example_inputs=torch.ones(2, 4))
        >>> plan.bytes_total, plan.bytes_rank, plan.traffic.forward, plan.traffic.backward
        (592, 304, {'all-reduce': 1}, {})
        >>> plan
        Plan(Sequential on tp=2: 3 of 4 parameters are cut, the fullest rank holds 51.4%)
        >>> [(whole.name, whole.reason) for whole in plan.whole]
        [('2.bias', 'every rank uses it after the sum over ranks')]
    """

    DATA = (
        "model", "tp", "cp", "cut", "cuts", "whole", "bytes_total", "bytes_rank", "traffic", "traffic_over_cp",
        "in_sequence", "balanced", "unbalanced", "notes", "types", "along_sequence", "outputs",
        "attention", "memory",
    )  # fmt: skip

    model: str
    tp: int
    cuts: tuple[CutRow, ...]
    whole: tuple[WholeRow, ...]
    bytes_total: int
    bytes_rank: int
    traffic: Traffic
    along_sequence: int | None = None
    outputs: tuple[Layout, ...] = ()
    cp: int = 1
    in_sequence: int = 0
    balanced: int = 0
    unbalanced: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, int] = field(default_factory=dict)
    attention: tuple[AttentionRow, ...] = ()
    memory: MemoryPlan | None = None
    source: Any = field(default=None, compare=False)

    def summary(self) -> str:
        """Returns how much is cut."""
        operators = [row for row in self.whole if row.operator]
        cut, every = len(self.cuts), len(self.cuts) + len(self.whole) - len(operators)
        without = f", {len(operators)} operators have no rule" if operators else ""
        fullest = f"the fullest rank holds {self.share:.1%}"
        return f"{self.model} on {self.sizes}: {cut} of {every} parameters are cut, {fullest}{without}"

    @property
    def sizes(self) -> str:
        """The sizes of the mesh as text."""
        return f"tp={self.tp}" + f", cp={self.cp}" * (self.cp > 1)

    @property
    def share(self) -> float:
        """The part of all bytes that the rank with the most holds."""
        return self.bytes_rank / self.bytes_total if self.bytes_total else 1.0

    @property
    def traffic_over_cp(self) -> Traffic:
        """The part of `traffic` between context-parallel ranks."""
        return self.traffic.over("cp")

    def expect(self, budget: Mapping[str, int]) -> None:
        """Raises Error if some numbered block sends more than a budget allows; for a test of one's own.

        Args:
            budget: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" -> the most of them in a block's forward;
                with "backward_" before the name, in its backward. What is not named is not limited.

        Raises:
            Error: a block sends more, or a name is none of these.

        Example:
            >>> model = nn.Sequential(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)))
            >>> autotp.explain(model, 2, example_inputs=torch.ones(2, 4)).expect({"all_reduce": 1, "all_gather": 0})
        """
        if unknown := [name for name in budget if name.removeprefix("backward_") not in COLLECTIVES]:
            raise Error(f"expect has {unknown[0]!r}", expected=", ".join(map(repr, COLLECTIVES)))
        sends: dict[tuple[str, str], list[str]] = {}
        for sent in self.traffic.sends:
            name = "backward_" * sent.backward + sent.kind.replace("-", "_")
            if (block := BLOCK.match(sent.module)) is not None and name in budget:
                inner = sent.module.removeprefix(block[0]).lstrip(".")
                sends.setdefault((block[0], name), []).append(inner or "itself")
        for (block_name, name), modules in sends.items():
            if len(modules) > budget[name]:
                collective, side = name.removeprefix("backward_"), "backward" if name.startswith("back") else "forward"
                raise Error(
                    f"`{block_name}` has {len(modules)} {collective} in {side}: {', '.join(modules)}",
                    expected=f"at most {budget[name]}",
                    fix="autotp.explain(...), whose table says what causes each",
                )

    @property
    def cut(self) -> dict[str, str | int]:
        """What is cut along what, as `cut=` of `parallelize` takes it: print it, change an entry, and give it back."""
        along: dict[str, str | int] = {row.name: row.layout.axis or row.layout.dim or 0 for row in self.cuts}
        along |= {row.name: WHOLE for row in self.whole if not row.operator}
        names_by_pattern: dict[str, list[str]] = {}
        for name in along:
            names_by_pattern.setdefault(LAYER.sub("*", name), []).append(name)
        # One entry for layers that are cut alike; a weight of a layer that is not has its own.
        entries = {
            key: along[key if key in along else names[0]]
            for pattern, names in names_by_pattern.items()
            for key in ([pattern] if len({along[name] for name in names}) == 1 else names)
        }
        # The last key that fits counts, and a short one fits within longer names: the most exact ones come last.
        return dict(sorted(entries.items(), key=lambda entry: (entry[0].count("."), -entry[0].count("*"))))

    def sheet(self) -> Sheet:
        """Returns the tables of what is cut and what stays whole, and the totals."""
        head = ("cut", "shape", "forward", "backward", "why")
        cut = Table(head, _cut_rows(self), ("cut", "", "sent", "sent", "note"))
        whole = Table(("whole on every rank", "shape", "why", "at"), _whole_rows(self), ("whole", "", "note", "note"))
        tables = [table for table in (cut, whole) if table.rows]
        tables += [self.memory.table()] if self.memory is not None and self.memory.largest else []
        return Sheet(f"{self.model} on {self.sizes}", (*tables, tuple(_totals(self))))


# ---- text


def _cut_rows(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Returns the rows of the table of cut parameters; layers that are alike are one row."""
    return tuple(folded([(c.name, (str(c.layout), c.forward, c.backward, c.why)) for c in plan.cuts]))


def _whole_rows(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Returns the rows of the table of what stays whole."""
    return tuple(folded([(row.name, row.cells()) for row in plan.whole]))


def _done(row: KeptRow) -> str:
    return ", ".join(f"{count} {fate}" for fate, count in row.done.items())


def _totals(plan: Plan) -> Iterator[str]:
    """Yields the lines below the tables: bytes, and what a step sends."""
    total, fullest = bytes_text(plan.bytes_total), bytes_text(plan.bytes_rank)
    yield f"parameters  {total}, the fullest rank holds {fullest} ({plan.share:.1%})"
    if plan.along_sequence is not None:
        none = "nothing: no sum over ranks has an axis along which an attention sums"
        yield f"sequence    {f'{plan.along_sequence} operators are cut along it' if plan.along_sequence else none}"
    if plan.outputs:
        layout_counts = Counter(str(layout).replace("-1", "?") for layout in plan.outputs)
        cut_outputs = ", ".join(f"{n} x {text}" if n > 1 else text for text, n in layout_counts.items())
        yield f'outputs     {cut_outputs} stay cut: autotp.gather makes them whole, or outputs="full"'
    yield from (f"{name:<12}{note}" for name, note in plan.notes.items())
    yield from (f"kernels     {line}" for line in attention_lines(plan.attention))
    yield from () if plan.memory is None else plan.memory.lines()
    if plan.cp > 1 and not plan.in_sequence:
        yield "over cp     no sequence can be cut: every cp rank computes the whole call"
    if plan.in_sequence:
        yield f"over cp     {plan.in_sequence} operators are cut along the sequence, and parameters are whole"
        if plan.balanced:
            yield f"balance     the ranks have equal work in {plan.balanced} causal attentions"
        for reason in plan.unbalanced:
            yield f"balance     the last rank has the most work in causal attention: {reason}"
        commonest = sorted(plan.types.items(), key=lambda item: -item[1])[:TYPES]
        yield f"types       {', '.join(f'{n} x {text}' for text, n in commonest)}{', ...' * (len(plan.types) > TYPES)}"
    inputs = " ".join("x".join(map(str, shape)) for shape in plan.traffic.shapes if shape)
    for axis in ("tp", "cp") if plan.cp > 1 else ("tp",):
        t, over = plan.traffic.over(axis), f" over {axis}" * (plan.cp > 1)
        for name, counts, size in (("forward", t.forward, t.forward_bytes), ("backward", t.backward, t.backward_bytes)):
            kinds = ", ".join(f"{n} {collective}" for collective, n in sorted(counts.items())) or "no collective"
            yield f"{name:<12}{kinds}{over}; {bytes_text(size)} for inputs {inputs}"
