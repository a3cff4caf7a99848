"""user_cuts: puts the user's choice of cuts before our own. The checker proves such a cut as it proves any other.

    Before: cut={"lm_head": "whole"}; candidates heads, width, vocab [embed, lm_head], ...
    After:  candidates heads, width, vocab [embed], ...

A choice names parameters by a pattern, and what they are cut along: an axis, a dimension, a side of a product, or
"whole". Candidates lose the parameters that the user wants otherwise; those that the user wants are accepted first.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import fx

from autotp.errors import Error
from autotp.options import COLUMNS, CUT_ALONG, HEADS, ROWS, WHOLE, UserCut, named_axis
from autotp.passes.plan.candidate import Candidate, readers, root
from autotp.passes.plan.infer_axes import Axes
from autotp.rules.call import operator_name
from autotp.sharding.axis import find, touches
from autotp.source_location import line_of


def resolved(cuts: Sequence[UserCut], names: Mapping[str, str]) -> tuple[UserCut, ...]:
    """Returns the choices with the names of their parameters. Of several that fit a parameter the last one counts.

    Words of a library's plan become ours, and those that are about communication alone are left out. Such a plan is for
    all sizes of a class, and may name a module that this model does not have: a warning.

    Args:
        names: each name of a parameter -> the first name of the same parameter.

    Raises:
        Error: a pattern fits no parameter.
    """
    choice: dict[str, int] = {}
    cuts = [cut for cut in cuts if named_axis(cut.along) not in ("", None)]
    ours = {*CUT_ALONG} - {COLUMNS, ROWS}  # Plans of libraries have these two words, and words of their own.
    of_libraries = [cut.along not in ours and not isinstance(cut.along, int) for cut in cuts]
    cuts = [replace(cut, along=along) for cut in cuts if (along := named_axis(cut.along)) is not None]
    for i, cut in enumerate(cuts):
        fitting = [first for name, first in names.items() if _fits(cut.pattern, name)]
        if not fitting and not of_libraries[i]:
            raise _unknown(cut, names)
        if not fitting:
            warnings.warn(str(_unknown(cut, names)), stacklevel=2)
        choice.update(dict.fromkeys(fitting, i))
    return tuple(
        replace(cut, parameters=tuple(name for name, number in choice.items() if number == i))
        for i, cut in enumerate(cuts)
    )


def _fits(pattern: str, name: str) -> bool:
    """True if the segments of the pattern stand one after the other in the name."""
    patterns, segments = pattern.split("."), name.split(".")
    starts = range(len(segments) - len(patterns) + 1)
    return any(all(map(fnmatchcase, segments[start:], patterns)) for start in starts)


def _unknown(cut: UserCut, names: Iterable[str]) -> Error:
    """Returns the error for a pattern that fits nothing, with the patterns that come close."""
    spelled = [re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name).split(".") for name in names]
    parts = {".".join(parts[i:j]) for parts in spelled for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    close = get_close_matches(cut.pattern, sorted(parts - {"*"}), n=3, cutoff=0.5)
    return Error(
        f"{cut}: no parameter has this name, or is in a module of this name",
        fix=f"cut={{{close[0]!r}: {cut.along!r}}}" if close else "a name of model.named_parameters(), or a part of one",
        **({"alternative": ", ".join(map(repr, close[1:]))} if close[1:] else {}),
    )


@dataclass(frozen=True)
class Choices:
    """The user's choices in a graph, and what candidates are for them.

    Attributes:
        cuts: placeholder of a parameter -> the choice for it.
        names: placeholder of a parameter -> its name.
    """

    cuts: Mapping[fx.Node, UserCut]
    names: Mapping[fx.Node, str]

    @staticmethod
    def of(graph: fx.Graph, cuts: Sequence[UserCut], parameters: Mapping[str, str]) -> Choices:
        """Returns the choices for the placeholders of a graph. parameters: placeholder name -> parameter name"""
        by_name = {name: cut for cut in cuts for name in cut.parameters}
        places = {node: parameters[node.name] for node in graph.nodes if node.name in parameters}
        return Choices({node: by_name[name] for node, name in places.items() if name in by_name}, places)

    def allowed(self, candidates: Sequence[Candidate], axes: Axes) -> list[Candidate]:
        """Returns the candidates without the parameters that the user wants otherwise, and without their readers."""
        return [self._allowed(candidate, axes) for candidate in candidates] if self.cuts else list(candidates)

    def _allowed(self, candidate: Candidate, axes: Axes) -> Candidate:
        others = {p for p in candidate.parameters if p in self.cuts and not self._agrees(p, candidate, axes)}
        if not others:
            return candidate
        nodes = [
            (node, factor)
            for node, factor in candidate.nodes
            if not any(root(axes.bound[node].operands[i]) in others for i in factor.ins)
        ]
        parameters = [p for p in candidate.parameters if p not in others]
        weights = [p for p in candidate.weights if p not in others]
        return replace(candidate, nodes=nodes, parameters=parameters, weights=weights)

    def wants(self, candidate: Candidate, axes: Axes, held: Collection[fx.Node]) -> list[fx.Node]:
        """Returns the parameters that are not cut yet, and that the user wants cut along the candidate."""
        return [
            p for p in candidate.parameters if p in self.cuts and p not in held and self._agrees(p, candidate, axes)
        ]

    def narrowed(self, candidate: Candidate, chosen: Sequence[fx.Node], axes: Axes) -> Candidate:
        """Returns an axis that connects many blocks, such as the hidden one, with the readers of these parameters only.

        The axes of a block are cut in the whole block, so that nothing is sent within it.
        """
        if candidate.core or candidate.name == "vocab":
            return candidate
        nodes = [
            (node, factor)
            for node, factor in candidate.nodes
            if any(root(axes.bound[node].operands[i]) in chosen for i in factor.ins)
        ]
        return replace(candidate, nodes=nodes, parameters=list(chosen), pattern=str(self.cuts[chosen[0]]))

    def _agrees(self, parameter: fx.Node, candidate: Candidate, axes: Axes) -> bool:
        """True if a cut of the parameter along the candidate is one that the user has chosen."""
        along = self.cuts[parameter].along
        if isinstance(along, int):
            dims = axes.of(parameter)
            return -len(dims) <= along < len(dims) and touches(dims[along], candidate.leaf)
        if along in (COLUMNS, ROWS):
            return any(
                bool(factor.outs) == (along == COLUMNS)
                for node, factor in candidate.nodes
                if any(root(axes.bound[node].operands[i]) is parameter for i in factor.ins)
            )
        return candidate.name == along or (along == "heads" and candidate.name in HEADS)

    def expect(self, held: Collection[fx.Node], candidates: Sequence[Candidate], axes: Axes) -> None:
        """Raises Error for a choice that is not met.

        Args:
            held: the parameters that are cut.
            candidates: all candidates, also those that the user does not want.
        """
        for cut in dict.fromkeys(self.cuts.values()):
            parameters = [p for p, choice in self.cuts.items() if choice is cut]
            missed = [p for p in parameters if p not in held]
            if cut.along == WHOLE or not missed:
                continue
            # A name of a module stands for those of its parameters that have the axis.
            able = [p for p in missed if any(p in c.parameters and self._agrees(p, c, axes) for c in candidates)]
            if able or len(missed) == len(parameters):
                raise self._unmet(cut, (able or missed)[0], candidates, axes)

    def _unmet(self, cut: UserCut, parameter: fx.Node, candidates: Sequence[Candidate], axes: Axes) -> Error:
        name = self.names[parameter]
        agreeing = [c for c in candidates if parameter in c.parameters and self._agrees(parameter, c, axes)]
        possible = [c for c in candidates if parameter in c.parameters and _cuttable(parameter, c)]
        dims = [dim for dim, axis in enumerate(axes.of(parameter)) if any(touches(axis, c.leaf) for c in possible)]
        names = [repr(c.name) for c in possible if c.name and c.name != cut.along]
        nearest = [*dict.fromkeys(names), *(str(dim) for dim in dims if dim != cut.along), repr(WHOLE)]
        facts = {"fix": f"cut={{{name!r}: {nearest[0]}}}"}
        if nearest[1:]:
            facts["alternative"] = ", ".join(nearest[1:])
        if not agreeing:
            shape = list(parameter.meta["val"].shape)
            return Error(f"{cut}: `{name}` {shape} has no such axis that can be cut", **facts)
        nodes = {node for node, _ in agreeing[0].nodes}
        against = [node for node in readers(parameter) if node not in nodes]
        if against:
            return Error(
                f"{cut}: `{operator_name(against[0])}` reads `{name}` and needs the whole of this axis",
                at=line_of(against[0]),
                **facts,
            )
        return Error(f"{cut}: what reads `{name}` is cut along another axis, which the user's choice has, too", **facts)


NO_CHOICES = Choices({}, {})


def _cuttable(parameter: fx.Node, candidate: Candidate) -> bool:
    """True if all readers of the parameter can be cut along the candidate."""
    nodes = {node for node, _ in candidate.nodes}
    return find(candidate.leaf).kind != "grid" and all(node in nodes for node in readers(parameter))
