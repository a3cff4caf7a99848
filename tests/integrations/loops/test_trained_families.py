"""Hugging Face families under `Trainer`: three steps are those of one device, on the path that a training takes."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_models import assert_values_close
from torch import Tensor, nn

import autotp

pytest.importorskip("transformers")

from support.hf_families import FAMILIES

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # in transformers
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pp": 2, "microbatches": 2},
    "interleaved": {"pp": 2, "microbatches": 2, "schedule": "interleaved"},
    "replicas": {"dp": 2},
    "zero": {"dp": 2, "zero": 3},
    "recompute": {"tp": 2, "recompute": "full"},
    "halves": {"tp": 2, "overlap": "batch"},
}
USUAL = {
    "pipeline": ("gpt2", "gemma3", "gpt_oss", "deepseek_v3", "deberta_v2", "t5"),
    "zero": ("llama",),
    "replicas": ("bert",),
    "halves": ("t5",),
    "recompute": ("phi3",),
}
"""Layout -> families that train in each run; the others are rare tests."""
ONE_SINGLE = ("mixtral", "mixtral-batched", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""Families whose experts torch computes in float32 only."""


def made(name: str) -> tuple[nn.Module, dict[str, Any], float]:
    """A family without dropout, with four rows, and how near it comes to one device."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for key in (
                [key for key, x in vars(owner).items() if "drop" in key and isinstance(x, float)] if owner else []
            ):
                setattr(owner, key, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if name not in ONE_SINGLE:
        model = model.double()
    dtype = next(model.parameters()).dtype
    rows = {key: _four(x, dtype) if isinstance(x, Tensor) else x for key, x in inputs.items()}
    return model.train(), rows, 3e-5 if name in ONE_SINGLE else 3e-6


def _four(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = torch.stack([x, x.flip(-1) if x.dim() > 1 else x], 1).flatten(0, 1)
    return x.to(dtype) if x.is_floating_point() else x


def trained(rank: int, n: int, name: str, layout: dict[str, Any]) -> str:
    """What autotp refused; "" if it trained as one device does."""
    whole, rows, near = made(name)

    def part(start: int, stop: int) -> dict[str, Any]:
        return {key: x[start:stop] if isinstance(x, Tensor) else x for key, x in rows.items()}

    mine = part(2 * rank, 2 * rank + 2) if "dp" in layout else rows
    example = part(0, 2 if "pp" in layout or "dp" in layout else 4)
    try:
        trainer = autotp.distribute(
            copy.deepcopy(whole), **layout, example_inputs=example, timeout=timedelta(seconds=50)
        )
    except autotp.Error as error:
        return str(error)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (whole, trainer)]
    for _ in range(3):
        loss = whole(**rows)[0]
        loss.backward()
        assert_values_close(trainer.step(**mine).double(), loss.detach().double(), rtol=near, atol=near)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = autotp.full_state_dict(trainer)
    for key, x in whole.state_dict().items() if rank == 0 else ():
        assert_values_close(state[key], x, rtol=0, atol=30 * near, msg=key)
    return ""


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            name, layout, marks=[pytest.mark.rare] * (name not in USUAL.get(layout, ())), id=f"{name}-{layout}"
        )
        for name in FAMILIES
        for layout in LAYOUTS
    ],
)
@pytest.mark.timeout(200)
def test_three_steps_of_families_are_one_devices(name: str, layout: str) -> None:
    """On ranks that have a hash seed each, as torchrun starts them: sets have another order on each."""
    refused = run_ranks(trained, 2, name, LAYOUTS[layout], timeout=110, fresh=True)
    assert refused[0] == refused[1]
    assert not refused[0] or name not in USUAL.get(layout, ()), refused[0]
