"""mesh_proof: a layout is proved for all its ranks, and what would make it wrong is an error."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import gpt
from torch import nn

import autotp
from autotp.diagnostics import mesh_proof
from autotp.diagnostics.mesh_proof import NOT_PROVED, expect_complete
from autotp.errors import Error
from autotp.training.pipeline.schedule_actions import Action, actions_of
from autotp.training.pipeline.schedules import ENGINES

SIZES: dict[str, Any] = {"block_size": 8, "vocab_size": 61, "n_layer": 4, "n_head": 4, "n_embd": 16}


def on_meta(**more: Any) -> Any:
    with torch.device("meta"):
        return gpt(**SIZES | {"dropout": 0.1} | more)


def test_a_mesh_on_meta_is_proved() -> None:
    report = autotp.verify(on_meta(), 3, pp=2, dp=5, microbatches=4, schedule="interleaved", zero=1)
    proof = report.mesh
    assert report.ok and proof is not None and not report.gradients
    assert proof.ranks == 30 and len(proof.operators) == 3 and len(set(proof.operators)) == 1
    assert proof.tied == {"wte.weight": (0, 1)}
    assert [len(blocks) for blocks in proof.division.blocks] == [1, 1, 1, 1]
    assert [tensors for tensors, _ in proof.sent] == [1, 1, 1]
    assert proof.actions == 2 * 4 * 4
    text = str(report)
    assert text.startswith("GPT on tp=3, pp=2, dp=5: proved on 30 ranks; nothing computed, as the model is on meta")
    assert "`wte.weight` on 0, 1, its gradient summed over them" in " ".join(text.split())
    once = "; the gradient of each is summed over the replicas once"
    words = " ".join(text.split())
    assert f"ZeRO stage 1: 52 parameters are divided over 5 replicas, none is whole on each{once}" in words
    assert words.endswith(f"not proved of ZeRO {NOT_PROVED}")
    assert report.to_dict()["mesh"]["ranks"] == 30


def test_mesh_proof_counts_bytes_across_a_boundary() -> None:
    model, rows, length = on_meta(), 2, 8
    x = torch.zeros(rows, length, dtype=torch.long)
    proof = autotp.verify(model, 2, pp=2, example_inputs=(x, x)).mesh  # As many microbatches as pipeline ranks.
    assert proof is not None and proof.microbatches == 2
    assert proof.sent == ((1, rows * length * SIZES["n_embd"] * 4),)


def test_mesh_proof_takes_several_stages_a_rank() -> None:
    report = autotp.verify(on_meta(n_layer=6), 1, pp=2, microbatches=4, schedule="interleaved", interleave=3)
    assert report.mesh is not None and report.mesh.interleave == 3 and report.mesh.actions == 2 * 6 * 4
    assert report.mesh.division.ranks == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize("schedule", ENGINES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 3)])
def test_schedules_are_complete(schedule: str, ranks: int, microbatches: int) -> None:
    kind = ENGINES[schedule]
    stages = [kind.stages(rank, ranks) for rank in range(ranks)]
    expect_complete(actions_of(kind, ranks, microbatches), stages, microbatches)


def dropped(order: list[list[Action]]) -> None:
    order[1].pop()


def repeated(order: list[list[Action]]) -> None:
    order[0].append(order[0][-1])


def on_another_rank(order: list[list[Action]]) -> None:
    order[0].append(order[1].pop())


def another_microbatch(order: list[list[Action]]) -> None:
    order[0][0] = Action(0, "F", 7)


def waiting_for_itself(order: list[list[Action]]) -> None:
    order[0].reverse()


SCHEDULES: dict[Callable[[list[list[Action]]], None], str] = {
    dropped: "pp rank 1 runs . of stage 1 0 times for microbatch 3",
    repeated: "pp rank 0 runs . of stage 0 2 times for microbatch 3",
    on_another_rank: "pp rank 0 runs . of stage 1 1 times for microbatch 3",
    another_microbatch: "pp rank 0 runs F of stage 0 . times for microbatch .",
    waiting_for_itself: "the schedule does not end",
}


@pytest.mark.parametrize("fault", SCHEDULES, ids=lambda fault: fault.__name__)
def test_an_incomplete_schedule_is_refused(fault: Callable[[list[list[Action]]], None]) -> None:
    order = [list(row) for row in actions_of(ENGINES["1F1B"], 2, 4)]
    fault(order)
    with pytest.raises(Error, match=SCHEDULES[fault]):
        expect_complete(order, [[0], [1]], 4)


def test_a_tied_gradient_that_is_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_proof, "holders", lambda *given: {})
    with pytest.raises(Error, match="the gradient of a parameter is not summed over its readers"):
        autotp.verify(on_meta(), 1, pp=2, microbatches=2)


def test_zero_leaves_whole_what_several_stages_of_a_rank_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the zero-bubble schedule with a V the first rank has the first and the last stage, and both read the table."""
    given: dict[str, Any] = {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "zero-bubble-v", "zero": 2}
    report = autotp.verify(on_meta(), 1, **given)
    assert report.mesh is not None and report.mesh.whole == ("wte.weight",)
    assert "divided over 2 replicas, 1 is whole on each" in " ".join(str(report).split())
    assert autotp.verify(on_meta(), 1, **{**given, "zero": 0}).mesh.whole == ()  # type: ignore[union-attr]
    monkeypatch.setattr(mesh_proof, "read_by_several_stages", lambda *given: set())
    with pytest.raises(Error, match="a parameter would be in two units of ZeRO"):
        autotp.verify(on_meta(), 1, **given)


class Shifted(nn.Module):
    """A norm with a table of shifts that has no rows."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.shifts = norm, nn.Parameter(torch.empty(0, width))

    def forward(self, x: Any) -> Any:
        return self.norm(x) + self.shifts.sum(0)


def test_zero_leaves_whole_what_has_no_elements() -> None:
    model = on_meta()
    model.ln_f = Shifted(model.ln_f, SIZES["n_embd"]).to("meta")
    report = autotp.verify(model, 2, dp=2, zero=1)
    assert report.mesh is not None and report.mesh.whole == ("ln_f.shifts",)


def test_ranks_that_divide_differently_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, division = [0], mesh_proof.division

    def other(training: Any, ranks: int, *given: Any) -> Any:
        calls[0] += 1
        return division(training, ranks + calls[0] - 1, *given)

    monkeypatch.setattr(mesh_proof, "division", other)
    monkeypatch.setattr(mesh_proof, "_composed", lambda program, graph, stages, *_: mesh_proof.compose(
        graph, [(stage.graph, stage.received) for stage in stages]
    ))  # fmt: skip
    with pytest.raises(Error, match="tp rank 1 would divide its graph in another way than tp rank 0"):
        autotp.verify(on_meta(), 2, pp=2, microbatches=2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pp": 0}, "pp=0 is not a whole number"),
        ({"dp": True}, "dp=True is not a whole number"),
        ({"microbatches": 1.5}, "microbatches=1.5 is not a whole number"),
        ({"pp": 2, "schedule": "2F2B"}, "schedule='2F2B'"),
        ({"pp": 2, "zero": 4}, "zero=4"),
        ({"pp": 5, "microbatches": 5}, "5 stages, and the model has 4 blocks"),
        ({"pp": 2, "microbatches": 1}, "this schedule on 2 ranks cannot run 1 microbatches"),
        ({"zero": 1}, "schedule and zero are options of distribute"),
        ({"schedule": "GPipe"}, "schedule and zero are options of distribute"),
        ({"pp": 2, "outputs": "full"}, "outputs and experts are options of parallelize"),
    ],
    ids=str,
)
def test_verify_refuses_layouts_that_cannot_be(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(Error, match=message):
        autotp.verify(on_meta(), 1, **sizes)


LIMITS = {"seconds": 60.0, "bytes": 2e9}


def of_llama(layers: int) -> Any:
    """Llama 3 with 405 billion parameters (Dubey et al. 2024, table 3), on meta."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=layers, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def of_deepseek(layers: int) -> Any:
    """DeepSeek-V3 with 671 billion parameters: the defaults of its configuration, on meta."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(num_hidden_layers=layers, use_cache=False)
    with torch.device("meta"):
        return DeepseekV3ForCausalLM(config)


def proved(model: Any, length: int, tp: int, pp: int, dp: int) -> Any:
    tokens = torch.zeros(1, length, dtype=torch.long)
    given = {"input_ids": tokens, "labels": tokens}
    return autotp.verify(model, tp, pp=pp, dp=dp, microbatches=pp, example_inputs=given).mesh


def test_a_llama_of_few_layers_is_proved() -> None:
    proof = proved(of_llama(4), 8192, 2, 2, 64)
    assert proof.ranks == 256 and proof.tied == {} and proof.sent == ((1, 8192 * 16384 * 4),)


@pytest.mark.rare
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("make", "layers", "billions", "sizes"),
    [(of_llama, 126, 405, (8, 16, 64)), (of_deepseek, 61, 671, (8, 16, 8))],
    ids=("llama-405b", "deepseek-671b"),
)
def test_models_at_full_size_are_proved(
    make: Callable[[int], Any], layers: int, billions: int, sizes: tuple[int, int, int]
) -> None:
    began, model = time.process_time(), make(layers)
    assert sum(p.numel() for p in model.parameters()) // 10**9 == billions
    proof = proved(model, 4096, *sizes)
    assert proof.ranks == math.prod(sizes) and len(proof.operators) == sizes[0]
    assert sum(map(len, proof.division.blocks)) == layers
    assert time.process_time() - began < LIMITS["seconds"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < LIMITS["bytes"]


class Counted(nn.Module):
    """A norm whose result is scaled by what has no gradient: a parameter, and a count of it in whole numbers."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.scale = norm, nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        scale = self.scale.detach()
        return self.norm(x) * scale * (scale > 0).float().cumsum(0, dtype=torch.int32)


def test_parameters_without_a_gradient_are_found_as_a_trainer_finds_them() -> None:
    model = on_meta()
    model.ln_f = Counted(model.ln_f, SIZES["n_embd"]).to("meta")
    report = autotp.verify(model, 2, pp=2)
    assert report.mesh is not None and report.mesh.without_gradient == ("ln_f.scale",)
    assert "; 1 without a gradient" in " ".join(str(report).split())
    alone = autotp.verify(on_meta(), 2, pp=2).mesh
    assert alone is not None and alone.without_gradient == ()


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 3)])
def test_cut_sequences_of_all_ranks_are_proved(tp: int, cp: int) -> None:
    """An odd length: the parts differ, and all ranks divide the blocks alike."""
    whole = gpt(n_layer=4).double()
    x = torch.randint(61, (2, 7))
    report = autotp.verify(whole, tp, cp=cp, pp=2, dp=2, microbatches=2, example_inputs=(x, x))
    assert report.ok and report.worst.error < 1e-12, report
    assert report.mesh is not None and report.mesh.ranks == tp * cp * 4 and len(report.mesh.operators) == tp * cp
    assert f"x {cp} of {cp} context-parallel ranks" in str(report)
