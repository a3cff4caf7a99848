"""compiler: the passes as one table, each a file of its name; what each finds, and what options leave out or add."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import noted_passes
from small_models import Plain, gpt
from torch import fx

import autotp
from autotp.compiler import (
    CANONICALIZE,
    EMIT,
    LOWER,
    PLAN,
    Captures,
    analyse,
    captured_program,
    flat_graph,
    graphs_after_passes,
    passes_of,
    programs_after_passes,
)
from autotp.extensions import values_of
from autotp.model_library import ModelLibrary
from autotp.options import DEFAULTS, OPTIONAL, Options
from autotp.passes.capture.capture import capture
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.lower.local_sizes import Target
from autotp.passes.program.program import CapturedProgram, Program

TABLE = (*CANONICALIZE, *PLAN, *LOWER, *EMIT)
PASSES = Path(autotp.__file__).resolve().parent.parent / "passes"
WITHIN = {"balance"}
"""Passes between two steps of another row: of `context_parallel`, which plans, lowers and checks over its own axis."""
ALWAYS_WITHIN = {"heads"}
"""Those that nothing leaves out: `cp_attention` says what they do."""
AFTERWARDS = {"compiled", "under_budget"}
"""Passes over a module: of one that has its parameters, and of blocks in the place of `recompute`."""
NOT_IN_THE_TABLE = {"repeats", "in_place", "outline", *WITHIN}
"""What may be left out of the stage capture, which is one call, and of a row."""
GIVEN = (skeleton_of(Plain()), (torch.ones(2, 3, 8),), {}, 2)
SIZES: dict[str, Any] = {"block_size": 8, "vocab_size": 60, "n_layer": 2, "n_head": 4, "n_embd": 16}


def names(options: Options) -> list[str]:
    """The passes that a model takes under these options."""
    found = [each.name for each, _ in programs_after_passes(captured_program(*GIVEN, options))]
    return found + [each.name for each, _ in graphs_after_passes(analyse(*GIVEN, options), Target("tp", 2, 0))]


def before_emit(options: Options) -> list[str]:
    """The rows of the stages before emit that these options want."""
    return [row.name for row in TABLE if row.stage != "emit" and row.wanted(options)]


def length_of(graph: fx.Graph, program: CapturedProgram) -> Any:
    """The second size of the model's argument, a symbol."""
    return next(node for node in graph.nodes if node.name == program.captured.inputs[0]).meta["val"].shape[1]


def test_sizes_a_pass_assumes_are_conditions_of_the_graph() -> None:
    """A pass that compares a length with a number has a graph for this number only."""

    def compare(name: str, program: CapturedProgram) -> CapturedProgram:
        return program if name != "cse" or length_of(program.graph, program) == 11 else replace(program, tp=3)

    given = (GIVEN[0], (torch.ones(2, 11, 8),), {}, 2)  # No other test captures this length.
    fits = analyse(*given, amend=compare).captured.fits
    for each in (fits, pickle.loads(pickle.dumps(fits))):
        assert each([(4, 11, 8)]) and not each([(4, 5, 8)])
    assert analyse(*GIVEN).captured.fits([(4, 5, 8)])


def test_lowering_passes_may_assume_nothing_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its conditions are tested no more."""

    def compare(program: Program, to: Target, graph: fx.Graph) -> fx.Graph:
        return graph if length_of(graph, program) == 13 else fx.Graph()

    program = analyse(GIVEN[0], (torch.ones(2, 13, 8),), {}, 2)
    last = replace(LOWER[-1], run=compare, wanted=lambda options: True)
    monkeypatch.setattr("autotp.compiler.LOWER", (*LOWER[:-1], last))
    with pytest.raises(autotp.Error, match=r"a pass assumes Eq\(\w+, 13\) of all calls"):
        flat_graph(program, 0, "fast")


def test_each_pass_of_the_table_is_a_file() -> None:
    for row in TABLE:
        (file,) = (PASSES / row.stage).rglob(f"{row.name}.py")
        assert file.read_text().startswith(f'"""{row.name}: '), row
    assert len({row.name for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("stage", ["canonicalize", "plan", "lower", "emit"])
def test_each_pass_file_is_in_the_table(stage: str) -> None:
    """A file that calls itself a pass is one, or a part of one, which the rows' own files import."""
    files = {file.stem: file.read_text() for file in (PASSES / stage).rglob("*.py")}
    passes = {name for name, text in files.items() if text.startswith(f'"""{name}: ')}
    rows = {row.name for row in TABLE if row.stage == stage}
    imported = re.compile(rf"from autotp\.passes\.{stage}\.(?:\w+\.)?(\w+) import")
    used = {name for text in files.values() for name in imported.findall(text)}
    assert rows <= passes <= rows | used | WITHIN | ALWAYS_WITHIN | AFTERWARDS


def test_each_optional_pass_is_left_out_alone() -> None:
    """Each of `OPTIONAL` is one row, which no other choice leaves out."""
    overlap: Any = ("none", *values_of("overlap"))[-1]
    some: dict[str, Any] = {"sequence_parallel": True, "experts": "expert", "summed": True, "cp": 2, "ep": 2}
    everything = Options(**some, overlap=overlap, outputs="loss")
    rows = passes_of(TABLE, everything)
    assert {*TABLE} <= {*rows}
    for name in OPTIONAL:
        remaining = passes_of(TABLE, replace(everything, without=(name,)))
        left_out = [row.name for row in rows if row not in remaining]
        # Writing a lookup's gradient into the head's is an in-place operator, too.
        assert left_out == (["tied_gradients"] if name == "in_place" else [name] * (name not in NOT_IN_THE_TABLE))
    assert set(OPTIONAL) > NOT_IN_THE_TABLE


@pytest.mark.parametrize(
    ("options", "more"),
    [
        (Options(summed=True), ["loss_totals", "row_independence", "count_load"]),
        (Options(outputs="loss"), ["only_loss"]),
        (Options(experts="expert"), ["experts"]),
        (Options(sequence_parallel=True), ["sequence_parallel"]),
        (Options(cp=2), ["equal_inputs", "unsort", "context_parallel", "experts"]),
    ],
    ids=["summed", "loss", "experts", "sequence", "context"],
)
def test_options_add_their_passes(options: Options, more: list[str]) -> None:
    assert [row.name for row in TABLE if row.wanted(options) and not row.wanted(DEFAULTS)] == more


def test_a_model_takes_the_passes_in_table_order() -> None:
    assert names(DEFAULTS) == before_emit(DEFAULTS)
    assert names(Options(without=("cse", "overlap"))) == [
        name for name in before_emit(DEFAULTS) if name not in ("cse", "overlap")
    ]


def parallelize(options: Options) -> None:
    """A call of a parallel model of one rank."""
    model = gpt(**SIZES)
    parallel = autotp.parallelize(model, 1, overlap=options.overlap, without=options.without)
    parallel(**model.dummy_inputs)


def distribute(options: Options) -> None:
    """A step of a training on one rank."""
    model = gpt(**SIZES)
    autotp.distribute(model, overlap=options.overlap).step(**model.dummy_inputs)


def verify(options: Options) -> None:
    """A call of two ranks in lockstep."""
    assert autotp.verify(gpt(**SIZES), 2, overlap=options.overlap, without=options.without).ok


def verify_step(options: Options) -> None:
    """A step of two ranks and two replicas in lockstep."""
    assert autotp.verify(gpt(**SIZES), 2, dp=2, overlap=options.overlap).ok


SUMMED = Options(summed=True)
OVERLAPS = [Options(overlap=value) for value in values_of("overlap")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("road", "options"),
    [
        *[(road, options) for road in (parallelize, verify) for options in (DEFAULTS, *OVERLAPS)],
        *[(road, Options(without=("late_sums", "cse"))) for road in (parallelize, verify)],
        *[(road, replace(x, summed=True)) for road in (distribute, verify_step) for x in (SUMMED, *OVERLAPS)],
    ],
)
def test_each_road_runs_each_pass_in_table_order(road: Callable[[Options], None], options: Options) -> None:
    """A row that is added is on all roads at once: what `verify` ran is what runs in a call, or in a step."""
    with noted_passes() as ran:
        road(options)
    assert ran == [row.name for row in passes_of(TABLE, options)]


RUN_ELSEWHERE = {
    # The graphs of what Python reads, of the totals of a loss, and of functions of them: none is a rank's graph.
    "bind": {"runtime.calls.graph_entry", "training.microbatches", "training.pipeline.rest_of_loss"},
    # As in `rank_graph`, but the graphs before it are compared, proved or counted.
    "fuse": {"diagnostics.verify", "diagnostics.mesh_proof", "tools.estimation.counts.pieces"},
    # Counts the collectives of a copy.
    "separate": {"diagnostics.report"},
    # Counts the experts of layers, which the numbers of ranks that are tried have to divide.
    "experts": {"tools.estimation.search"},
}
"""Functions of passes that return a graph -> modules that call them beside the compiler."""


@pytest.mark.each_time
def test_no_road_runs_a_pass_of_its_own() -> None:
    """What one road did to a graph by itself, the others would not run, and `verify` would not see."""
    files = [file for stage in ("canonicalize", "plan", "lower", "emit") for file in (PASSES / stage).rglob("*.py")]
    passes = {file.stem for file in files if file.read_text().startswith(f'"""{file.stem}: ')}
    found: dict[str, set[str]] = {}
    for file in (PASSES.parent / "autotp").rglob("*.py"):
        module = ".".join(file.relative_to(PASSES.parent / "autotp").with_suffix("").parts)
        imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        # What an extension adds are passes, made of others: rows of the table for all roads (`passes_of`).
        for node in imports if module != "compiler" and not module.startswith("experimental.") else ():
            if (node.module or "").startswith("autotp.passes.") and str(node.module).rpartition(".")[2] in passes:
                for name in [alias.name for alias in node.names]:
                    value = getattr(importlib.import_module(str(node.module)), name)
                    if inspect.isfunction(value) and "fx.Graph" in str(value.__annotations__.get("return")):
                        found.setdefault(name, set()).add(module)
    assert "attach_parameters" in passes and found.keys() <= RUN_ELSEWHERE.keys()
    assert all(modules <= RUN_ELSEWHERE[name] for name, modules in found.items()), found


def test_a_program_has_a_fact_from_the_pass_on_that_finds_it() -> None:
    """Before, no type has it, so that nobody can read it: neither mypy nor Python knows the attribute."""
    program = captured_program(*GIVEN)
    facts_of = {"captured": {item.name for item in fields(program)}}
    for row, later in programs_after_passes(program):
        more = [item.name for item in fields(later) if not hasattr(program, item.name)]
        facts_of |= {row.name: set(more)} if more else {}
        program = later
    assert facts_of == {
        "captured": {item.name for item in fields(CapturedProgram)},
        "decouple": {"axes"},
        "match": {"stay", "candidates"},
        "choose": {"decision"},
        "propagate": {"differentiable", "have", "hoisted"},
        "outputs": {"caches", "layouts", "local_outputs"},
    }
    with pytest.raises(FrozenInstanceError):
        program.tp = 3  # type: ignore[misc]


def test_what_numbers_of_ranks_share_is_what_each_has_alone() -> None:
    """Passes that run once for all numbers of ranks get ANY_TP, with which nobody can compute."""
    model, captures = skeleton_of(gpt()), Captures()
    inputs = (torch.zeros(2, 7, dtype=torch.int64),), {}
    for tp in (2, 3):
        shared, alone = analyse(model, *inputs, tp, captures=captures), analyse(model, *inputs, tp)
        assert str(flat_graph(shared, 1, "exact")) == str(flat_graph(alone, 1, "exact"))


def test_operators_of_libraries_are_added_around_each_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for `stages`, which does not analyse; and after it, since forward may import a kernel."""
    events: list[str] = []
    monkeypatch.setattr(ModelLibrary, "add_operators", lambda self: events.append("added"))
    monkeypatch.setattr("autotp.compiler.capture", lambda *args: events.append("captured") or capture(*args))
    captured_program(*GIVEN)
    assert events == ["added", "captured", "added"]


def test_analyse_stops_at_the_last_pass_asked_for() -> None:
    """Its program has no facts of later passes."""
    program = analyse(*GIVEN, last="match")
    assert program.candidates and not hasattr(program, "decision")


def test_another_version_of_torch_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    with pytest.warns(UserWarning, match=r"tested with torch 2\.13\.x, and this is 2\.12\.1") as told:
        captured_program(*GIVEN, DEFAULTS)
    assert len(told) == 1
