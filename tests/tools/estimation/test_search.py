"""`search`: the fastest layouts that fit, and why the obvious ones lost."""

import ast
import itertools
import json
import math
import shlex
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from errors import message
from torch import nn

import autotp
from autotp import compiler
from autotp.costs.hardware import hardware_of
from autotp.models.gpt import GPT, GPTConfig
from autotp.tools.estimation import search as search_module
from autotp.tools.estimation.counts import pieces
from autotp.tools.estimation.layout import AUTOTP, StepLayout
from autotp.tools.estimation.result import RankMemory
from autotp.tools.estimation.search import Layouts
from autotp.tools.estimation.start_lines import python_line, torchrun_line
from autotp.training.pipeline.schedule_actions import actions_of
from autotp.training.pipeline.schedules import engine_of

IN_BFLOAT16 = StepLayout(batch=1, dtype=torch.bfloat16)
SMALL_DEVICE = "312TF 2TB/s 8.5GiB node=4x300GB/s net=25GB/s"


def gpt(dropout: float = 0.0) -> GPT:
    with torch.device("meta"):
        config = GPTConfig(block_size=1024, vocab_size=51200, n_layer=16, n_head=16, n_embd=2048, dropout=dropout)
        return GPT(config)


def searched(model: nn.Module | None = None, **given: Any) -> autotp.Search:
    options: dict[str, Any] = {"gpus": 8, "gpu": SMALL_DEVICE, "batch": 32, "dtype": torch.bfloat16, **given}
    return autotp.search(gpt() if model is None else model, **options)


@pytest.fixture(scope="module")
def found() -> autotp.Search:
    return searched()


def test_the_best_fit_and_are_sorted(found: autotp.Search) -> None:
    assert 1 < len(found.best) <= 5 and found.tried > 50
    assert all(est.fits for est in found.best)
    assert [est.seconds for est in found.best] == sorted(est.seconds for est in found.best)
    assert all(est.layout.devices == 8 for est in found.best)


def test_the_price_of_a_layout_is_that_of_estimate(found: autotp.Search) -> None:
    for est in found.best[:2]:
        options = vars(est.layout)
        again = autotp.estimate(gpt(), gpu=SMALL_DEVICE, **options)
        assert again.fits
        assert again.seconds == pytest.approx(est.seconds) and again.memory[0].total == pytest.approx(
            est.memory[0].total
        )


def test_no_layout_of_a_grid_is_faster(found: autotp.Search) -> None:
    """Against estimates of all layouts of a coarse grid."""
    seconds = []
    for tp, pp, micro, zero in itertools.product((1, 2, 4, 8), (1, 2), (1, 2), (0, 1)):
        if 8 % (tp * pp) == 0:
            options = {"tp": tp, "pp": pp, "dp": 8 // tp // pp, "micro_batch": micro, "zero": zero}
            est = autotp.estimate(
                gpt(), gpu=SMALL_DEVICE, batch=32, dtype=torch.bfloat16, sequence_parallel=tp > 1, **options
            )  # type: ignore[arg-type]
            seconds += [est.seconds] * est.fits
    assert found.best[0].seconds <= min(seconds) * 1.001


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00012, "+0.00012"), (-0.0034, "-0.0034"), (0.251, "+0.25"), (12.4, "+12"), (124, "+120")]
)
def test_differences_have_digits_that_say_something(seconds: float, text: str) -> None:
    assert search_module._two_digits(seconds) == text


def test_obvious_layouts_say_why_they_lost(found: autotp.Search) -> None:
    why = {other.layout.partition(":")[0]: other.why for other in found.lost}
    assert "%): " in why["a pipeline without tp"] and " +" in why["a pipeline without tp"]
    assert why["tp across nodes"].endswith("tp=8 crosses nodes")
    assert not any(other.layout.endswith(str(found.best[0].layout)) for other in found.lost)


def test_a_layout_that_does_not_fit_says_on_which_rank(found: autotp.Search) -> None:
    best, gib = found.best[0], 2**30
    full = replace(best, memory=(RankMemory(weights=2 * gib), RankMemory(weights=6 * gib)))
    layouts = Layouts(gpt(), best.device, AUTOTP, IN_BFLOAT16, None, None, 5 * gib)
    assert search_module._why(full, best, layouts) == "does not fit: 6 of 5 GiB on pipeline rank 1"


def test_no_obvious_layout_is_named_twice(found: autotp.Search) -> None:
    layouts = [other.layout.split(": ", 1)[1] for other in found.lost]
    assert len(layouts) > 1 and len(set(layouts)) == len(layouts)


def test_large_micro_batches_and_all_stages_of_zero_are_tried() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=32, vocab_size=512, n_layer=2, n_head=4, n_embd=128))
    found = searched(model, gpus=2, batch=64, memory=0.5)
    assert found.best[0].layout.micro_batch == 32  # The products of a few rows are small.
    layouts = Layouts(model, hardware_of(SMALL_DEVICE), AUTOTP, IN_BFLOAT16, None, None)
    legal = list(layouts.legal(4, 128))
    assert {x.zero for x in legal if x.pp == 1 and x.dp > 1} == {0, 1, 2, 3}
    assert len(set(legal)) == len(legal)


def test_only_layouts_that_are_far_from_fitting_have_no_price() -> None:
    """And budgets of those that fit without one."""
    layouts = Layouts(gpt(), hardware_of(SMALL_DEVICE), AUTOTP, IN_BFLOAT16, None, None)
    found, tried = search_module._priced_roughly(layouts, 8, 32)
    legal = list(layouts.legal(8, 32))
    priced = {layout for layout, _ in found}
    assert tried == len(legal) > len(priced)
    without_price = [x for x in legal if x not in priced]
    budgets = [x for x in without_price if layouts.rough(x).memory <= search_module.FAR * layouts.limit(x)]
    assert 0 < len(budgets) < len(without_price) and all(x.memory is not None for x in budgets)
    unbudgeted = [replace(x, memory=None) for x in budgets]
    assert all(layouts.rough(x).memory * search_module.FAR <= layouts.limit(x) and x in priced for x in unbudgeted)


def test_a_budget_makes_layouts_fit(found: autotp.Search) -> None:
    """It takes the place of recomputation: never slower than "full", in no more bytes than `estimate` lets it take."""
    under_budget = [est for est in found.best if est.layout.memory is not None]
    assert under_budget and all(est.layout.recompute == "none" for est in found.best)
    for est in under_budget[:2]:
        options = vars(est.layout) | {"memory": None}
        assert est.layout.memory == "auto" and est.fits
        assert not autotp.estimate(gpt(), gpu=SMALL_DEVICE, **options).fits
        full = autotp.estimate(gpt(), gpu=SMALL_DEVICE, **options | {"recompute": "full"})
        assert est.seconds < full.seconds and 'memory="auto"' in python_line(est.layout)


def test_states_of_another_optimizer_leave_more_room(found: autotp.Search) -> None:
    """What `estimate` counts for them, search counts; and its line for `distribute` has them."""
    small = searched(state_bytes=2.03)
    assert small.best[0].layout.state_bytes == 2.03 and "state_bytes=2.03" in python_line(small.best[0].layout)
    assert small.best[0].seconds < found.best[0].seconds
    layout = vars(small.best[0].layout)
    est = autotp.estimate(gpt(), gpu=SMALL_DEVICE, **layout)
    assert est.fullest.total == small.best[0].fullest.total
    adamw = autotp.estimate(gpt(), gpu=SMALL_DEVICE, **layout | {"state_bytes": None})
    assert est.fullest.optimizer == pytest.approx(adamw.fullest.optimizer * 2.03 / 8)
    assert est.fullest.activations > adamw.fullest.activations  # The budget takes the room.
    for wrong in ({"state_bytes": -1}, {"capacity": 0}):
        assert next(iter(wrong)) in message(searched, **wrong)


def test_memory_is_a_part_or_bytes(found: autotp.Search) -> None:
    """Which tensors may take at most; a layout has to fit the device in any case."""
    limits = [search_module.expect_search(8, SMALL_DEVICE, 32, x)[1] for x in (0.5, "50%", "4.25GiB", "auto")]
    assert limits == [4.25 * 2**30] * 3 + [math.inf]
    half = searched(memory=0.5)
    assert half.best[0].seconds > found.best[0].seconds
    assert all(est.fits and est.fullest.total <= 4.25 * 2**30 for est in half.best)


def test_it_prints_and_is_plain_data(found: autotp.Search) -> None:
    text = str(found)
    assert text.startswith(f"the best of {found.tried} layouts on 8 x {SMALL_DEVICE}") and "why it lost" in text
    first = text[text.index("of peak") : text.index("obvious, and")]
    assert first.count(" ±") == 5 * len(found.best) and found.summary().count(" ±") == 2  # An error bar on each number.
    assert "32 rows; the tensors of a row are [1024], [1024]" in text
    assert " ".join(map(str.strip, text.splitlines())).endswith(python_line(found.best[0].layout))
    data = json.loads(json.dumps(found.to_dict()))
    assert len(data["best"]) == len(found.best) and data["tried"] == found.tried
    assert repr(found).startswith("Search(") and "obvious" in found._repr_html_()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gpus": 0}, "gpus=0 is not a whole number of 1 or more\n  try      gpus=8"),
        ({"memory": 90}, 'memory=90 is not a part of a device\'s memory\n  try      memory="auto"'),
        ({"batch": 0}, "batch=0 is not a whole number of 1 or more"),
        ({"gpu": "b1000"}, "gpu='b1000' is not known"),
        ({"gpu": "312TF 2TB/s 0.1GB node=4x300GB/s net=25GB/s"}, "no layout fits: "),
    ],
    ids=["gpus", "memory", "batch", "gpu", "fits"],
)
def test_what_cannot_be_is_one_error(given: dict[str, Any], expected: str) -> None:
    text = message(lambda: searched(**given))
    assert text.startswith(f"search(GPT, gpus={given.get('gpus', 8)}): {expected}")


def test_a_batch_that_no_layout_divides_is_refused() -> None:
    with torch.device("meta"):
        one = GPT(GPTConfig(block_size=64, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    text = message(lambda: searched(one, gpus=34, batch=1, gpu=SMALL_DEVICE))
    assert "a batch of 1 rows is not divided evenly by any layout of 34 devices" in text


def test_long_sequences_may_be_cut() -> None:
    """One row for each step: there are no replicas, and one head, so that nothing else divides the sequence."""
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=8192, vocab_size=64, n_layer=1, n_head=1, n_embd=64, dropout=0.0))
    found = autotp.search(model, gpus=2, gpu="a100-80gb", batch=1, dtype=torch.bfloat16)
    assert {est.layout.cp for est in found.best} == {1, 2}
    short = autotp.search(model, gpus=2, gpu="a100-80gb", batch=1, dtype=torch.bfloat16, sequence=1024)
    assert all(est.layout.cp == 1 for est in short.best)
    without_attention = nn.Sequential(nn.Linear(4, 4))
    given = torch.ones(2, 9000, 4)
    plain = autotp.search(without_attention, gpus=2, gpu="a100-80gb", batch=2, example_inputs=given)
    assert all(est.layout.cp == 1 for est in plain.best)


@pytest.mark.parametrize("batch", [1, 16])
def test_low_prices_lose_no_layout(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a search that lowers all numbers of ranks: one row, where most of the best cut it, and many rows."""
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=8192, vocab_size=512, n_layer=2, n_head=4, n_embd=256, dropout=0.0))
    lowered = list[tuple[int, int]]()
    kept = search_module.lowered_for
    monkeypatch.setattr(
        search_module, "lowered_for", lambda call, x, **how: lowered.append((x.tp, x.cp)) or kept(call, x, **how)
    )
    few = autotp.search(model, gpus=8, gpu="a100-80gb", batch=batch, dtype=torch.bfloat16)
    pairs = set(lowered)
    monkeypatch.setattr(Layouts, "is_lowered", lambda *_: True)
    lowered.clear()
    whole = autotp.search(model, gpus=8, gpu="a100-80gb", batch=batch, dtype=torch.bfloat16)
    assert [est.layout for est in few.best] == [est.layout for est in whole.best]
    assert few.tried == whole.tried and (pairs == set(lowered)) == (batch == 1)
    cut = sum(est.layout.cp > 1 for est in few.best)
    assert cut >= 3 if batch == 1 else 0 < cut < 3


def test_the_model_is_captured_once_for_all_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is planned once for each tp, and pieces are emitted once for all micro-batches."""
    captures, lowerings, emissions = list[Any](), list[int](), list[Any]()
    capture, lowered, emit = compiler.capture, pieces.analyse_microbatch, pieces.emitted_operators
    monkeypatch.setattr(compiler, "capture", lambda *given: captures.append(given) or capture(*given))
    monkeypatch.setattr(pieces, "analyse_microbatch", lambda *given: lowerings.append(given[3]) or lowered(*given))
    monkeypatch.setattr(pieces, "emitted_operators", lambda graph, *rest: emissions.append(graph) or emit(graph, *rest))
    found = searched()
    assert {est.layout.micro_batch for est in found.best} and found.tried > 50
    assert len(captures) == 1 and sorted(lowerings) == [1, 2, 4, 8]
    kinds = 4  # The first block, one in the middle, the one before the last, and the last.
    graphs = 2 * len(lowerings)  # Schedules in two halves have one without `overlap`.
    assert len(emissions) <= kinds * (2 * graphs + 1)  # With and without recomputation; and for the FLOPs.


def test_passes_that_do_not_depend_on_tp_run_once_for_all_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others run once for each number of ranks."""
    runs = Counter[str]()

    def counted(one: compiler.Pass) -> compiler.Pass:
        return replace(one, run=lambda program: runs.update([one.name]) or one.run(program))  # type: ignore[func-returns-value]

    for table in ("CANONICALIZE", "PLAN"):
        monkeypatch.setattr(compiler, table, tuple(map(counted, getattr(compiler, table))))
    searched()
    alone = {one.name for one in (*compiler.CANONICALIZE, *compiler.PLAN) if not one.by_tp}
    assert {runs[name] for name in alone if runs[name]} == {1}
    assert runs["decouple"] == 1 and runs["match"] == 4


def test_shared_passes_and_sizes_change_no_number(found: autotp.Search, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranked layouts, seconds and bytes are those of a search that shares neither."""
    planned = compiler.Captures.planned
    monkeypatch.setattr(compiler.Captures, "planned", lambda self, program: planned(compiler.Captures(), program))
    monkeypatch.setattr("autotp.tools.estimation.counts.record.call", lambda func, args, kwargs: func(*args, **kwargs))
    assert searched().to_dict() == found.to_dict()


@pytest.mark.parametrize("schedule", ["zero-bubble", "zero-bubble-v"])
def test_schedules_in_two_halves_are_tried(schedule: str) -> None:
    """Their prices are those of `estimate`, which lowers them without the pass `overlap`."""
    layouts = Layouts(gpt(), hardware_of(SMALL_DEVICE), AUTOTP, IN_BFLOAT16, None, None)
    layout = next(x for x in layouts.legal(8, 32) if (x.schedule, x.tp, x.pp) == (schedule, 2, 2))
    assert layouts.price(layout).seconds == pytest.approx(
        autotp.estimate(gpt(), gpu=SMALL_DEVICE, **vars(layout)).seconds
    )
    for one in layouts.legal(8, 32):
        actions_of(engine_of(one.schedule, one.interleave), one.pp, one.microbatches)


def test_a_shared_capture_changes_no_number(found: autotp.Search, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranked layouts, seconds and bytes are those of a search that captures the model for each number of ranks."""
    monkeypatch.setattr(compiler.Captures, "of", lambda self, key, capture: capture())
    again = searched()
    assert again.to_dict() == found.to_dict()


def test_a_shared_capture_of_cut_sequences_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """One capture serves whole sequences and cut ones."""
    given: dict[str, Any] = {"gpus": 4, "batch": 8, "gpu": "a100-80gb"}
    monkeypatch.setattr("autotp.tools.estimation.search.LONG", 1024)
    captures, capture = list[Any](), compiler.capture
    monkeypatch.setattr(compiler, "capture", lambda *given: captures.append(given) or capture(*given))
    found = searched(**given)
    assert len(captures) == 1
    assert any("cp=" in str(layout) for layout in [*(est.layout for est in found.best), *found.lost])
    monkeypatch.setattr(compiler.Captures, "of", lambda self, key, capture: capture())
    assert searched(**given).to_dict() == found.to_dict()


def test_layouts_that_error_bars_do_not_tell_apart(found: autotp.Search) -> None:
    """The first one's bar reaches to 1.1 of its time; the others' bars may reach down to it."""
    first = replace(found.best[0], seconds=1.0, layout=replace(found.best[0].layout, zero=0))
    bar = first.error
    near, far = replace(first, seconds=1 + bar), replace(first, seconds=1.1 * (1 + bar) / (1 - bar))
    assert "too close" not in str(replace(found, best=(first, far)))
    assert "the error bars of 1 of the others overlap" in str(replace(found, best=(first, near, far)))
    assert "the error bars of all others overlap" in str(replace(found, best=(first, near)))


def test_the_commands_can_be_copied_from_a_terminal(found: autotp.Search) -> None:
    """Lines that a terminal of 80 columns does not break, and that shell and Python read as one."""
    layout = StepLayout(
        batch=512, tp=4, pp=8, dp=8, schedule="interleaved", interleave=4, sequence_parallel=True, zero=1,
        recompute="selective", dtype=torch.bfloat16,
    )  # fmt: skip
    lines = str(replace(found, best=(replace(found.best[0], layout=layout),))).splitlines()
    shell, call = "\n".join(lines[lines.index("the first:") + 1 :]).split("trainer = ")
    assert max(map(len, f"{shell}trainer = {call}".splitlines())) <= 80 and " \\\n" in shell and "\n" in call
    assert shlex.split(shell.replace("\\\n", "")) == shlex.split(torchrun_line(256, 4))
    assert ast.dump(ast.parse(f"trainer = {call}")) == ast.dump(ast.parse(python_line(layout)))


def test_the_fastest_of_the_best_without_zero_3_is_named(found: autotp.Search) -> None:
    """Where the first has ZeRO 3. It says nothing where the first is without, or none is."""
    with_zero, without = (
        [replace(est, layout=replace(est.layout, zero=zero), seconds=4.0 + i) for i, est in enumerate(found.best[:3])]
        for zero in (3, 1)
    )
    shown = {
        (3, 3, 1): "without      the fastest without ZeRO 3 is layout 3 of these: +2 s (+50%)",
        (3, 1, 1): "without      the fastest without ZeRO 3 is layout 2 of these: +1 s (+25%)",
        (1, 3, 1): "",
        (3, 3, 3): "",
    }
    for stages, text in shown.items():
        best = tuple(with_zero[i] if zero == 3 else without[i] for i, zero in enumerate(stages))
        lines = str(replace(found, best=best)).splitlines()
        assert [line for line in lines if line.startswith("without ")] == [text] * bool(text)


def test_the_best_without_zero_3_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all the fastest divide parameters, too: the error of their estimates is larger."""
    plain = search_module.Layouts.rough
    monkeypatch.setattr(
        Layouts, "rough",
        lambda self, x: replace(plain(self, x), seconds=plain(self, x).seconds * (1 if x.zero == 3 else 3)),
    )  # fmt: skip
    monkeypatch.setattr(search_module, "PRICED", 5)
    lost = searched().lost[0].layout
    assert lost.startswith("without ZeRO 3: tp=") and "zero=3" not in lost


def test_a_wide_error_bar_says_why(found: autotp.Search) -> None:
    plain, divided = (replace(est, layout=replace(est.layout, zero=z)) for est in found.best[:1] for z in (1, 3))
    assert "zero=3       published steps took from 16 % less to 12 % more time" in str(
        replace(found, best=(plain, divided))
    )
    assert "published steps" not in str(replace(found, best=(plain,)))
