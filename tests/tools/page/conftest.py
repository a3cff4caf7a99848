"""What tests of the page share: results of a small GPT, and what a page is about."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import autotp
from autotp.models.gpt import GPT, GPTConfig
from autotp.tools.page.axes import PageAxes
from autotp.tools.page.blocks import block_data
from autotp.tools.page.subject import Subject, subject_of


def gpt(n_layer: int = 6, n_head: int = 4) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(block_size=64, vocab_size=512, n_layer=n_layer, n_head=n_head, n_embd=n_head * 16))


@pytest.fixture
def make_gpt() -> Callable[..., GPT]:
    """Builds a GPT on `meta` of a number of layers and heads."""
    return gpt


@pytest.fixture(scope="session")
def estimate() -> autotp.Estimate:
    """tp=2, pp=2, dp=2 with sequence parallelism, two stages on each rank."""
    return autotp.estimate(
        gpt(), gpu="h100-80gb", batch=16, tp=2, pp=2, dp=2, schedule="interleaved", sequence_parallel=True, zero=1,
        dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.fixture(scope="session")
def uneven() -> autotp.Plan:
    """Three heads on two ranks."""
    return autotp.explain(gpt(2, 3), tp=2)


@pytest.fixture(scope="session")
def report() -> autotp.Report:
    """What `verify` found of an MLP in two blocks on two ranks."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)) for _ in range(2))
    return autotp.verify(nn.Sequential(*blocks), 2, example_inputs=torch.ones(3, 4))


@pytest.fixture(scope="session")
def in_sequence() -> autotp.Estimate:
    """tp=2, cp=2, dp=2."""
    return autotp.estimate(gpt(2), gpu="h100-80gb", batch=4, tp=2, cp=2, dp=2, sequence=32)


@pytest.fixture(scope="session")
def subject(estimate: autotp.Estimate) -> Subject:
    return subject_of(estimate)


@pytest.fixture(scope="session")
def axes(subject: Subject) -> PageAxes:
    """The axes, as far as blocks have them."""
    found = PageAxes(subject)
    block_data(subject, found)
    return found
