"""bisect: finds, by halving, the cut, the pass and the rule that a difference from one device comes from.

A trial runs the comparison of `verify` again, with half of the suspects switched off: cuts are given up (their
parameters stay whole), passes are left out, operators lose their rules (they get whole tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from autotp.diagnostics.verify import Report, compare_calls
from autotp.display.progress import Line, progress
from autotp.display.sheet import Sheet, Shown, Table
from autotp.errors import Error
from autotp.options import OPTIONAL, Options
from autotp.passes.capture.example_inputs import Inputs
from autotp.passes.plan.choose import Decision, accept
from autotp.passes.program.program import CapturedProgram, ProgramWithDecision
from autotp.rules.registry import RULES, without_rules

T = TypeVar("T")
SHOWN = 3
"""The weights that are named beside the guilty one."""


@dataclass(frozen=True, repr=False)
class Blame(Shown):
    """What a difference comes from.

    Attributes:
        weights: the parameters that are cut along the guilty axes, the guilty one first; empty if the difference stays
            when nothing is cut.
        why: the pattern of the first guilty axis in the plan.
        passes: the optional passes without which there is no difference.
        rule: the operator without whose rule there is no difference, though most stays cut; "" if a pass is guilty.
        trials: the number of comparisons.
    """

    weights: tuple[str, ...]
    why: str
    passes: tuple[str, ...]
    rule: str
    trials: int

    def summary(self) -> str:
        """Returns how it was found."""
        return f"what the difference comes from, found by {self.trials} comparisons"

    def sheet(self) -> Sheet:
        """Returns the table of what a difference comes from."""
        return Sheet(self.summary(), (self.table(),), "bad", apart=False)

    def table(self) -> Table:
        """Returns what a difference comes from: what it is, and its name."""
        first, *further = self.weights or ("none: the difference stays when nothing is cut",)
        more = f" and {len(further) - SHOWN} more" if len(further) > SHOWN else ""
        passes = (
            f"{', '.join(self.passes)} (leave it out with --without)" if self.passes else "none that can be left out"
        )
        rows = (
            ("guilty weight", first),
            *[("cut with it", f"{', '.join(further[:SHOWN])}{more}  ({self.why})")] * bool(further),
            ("guilty pass", passes),
            ("guilty rule", self.rule or "none"),
        )
        return Table(("", ""), rows, ("note", ""))


def halve(suspects: Sequence[T], differs: Callable[[Sequence[T]], bool]) -> list[T]:
    """Returns a smallest part of the suspects with which there is a difference, found by halving (Zeller 1999).

    Args:
        suspects: with all of them there is a difference.
        differs: returns whether there is a difference with these suspects alone.

    Returns:
        An empty list if there is a difference without any of them.
    """
    return [] if not suspects or differs([]) else _halve(list(suspects), differs, [])


def _halve(suspects: list[T], differs: Callable[[Sequence[T]], bool], beside: list[T]) -> list[T]:
    """Halves suspects. beside: others that are on in each trial"""
    if len(suspects) == 1:
        return suspects
    first, second = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
    if differs([*beside, *first]):
        return _halve(first, differs, beside)
    if differs([*beside, *second]):
        return _halve(second, differs, beside)
    guilty = _halve(first, differs, [*beside, *second])  # Only both halves together make the difference.
    return guilty + _halve(second, differs, [*beside, *guilty])


class _Trials:
    """The comparisons of one model, with some suspects switched off; counts them."""

    def __init__(self, model: nn.Module, inputs: Inputs, tp: int, settings: Options, line: Line) -> None:
        self.run = partial(compare_calls, model, inputs, tp)
        self.settings, self.line, self.count = settings, line, 0
        self.program: ProgramWithDecision | None = None  # That of the first trial.

    def report(
        self, settings: Options, only: Sequence[int] | None = None, stored: Collection[str] | None = None
    ) -> Report:
        """Returns the report of a trial.

        Args:
            only: the cuts that are made, by their number; None means all.
            stored: the parameters of which a rank stores its part; of others it takes the part in each call. None means
                all that the cuts allow.
        """

        def amend(name: str, program: CapturedProgram) -> CapturedProgram:
            if name != "choose" or not isinstance(program, ProgramWithDecision):
                return program
            # Suspects are numbered as in the first trial, in which nothing is switched off.
            self.program = self.program or program
            return replace(program, decision=_reduced(program, only, stored))

        self.count += 1
        self.line.begin(f"trial {self.count}")
        return self.run(settings, amend)

    def differs(
        self, settings: Options, only: Sequence[int] | None = None, stored: Collection[str] | None = None
    ) -> bool:
        """Whether a trial finds a difference; False if it is refused."""
        try:
            return not self.report(settings, only, stored).ok
        except Error:
            # Cuts may need each other. A trial that is refused has shown no difference, so its suspects are not guilty
            # alone.
            return False


def _reduced(program: ProgramWithDecision, only: Sequence[int] | None, stored: Collection[str] | None) -> Decision:
    """Returns the program's decision, with fewer cuts or fewer parameters that are stored cut."""
    decision, names = program.decision, program.captured.parameters
    if only is not None:
        decision = Decision()
        # In the order of the plan: an operator keeps the first axis that it is cut along.
        for number in sorted(only):
            accept(program.decision.chosen[number], decision)
    if stored is None:
        return decision
    stored_leaves = {node: leaf for node, leaf in decision.held.items() if names.get(node.name, node.name) in stored}
    # The operators stay cut: each rank takes its part of a whole parameter in the call.
    return replace(decision, held=stored_leaves)


def bisect(model: nn.Module, inputs: Inputs, tp: int, settings: Options) -> Blame | None:
    """Returns what a difference of `tp` ranks from `model` comes from; None if there is no difference.

    Args:
        inputs: positional and keyword arguments of the call.
    """
    with progress(f"halving of {type(model).__name__}, tp={tp}") as line:
        return _blame(_Trials(model, inputs, tp, settings, line), settings)


def _blame(trials: _Trials, settings: Options) -> Blame | None:
    if trials.report(settings).ok:
        return None
    program: Any = trials.program
    weights, why = _weights(trials, program)
    passes = _passes(trials)
    return Blame(weights, why, passes, "" if passes else _rule(trials, program), trials.count)


def _weights(trials: _Trials, program: ProgramWithDecision) -> tuple[tuple[str, ...], str]:
    """Returns the parameters along the guilty axes, the guilty ones first, and the pattern of the first axis.

    Halving finds the axes; then, among the parameters that these cut, those whose storage makes the difference. If the
    difference does not come from their storage, those with the largest differences come first.
    """
    chosen, settings = program.decision.chosen, trials.settings
    guilty = halve(range(len(chosen)), lambda only: trials.differs(settings, only))
    if not guilty:
        return (), ""
    cut_names = {program.captured.parameters[node.name] for i in guilty for node in chosen[i].parameters}
    names = [name for name in dict.fromkeys(program.captured.parameters.values()) if name in cut_names]
    itself = halve(names, lambda stored: trials.differs(settings, guilty, stored))
    errors = {row.name: row.error for row in trials.report(settings, guilty).gradients}
    first = chosen[guilty[0]]
    ordered = sorted(names, key=lambda name: (name not in itself, -errors.get(name, 0.0)))
    return tuple(ordered), first.pattern or first.name


def _passes(trials: _Trials) -> tuple[str, ...]:
    # Recomputation works on the blocks that `outline` makes.
    needed = {"outline"} if trials.settings.recompute != "none" else set()
    suspects = [name for name in OPTIONAL if trials.settings.optional(name) and name not in needed]

    def differs(on: Sequence[str]) -> bool:
        off = [name for name in suspects if name not in on]
        return trials.differs(replace(trials.settings, without=(*trials.settings.without, *off)))

    return tuple(halve(suspects, differs))


def _rule(trials: _Trials, program: ProgramWithDecision) -> str:
    """Returns the guilty operator.

    Where an operator has no rule, less is cut, and a difference may be gone for this reason alone. So of the operators
    that halving finds it is the one without whose rule the ranks hold least; of several, one that is not torch's.
    """
    suspects = list(dict.fromkeys(node.target for node in program.graph.nodes if node.target in RULES))

    def differs(on: Sequence[Any]) -> bool:
        with without_rules([operator for operator in suspects if operator not in on]):
            return trials.differs(trials.settings)

    def held(operator: Any) -> tuple[int, bool]:
        with without_rules([operator]):
            return trials.report(trials.settings).plan.bytes_rank, operator.namespace == "aten"

    return str(min(halve(suspects, differs), key=held, default=""))
