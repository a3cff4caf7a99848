"""verify: compares a parallel model with the original model, in one process and in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from typing_extensions import Unpack

from autotp.compiler import Amend, analyse, flat_graphs
from autotp.diagnostics.differences import (
    TOLERANCE,
    Difference,
    RankTensors,
    descending,
    difference,
    gradient_differences,
    largest,
    rank_tensors,
    step_differences,
)
from autotp.diagnostics.double import add_noise, all_double, copied_model, doubled
from autotp.diagnostics.lockstep import Grid, run_programs, simulated
from autotp.diagnostics.mesh_proof import MeshProof, prove
from autotp.diagnostics.mesh_step import compare_step
from autotp.diagnostics.plan import Plan
from autotp.diagnostics.report import report
from autotp.display.progress import Line, progress
from autotp.display.sheet import Sheet, Shown, Table
from autotp.distributed.mesh import Mesh, tell_errors
from autotp.errors import Error, within
from autotp.model_library import library
from autotp.ops.random_state import forked, seed
from autotp.options import DEFAULTS, Memory, Options, VerifyOptions, expect_options, lists_options, memory_limit
from autotp.passes.canonicalize.custom_vjp import fuse
from autotp.passes.capture.captured import Captured, InputSize, OutputAt
from autotp.passes.capture.example_inputs import Inputs
from autotp.passes.capture.example_inputs import example_inputs as find_inputs
from autotp.passes.capture.guards.gradient_queries import GradientsWanted
from autotp.passes.capture.guards.values import NO_VALUES, KnownValues, Listing
from autotp.passes.capture.python_state.attribute_writes import Before, Change, Write, flatten_new_value
from autotp.passes.capture.python_state.contents import contents_of
from autotp.passes.capture.python_state.walk import GONE, found_at, put_at, spelled
from autotp.passes.capture.pytree import flatten, leaf_names, map_leaves, outcome, states
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.capture.unsupported.function_caches import empty_caches
from autotp.passes.emit.memory.budget import budget_on
from autotp.passes.pipeline.stages import Stage, expect_enough
from autotp.passes.program.program import CallState, Program
from autotp.rules.traits import draws
from autotp.runtime.build import expect_usable
from autotp.runtime.calls.graph_digest import order_of, same_order
from autotp.runtime.calls.graph_entry import Ran, run_until_right
from autotp.sharding.layout import Layout
from autotp.source_location import block_in
from autotp.torch_internals import SETS_FLAGS
from autotp.training.distribute import expect_training
from autotp.training.pipeline.schedule_actions import actions_of
from autotp.training.pipeline.schedules import Schedule, Training, stages_of


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The differences of a parallel model from the original, returned by `verify`; `print(report)` is a text to read.

    On a terminal it is in colour, and a notebook shows it as HTML. `f"{report}"` is plain, for files and logs.

    Attributes:
        plan: the plan that was verified; its sizes in bytes are those of float64.
        outputs: the difference of each output, and of each buffer, largest first.
        gradients: the difference of the gradient of each parameter and floating input, largest first.
        steps: the difference of each parameter after an optimizer step, largest first.
        tolerance: the largest relative difference that counts as equal.
        mesh: what was proved of pipeline ranks, replicas and microbatches; None if there were none.

        All differences are relative to the scale of the compared values. A model on `meta` has none.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        >>> report = autotp.verify(model, 2, example_inputs=torch.ones(2, 4))
        >>> report.ok, report.worst.error < report.tolerance
        (True, True)
    """

    DATA = ("ok", "computed", "tolerance", "outputs", "gradients", "steps", "plan", "mesh")

    plan: Plan
    outputs: tuple[Difference, ...]
    gradients: tuple[Difference, ...]
    steps: tuple[Difference, ...]
    tolerance: float = TOLERANCE
    mesh: MeshProof | None = None

    @property
    def ok(self) -> bool:
        """True if no difference is larger than `tolerance`; an undefined difference (NaN) counts as larger."""
        return all(d.error <= self.tolerance for d in (*self.outputs, *self.gradients, *self.steps))

    @property
    def computed(self) -> bool:
        """False if the graphs were proved only, and no numbers compared."""
        return bool(self.gradients)

    @property
    def worst(self) -> Difference:
        """The largest difference of a gradient: name and error."""
        return self.gradients[0] if self.gradients else Difference("nothing compared", 0.0)

    @property
    def verdict(self) -> str:
        """Whether the ranks are equal to one device, in words."""
        if not self.computed and self.mesh is not None:
            ranks = f"{self.mesh.ranks:,} rank{'s' * (self.mesh.ranks > 1)}"
            return f"proved on {ranks}; nothing computed, as {self.mesh.not_computed}"
        if not self.computed:
            return "the model is on meta: proved and counted, nothing computed"
        return "equal to one device" if self.ok else "DIFFERENT from one device"

    def summary(self) -> str:
        """Returns the verdict, with the largest difference of a gradient."""
        worst = f", worst gradient {self.worst}" if self.computed else ""
        return f"{self.title}: {self.verdict}{worst}"

    def sheet(self) -> Sheet:
        """Returns the verdict, the largest differences, and the collectives of a step."""
        how = f" (float64, tolerance {self.tolerance:.0e})" if self.computed else ""
        parts: tuple[Table | tuple[str, ...], ...] = (tuple(_lines(self)),)
        if self.mesh is not None:
            tables = (self.mesh.table(), self.mesh.not_proved())
            parts = (*parts, ("",), *(table for table in tables if table is not None))
        return Sheet(f"{self.title}: {self.verdict}{how}", parts, "good" if self.ok else "bad", apart=False)

    @property
    def title(self) -> str:
        """The model, and the sizes of the mesh."""
        sizes = "" if self.mesh is None else f", pp={self.mesh.pp}, dp={self.mesh.dp}"
        sizes += f", ep={self.mesh.ep}" if self.mesh is not None and self.mesh.ep > 1 else ""
        return f"{self.plan.model} on {self.plan.sizes}{sizes}"


@dataclass(frozen=True)
class Trial:
    """A model and a call's arguments, in float64 on the CPU (a model on meta stays there), and the ranks' graphs.

    Attributes:
        of_inputs: whether gradients of floating inputs are compared, too.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    analysis: Program
    graphs: tuple[fx.Graph, ...]
    plan: Plan
    settings: Options
    of_inputs: bool = True


def make_trial(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tp: int,
    settings: Options = DEFAULTS,
    amend: Amend | None = None,
    values: KnownValues = NO_VALUES,
    of_inputs: bool = True,
) -> Trial:
    """Returns a copy of `model` with the graphs of its `tp` ranks.

    Args:
        amend: as for `analyse`.
        values: what is known of the values that Python reads of tensors.
        of_inputs: whether floating inputs require a gradient.
    """
    name = type(model).__name__
    # As in `build`: what is verified must be what runs.
    if settings.recompute == "none" and settings.memory is None and library().recomputes(model):
        settings = replace(settings, recompute="full")
    if _on_meta(model):
        analysis = analyse(skeleton_of(model), args, kwargs, tp, settings, amend=amend)
        return Trial(model, args, kwargs, analysis, (), _plan(analysis, name), settings)
    with all_double(), empty_caches(model):
        whole = add_noise(copied_model(model).cpu().double())
        library().keep_activations(whole)
        args, kwargs = map_leaves(lambda x: doubled(x) if isinstance(x, Tensor) else x, (args, kwargs))
        tensors = [
            of_inputs and x.is_floating_point() for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        ]
        needed = GradientsWanted(inputs=tuple(tensors), parameters=tuple(p.requires_grad for p in whole.parameters()))
        call = CallState(wanted=needed, values=values)
        # Only with "exact" do the ranks draw the masks of one device.
        skeleton, settings = skeleton_of(whole), replace(settings, randomness="exact")
        programs = [analyse(skeleton, args, kwargs, tp, settings, call, amend, rank) for rank in range(settings.cp)]
        graphs, analysis = [graph for program in programs for graph in flat_graphs(program, "exact")], programs[0]
        # In lockstep no rank waits: nobody would see that ranks on processes wait for ever.
        same_order(0).expect(dict(enumerate(map(order_of, graphs))), Mesh(size=len(graphs)))
        plan = _plan(analysis, name, graphs[0])
        return Trial(whole, args, kwargs, analysis, tuple(map(fuse, graphs)), plan, settings, of_inputs)


def _plan(program: Program, name: str, first: fx.Graph | None = None) -> Plan:
    """Returns the plan of a program, with the program for the page. Arguments as for `report`."""
    return replace(report(program, name, first), source=program)


Edit = Callable[[fx.Graph, int], fx.Graph]
"""(graph, rank) -> graph: a test's change of a rank's graph before it runs."""


def _unchanged(graph: fx.Graph, rank: int) -> fx.Graph:
    return graph


@contextmanager
def _in_double(trial: Trial) -> Iterator[None]:
    """A region in which a trial runs: in float64, each time with the same random numbers."""
    with all_double(), empty_caches(trial.model), forked():
        seed(0)
        yield


def run_ranks(trial: Trial, change: Edit = _unchanged) -> Ran[tuple[list[RankTensors], list[list[Any]]]]:
    """Runs the ranks of a trial in lockstep; returns the first one's outputs, and the tensors and outputs of each."""
    analysis, inputs = trial.analysis, trial.analysis.captured.inputs
    with _in_double(trial):
        ranks = [_rank(trial, i % analysis.tp) for i in range(len(trial.graphs))]
        programs = [
            # A copy, as a test changes it.
            simulated(change(_copy_of(graph), i), ranks[i], analysis, trial.model, trial.settings, i % analysis.tp)
            for i, graph in enumerate(trial.graphs)
        ]
        caches = {place: analysis.captured.buffers[place] for place in analysis.caches}
        names = {**{name: f"input {i}" for i, name in enumerate(inputs)}, **caches}
        operands_of_ranks = [{place: rank[name] for place, name in names.items()} for rank in ranks]
        rows = run_programs(programs, operands_of_ranks, Grid(cp=analysis.options.cp))
        return rows[0], (ranks, rows)


def run_and_compare(
    trial: Trial, change: Edit = _unchanged, ran: tuple[list[RankTensors], list[list[Any]]] | None = None
) -> Report:
    """Runs a model, and its ranks in lockstep, with the same random numbers; returns the differences.

    Args:
        ran: the tensors and outputs of each rank, if they have run.
    """
    if not trial.graphs:
        return Report(trial.plan, (), (), ())
    ranks, results = ran or run_ranks(trial, change)[1]
    analysis = trial.analysis
    with _in_double(trial):
        model, inputs = copied_model(trial.model), _inputs(trial)
        rank_outputs = [[_as_tensor(x) for x in row] for row in results]
        expected, names, differences = _returned(model, trial, inputs)
        outputs = [
            _output(i, names.get(i, f"{i}"), value, [row[i] for row in rank_outputs], analysis)
            for i, value in expected.items()
        ] + differences
        outputs += _buffers(model, rank_outputs, ranks, trial)
        _backward(expected, rank_outputs, analysis)
        whole = dict(model.named_parameters()) | inputs
        rows = outputs, gradient_differences(whole, ranks, analysis), step_differences(whole, ranks, analysis)
    return Report(trial.plan, *[tuple(sorted(row, key=descending)) for row in rows])  # type: ignore[arg-type]


def _copy_of(graph: fx.Graph) -> fx.Graph:
    copied_graph = fx.Graph()
    copied_graph.output(copied_graph.graph_copy(graph, {}))
    return copied_graph


def _joined(first: Report, second: Report) -> Report:
    """Joins the reports of two consecutive calls."""

    def both(first_rows: Sequence[Difference], second_rows: Sequence[Difference]) -> tuple[Difference, ...]:
        later = [Difference(f"{row.name} of a second call", row.error) for row in second_rows]
        return tuple(sorted((*first_rows, *later), key=descending))

    gradients = both(first.gradients, second.gradients)
    return Report(first.plan, both(first.outputs, second.outputs), gradients, both(first.steps, second.steps))


def _inputs(trial: Trial) -> RankTensors:
    """Returns copies of the tensors among the arguments, then of those in attributes.

    Floating tensors require a gradient, unless the model cannot run with such arguments.
    """
    tensors = [leaf for leaf in flatten((trial.args, trial.kwargs))[0] if isinstance(leaf, Tensor)]
    modules = dict(trial.model.named_modules())
    tensors += [found_at(modules, path) for path in trial.analysis.captured.input_at]
    copies = {f"input {i}": t.detach().clone() for i, t in enumerate(tensors)}
    return {name: t.requires_grad_() if trial.of_inputs and t.is_floating_point() else t for name, t in copies.items()}


def _rank(trial: Trial, rank: int) -> RankTensors:
    return rank_tensors(trial.model, trial.analysis.layouts, rank, trial.analysis.layouts_of_caches) | _inputs(trial)


def _returned(
    model: nn.Module, trial: Trial, inputs: RankTensors
) -> tuple[dict[int, Tensor], dict[int, str], list[Difference]]:
    """Runs the model on one device.

    Returns:
        position among a rank's outputs -> tensor of the result, of a state, or of an attribute; position -> key in the
        result; and the differences of other attributes, and of the number of results.
    """
    queue, (leaves, spec) = iter(inputs.values()), flatten((trial.args, trial.kwargs))
    arguments = [next(queue) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    captured, modules = trial.analysis.captured, dict(model.named_modules())
    tensors_at = [i for i, leaf in enumerate(arguments) if isinstance(leaf, Tensor)]
    for i, _ in captured.outputs.into:
        arguments[tensors_at[i]] = arguments[tensors_at[i]].clone()  # Forward must not write into a leaf.
    args, kwargs = pytree.tree_unflatten(arguments, spec)
    for path in captured.input_at:
        # A clone: forward may write into it, and its gradient reaches the leaf.
        put_at(modules, path, next(queue).clone())
    shapes: list[Sequence[int]] = [t.shape for t in arguments if isinstance(t, Tensor)]
    shapes += [x.shape if isinstance(x, Tensor) else (x,) for x in (found_at(modules, p) for p in captured.opened)]
    before, changed = Before(model), states((args, kwargs))
    result_leaves, (of_result, _) = outcome(model(*args, **kwargs), changed)
    result_tensors = [leaf for leaf in result_leaves if isinstance(leaf, Tensor)]
    keys = leaf_names(of_result)
    names = dict(enumerate(keys[i] for i, leaf in enumerate(result_leaves[: len(keys)]) if isinstance(leaf, Tensor)))
    omitted = captured.outputs.omitted
    tensors = {i: x for i, x in enumerate(result_tensors[: captured.outputs.results]) if i not in omitted}
    written = {change.at: found_at(modules, change.path) for change in captured.changes if isinstance(change, Write)}
    written |= {position: arguments[tensors_at[i]] for i, position in captured.outputs.into}
    set_to, differences = _set_to(before, captured, shapes)
    if len(result_tensors) != captured.outputs.results:
        counts = f"the number of outputs: {captured.outputs.results} of a rank, {len(result_tensors)} of one device"
        differences.append(Difference(counts, float("inf")))
    return {**set_to, **written, **tensors}, names, differences


def _set_to(
    before: Before, captured: Captured, shapes: Sequence[Sequence[int]]
) -> tuple[dict[int, Tensor], list[Difference]]:
    """Compares attributes that one device sets with those that a rank sets: tensors by position, and differences."""
    tensors, different = dict[int, Tensor](), list[Difference]()
    real = dict(before.changes())
    for change in captured.changes:
        if not isinstance(change, Change):
            continue
        holder = contents_of(before.at(change.path))
        for key, value in change.values.items():
            rank_value, device_value = value, flatten_new_value(holder[key], before.places) if key in holder else GONE
            # What is left in `real` at the end is set by one device alone.
            real.get(change.path, {}).pop(key, None)
            # [0] has the leaves, [1] the structure.
            if rank_value is GONE or device_value is GONE or rank_value[1] != device_value[1]:
                # GONE on both sides is no difference.
                different += [Difference(spelled(change.path, key), float("inf"))] * (rank_value is not device_value)
                continue
            for leaf, device_leaf in zip(rank_value[0], device_value[0], strict=True):
                if isinstance(leaf, OutputAt):
                    tensors[leaf.at] = _as_tensor(device_leaf)
                elif (leaf.kind(leaf.expression(shapes)) if isinstance(leaf, InputSize) else leaf) != device_leaf:
                    different.append(Difference(spelled(change.path, key), float("inf")))
    return tensors, different + [
        Difference(spelled(path, key), float("inf")) for path, values in real.items() for key in values
    ]


def _as_tensor(x: Any) -> Tensor:
    """Returns a tensor itself, and a number as a tensor."""
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)


def _buffers(
    model: nn.Module, rank_outputs: Sequence[Sequence[Tensor]], ranks: Sequence[RankTensors], trial: Trial
) -> list[Difference]:
    """Compares the buffers that the call changes, on one device or on a rank: in place, or as the last outputs."""
    names = [trial.analysis.captured.buffers[place] for place in trial.analysis.updated]
    caches = trial.analysis.layouts_of_caches
    returned = dict(zip(names, zip(*(row[len(row) - len(names) :] for row in rank_outputs), strict=True), strict=True))
    rows = []
    # Buffers that forward assigns: `_set_to` has compared them.
    made = {
        f"{c.path[0]}.{key}".lstrip(".")
        for c in trial.analysis.captured.changes
        if isinstance(c, Change)
        for key in c.values
    }
    for name, whole in ((name, b) for name, b in model.named_buffers() if name in ranks[0] and name not in made):
        parts = list(returned.get(name, [rank[name] for rank in ranks]))
        before = trial.model.get_buffer(name)
        if name in returned or any(not _same(x, before) for x in (whole, *(() if name in caches else parts))):
            layout = caches.get(name) or Layout(tuple(whole.shape))
            rows.append(Difference(name, difference(whole, parts, layout, 1.0)))
    return rows


def _same(x: Tensor, y: Tensor) -> bool:
    x, y = x.to_dense(), y.to_dense()  # A buffer may be sparse.
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())


def _backward(expected: Mapping[int, Tensor], rank_outputs: Sequence[Sequence[Tensor]], analysis: Program) -> None:
    """Computes the gradients of one objective, on one device and on the ranks; of a cut output each has its part."""
    indices = [i for i, value in expected.items() if value.requires_grad]
    if not indices:
        return
    weights = {i: _weights(expected[i]) for i in indices}
    objectives = []
    for rank, row in enumerate(rank_outputs):
        parts = {i: _whole_layout(i, expected[i], analysis).take(weights[i], rank % analysis.tp) for i in indices}
        objectives.append(_objective([(row[i], parts[i]) for i in indices]))
    torch.autograd.backward(_objective([(expected[i], weights[i]) for i in indices]))  # A method would leave the mode.
    torch.autograd.backward(objectives)


def _weights(value: Tensor) -> Tensor:
    """Returns a different weight for each element."""
    return torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)


def _objective(outputs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns a scalar that depends on every element of every output, by its weight."""
    return torch.stack([(value * weights).sum() for value, weights in outputs]).sum()


def _output(i: int, name: str, value: Tensor, parts: list[Tensor], analysis: Program) -> Difference:
    layout = _whole_layout(i, value, analysis)
    label = "loss" if value.dim() == 0 else f"output {name}".rstrip()
    scale = largest([value.detach()]) if value.dtype != torch.bool else 1.0
    return Difference(label, difference(value.detach(), [part.detach() for part in parts], layout, scale))


def _whole_layout(i: int, value: Tensor, analysis: Program) -> Layout:
    """Returns the layout of an output, with its actual sizes."""
    layout = analysis.local_outputs.get(i, Layout(tuple(value.shape)))
    return Layout(tuple(value.shape), layout.dim, layout.pieces, layout.axis)


def _on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def _lines(report: Report) -> Iterator[str]:
    if report.computed:
        rows_by_label = {"outputs": report.outputs, "gradients": report.gradients, "after a step": report.steps}
        for label, rows in rows_by_label.items():
            worst = rows[0] if rows else "none"
            yield f"  {label:<13}{len(rows):>4} compared, worst {worst}"
            for bad in [row for row in rows[1:8] if not row.error <= report.tolerance]:
                yield f"  {'':<13}     and {bad}"
    sides = (report.plan.traffic.forward, report.plan.traffic.backward)
    kinds = [", ".join(f"{n} {collective}" for collective, n in sorted(c.items())) or "none" for c in sides]
    yield f"  forward         {kinds[0]}"
    yield f"  backward        {kinds[1]}"


@lists_options
def verify(
    model: nn.Module,
    tp: int,
    *,
    pp: int = 1,
    dp: int = 1,
    microbatches: int | None = None,
    schedule: Schedule = "1F1B",
    interleave: int | None = None,
    zero: Literal[0, 1, 2, 3] = 0,
    example_inputs: Any = None,
    cp: int = 1,
    ep: int = 1,
    **options: Unpack[VerifyOptions],
) -> Report:
    """Compares `tp` ranks of `model` with the model itself, and returns the differences.

    It compares the outputs, the loss, every gradient, and the parameters after a step of an optimizer. All ranks run in
    one process, in lockstep and in float64, and draw the same random numbers as one device. The model is not changed:
    copies run, with noise added to their parameters. For a model on `meta` the graph is checked and its collectives are
    counted, but nothing is computed.

    With `pp`, `dp`, `ep` or `microbatches`, it proves and compares what `distribute` would train: the graphs of all
    ranks and stages, and a step on a whole batch, in training mode. A model that draws random numbers is proved only.

    Args:
        model: an ordinary model, in the mode (train or eval) that is to be verified.
        tp: the number of ranks.
        pp, dp, ep, schedule, interleave, zero: as for `distribute`. The nodes of ZeRO are checked and run, each
            replica's on whole parameters.
        microbatches: as for `distribute`; by default as many as pipeline ranks. The step that is compared is made of
            the rows of the example inputs, which are those of a microbatch.
        example_inputs, cp: as for `parallelize`.
        options: as for `parallelize`. Under `memory`, backward computes again each block of which a value is computed
            again; a number of bytes is for the model in its own dtype, and in float64 counts as so much more.

    Raises:
        Error: as `parallelize` or `distribute`; or the model is parallel already.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        >>> report = autotp.verify(model, tp=2, example_inputs=torch.ones(2, 4))
        >>> assert report.ok, report
    """

    def run() -> Report:
        tell_errors()
        expect_options(verify, options)
        settings = Options(cp=cp, ep=ep, **options)
        parts = microbatches_of(pp) if microbatches is None else microbatches
        training = training_of(settings, parts, schedule, zero, interleave)
        expect_usable("verify", model, tp, settings)
        expect_layout(settings, training, (tp, pp, dp))
        if not training.is_stepped(pp, dp):
            return compare_calls(model, find_inputs(model, example_inputs), tp, settings)
        expect_blocks(model, training, pp)
        args, kwargs = find_inputs(model, example_inputs)
        return compare_mesh(model, (args, library().with_documents(model, kwargs)), (tp, pp, dp), training)

    sizes = f", cp={cp}" * (cp != 1) + f", pp={pp}, dp={dp}" * ((pp, dp) != (1, 1)) + f", ep={ep}" * (ep != 1)
    return within(f"verify({type(model).__name__}, tp={tp}{sizes})", run)


def microbatches_of(pp: int) -> int:
    """Returns the least number of microbatches that every schedule of `pp` pipeline ranks can run."""
    return max(1, pp) if isinstance(pp, int) else 1


def training_of(
    settings: Options, microbatches: int, schedule: Schedule, zero: Literal[0, 1, 2, 3], interleave: int | None
) -> Training:
    """Returns what `distribute` would be asked for with these options."""
    of_training = vars(settings) | {"outputs": "local", "experts": "width", "summed": True}
    return Training(**of_training, microbatches=microbatches, schedule=schedule, zero=zero, interleave=interleave)


def expect_layout(settings: Options, training: Training, sizes: tuple[int, int, int]) -> None:
    """Raises Error if no model can be trained in this layout of (tp, pp, dp) ranks."""
    tp, pp, dp = sizes
    expect_training(training, pp, dp, tp)
    if not training.is_stepped(pp, dp):
        if training.schedule != "1F1B" or training.zero:
            raise Error(
                "schedule and zero are options of distribute, and this is one call of a model",
                fix="pp=, dp= or microbatches= beside them, or leave them out",
            )
        return
    if settings.outputs != "auto" or settings.experts != "width":
        raise Error("outputs and experts are options of parallelize", fix="verify without pp, dp and microbatches")
    actions_of(training.engine, pp, training.microbatches)


def expect_blocks(model: nn.Module, training: Training, pp: int) -> None:
    """Raises Error if a model has fewer numbered modules than the pipeline has stages."""
    blocks = {block_in(name) for name, _ in model.named_modules()} - {""}
    expect_enough(len(blocks), len([i for rank in range(pp) for i in stages_of(training, rank, pp)]))


def compare_mesh(model: nn.Module, inputs: Inputs, sizes: tuple[int, int, int], training: Training) -> Report:
    """Returns the report of `verify` for a mesh of (tp, pp, dp) ranks.

    Args:
        inputs: positional and keyword arguments of a microbatch.
    """
    name, computes, stages = type(model).__name__, not _on_meta(model), list[list[Stage]]()
    training = replace(training, memory=_budget_of_double(training.memory, model))
    if not computes:
        program, first, proof = prove(model, inputs, sizes, training)
        proof = replace(proof, not_computed="the model is on meta")
        return Report(_plan(program, name, first), (), (), (), mesh=proof)
    with all_double(), empty_caches(model), forked():
        seed(0)
        whole, training = add_noise(copied_model(model).cpu().double()).train(), replace(training, randomness="exact")
        library().keep_activations(whole)
        inputs = map_leaves(lambda x: doubled(x) if isinstance(x, Tensor) else x, inputs)
        program, first, proof = prove(whole, inputs, sizes, training, stages)
        plan = _plan(program, name, first)
        if any(map(draws, program.graph.nodes)):  # In a microbatch it draws others than one device for all rows.
            proof = replace(proof, not_computed="the model draws random numbers, such as dropout's")
            return Report(plan, (), (), (), mesh=proof)
        return Report(plan, *compare_step(whole, inputs, program, stages, proof, training), mesh=proof)


def compare_calls(model: nn.Module, inputs: Inputs, tp: int, settings: Options, amend: Amend | None = None) -> Report:
    """Returns the report of `verify`: of a call, and of a second call if the first sets attributes.

    Args:
        inputs: positional and keyword arguments.
        amend: as for `make_trial`.
    """
    settings = replace(settings, memory=_budget_of_double(settings.memory, model))
    with progress(f"verify({type(model).__name__}, tp={tp})", total=2) as line:  # The capture, and the run.
        trial, first_report = _compared(model, inputs, tp, settings, amend, line)
        line.count()
        writes = any(isinstance(change, Change | Write) for change in trial.analysis.captured.changes)
        if not writes or not trial.graphs:
            return first_report
        with all_double(), empty_caches(model):  # The second call reads the attributes that the first has set.
            called, changed = copied_model(trial.model), copy.deepcopy((trial.args, trial.kwargs))
            with torch.no_grad(), forked():
                called(*changed[0], **changed[1])
        return _joined(first_report, _compared(called, (trial.args, trial.kwargs), tp, settings, amend)[1])


def _budget_of_double(memory: Memory, model: nn.Module) -> Memory:
    """Returns a budget for a copy of a model in float64, whose values take more bytes.

    Raises:
        Error: it is "auto".
    """
    budget = budget_on(memory, torch.device("cpu"), ())
    if budget is None or memory_limit(budget) <= 1:
        return budget
    widths = [x.itemsize for x in model.parameters() if x.is_floating_point()]
    return int(memory_limit(budget) * 8 / max(widths, default=8))


def _read_by_one_device(trial: Trial, first: int) -> KnownValues | None:
    """Runs the model on one device; returns what Python reads, if that are more reads than are known."""
    places = trial.analysis.captured.attempt.values.places
    with _in_double(trial), Listing(places) as listing:
        _returned(copied_model(trial.model), trial, _inputs(trial))
    return KnownValues(places, tuple(listing.outcomes)) if len(listing.outcomes) > first else None


def _compared(
    model: nn.Module, inputs: Inputs, tp: int, settings: Options, amend: Amend | None, line: Line | None = None
) -> tuple[Trial, Report]:
    """Makes a trial and runs it; again where Python reads other values of activations than the graph assumes."""

    def prepare(known: KnownValues, of_inputs: bool = True) -> Trial:
        try:
            trial = make_trial(model, *inputs, tp, settings, amend, known, of_inputs)
        except Error as error:
            # A model that sets `requires_grad` of its input cannot take one that has a gradient.
            if not (of_inputs and SETS_FLAGS in str(error)):
                raise
            return prepare(known, of_inputs=False)
        if line is not None and known is NO_VALUES:
            line.count()
            line.begin("run")
        return trial

    if _on_meta(model):
        trial = prepare(NO_VALUES)
        return trial, run_and_compare(trial)
    trial, (_, ran) = run_until_right(prepare, run_ranks, _read_by_one_device)
    return trial, run_and_compare(trial, ran=ran)
