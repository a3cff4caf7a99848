"""The order of a model's passes: capture, canonicalize, plan, lower, check, emit. No other file knows this order.

`parallelize`, `distribute`, `explain`, `verify` and `stages` all take it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autotp.display.progress import progress
from autotp.errors import REPORT, Error
from autotp.extensions import chosen_extensions
from autotp.model_library import library
from autotp.ops.eager_mode import uncollected
from autotp.options import DEFAULTS, Options
from autotp.passes.builder import size_assumptions
from autotp.passes.canonicalize.canonicalize import canonicalize
from autotp.passes.canonicalize.causal_attention import causal_attention
from autotp.passes.canonicalize.cse import cse
from autotp.passes.canonicalize.custom_vjp import fuse, mark
from autotp.passes.capture.capture import capture
from autotp.passes.capture.captured import Attempt, Captured
from autotp.passes.capture.python_state.attribute_writes import make_changes
from autotp.passes.capture.unsupported.long_sizes import FEWER, Symbols
from autotp.passes.check.check import check
from autotp.passes.check.types import Typed
from autotp.passes.emit.late_sums import late_sums
from autotp.passes.emit.python_calls import call_python
from autotp.passes.emit.rank_program import RankProgram
from autotp.passes.emit.tied_gradients import tied_gradients
from autotp.passes.lower.bucket import bucket
from autotp.passes.lower.dce import dce
from autotp.passes.lower.fuse_bias import fuse_bias
from autotp.passes.lower.local_sizes import Target, has_unknown_sizes
from autotp.passes.lower.lower import lower
from autotp.passes.lower.overlap import overlap
from autotp.passes.plan.experts.unsort import unsort
from autotp.passes.plan.infer_axes import Axes, infer_axes
from autotp.passes.plan.user_cuts import resolved
from autotp.passes.program import canonicalized, emitted, planned, sequences
from autotp.passes.program.emitted import FIRST_SEAT, Seat, Site
from autotp.passes.program.loss_only import with_loss_only
from autotp.passes.program.program import FIRST_CALL, CallState, CapturedProgram, Program, ProgramWithAxes
from autotp.rules.call import placeholders

AnyProgram = TypeVar("AnyProgram", bound=CapturedProgram)
Amend = Callable[[str, CapturedProgram], CapturedProgram]
"""(name of a pass, the program after it) -> the program that the next pass gets."""
ANY_TP: Any = object()
"""Stands for the number of ranks in a program that is for all of them: nobody can compute with it."""


@dataclass(frozen=True)
class Pass:
    """A row of the table of passes.

    Attributes:
        stage: the folder of `passes/` with its file; of an extension's pass, the one with the passes beside it.
        name: the name of its file.
        run: the function that runs it.
        wanted: returns whether it runs under the user's options.
        by_tp: whether it depends on the number of tensor-parallel ranks, or on the options that `_for_any_tp` resets.
    """

    stage: str
    name: str
    run: Callable[..., Any]
    wanted: Callable[[Options], bool] = lambda choices: True
    by_tp: bool = False


def _on_graph(run: Callable[[fx.Graph], fx.Graph]) -> Callable[[AnyProgram], AnyProgram]:
    """Returns a pass from graph to graph as one from program to program."""
    return lambda program: replace(program, graph=run(program.graph))


def _on_lowered(run: Callable[[fx.Graph], fx.Graph]) -> Callable[[Program, Target, fx.Graph], fx.Graph]:
    """Returns a pass from graph to graph as one of the stage lower."""
    return lambda program, to, graph: run(graph)


def _unless_left_out(name: str) -> Callable[[Options], bool]:
    return lambda options: options.optional(name)


def _is_summed(options: Options) -> bool:
    return options.summed


def _cuts_sequences(options: Options) -> bool:
    return options.cp > 1


def _sorts_rows(options: Options) -> bool:
    return options.experts == "expert" or options.ep > 1 or options.cp > 1 or options.capacity is not None


CANONICALIZE = (
    Pass("canonicalize", "relocate", canonicalized.relocated),
    Pass("canonicalize", "autocast", canonicalized.autocasted),
    Pass("canonicalize", "functionalize", canonicalized.functionalized),
    # After `functionalize`, which says how many of the last outputs are new values of buffers.
    Pass("canonicalize", "value_reads", canonicalized.with_value_reads),
    Pass("canonicalize", "constant_index", canonicalized.with_constant_indices),
    Pass("canonicalize", "canonicalize", _on_graph(canonicalize)),
    Pass("canonicalize", "causal_attention", _on_graph(causal_attention)),
    Pass("canonicalize", "custom_vjp", _on_graph(mark)),
    Pass("canonicalize", "canonical_order", canonicalized.in_canonical_order),
    Pass("pipeline", "loss_totals", with_loss_only, _is_summed),
    Pass("canonicalize", "only_loss", canonicalized.with_only_loss, lambda options: options.outputs == "loss"),
    Pass("canonicalize", "cse", _on_graph(cse), _unless_left_out("cse")),
)

PLAN = (
    Pass("plan", "equal_inputs", sequences.with_equal_inputs, _cuts_sequences),
    Pass("plan", "unsort", _on_graph(unsort), lambda options: options.cp > 1 or options.capacity is not None),
    Pass("plan", "context_parallel", sequences.with_cut_sequences, _cuts_sequences, by_tp=True),
    Pass("plan", "decouple", planned.decoupled),
    Pass("pipeline", "row_independence", planned.with_independent_rows, _is_summed),
    Pass("plan", "experts", planned.with_experts, _sorts_rows, by_tp=True),
    Pass("plan", "expert_parallel", planned.with_expert_parallelism, lambda options: options.ep > 1, by_tp=True),
    Pass("lower", "prove_rules", planned.with_proved_rules, by_tp=True),
    Pass("plan", "match", planned.matched, by_tp=True),
    Pass("plan", "choose", planned.decided, by_tp=True),
    Pass(
        "lower", "linear_cross_entropy", planned.with_linear_cross_entropy, _unless_left_out("linear_cross_entropy"),
        by_tp=True,
    ),
    Pass("lower", "decompose", planned.decomposed, by_tp=True),
    Pass(
        "lower", "defer_reductions", planned.with_deferred_reductions, _unless_left_out("defer_reductions"), by_tp=True
    ),
    Pass("plan", "propagate", planned.propagated, by_tp=True),
    Pass("plan", "hoist", planned.hoisted, _unless_left_out("hoist"), by_tp=True),
    Pass(
        "plan", "sequence_parallel", planned.with_sequence_parallelism,
        lambda options: options.sequence_parallel, by_tp=True,
    ),
    Pass("plan", "outputs", planned.with_layouts, by_tp=True),
)  # fmt: skip


def _lower(p: Program, to: Target, _: fx.Graph) -> fx.Graph:
    return lower(p.graph, p.axes, p.decision, p.differentiable, to, p.hoisted)


LOWER = (
    Pass("lower", "lower", _lower),
    Pass("lower", "dce", _on_lowered(dce)),
    Pass("lower", "fuse_bias", _on_lowered(fuse_bias), _unless_left_out("fuse_bias")),
    Pass("lower", "bucket", _on_lowered(bucket), _unless_left_out("bucket")),
    Pass("lower", "overlap", _on_lowered(overlap), _unless_left_out("overlap")),
)

EMIT = (
    # `bind` is first because the next two take a bound graph, and `python_calls` last because all others ask what an
    # operator is. `recompute` makes a module of the graph, and a budget asks what operators keep.
    Pass("emit", "bind", emitted.bound),
    Pass("emit", "count_load", emitted.counting, _is_summed),
    Pass("emit", "late_sums", lambda p, site, graph: late_sums(graph), _unless_left_out("late_sums")),
    Pass("emit", "recompute", emitted.as_module),
    Pass("emit", "tied_gradients", lambda p, site, module: tied_gradients(module), _unless_left_out("in_place")),
    Pass("emit", "python_calls", lambda p, site, module: call_python(module)),
)


def passes_of(table: Sequence[Pass], options: Options) -> list[Pass]:
    """Returns the passes of a table that run under the user's options, with those of extensions behind theirs."""
    added = [extension.passes for extension in chosen_extensions(options)]
    rows = (
        row for first in table for row in (first, *(more for by_name in added for more in by_name.get(first.name, ())))
    )
    return [row for row in rows if row.wanted(options)]


class Captures:
    """What was captured of a model, for programs of one call that differ only in how the model is cut.

    These programs share the symbols of sizes, and what passes assume of them, which is true of this call. So they are
    for calls of one size, as those of `autotp.search`. Where sequences are cut, passes assume more (`equal_inputs`):
    such programs are analysed after the others.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Captured] = {}
        self._planned: dict[Any, tuple[Captured, CapturedProgram]] = {}

    def of(self, key: Any, capture: Callable[[], Captured]) -> Captured:
        """Returns what was captured for a key; captures it if nothing was."""
        if key not in self._known:
            self._known[key] = capture()
        return self._known[key]

    def planned(self, program: CapturedProgram) -> CapturedProgram:
        """Returns a captured program after the passes that do not depend on tensor-parallel ranks.

        They run once for all numbers of ranks. Axes are inferred for each: later passes refine them.
        """
        any_tp = _for_any_tp(program)
        key = id(program.captured), program.cp_rank, any_tp.options
        if key not in self._planned:
            for pass_ in _before_tp(program.options):
                any_tp = pass_.run(any_tp)
            self._planned[key] = program.captured, any_tp  # The first is kept, so that its `id` stays its own.
        _, shared = self._planned[key]
        result = replace(shared, tp=program.tp, options=program.options)
        return replace(result, axes=infer_axes(result.graph)) if isinstance(result, ProgramWithAxes) else result


def _for_any_tp(program: CapturedProgram) -> CapturedProgram:
    """Returns the program without what only passes of `Pass.by_tp` may read."""
    options = replace(program.options, sequence_parallel=False, recompute="none", memory=None, state_bytes=None)
    return replace(program, tp=ANY_TP, options=options)


def _wanted(options: Options) -> list[Pass]:
    return passes_of((*CANONICALIZE, *PLAN), options)


def _before_tp(options: Options) -> list[Pass]:
    """Returns the passes before the first that depends on tensor-parallel ranks."""
    return list(itertools.takewhile(lambda pass_: not pass_.by_tp, _wanted(options)))


TESTED_TORCH = "2.13."
"""The beginning of the version of torch with which all tests run."""


def analyse(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tp: int,
    options: Options = DEFAULTS,
    call: CallState = FIRST_CALL,
    amend: Amend | None = None,
    cp_rank: int = 0,
    captures: Captures | None = None,
    last: str = "",
) -> Program:
    """Captures `skeleton` on these arguments and decides what is cut on `tp` ranks.

    Args:
        skeleton: the model on `meta`.
        options: the user's options.
        call: the state around the call.
        amend: changes the program after a pass, to find out what a difference comes from (`bisect.py`).
        cp_rank: the rank on the axis `cp`, if `options.cp` is more than 1.
        captures: takes what is captured, and has what was captured for another number of ranks.
        last: the name of the last pass to run, for a caller that wants only its errors; "" runs all.
    """
    options = replace(options, cut=resolved(options.cut, _parameter_names(skeleton)))
    with uncollected(), progress(f"capture of {type(skeleton).__name__}") as line:
        symbols: Symbols | None = "all"
        program: CapturedProgram
        while symbols is not None:
            program = captured_program(skeleton, args, kwargs, tp, options, call, symbols, captures)
            # What capture assumed is among the conditions of the graph already; passes may assume more.
            by_capture = len(size_assumptions(program.graph))
            call, symbols = _next_capture(program, amend)
        program, done = replace(program, cp_rank=cp_rank), 0
        # A pass that `amend` changes gives another program, which no other analysis may share.
        if captures is not None and amend is None:
            program, done = captures.planned(program), len(_before_tp(options))
        for pass_, later in programs_after_passes(program, amend, done):
            line.begin(pass_.stage)
            program = later
            if pass_.name == last:
                break
    # With `last`, the program is of an earlier type, which has no attribute for what is not known.
    return cast(Program, _for_assumed_sizes(program, by_capture))


def _parameter_names(module: nn.Module) -> dict[str, str]:
    """Returns each name of a parameter -> the first name of the same parameter."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)}


def _for_assumed_sizes(program: CapturedProgram, by_capture: int) -> CapturedProgram:
    """Returns the program with a graph that fits only sizes of which all that its passes assumed is true."""
    captured = program.captured
    assumed = size_assumptions(captured.graph)[by_capture:]
    return replace(program, captured=replace(captured, fits=captured.fits.narrowed(assumed))) if assumed else program


@contextmanager
def _expect_no_assumptions(graph: fx.Graph) -> Iterator[None]:
    """Raises Error if a pass assumes something about sizes: it is too late to make it a condition of the graph."""
    before = len(size_assumptions(graph))
    yield
    if assumed := size_assumptions(graph)[before:]:
        raise Error(f"a pass assumes {assumed[0]} of all calls", fix=REPORT)


def _next_capture(program: CapturedProgram, amend: Amend | None) -> tuple[CallState, Symbols | None]:
    """Returns what a further capture has to know and its symbols; None if the present graph can be a rank's.

    NOTE [Sizes that become numbers] in `long_sizes.py` says of which sizes a rank cannot compute its own.
    """
    call, captured = program.call, program.captured
    symbols = captured.attempt.symbols
    unknown = symbols in FEWER and has_unknown_sizes(program.graph)
    places = captured.symbolic - call.values.places
    if not (unknown or places) or _is_lowered(program, amend):
        return call, None
    if unknown:
        return call, FEWER[symbols]
    return replace(call, values=replace(call.values, places=call.values.places | places)), symbols


def _is_lowered(program: CapturedProgram, amend: Amend | None) -> bool:
    """True if a rank can have a graph in which sizes are made of values that it does not know."""
    try:
        for _, later in programs_after_passes(program, amend):
            program = later
        flat_graph(cast(Program, program), 0, "fast")
    # The second is torch's, for a comparison of sizes whose outcome depends on values.
    except (Error, GuardOnDataDependentSymNode):
        return False
    return True


def _warn_of_untested_torch() -> None:
    """Warns once: what torch's exporter records differs between versions, and not every difference fails."""
    if not torch.__version__.startswith(TESTED_TORCH):
        warnings.warn(
            f"autotp is tested with torch {TESTED_TORCH}x, and this is {torch.__version__}: compare the model's "
            "gradients first, by autotp.verify; docs/versions.md says what was tried",
            stacklevel=2,
        )


def warn_of_whole_sequences(program: Program, call: str) -> bool:
    """Warns if every cp rank computes the whole of a call with gradients; returns whether it did.

    Args:
        call: the name of the call.
    """
    computes_all = program.options.cp > 1 and program.sequences.uncut_graph is None and torch.is_grad_enabled()
    if computes_all:
        warnings.warn(
            f"{call}: no sequence of this call can be cut over cp, so every cp rank computes and keeps the whole call: "
            "no attention has it in its queries and in its keys. The numbers are right. Train such batches with cp=1",
            stacklevel=2,
        )
    return computes_all


def captured_program(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tp: int,
    options: Options = DEFAULTS,
    call: CallState = FIRST_CALL,
    symbols: Symbols = "all",
    captures: Captures | None = None,
) -> CapturedProgram:
    """Captures `skeleton` on these arguments; returns the program before the first pass. Arguments as for `analyse`.

    Args:
        symbols: the dimensions of inputs that are symbols at most.
        captures: as for `analyse`.
    """
    _warn_of_untested_torch()
    library().add_operators()
    attempt = Attempt(
        opened=call.opened, values=call.values, symbols=symbols, looks=call.looks,
        blocks="by objects" if options.optional("repeats") else "each",
    )  # fmt: skip

    def one_call() -> Captured:
        return capture(skeleton, args, kwargs, call.autocast, call.wanted, attempt)

    def captured() -> Captured:
        first = one_call()
        # Parts of a batch cannot share changes (`loss_only.py`), unless a second call no longer makes them.
        if not options.summed or not first.changes_of_model or first.computes_changes:
            return first
        # Changes that only a first call makes, for example the kind of labels.
        make_changes(first.changes, dict(skeleton.named_modules()), lambda x: x, lambda module, _: vars(module))
        return one_call()

    key = skeleton, options.summed, call.autocast, call.wanted, attempt
    result = captured() if captures is None else captures.of(key, captured)
    library().add_operators()  # Again: forward may have imported some.
    call = replace(call, training=skeleton.training)
    return CapturedProgram(captured=result, graph=result.graph, tp=tp, options=options, call=call)


def programs_after_passes(
    program: CapturedProgram, amend: Amend | None = None, done: int = 0
) -> Iterator[tuple[Pass, CapturedProgram]]:
    """Yields each pass of the stages canonicalize and plan, with the program after it, which `amend` may change.

    Args:
        done: the number of passes that have run.
    """
    for pass_ in _wanted(program.options)[done:]:
        program = pass_.run(program)
        program = program if amend is None else amend(pass_.name, program)
        yield pass_, program


def rank_graph(program: Program, rank: int, randomness: Literal["exact", "fast"], checked: bool = True) -> fx.Graph:
    """Returns the lowered graph of one rank; arguments and errors as of `flat_graph`."""
    return fuse(flat_graph(program, rank, randomness, checked=checked))


def flat_graph(
    program: Program,
    rank: int,
    randomness: Literal["exact", "fast"],
    axes: Axes | None = None,
    checked: bool = True,
) -> fx.Graph:
    """Returns the lowered graph of one rank before `fuse`: backwards are not separate graphs.

    Args:
        axes: `infer_axes(program.graph)`, if the caller has it.
        checked: whether its types are checked: only a graph that nobody runs may go without.

    Raises:
        Error: the graph's types do not fit; names the value, and the pass after which they do not.
    """
    to = Target("tp", program.tp, rank, randomness, frozenset(program.local_outputs))
    with uncollected(), _expect_no_assumptions(program.graph):
        for _, graph in graphs_after_passes(program, to):
            lowered = graph
        try:
            if checked:
                expect_typed(lowered, program, to, axes)
        except Error as error:
            # Only now is the graph after each pass checked, to name the first that does not fit. Until the pass `dce`
            # there are dead operators.
            graphs = graphs_after_passes(program, to)
            error.facts["after"] = next(pass_.name for pass_, graph in graphs if not _is_typed(dce(graph), program, to))
            raise
    return lowered


def flat_graphs(program: Program, randomness: Literal["exact", "fast"]) -> Iterator[fx.Graph]:
    """Yields `flat_graph` of each rank. The check infers the axes of the model once for all."""
    axes = infer_axes(program.graph)
    yield from (flat_graph(program, rank, randomness, axes) for rank in range(program.tp))


def graphs_after_passes(program: Program, to: Target) -> Iterator[tuple[Pass, fx.Graph]]:
    """Yields each pass of the stage lower, with one rank's graph after it."""
    graph = program.graph
    for pass_ in passes_of(LOWER, program.options):
        graph = pass_.run(program, to, graph)
        yield pass_, graph


def expect_typed(
    graph: fx.Graph, program: Program, to: Target, axes: Axes | None = None
) -> dict[fx.Node, tuple[Typed, ...]]:
    """The stage check: returns the types of all tensors in a rank's graph. Raises Error if they do not fit.

    Args:
        axes: `infer_axes(program.graph)`, if the caller has it.
    """
    captured = program.captured
    layouts = {place: program.layouts[name] for place, name in captured.parameters.items()}
    layouts |= program.local_inputs | program.caches
    trainable = [*captured.parameters, *captured.inputs]
    return check(graph, program.graph, layouts, trainable, to, program.local_outputs, axes)


def _is_typed(graph: fx.Graph, program: Program, to: Target) -> bool:
    try:
        expect_typed(graph, program, to)
    except Error:
        return False
    return True


def rank_program(
    graph: fx.Graph,
    program: Program,
    settings: Options,
    device: torch.device,
    groups: Mapping[str, str | None],
    seat: Seat = FIRST_SEAT,
) -> RankProgram:
    """Returns a rank's graph, or that of one of its stages, as it runs, with the sources of its placeholders.

    There is no other way to make a graph that runs: `verify` sees what each pass does to it.

    Args:
        groups: mesh axis -> name of the process group; empty for a simulation.
        seat: where the rank is, for a budget of memory.
    """
    module = _emitted(EMIT, graph, program, Site(settings=settings, device=device, groups=groups, seat=seat))
    captured = program.captured
    buffers = {place: name for place, name in captured.buffers.items() if place not in program.caches}
    sources: dict[str, str | Tensor] = {**captured.parameters, **buffers, **captured.constants}
    read = {name: sources[name] for name in placeholders(graph) if name in sources}
    return RankProgram(
        module=module, parameters=captured.parameters,
        sources={name: x.to(device) if isinstance(x, Tensor) else x for name, x in read.items()},
    )  # fmt: skip


def emitted_operators(
    graph: fx.Graph, program: Program, settings: Options, device: torch.device, groups: Mapping[str, str | None]
) -> fx.GraphModule:
    """Returns the module of `rank_program` before the last pass: for readers, who ask what an operator is."""
    return _emitted(EMIT[:-1], graph, program, Site(settings=settings, device=device, groups=groups))


def _emitted(passes: Sequence[Pass], graph: fx.Graph, program: Program, site: Site) -> fx.GraphModule:
    emission: Any = graph
    for pass_ in passes_of(passes, site.settings):
        emission = pass_.run(program, site, emission)
    return emission
