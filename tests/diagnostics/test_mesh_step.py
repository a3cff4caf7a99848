"""mesh_step: a step of all ranks, stages and microbatches is one device's; whatever is done wrong to it shows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hugging_face import FAMILIES, MODELS, built, tiny
from small_models import AttendingMixtures, CentredMixture, Mixture, Regression, gpt
from torch import Tensor, nn

import autotp
from autotp.diagnostics import lockstep, mesh_step, verify
from autotp.passes.emit.attach_parameters import ParameterPlace
from autotp.passes.emit.rank_program import RankProgram
from autotp.passes.plan.experts import expert_parallel
from autotp.passes.program import planned

SIZES: dict[str, Any] = {"block_size": 8, "vocab_size": 61, "n_layer": 4, "n_head": 4, "n_embd": 16}
MESHES: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2, "dp": 2, "microbatches": 2},
    {"tp": 3, "pp": 2, "microbatches": 4, "schedule": "interleaved", "sequence_parallel": True},
    {"tp": 1, "dp": 3, "microbatches": 2, "zero": 3},
    {"tp": 2, "microbatches": 2, "recompute": "full"},
    {"tp": 2, "pp": 2, "dp": 2, "microbatches": 2, "memory": "60%", "zero": 3},
    {"tp": 1, "pp": 2, "dp": 2, "microbatches": 4, "schedule": "zero-bubble-v", "zero": 1, "recompute": "selective"},
]


def uneven() -> dict[str, Tensor]:
    """Rows of which other numbers of labels count."""
    tokens = torch.arange(16).view(2, 8) * 7 % 61
    return {"tokens": tokens, "labels": tokens.masked_fill(torch.tensor([[1] * 6 + [0] * 2, [0] * 8]).bool(), -100)}


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_step_is_one_devices(sizes: dict[str, Any]) -> None:
    model = gpt(0, **SIZES)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = autotp.verify(model, example_inputs=uneven(), **sizes)
    assert report.ok, report
    names = {name for name, _ in model.named_parameters()}
    assert {d.name for d in report.gradients} == {d.name for d in report.steps} == names
    assert [d.name for d in report.outputs] == ["loss"] and report.worst.error < 1e-12
    assert "equal to one device (float64" in str(report)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", [name for name in MODELS if name in ("llama", "t5", "gpt2", "bart")])
def test_a_step_of_models_of_transformers_is_one_devices(name: str) -> None:
    tokens = torch.arange(16).view(2, 8) % 19 + 2
    labels = tokens.masked_fill(torch.tensor([[1] * 5 + [0] * 3, [0] * 8]).bool(), -100)
    report = autotp.verify(
        built(name), 2, pp=2, dp=2, microbatches=2, example_inputs={"input_ids": tokens, "labels": labels}
    )
    assert report.ok and (report.gradients or "dropout" in report.verdict), report


ROWS = {
    "bert-choice": "computes with the numbers of rows", "clip": "for batches of 2 rows only",
    "albert": "2 stages, and the model has 1 blocks",
}  # fmt: skip
"""Families that cannot be computed in parts: choices, a contrastive loss, and one block for all layers."""


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)
    return model


@pytest.mark.rare
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # in transformers
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_families_is_one_devices(family: str) -> None:
    model, inputs = tiny(family)
    call = functools.partial(autotp.verify, without_dropout(model), 2, pp=2, dp=2, microbatches=2)
    if family in ROWS:
        with pytest.raises(autotp.Error, match=ROWS[family]):
            call(example_inputs=inputs)
    else:
        report = call(example_inputs=inputs)
        assert report.ok and report.gradients, report


def test_a_step_of_a_model_without_blocks_is_one_devices() -> None:
    inputs = (torch.randn(6, 4),)
    assert autotp.verify(Regression(), 1, dp=3, microbatches=2, example_inputs=inputs).ok


EXPERTS: list[dict[str, Any]] = [
    {"tp": 2, "dp": 2, "ep": 2, "zero": 3},
    {"tp": 1, "dp": 4, "cp": 2, "ep": 2, "microbatches": 2},
    {"tp": 1, "dp": 2, "cp": 2, "ep": 4},
    {"tp": 1, "cp": 2, "ep": 2},
]


@pytest.mark.parametrize("sizes", EXPERTS, ids=str)
def test_a_step_with_experts_over_ranks_is_one_devices(sizes: dict[str, Any]) -> None:
    """Rows of all replicas travel together, and the loss balances experts over the whole batch."""
    report = autotp.verify(mixtures(), example_inputs=ROWS_OF_MIXTURES, **sizes)
    assert report.ok and report.worst.error < 1e-12 and report.mesh is not None, report
    assert report.mesh.of_experts == tuple(f"{layer}.{name}" for layer in ("first", "second") for name in STACKS)
    assert f"8 parameters, each of {sizes['ep']} ranks stores its own" in str(report)


class Pooled(AttendingMixtures):
    """Its experts compute a mean of each sequence."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [batch seq 8], y: [batch seq 3]"""
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.attention(x).split(8, -1))
        x = x + nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return nn.functional.mse_loss(self.head(self.first(x.mean(1))), y.mean(1))


@pytest.mark.parametrize("mixture", [Mixture, CentredMixture])
def test_experts_of_whole_sequences_are_not_cut_over_parts_of_them(mixture: type[Mixture]) -> None:
    """Each part would send the same rows, also to weights that each rank stores whole."""
    model = Pooled()
    model.first.__class__ = mixture
    assert autotp.verify(model, 1, dp=2, cp=2, ep=2, example_inputs=ROWS_OF_MIXTURES).ok
    with pytest.raises(autotp.Error, match="`first` has rows of whole ones on every cp rank"):
        autotp.verify(model, 1, cp=2, ep=2, example_inputs=ROWS_OF_MIXTURES)


STACKS = "up", "up_bias", "down", "down_bias"
ROWS_OF_MIXTURES = torch.randn(4, 6, 8), torch.randn(4, 6, 3)


def mixtures() -> nn.Module:
    torch.manual_seed(0)
    return AttendingMixtures()


def rows_at_other_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row that arrives is taken for the one after it."""
    sent = lockstep._sent
    monkeypatch.setattr(lockstep, "_sent", lambda *given: [x.roll(1, 0) for x in sent(*given)])


def experts_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_step, "chunk_bounds", lambda size, ranks, rank: (0, size // ranks))


def experts_summed_over_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of an expert's copy is that of all ranks along cp, which have rows of other experts."""
    monkeypatch.setattr(expert_parallel, "CP_COPIES", "cp")
    monkeypatch.setattr(planned, "expect_expert_rows", lambda *given: None)


@pytest.mark.parametrize(
    "fault", [rows_at_other_places, experts_of_another_rank, experts_summed_over_all_parts], ids=lambda it: it.__name__
)
def test_mesh_step_sees_faults_of_experts(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert not autotp.verify(mixtures(), 1, cp=2, ep=2, example_inputs=ROWS_OF_MIXTURES).ok


def test_a_model_that_draws_is_proved_only() -> None:
    report = autotp.verify(gpt(0, **SIZES, dropout=0.1), 2, pp=2, microbatches=2)
    assert report.ok and not report.gradients
    assert report.verdict == "proved on 4 ranks; nothing computed, as the model draws random numbers, such as dropout's"


def of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Totals of the first replica only: a mean of means."""
    counts, calls = mesh_step.counts_of, [0]

    def first(*given: Any) -> Any:
        calls[0] += 1
        found = counts(*given)
        return found if calls[0] == 1 or found is None else found * 0

    monkeypatch.setattr(mesh_step, "counts_of", first)


def stages_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage gets what it should get with another sign."""
    run = mesh_step.run_programs
    monkeypatch.setattr(mesh_step, "run_programs", lambda *given: [[-x for x in row] for row in run(*given)])


def a_tied_part_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage's share of the table's gradient."""
    run, calls = mesh_step.run_programs, [0]

    def without_table(program: RankProgram) -> RankProgram:
        def read(place: ParameterPlace) -> Tensor:
            tensor = program.read(place)
            return tensor.detach() if tensor.shape[:1] == (61,) else tensor

        return replace(program, read=read)

    def detached(programs: list[RankProgram], given: Any, grid: Any) -> Any:
        calls[0] += 1
        return run(list(map(without_table, programs)) if calls[0] % 2 == 0 else programs, given, grid)

    monkeypatch.setattr(mesh_step, "run_programs", detached)


@pytest.mark.parametrize("fault", [of_a_part, stages_swapped, a_tied_part_left_out], ids=lambda it: it.__name__)
def test_mesh_step_sees_each_fault(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    report = autotp.verify(gpt(0, **SIZES), 1, pp=2, dp=2, microbatches=2, example_inputs=uneven())
    assert not report.ok and "DIFFERENT" in report.verdict


def test_one_part_is_the_comparison_of_a_call() -> None:
    """Without a mesh nothing else is compared than before."""
    report = verify.verify(gpt(0, **SIZES), 2, example_inputs=uneven())
    assert report.mesh is None and report.ok
