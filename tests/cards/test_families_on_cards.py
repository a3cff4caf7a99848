"""Hugging Face families on NVIDIA cards, pretended ones or the machine's: every gradient equals one device's.

Parallel models communicate over NCCL. The model itself runs on this rank's card, as it draws random numbers there: OPT
draws others on the CPU, too, which layers it drops. Batches of parallel models are on the CPU, as loaders give them.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import autotp

pytest.importorskip("transformers")
from support.hf_families import FAMILIES

pytestmark = pytest.mark.system
TOLERANCE = 1e-5
"""The largest difference, relative to the largest gradient: models in float64 may cast to float32."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence_parallel": {"sequence_parallel": True},
    "recompute": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "overlap": {"overlap": "batch"},
    "experts": {"experts": "expert"},
    "cp": {"cp": 2},
}
EXPERTS = ("mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe")
"""Families whose products of experts torch does not compute in float64."""
IN_SINGLE = 1e-4
"""The largest difference for these, in float32."""
USUAL = ("llama", "bert")
"""Of these families each option is tried alone on two ranks; what else there is are rare tests."""


def differences(rank: int, n: int, name: str, combinations: Sequence[Sequence[str]]) -> dict[str, float | str]:
    """The largest difference of loss and gradients for each combination of options, or the problem of a refusal."""
    torch.manual_seed(0)
    whole, inputs = FAMILIES[name]()
    if name not in EXPERTS:
        whole = whole.double()
        inputs = {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()}
    whole.train().to(f"cuda:{rank}")
    expected, _ = stepped(whole, {k: x.to(f"cuda:{rank}") if isinstance(x, Tensor) else x for k, x in inputs.items()})
    answers: dict[str, float | str] = {}
    for combination in combinations:
        options = {key: value for option in combination for key, value in OPTIONS[option].items()}
        try:
            tp = n // options.get("cp", 1)
            parallel = autotp.parallelize(
                copy.deepcopy(whole), tp, example_inputs=inputs, randomness="exact", **options
            )
            loss, device = stepped(parallel, inputs)
        except autotp.Error as error:
            answers["+".join(combination)] = error.problem
            continue
        assert device.type == "cuda"
        answers["+".join(combination)] = max(abs(loss - expected) / abs(expected), of_gradients(whole, parallel))
    return answers


def stepped(model: nn.Module, inputs: dict[str, Any]) -> tuple[float, torch.device]:
    """The loss of a step of forward and backward, and the device of the loss."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), loss.device


def of_gradients(whole: nn.Module, parallel: nn.Module) -> float:
    """The largest difference of the gradients, relative to the largest of all; inf where one is NaN."""
    pairs = [
        (p.grad, autotp.gather(q.grad))
        for p, q in zip(whole.parameters(), parallel.parameters(), strict=True)
        if p.grad is not None
    ]
    scale = max(float(p.abs().max()) for p, _ in pairs if p is not None and p.numel())
    apart = [(p - q).abs().nan_to_num(nan=math.inf).max() for p, q in pairs if p is not None and p.numel()]
    return float(max(apart)) / scale


def expect_equal(name: str, n: int, combinations: Sequence[Sequence[str]]) -> None:
    for answers in run_ranks(differences, n, name, combinations, cards=True, timeout=110):
        for options, answer in answers.items():
            assert isinstance(answer, str) or answer <= (IN_SINGLE if name in EXPERTS else TOLERANCE), (
                f"{name} {options}: {answer:.1e}"
            )


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str) -> None:
    """On the path of a training: `verify` runs other graphs."""
    expect_equal(name, 2, [("plain",)])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.rare] * (name not in USUAL)) for name in FAMILIES]
)
def test_family_with_each_option_alone(name: str) -> None:
    expect_equal(name, 2, [(option,) for option in OPTIONS])


@pytest.mark.rare
@pytest.mark.timeout(600)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_family_with_each_pair_of_options(name: str, n: int) -> None:
    pairs = [pair for pair in itertools.combinations(OPTIONS, 2) if n % 2 == 0 or "cp" not in pair]
    for part in (
        itertools.batched(pairs, 4)
        if hasattr(itertools, "batched")
        else [pairs[i : i + 4] for i in range(0, len(pairs), 4)]
    ):
        expect_equal(name, n, part)
