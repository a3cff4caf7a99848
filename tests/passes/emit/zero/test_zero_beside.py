"""ZeRO 3 beside other options: ten steps have the bits of replicas that divide nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_models import gpt
from torch import Tensor, nn
from torch.nn import functional as F

import autotp

SIZES: dict[str, Any] = {"block_size": 16, "vocab_size": 67, "n_layer": 4, "n_head": 2, "n_embd": 24}


class Untied(nn.Module):
    """Four blocks between an embedding and a head: ranks of a pipeline share no weight, whose sums have two orders."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(67, 24), nn.Linear(24, 67)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)) for _ in range(4))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens, labels: [batch seq]"""
        x = self.embed(tokens)
        for block in self.h:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    tokens = torch.randint(67, (8, 16), generator=torch.Generator().manual_seed(0))
    return gpt(seed=0, **SIZES), {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def llama(adapters: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    from hugging_face import adapted, tiny

    model, inputs = adapted("llama") if adapters else tiny("llama")
    tokens = torch.randint(30, (8, inputs["input_ids"].shape[1]), generator=torch.Generator().manual_seed(0))
    return model, {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "gpt": small, "untied": lambda: (Untied(), small()[1]), "llama": lambda: llama(False), "lora": lambda: llama(True),
}  # fmt: skip


def ten_steps(name: str, dp: int, zero: Any, **options: Any) -> dict[str, Tensor]:
    """The whole parameters after ten steps on rows that differ from step to step."""
    model, rows = MODELS[name]()
    micro = 8 // (dp * options.get("microbatches", 1))
    example = {key: x[:micro] for key, x in rows.items()}
    trainer = autotp.distribute(copy.deepcopy(model), dp=dp, zero=zero, example_inputs=example, **options)
    optimizer = torch.optim.AdamW([p for p in trainer.parameters() if p.requires_grad], lr=0.01)
    place = trainer.mesh["dp"].get_local_rank()
    for step in range(10):
        trainer.step(**{key: x.roll(step, 1).chunk(dp)[place] for key, x in rows.items()})
        optimizer.step()
        optimizer.zero_grad()
    return {**autotp.full_state_dict(trainer)}


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "lora": (2, "lora", {}),
    "masters": (2, "llama", {"compute_dtype": torch.bfloat16}),
    "recompute": (2, "gpt", {"recompute": "full"}),
    "budget": (2, "gpt", {"memory": 2**27}),
    "pipeline": (4, "untied", {"pp": 2, "microbatches": 4}),
    "interleaved": (4, "untied", {"pp": 2, "microbatches": 4, "schedule": "interleaved"}),
    "cp": (4, "gpt", {"cp": 2}),
    "tp": (4, "gpt", {"tp": 2, "sequence_parallel": True}),
}
RARE = ("interleaved", "tp")


def compared(rank: int, n: int, case: str) -> None:
    _, name, options = CASES[case]
    plain, divided = (ten_steps(name, 2, zero, **options) for zero in (0, 3))
    before = dict(MODELS[name]()[0].state_dict())
    assert rank or plain
    for key, x in plain.items():
        assert torch.equal(divided[key], x), key
    assert rank or any(not torch.equal(before[key], x) for key, x in plain.items() if key in before)


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.rare] * (x in RARE), id=x) for x in CASES])
def test_ten_steps_have_the_bits_of_replicas_that_divide_nothing(case: str) -> None:
    """Two replicas: a sum of two numbers has one order. Each adds up what its microbatches give in the same order."""
    run_ranks(compared, CASES[case][0], case, timeout=200)


def interrupted(rank: int, n: int, where: str) -> tuple[str, str, int]:
    """A step that fails on rank 1, in a forward between gathers, or in a gather; then another call."""
    model, rows = small()
    example = {key: x[:2] for key, x in rows.items()}
    trainer = autotp.distribute(
        model, dp=n, zero=3, microbatches=2, example_inputs=example, timeout=timedelta(seconds=20)
    )
    mine = {key: x.chunk(n)[rank] for key, x in rows.items()}
    trainer.step(**mine)
    if rank == 1 and where == "forward":
        mine["tokens"] = mine["tokens"].clone()
        mine["tokens"][-1] += 99
    units = [unit for graph in trainer._pipelines[0].stages.values() for unit in graph.units]
    if rank == 1 and where == "gather":
        units[2]._filled_memory = no_memory  # type: ignore[method-assign]
    first, later = (raised(lambda values=values: trainer.step(**values)) for values in (mine, rows))
    return first, later, sum(x.untyped_storage().nbytes() for unit in units for x in unit._memories)


def no_memory(*_: Any) -> Tensor:
    raise torch.OutOfMemoryError("no memory for a gathered block")


def raised(run: Callable[[], Any]) -> str:
    with pytest.raises((autotp.Error, IndexError, RuntimeError)) as error:
        run()
    return str(error.value)


@pytest.mark.parametrize(
    ("where", "text"),
    [("forward", "out of range"), ("gather", "no memory for a gathered block")],
    ids=["forward", "gather"],
)
def test_a_step_that_ends_on_one_rank_is_an_error_on_all_and_leaves_nothing_gathered(where: str, text: str) -> None:
    (waiting, refused, left), (failing, later, other) = run_ranks(interrupted, 2, where, timeout=100, alone=True)
    assert text in failing and text in waiting and "dp rank 1" in waiting, waiting
    assert left == other == 0 and all(
        "an earlier call failed in the middle" in x or text in x for x in (refused, later)
    )
