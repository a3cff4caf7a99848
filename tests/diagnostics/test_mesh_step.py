"""mesh_step: a step of all ranks, stages and microbatches is one device's; whatever is done wrong to it shows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hugging_face import FAMILIES, MODELS, built, tiny
from small_models import Regression, gpt
from torch import Tensor, nn

import autotp
from autotp.diagnostics import mesh_step, verify
from autotp.passes.emit.attach_parameters import ParameterPlace
from autotp.passes.emit.rank_program import RankProgram

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

    def detached(programs: list[RankProgram], given: Any, cp: int) -> Any:
        calls[0] += 1
        return run(list(map(without_table, programs)) if calls[0] % 2 == 0 else programs, given, cp)

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
