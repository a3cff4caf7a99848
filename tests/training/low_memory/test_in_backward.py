"""Steps in backward: they are those of one device, gradients are freed, and what cannot be is one Error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from errors import message
from ranks import run_ranks
from small_models import gpt
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import mine

import autotp
from autotp import low_memory
from autotp.sharding.boxes import local_of

SIZES: dict[str, Any] = {"block_size": 8, "vocab_size": 97, "n_layer": 2, "n_head": 4, "n_embd": 64}
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def batch(step: int) -> dict[str, Tensor]:
    tokens, labels = torch.randint(97, (2, 8, 8), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens, "labels": labels}


def built() -> nn.Module:
    return gpt(seed=0, **SIZES).double()


def on_one_device() -> nn.Module:
    model = built()
    optimizer = low_memory(torch.optim.AdamW)(model.parameters(), **ADAMW)
    for step in range(4):
        model(**batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def parallel(rank: int, n: int) -> tuple[dict[str, Tensor], int, int]:
    model = autotp.parallelize(built(), n, example_inputs=batch(0))
    optimizer = low_memory(torch.optim.AdamW, in_backward=True)(model.parameters(), **ADAMW)
    most, every = 0, list(model.parameters())

    def count(_: Any) -> None:
        nonlocal most
        most = max(most, sum(p.grad is not None for p in every))

    for p in every:
        p.register_post_accumulate_grad_hook(count)
    for step in range(4):
        model(**batch(step)).backward()
        assert all(p.grad is None for p in every)
        optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}
    return autotp.full_state_dict(model), most, len(every)


def distributed(rank: int, n: int, layout: tuple[int, int, int], zero: Any) -> dict[str, Tensor]:
    tp, pp, dp = layout
    example = {key: x[: 8 // (2 * dp)] for key, x in batch(0).items()}
    trainer = autotp.distribute(built(), tp=tp, pp=pp, dp=dp, zero=zero, microbatches=2, example_inputs=example)
    optimizer = low_memory(torch.optim.AdamW, in_backward=True)(trainer.parameters(), **ADAMW)
    for step in range(4):
        trainer.step(**mine(batch(step), trainer.mesh["dp"].get_local_rank(), dp))
        assert all(p.grad is None for p in trainer.parameters())
        optimizer.step()
    return autotp.full_state_dict(trainer)


def expect_one_device(parameters: dict[str, Tensor]) -> None:
    for name, x in on_one_device().named_parameters():
        torch.testing.assert_close(parameters[name], x.detach(), rtol=0, atol=1e-10)


def in_steps_of_one_part(rank: int, n: int, zero: Any) -> tuple[dict[str, Tensor], int, int]:
    """The parameters after four steps of one microbatch; the most bytes of gradients at a time, and those of all."""
    example = {key: x[: 8 // n] for key, x in batch(0).items()}
    trainer = autotp.distribute(built(), dp=n, zero=zero, example_inputs=example)
    optimizer = low_memory(torch.optim.AdamW, in_backward=True)(trainer.parameters(), **ADAMW)
    every = [*trainer.parameters()]
    with Gradients(every) as gradients:
        for step in range(4):
            gradients.most = 0  # Buckets are known after a first step.
            trainer.step(**mine(batch(step), rank, n))
            assert all(p.grad is None for p in every)
            optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}
    return autotp.full_state_dict(trainer), gradients.most, sum(local_of(p).nbytes for p in every)


class Gradients(TorchDispatchMode):
    """Counts the bytes of all gradients at each operator."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.parameters, self.most = parameters, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.most = max(self.most, sum(local_of(p.grad).nbytes for p in self.parameters if p.grad is not None))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("n", "zero", "part"), [(1, 0, 4), (2, 0, 1), (2, 1, 2), (2, 3, 2)], ids=str)
def test_a_trainer_steps_while_backward_runs(n: int, zero: int, part: int) -> None:
    """Of the bytes of all gradients only a part exists at a time."""
    results = run_ranks(in_steps_of_one_part, n, zero, timeout=100)
    expect_one_device(results[0][0])
    assert all(0 < most <= total / part for _, most, total in results)


def test_a_parallel_model_steps_while_backward_runs() -> None:
    """Of its gradients only a few exist at a time."""
    parameters, most, number = run_ranks(parallel, 2)[0]
    expect_one_device(parameters)
    assert most < number / 4


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("layout", "zero"), [((2, 1, 2), 1), pytest.param((1, 2, 2), 0, marks=pytest.mark.rare)], ids=str
)
def test_a_trainer_steps_what_it_has_summed(layout: tuple[int, int, int], zero: int) -> None:
    expect_one_device(run_ranks(distributed, 4, layout, zero, timeout=120)[0])


def refused(rank: int, n: int) -> list[str]:
    model = autotp.parallelize(built(), n, example_inputs=batch(0))
    optimizer = low_memory(torch.optim.AdamW, in_backward=True)(model.parameters(), **ADAMW)
    model(**batch(0)).backward()
    norms = [
        message(lambda: autotp.clip_grad_norm_(model, 1.0)),
        message(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
    ]
    loss = model(**batch(1))
    twice = message(loss.backward)
    del optimizer
    return [*norms, twice]


def test_norms_and_a_second_backward_are_refused_on_every_rank() -> None:
    no_norm = "clip_grad_norm_: AdamW steps in backward, and there is no gradient left whose norm could be clipped"
    twice = "AdamW has stepped a parameter in backward, which got another gradient before `optimizer.step()`"
    for by_autotp, by_torch, second in run_ranks(refused, 2, alone=True):
        assert [text.splitlines()[0] for text in (by_autotp, by_torch, second)] == [no_norm, no_norm, twice]
