"""reasons: why a parameter stays whole on every rank.

NOTE [Why a reader is not cut]
A parameter can be stored cut only if all its readers are cut along one of its axes. A reader is not cut if it cannot be
cut along the axis, or if nobody chose the axis. So the cause is looked for in this order: an operator that divides the
axis in another way; the reader itself, which needs the whole axis; a product that is cut along another axis already; an
operator without a rule that makes what the reader reads. Each step names its operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from torch import fx

from autotp.diagnostics.node_text import operator_text
from autotp.diagnostics.plan import Cause
from autotp.ops import collectives
from autotp.options import WHOLE
from autotp.passes.plan.candidate import Candidate, contracts, maker
from autotp.passes.plan.choose import Refusal, refusal
from autotp.passes.plan.infer_axes import Axes, visit
from autotp.passes.plan.match import candidate_at
from autotp.passes.program.program import Program
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Axis, find, leaves
from autotp.source_location import line_of

WHY = {
    "no rule": "has no rule",
    "whole": "needs the whole of its axis of {size}",
    "tangled": "divides its axis of {size} in another way",
    "read": "a weight with its axis of {size} has another reader",
    "element": "one element cannot be divided",
    "unweighed": "no product has its axis of {size}",
    "taken": "the weights that have this axis of {size} are cut along their other one: {others}",
    "small": "a cut of its axis of {size} would divide less than half a percent of the parameters",
    "sent": "a cut of its axis of {size} would send more than it saves{most}",
}
"""What is said of an operator, or of an axis, that is the cause why a reader is not cut."""
NORM_OPERATORS = 16
"""The most operators before a vector among which a mean over its axis is looked for."""
STEPS = 4
"""The most steps in the text of a reason."""


def read_by(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields the readers of a parameter, each with what it reads: the parameter, or its copy over another mesh axis."""
    for user in node.users:
        if user.target is collectives.copy:
            yield from read_by(user)
        else:
            yield node, user


class Reasons:
    """The reasons why parameters of a model stay whole."""

    def __init__(self, analysis: Program) -> None:
        self.analysis = analysis
        names, axes = analysis.captured.parameters, analysis.axes
        self.parameters = [node for node in analysis.graph.nodes if node.name in names and node in axes.dims]
        self.total = sum(node.meta["val"].numel() for node in self.parameters)
        self._choices = {name: cut for cut in analysis.options.cut for name in cut.parameters if cut.along == WHOLE}
        self._refusals: dict[int, tuple[Candidate, Refusal]] = {}

    def of(self, node: fx.Node, reader: fx.Node) -> tuple[str, tuple[Cause, ...]]:
        """Returns why a parameter stays whole; where its reader is not cut, the steps to the cause as well.

        Args:
            node: the parameter.
            reader: its first reader.
        """
        analysis = self.analysis
        bound = analysis.axes.bound.get(reader)
        if analysis.tp == 1:
            return "tp=1: weights are whole", ()
        if (choice := self._choices.get(self.analysis.captured.parameters[node.name])) is not None:
            return str(choice), ()
        if bound is not None and not bound.known:
            return f"{reader.target} {WHY['no rule']}", ()
        if has(reader.target, Trait.NORM) or self._scales_a_norm(node, reader):
            return "the norm needs the whole width", ()
        if has(reader.target, Trait.LOOKUP):
            return "a small table, or a table of positions", ()
        if reader in analysis.hoisted:
            return "every rank needs all of its result", ()
        if contracts(bound):
            return "a cut would send more than it saves", ()
        if reader in analysis.decision.cuts:
            return "its reader is cut along another axis", ()
        if any(_is_reduced(operand, analysis) for operand in reader.all_input_nodes):
            return "every rank uses it after the sum over ranks", ()
        because = Cause(operator_text(reader), line_of(reader), "is not cut"), *self._causes(node, reader)
        return f"its reader {_text(because)}", because

    def _scales_a_norm(self, node: fx.Node, reader: fx.Node) -> bool:
        """True if a vector scales or shifts the result of a norm that is written out, as a mean and products."""
        axes, (axis, *more) = self.analysis.axes, self.analysis.axes.of(node) or (None,)
        # A cast of the weight, or 1 plus it (Gemma's), is read in its place.
        while reader.all_input_nodes == [node] and len(reader.users) == 1:
            node, reader = reader, next(iter(reader.users))
        queue, visited = [reader], {node}
        # A norm with a cast, an epsilon and a variance is made of about ten operators.
        while queue and not more and axis is not None and len(visited) < NORM_OPERATORS:
            operator_node = queue.pop(0)
            bound = axes.bound.get(operator_node)
            if bound is None or operator_node in visited or contracts(bound):
                continue
            visited.add(operator_node)
            if any(find(factor.axis) is find(axis) and factor.ins and not factor.outs for factor in bound.factors):
                return True
            queue += operator_node.all_input_nodes
        return False

    def _causes(self, node: fx.Node, reader: fx.Node) -> tuple[Cause, ...]:
        """Returns the steps from the reader of a parameter to the cause why it is not cut."""
        every = dict.fromkeys(leaf for axis in self.analysis.axes.of(node) for leaf in leaves(axis))
        lengths = [leaf for leaf in every if leaf.size.number > 1 and not leaf.size.symbols]
        if not lengths:
            return (Cause("", "", WHY["element"]),)
        weighed = [leaf for leaf in lengths if not leaf.tangled and self._refusal(leaf)[1].kind != "unweighed"]
        return self._cause(node, reader, max(weighed or lengths, key=lambda leaf: leaf.size.number))

    def _cause(self, node: fx.Node, reader: fx.Node, leaf: Axis) -> tuple[Cause, ...]:
        """Returns the steps to the cause why the reader is not cut along one axis of the parameter."""
        size = leaf.size.number
        if leaf.tangled:
            whole = next(axis for axis in self.analysis.axes.of(node) if leaf in leaves(axis))
            return (_cause(self._tangling.get(node, reader), "tangled", whole.size.number),)
        if self.analysis.axes.bound[reader].cuttable(leaf) is None:
            return (_cause(reader, "whole", size),)
        candidate, refused = self._refusal(leaf)
        if refused.kind == "read":
            blocked = refused.nodes[0]
            has_rule = blocked not in self.analysis.axes.bound or self.analysis.axes.bound[blocked].known
            return (
                Cause("", "", WHY["read"].format(size=size)),
                _cause(blocked, "whole" if has_rule else "no rule", size),
            )
        if refused.kind == "unweighed" and (path := self._path(reader, candidate)):
            steps = [Cause(operator_text(step), line_of(step), "is not cut") for step in path[:-1]]
            return (*steps, _cause(path[-1], "no rule", size))
        names = [f"{find(rival.leaf).size} {rival.name}".rstrip() for rival in refused.others]
        sender_text = "".join(
            f", most at `{operator_text(sender)}` ({line_of(sender).split('  ')[0]})" for sender in refused.nodes
        )
        rival_names = ", ".join(dict.fromkeys(names)) or "another one"
        return (Cause("", "", WHY[refused.kind].format(size=size, others=rival_names, most=sender_text)),)

    def _path(self, reader: fx.Node, candidate: Candidate) -> list[fx.Node]:
        """Returns the operators from a reader up to one without a rule that makes the axis; without the reader itself.

        They are those that compute along the axis. Empty, if there is no such operator.
        """
        axes, read_from = self.analysis.axes, {reader: reader}
        queue = [reader]
        # The list grows meanwhile, so that near operators are looked at before far ones.
        for node in queue:
            if not axes.bound[node].known:
                path = [node]
                while read_from[path[0]] is not reader:
                    path.insert(0, read_from[path[0]])
                return path
            factor = axes.bound[node].cuttable(candidate.leaf)
            made = [maker(axes.bound[node].operands[i]) for i in (factor.ins if factor is not None else ())]
            unvisited = [operand for operand in made if operand in axes.bound and operand not in read_from]
            read_from.update(dict.fromkeys(unvisited, node))
            queue += dict.fromkeys(unvisited)
        return []

    def _refusal(self, leaf: Axis) -> tuple[Candidate, Refusal]:
        """Returns an axis as a candidate, and why it was refused."""
        key = id(find(leaf))
        if key not in self._refusals:
            program = self.analysis
            having = [node for node in self.parameters if any(axis is find(leaf) for axis in self._leaves(node))]
            candidate = candidate_at(find(leaf), self._touching.get(key, ()), program.axes, having)
            why = refusal(candidate, program.decision, program.axes, program.differentiable, self.total, program.tp)
            self._refusals[key] = candidate, why
        return self._refusals[key]

    def _leaves(self, node: fx.Node) -> Iterator[Axis]:
        return (leaf for axis in self.analysis.axes.of(node) for leaf in leaves(axis))

    @cached_property
    def _touching(self) -> dict[int, list[fx.Node]]:
        """The operators that have a leaf, by its id."""
        nodes_by_leaf: dict[int, list[fx.Node]] = {}
        for node, bound in self.analysis.axes.bound.items():
            for leaf in dict.fromkeys(leaf for factor in bound.factors for leaf in leaves(factor.axis)):
                nodes_by_leaf.setdefault(id(leaf), []).append(node)
        return nodes_by_leaf

    @cached_property
    def _tangling(self) -> dict[fx.Node, fx.Node]:
        """Parameter -> the first operator behind which one of its axes can no longer be cut."""
        axes, tangling = Axes(), dict[fx.Node, fx.Node]()
        # Infers the axes once more, operator by operator: the program has only the result of all.
        for node in self.analysis.graph.nodes:
            visit(node, axes)
            for parameter in self.parameters:
                dims = axes.of(parameter) if parameter in axes.dims and parameter not in tangling else ()
                if any(leaf.tangled for axis in dims for leaf in leaves(axis)):
                    tangling[parameter] = node
        return tangling


def _cause(node: fx.Node, why: str, size: int) -> Cause:
    return Cause(operator_text(node), line_of(node), WHY[why].format(size=size))


def _text(because: Sequence[Cause]) -> str:
    """Returns the steps from a reader to the cause, without most of those between."""
    first, *between, last = because
    steps = [first, *between[: STEPS - 2]]
    texts = [*map(str, steps), *["..."] * (len(because) > STEPS)]
    itself = (last.operator, last.at) == (first.operator, first.at)
    return ": ".join([*texts, f"it {last.why}" if itself else f"{last}"])


def _is_reduced(value: fx.Node, analysis: Program) -> bool:
    """True for a value that a cut operator sums over ranks."""
    leaf = analysis.decision.cuts.get(value)
    factor = analysis.axes.bound[value].cuttable(leaf) if leaf is not None else None
    # The axis is summed over, and not in the result: each rank has a term of the sum.
    return factor is not None and not factor.outs and factor.summed
