"""Proof from outside: a transformer that PyTorch tests its own tensor parallelism with, under a plan written by hand.

Three ways: one device, PyTorch's plan for it, and `autotp.parallelize`, which is told nothing.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Checks
from small_models import assert_values_close
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autotp
from autotp.diagnostics.double import all_double

pytest.importorskip("expecttest")
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

checks = Checks()
STEPS, TOLERANCE, VOCAB = 5, 1e-12, 64
Gradients = dict[str, Tensor]


class Language(nn.Module):
    """The transformer and a loss."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.model = Transformer(ModelArgs(dropout_p=0.0, vocab_size=VOCAB, **settings))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens, and labels: [batch seq]; another one for each step, its length too."""
    drawn = torch.randint(VOCAB, (2, 3, 10 + step), generator=torch.Generator().manual_seed(step))
    return drawn[0], drawn[1]


def train(model: nn.Module) -> tuple[list[float], list[dict[str, Any]]]:
    """The loss of each step, and the gradients by name, as the model holds them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return losses, gradients


@checks.on(2)
def checkpointed_training_equals_dtensor_and_one_device(rank: int, n: int) -> None:
    """Losses and every gradient of five steps, with the head tied to the embedding, its layers checkpointed."""
    expect_equal_steps(n, {"checkpoint_activations": True})


@checks.on(2, 4, rare=True)
def training_with_other_settings_equals_dtensor_and_one_device(rank: int, n: int) -> None:
    expect_equal_steps(n, {}, {"weight_tying": False}, {"checkpoint_activations": True})


def expect_equal_steps(n: int, *kinds: dict[str, bool]) -> None:
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
    for settings in kinds:
        with all_double():  # its logits are cast to float32 otherwise
            torch.manual_seed(0)
            whole = Language(**settings).double()
            theirs = copy.deepcopy(whole)
            Transformer.parallelize(theirs.model, mesh, False, local_output_for_attn=True)
            parallel = autotp.parallelize(copy.deepcopy(whole), mesh=mesh, example_inputs=batch(0))
            expect_cut(parallel)
            (losses, expected), *others = (train(model) for model in (whole, theirs, parallel))
        for found, gradients in others:
            assert all(abs(a - b) < TOLERANCE for a, b in zip(losses, found, strict=True))
            for step, each in enumerate(expected):
                expect_equal(each, gradients[step])


def expect_cut(parallel: autotp.ParallelModule) -> None:
    """Every matrix but the table of positions; two all-reduces a layer, one of the embedding, two of the loss."""
    whole = {name for name, layout in parallel.layouts.items() if layout.dim is None and len(layout.shape) > 1}
    assert whole == {"model.pos_embeddings.weight"}
    assert parallel.plan.traffic.forward == {"all-reduce": 2 * 2 + 3}


def expect_equal(expected: Gradients, found: Gradients) -> None:
    scale = max(float(grad.abs().max()) for grad in expected.values())
    assert found.keys() == expected.keys()
    for name, whole in expected.items():
        part = found[name]
        if isinstance(part, DTensor):
            part = part.full_tensor()
        assert_values_close(part, whole, rtol=0, atol=TOLERANCE * scale, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
