"""Program: a model's graph and the facts about it, between two passes; a type for each set of facts that is known."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import fx

from autotp.options import Options
from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.capture import ALWAYS, OFF
from autotp.passes.capture.captured import NOTHING_OPENED, Captured, Opened
from autotp.passes.capture.guards.gradient_queries import GradientsWanted
from autotp.passes.capture.guards.values import NO_VALUES, KnownValues
from autotp.passes.capture.python_state.walk import Path
from autotp.passes.pipeline.batch_sums import Name
from autotp.passes.pipeline.loss_totals import Totals
from autotp.passes.pipeline.row_independence import batched
from autotp.passes.plan.candidate import Candidate
from autotp.passes.plan.choose import Decision
from autotp.passes.plan.infer_axes import Axes
from autotp.passes.plan.propagate import Have
from autotp.rules.call import returned
from autotp.sharding.layout import Layout

P = TypeVar("P", bound="CapturedProgram")


@dataclass(frozen=True, kw_only=True)
class CallState:
    """The state around a captured call, beside its arguments.

    Attributes:
        autocast: the settings of autocast around the model.
        layouts: the layouts of parameters that are cut already, for a further graph; None for a model's first graph.
        cut_inputs: layouts of inputs that are cut: by place among the arguments' tensors, or by path of an attribute.
        cut_caches: layouts of buffers that are cut, by first name.
        opened: the attributes that change from call to call.
        wanted: the answers to the model's questions about gradients.
        rows: places, among the arguments' tensors, of those with the rows of a batch; None: those as long as the first.
        values: what is known of the values that Python reads of tensors.
        looks: whether the graph may be one for batches with padding, or without: NOTE [Looks at masks]
        training: whether the model is in training; the capture notes it.
        sums: of one row, the sums over the batch in the graph of two rows: NOTE [Names of sums]
    """

    autocast: Autocast = OFF
    layouts: Mapping[str, Layout] | None = None
    cut_inputs: Mapping[int | Path, Layout] = field(default_factory=dict)
    cut_caches: Mapping[str, Layout] = field(default_factory=dict)
    opened: Opened = NOTHING_OPENED
    wanted: GradientsWanted = ALWAYS
    rows: frozenset[int] | None = None
    values: KnownValues = NO_VALUES
    looks: bool = True
    training: bool = True
    sums: frozenset[Name] | None = None


FIRST_CALL = CallState()


@dataclass(frozen=True, kw_only=True)
class SequenceFacts:
    """What `context_parallel` did to a program.

    Attributes:
        uncut_graph: the graph before sequences are cut over the axis `cp`; None if none is cut.
        operators: the number of operators that are cut.
        balanced: the number of causal attentions in which all ranks have equal work.
        unbalanced: why other causal attentions are not so: a sentence for each reason.
    """

    uncut_graph: fx.Graph | None = None
    operators: int = 0
    balanced: int = 0
    unbalanced: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CapturedProgram:
    """A model's graph and the facts about it before its axes are known. A later type has what later passes find.

    Attributes:
        captured: the captured graph and its facts.
        graph: the graph after the last pass.
        tp: number of ranks.
        options: the user's options.
        cp_rank: the rank on the axis `cp`, whose graph is made, if sequences are cut over this axis.
        sequences: then, what is cut.
        undivided: the operators that read all of what other operators divide, each with the reason.
        notes: what the user is told of a pass: the beginning of a line -> the rest of it.
        call: the state around the captured call.
        updated: placeholder names of the buffers whose new values `graph` returns last (functionalize).
        totals: how a part of the batch contributes to the totals of a summed loss (loss_totals).
    """

    captured: Captured
    graph: fx.Graph
    tp: int
    options: Options
    call: CallState
    cp_rank: int = 0
    sequences: SequenceFacts = SequenceFacts()
    undivided: tuple[tuple[fx.Node, str], ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    updated: Sequence[str] = ()
    totals: Totals | None = None

    def with_facts(self, later: type[P], **facts: Any) -> P:
        """Returns the program as one of a later type, with the facts that this type adds; they replace known ones."""
        return later(**vars(self) | facts)

    @property
    def rows(self) -> list[str]:
        """The names of the inputs that are a batch."""
        inputs, places = self.captured.inputs, self.call.rows
        return batched(inputs, self.captured.example) if places is None else [inputs[i] for i in sorted(places)]

    @property
    def cut_inputs(self) -> dict[str, Layout]:
        """Placeholder name -> layout of a cut input, with the sizes of the call that was cut."""
        names: dict[int | Path, str] = dict(enumerate(self.captured.inputs))
        names.update(self.captured.input_at)
        return {names[i]: layout for i, layout in self.call.cut_inputs.items() if i in names}

    @property
    def local_inputs(self) -> dict[str, Layout]:
        """Placeholder name -> layout of a cut input, with its sizes in this graph."""
        shapes = {n.name: tuple(n.meta["val"].shape) for n in self.graph.find_nodes(op="placeholder")}
        return {n: replace(how, shape=shapes[n]) for n, how in self.cut_inputs.items() if n in shapes}

    @property
    def local_caches(self) -> dict[str, Layout]:
        """Placeholder name -> layout of a buffer that is cut already."""
        cut, names = self.call.cut_caches, self.captured.buffers
        return {n.name: cut[names[n.name]] for n in self.graph.find_nodes(op="placeholder")
                if names.get(n.name) in cut}  # fmt: skip

    @property
    def sources(self) -> frozenset[fx.Node]:
        """The nodes that may require a gradient: parameters and inputs."""
        return self.sources_of(self.graph)

    def sources_of(self, graph: fx.Graph) -> frozenset[fx.Node]:
        """Returns the nodes of another graph of the program that may require a gradient."""
        names = {*self.captured.parameters, *self.captured.inputs}
        return frozenset(n for n in graph.nodes if n.op == "placeholder" and n.name in names)


@dataclass(frozen=True, kw_only=True)
class ProgramWithAxes(CapturedProgram):
    """A program after the pass `decouple`. axes: those of `graph`"""

    axes: Axes


@dataclass(frozen=True, kw_only=True)
class ProgramWithCandidates(ProgramWithAxes):
    """A program after the pass `match`.

    Attributes:
        stay: positions of the outputs that stay cut if they are cut.
        candidates: the axes that may be cut, best first.
    """

    stay: Sequence[int]
    candidates: list[Candidate]


@dataclass(frozen=True, kw_only=True)
class ProgramWithDecision(ProgramWithCandidates):
    """A program after the pass `choose`. decision: what is cut"""

    decision: Decision


@dataclass(frozen=True, kw_only=True)
class ProgramWithPlacements(ProgramWithDecision):
    """A program after the pass `propagate`.

    Attributes:
        differentiable: the values of `graph` that a gradient may flow through.
        have: the placement of each value.
        hoisted: operators of `graph` that all ranks compute whole, from copies (hoist).
    """

    differentiable: set[fx.Node]
    have: Have
    hoisted: Collection[fx.Node] = ()


@dataclass(frozen=True, kw_only=True)
class Program(ProgramWithPlacements):
    """A program after the last pass of the stage plan: all that a rank's graph is made of.

    Attributes:
        layouts: parameter name -> layout.
        local_outputs: position -> layout, for outputs that stay cut.
        caches: placeholder name -> layout, for buffers that are cut.
    """

    layouts: dict[str, Layout]
    local_outputs: dict[int, Layout]
    caches: dict[str, Layout]

    @property
    def outputs_before_buffers(self) -> int:
        """The number of outputs before the new values of buffers."""
        return len(returned(self.graph)) - len(self.updated)

    @property
    def layouts_of_caches(self) -> dict[str, Layout]:
        """Buffer name -> layout, for buffers that are cut."""
        return {self.captured.buffers[place]: layout for place, layout in self.caches.items()}
