"""Hugging Face families, unedited: equal to one device, cut as they should be, and in step after twenty steps."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import PAIRS, PASSES, only
from ranks import Checks, run_ranks
from small_models import assert_values_close
from torch import Tensor, nn
from torch.optim import Optimizer

import autotp
from autotp.diagnostics.plan import MemoryPlan
from autotp.options import memory_limit

pytest.importorskip("transformers")

import hf_coverage
from hf_coverage import HEADER, TABLE, share, stacks
from support.hf_families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # in transformers
checks = Checks()
FEW_HEADS = ("llama",)
FEW_HEADS_TOO = ("falcon-new", "gemma", "phi3", "falcon-mqa", "gpt_bigcode")
LOW_RANKS = {"deepseek_v3": 0.93, "gemma": 0.94}
"""Where less than 95 % is cut: the low ranks of latent attention, one key/value head of six."""
USUAL = ("gpt2", "bloom", "falcon-new", "llama", "gemma3", "deepseek_v3", "bert", "deberta_v2", "t5", "clip")
"""One of each kind: of heads, positions, norms, experts, encoders. The others are rare tests."""
ENCODER_DECODERS = ("t5", "bart", "marian", "pegasus", "whisper")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.rare] * (n not in USUAL)) for n in FAMILIES])
def test_hugging_face_family_equals_one_device(name: str) -> None:
    expect_equal(name, 2, train=True, cache=False)


@pytest.mark.parametrize("name", [*FEW_HEADS, *(pytest.param(n, marks=pytest.mark.rare) for n in FEW_HEADS_TOO)])
def test_family_with_fewer_key_heads_than_ranks_equals_one_device(name: str) -> None:
    expect_equal(name, 4, train=True)


@pytest.mark.rare
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("tp", [2, 3, 4, 8])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_at_every_tp_equals_one_device(name: str, tp: int, train: bool) -> None:
    expect_equal(name, tp, train)


@pytest.mark.rare
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_under_sequence_parallel_equals_one_device(name: str, tp: int) -> None:
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    report = autotp.verify(model.train(), tp, example_inputs=inputs, sequence_parallel=True)
    assert report.ok, f"{name} tp={tp}: {report}"
    assert report.plan.along_sequence


@pytest.mark.rare
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_with_few_passes_equals_one_device(name: str) -> None:
    """None of those that may be left out, each alone, and of their pairs those whose turn it is: each has several."""
    turn = list(FAMILIES).index(name) % 9
    for names in [(), *((one,) for one in PASSES), *PAIRS[turn::9]]:
        torch.manual_seed(0)
        model, inputs = FAMILIES[name]()
        report = autotp.verify(model.train(), 2, example_inputs=inputs, **only(names))
        assert report.ok, f"{name} with {names} alone: {report}"


BUDGETED = ("llama", "t5", "mixtral")
"""Families that a budget is tried on in each run; the others are rare tests."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.rare] * (n not in BUDGETED)) for n in FAMILIES])
def test_family_under_a_budget_has_the_same_bits(name: str) -> None:
    """At 70, 50 and 30 % of what a call keeps, or at the least that its error names; in two calls, with dropout."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    if name not in SINGLE:
        model = model.double()
        inputs = {key: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for key, x in inputs.items()}
    expected, _ = steps_under(model.train(), inputs, None)
    for memory in ("70%", "50%", "30%"):
        try:
            found, plan = steps_under(model, inputs, memory)
        except autotp.Error as error:
            assert "a microbatch keeps at least" in str(error)
            memory = str(error).partition('memory="')[2].partition('"')[0]
            found, plan = steps_under(model, inputs, memory)
        assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
        assert plan is not None and plan.kept <= memory_limit(memory) * plan.kept_without


def steps_under(model: nn.Module, inputs: dict[str, Any], memory: str | None) -> tuple[list[Tensor], MemoryPlan | None]:
    """The losses and gradients of two calls, and what a budget did."""
    parallel = autotp.parallelize(copy.deepcopy(model), 1, example_inputs=inputs, memory=memory)
    values: list[Tensor] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loss = parallel(**inputs)[0]
        loss.sum().backward()
        values += [loss.detach(), *(p.grad.clone() for p in parallel.parameters() if p.grad is not None)]
    return values, parallel.plan.memory


def expect_equal(name: str, tp: int, train: bool, cache: bool = True) -> None:
    """Every gradient; nearly all of the blocks cut; two collectives a layer and way, three with cross-attention.

    Args:
        cache: False for calls without one, where the family has one by default.
    """
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    if not cache and getattr(model.config, "use_cache", False):
        inputs = {**inputs, "use_cache": False}
    report = autotp.verify(model.train(train), tp, example_inputs=inputs)
    assert report.ok, f"{name} tp={tp} train={train}: {report}"
    if tp == 2:
        assert share(report.plan) >= LOW_RANKS.get(name, 0.95), share(report.plan)
    for stack, (forward, backward, *_) in stacks(report.plan):
        most = 3 if name in ENCODER_DECODERS and "decoder" in stack else 4 if name == "albert" else 2
        assert forward <= most and backward <= most, (name, stack, forward, backward)


def test_coverage_table_names_every_family() -> None:
    tables = TABLE.read_text().split(hf_coverage.SEQUENCES)
    rows, cut = ([line.split("|")[1].strip() for line in t.splitlines() if line.startswith("| ")] for t in tables)
    missing = "docs/coverage.md: python examples/hf_coverage.py --families NAME --write"
    assert rows == cut == [HEADER.split("|")[1].strip(), *FAMILIES], missing
    assert f"{len(FAMILIES)} families" in (TABLE.parents[1] / "README.md").read_text()


def test_coverage_write_changes_one_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = tmp_path / "coverage.md"
    copy.write_text(TABLE.read_text())
    monkeypatch.setattr(hf_coverage, "TABLE", copy)
    before = copy.read_text().splitlines()
    hf_coverage.write({"llama": "| llama | new |"}, list(hf_coverage.SIZES))
    after = copy.read_text().splitlines()
    assert [(i.split("|")[1].strip(), j) for i, j in zip(before, after, strict=True) if i != j] == [
        ("llama", "| llama | new |"),
    ]  # fmt: skip


def test_coverage_write_sequences_changes_one_row_and_the_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = tmp_path / "coverage.md"
    copy.write_text(TABLE.read_text())
    monkeypatch.setattr(hf_coverage, "TABLE", copy)
    before, _, rows = copy.read_text().partition(hf_coverage.SEQUENCES)
    hf_coverage.write_sequences({"llama": f"| llama {hf_coverage.UNEQUAL} why |"})
    after, _, written = copy.read_text().partition(hf_coverage.SEQUENCES)
    assert before == after
    other = [j for i, j in zip(rows.splitlines(), written.splitlines(), strict=True) if i != j]
    assert other[0] == "| llama | | | why |" and len(other) == 2
    every, bad = len(FAMILIES), written.count(hf_coverage.UNEQUAL)
    assert other[1] == f"{every - bad} of {every} equal to one device in all these layouts."


# ---- real ranks

SINGLE = ("mixtral", "deepseek_v3", "gpt_oss")
"""Families whose experts torch computes in float32 only."""
CUT = ("gpt2", "llama", "t5", "deberta_v2")
"""Families whose sequences are cut on real ranks in each run; the others are rare tests."""


def in_parts(rank: int, n: int, name: str, layout: tuple[int, int]) -> None:
    """Loss and gradients of a model whose sequences are cut: at the length of the capture, a longer and a shorter one.

    Of 5 positions the last of four ranks has none.

    transformers computes losses, norms or positions in float32, also in a model in float64.
    """
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    if name not in SINGLE:
        model = model.double()
        inputs = {key: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for key, x in inputs.items()}
    near = 3e-5 if name in SINGLE else 3e-6
    whole = copy.deepcopy(model.train())
    tp, cp = layout
    parallel = autotp.parallelize(model, tp, cp=cp, example_inputs=inputs, randomness="exact")

    def long(x: Any, length: int) -> Any:
        tokens = torch.is_tensor(x) and x.dim() == 2 and x.shape[1] == 7
        return torch.cat([x, x.flip(1)], 1)[:, :length].contiguous() if tokens else x

    for length in (7, 11, 5):
        given = {key: long(x, length) for key, x in inputs.items()}
        losses = []
        for one in (whole, parallel):
            torch.manual_seed(1)
            losses.append(one(**given)[0])
            losses[-1].sum().backward()
        assert_values_close(losses[1].detach(), losses[0].detach(), rtol=near, atol=near)
        gradients = {key: p.grad for key, p in whole.named_parameters() if p.grad is not None}
        scale = max(gradient.abs().max() for gradient in gradients.values())
        for key, p in parallel.named_parameters():
            if key in gradients:
                assert_values_close(p.grad / scale, gradients[key] / scale, rtol=0, atol=near, msg=key)
        whole.zero_grad()
        parallel.zero_grad()


@pytest.mark.parametrize(
    "layout", [(1, 2), *(pytest.param(layout, marks=pytest.mark.rare) for layout in ((2, 2), (1, 4), (4, 2)))], ids=str
)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.rare] * (n not in CUT)) for n in FAMILIES])
def test_family_with_cut_sequences_equals_one_device(name: str, layout: tuple[int, int]) -> None:
    tp, cp = layout
    run_ranks(in_parts, tp * cp, name, layout, timeout=110)


@checks.on(4)
def key_head_copies_stay_equal_over_20_steps(rank: int, n: int) -> None:
    """Two key/value heads on four ranks: after 20 steps of AdamW the copies are the same to the last bit."""
    _expect_equal_steps(("llama",), rank, n)


@checks.on(4, rare=True)
def fused_weight_copies_stay_equal_over_20_steps(rank: int, n: int) -> None:
    _expect_equal_steps(("falcon-new",), rank, n)


def _expect_equal_steps(names: Iterable[str], rank: int, n: int) -> None:
    for name in names:
        whole, inputs = _trained_alone(name)
        parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=inputs)
        # With AdamW's own eps the round-off of a gradient that is nearly zero would be a step.
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (whole, parallel)]
        for _ in range(20):
            for model, optimizer in zip((whole, parallel), optimizers, strict=True):
                optimizer.zero_grad()
                model(**inputs).loss.backward()
                clip = autotp.clip_grad_norm_ if model is parallel else nn.utils.clip_grad_norm_
                clip(model.parameters() if model is whole else model, 0.5)
                optimizer.step()
        _expect_equal_copies(parallel)
        state = autotp.full_state_dict(parallel)
        for key, tensor in whole.state_dict().items() if rank == 0 else ():
            assert_values_close(state[key], tensor, rtol=0, atol=1e-5)  # their norms compute in float32


def _trained_alone(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    return model.double().train(), inputs


def _expect_equal_copies(model: autotp.ParallelModule) -> None:
    """Every position that several ranks hold, in a table of the whole: its least and its largest value are one."""
    repeated = 0
    for name, parameter in model.named_parameters():
        layout = model.layouts[name]
        if layout.dim is None or not layout.repeated:
            continue
        repeated += 1
        for worst, op in ((float("-inf"), dist.ReduceOp.MAX), (float("inf"), dist.ReduceOp.MIN)):
            part = parameter.to_local().detach()
            full = torch.full(layout.shape, worst, dtype=part.dtype, device=part.device)
            layout.put(full, part, model.mesh.rank)
            dist.all_reduce(full, op)
            assert torch.equal(layout.take(full, model.mesh.rank), part), name
    assert repeated


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


# --- Muon of whole matrices


def family(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    return model.train(), inputs


def optimizers(parameters: Iterable[nn.Parameter], muon: type[Optimizer]) -> list[Optimizer]:
    """Muon for matrices, SGD for all else."""
    every = list(parameters)
    matrices, rest = [p for p in every if p.dim() == 2], [p for p in every if p.dim() != 2]
    return [muon(matrices, lr=0.02), *([torch.optim.SGD(rest, lr=0.1)] if rest else [])]


def muon_steps(rank: int, n: int, name: str) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The whole gradients of two steps, and the state after them."""
    model, inputs = family(name)
    cut = autotp.parallelize(model, n, example_inputs=inputs)
    some, seen = optimizers(cut.parameters(), autotp.whole_matrices(torch.optim.Muon)), []
    for _ in range(2):
        cut(**inputs).loss.backward()
        learning = [(key, p.grad) for key, p in cut.named_parameters() if p.grad is not None]
        seen.append({key: autotp.gather(grad).as_subclass(Tensor).clone() for key, grad in learning})
        for optimizer in some:
            optimizer.step()
            optimizer.zero_grad()
    return seen, autotp.full_state_dict(cut)


def muon_alone(rank: int, n: int, name: str, every: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state on one device after steps of torch's own optimizers on these gradients."""
    model, _ = family(name)
    some = optimizers(model.parameters(), torch.optim.Muon)
    for gradients in every:
        for key, p in model.named_parameters():
            p.grad = gradients.get(key)
        for optimizer in some:
            optimizer.step()
    return model.state_dict()


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FAMILIES)
def test_muon_step_of_every_family_is_bit_identical(name: str) -> None:
    """On the same gradients, to the same bits."""
    seen, found = run_ranks(muon_steps, 2, name, timeout=200)[0]
    (expected,) = run_ranks(muon_alone, 1, name, seen)
    for key, x in expected.items():
        assert torch.equal(found[key], x), key
