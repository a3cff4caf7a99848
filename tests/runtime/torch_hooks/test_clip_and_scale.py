"""clip_and_scale: torch's gradient clipping is one device's; so is GradScaler's decision to skip a step."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from ranks import Checks
from small_models import STEPS, Normed, X, _made, expect_equal_state, pair
from torch import Tensor, nn
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_, get_total_norm

import autotp

checks = Checks()


def expect_equal_training(n: int, dtype: torch.dtype, tolerance: float, clip: Any) -> None:
    """Ten steps, clipped by `clip(parameters)`, on both."""
    whole, parallel = pair(n, dtype)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9) for m in (whole, parallel)]
    for step in range(STEPS):
        norms = []
        for model, optimizer in zip((whole, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            model(X[dtype] * (1 + step)).backward()
            norms.append(clip(model))
            optimizer.step()
        assert abs(float(norms[0]) - float(norms[1])) <= tolerance * float(norms[0]), (step, norms)
    expect_equal_state(whole, parallel, tolerance * 100)


@checks.on(2)
@checks.on(3, rare=True)
def clip_grad_norm_equals_one_device(rank: int, n: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        for order in (2.0, 1.0, 3.0, float("inf")):
            expect_equal_training(
                n, dtype, tolerance, lambda m, order=order: clip_grad_norm_(m.parameters(), 0.1, order)
            )


@checks.on(2)
def clip_grad_norm_of_parts_equals_one_device(rank: int, n: int) -> None:
    """Its bias terms by themselves; each parameter by itself; by the two halves of torch's function."""

    def halves(model: nn.Module) -> Tensor:
        norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        return norm

    def groups(model: nn.Module) -> Tensor:
        return clip_grad_norm_([p for p in model.parameters() if p.dim() == 1], 0.05)

    def each(model: nn.Module) -> Tensor:
        return torch.stack([clip_grad_norm_(p, 0.02) for p in model.parameters()]).sum()

    for clip in (halves, groups, each):
        expect_equal_training(n, torch.float64, 1e-13, clip)


@checks.on(2)
def clip_grad_norm_of_two_models_counts_the_rest_once(rank: int, n: int) -> None:
    """What is in no parallel model is the same on all ranks, and counted once."""
    torch.manual_seed(0)
    wholes, heads = [Normed().double(), Normed().double()], [nn.Linear(8, 1).double() for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    parallels = [autotp.parallelize(copy.deepcopy(m), n, example_inputs=X[torch.float64]) for m in wholes]
    norms = []
    for models, head in ((wholes, heads[0]), (parallels, heads[1])):
        loss = sum(model(X[torch.float64]) for model in models) + head(X[torch.float64]).sum()
        loss.backward()
        parameters = [p for model in (*models, head) for p in model.parameters()]
        norms.append(clip_grad_norm_(parameters, 0.1))
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-13, atol=0)
    torch.testing.assert_close(heads[1].weight.grad, heads[0].weight.grad, rtol=1e-13, atol=0)


@checks.on(2)
def clip_grad_value_equals_one_device(rank: int, n: int) -> None:
    def clip(model: nn.Module) -> Tensor:
        clip_grad_value_(model.parameters(), 0.01)
        return torch.ones(())

    expect_equal_training(n, torch.float64, 1e-13, clip)


@checks.on(2)
def clip_grad_norm_is_infinite_where_one_rank_is(rank: int, n: int) -> None:
    _, parallel = pair(n)
    parallel(X[torch.float64]).backward()
    if rank:
        parallel.up.weight.grad.to_local()[0, 0] = torch.inf
    assert clip_grad_norm_(parallel.parameters(), torch.inf) == torch.inf
    with pytest.raises(RuntimeError, match="gradients from `parameters` is non-finite"):
        clip_grad_norm_(parallel.parameters(), 1.0, error_if_nonfinite=True)


@checks.on(2)
def clip_grad_norm_in_a_compiled_step_equals_one_device(rank: int, n: int) -> None:
    step = torch.compile(lambda m: clip_grad_norm_(list(m.parameters()), 0.1), backend="eager")
    expect_equal_training(n, torch.float64, 1e-13, step)


@checks.on(2)
def grad_scaler_skips_a_step_on_all_ranks(rank: int, n: int) -> None:
    """A gradient that overflows on the last rank alone skips the step on all, also where the kernel looks at it."""
    for fused in (False, True):
        for unscaled_before in (False, True):
            whole, parallel = pair(n, torch.float32)
            models, scalers = (
                (whole, parallel),
                [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) for _ in "12"],
            )
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.3, fused=fused) for m in models]
            for step in range(STEPS):
                for model, scaler, optimizer in zip(models, scalers, optimizers, strict=True):
                    optimizer.zero_grad()
                    scaler.scale(model(X[torch.float32])).backward()
                    if step in (2, 7):
                        model.up.weight.grad[-1, -1] = torch.inf  # The last rank has this row.
                    if unscaled_before:
                        scaler.unscale_(optimizer)
                        clip_grad_norm_(model.parameters(), 0.5)
                    scaler.step(optimizer)
                    scaler.update()
                assert scalers[0].get_scale() == scalers[1].get_scale(), (step, fused)
            expect_equal_state(whole, parallel, 1e-4)


def _functions() -> list[Any]:
    return [clip_grad._get_total_norm.__closure__[0].cell_contents, torch.amp.GradScaler._unscale_grads_]


@checks.on(2)
def torch_s_clipping_is_restored_without_parallel_models(rank: int, n: int) -> None:
    """Its functions are replaced as long as there is a parallel model, and behave the same to everybody else's."""
    _made.cache_clear()
    gc.collect()
    before = _functions()
    assert {fn.__module__ for fn in before} == {"torch.nn.utils.clip_grad", "torch.amp.grad_scaler"}
    assert not any(hasattr(fn, "__wrapped__") for fn in before)
    parallel = autotp.parallelize(Normed(), n, example_inputs=X[torch.float32])
    second, now = copy.deepcopy(parallel), _functions()
    assert all(a is not b for a, b in zip(before, now, strict=True))
    other = nn.Linear(3, 3)
    other(torch.ones(2, 3) * (rank + 1)).sum().backward()
    grads = [p.grad for p in other.parameters()]
    assert clip_grad_norm_(other.parameters(), 1e9) == before[0](grads), "each rank's own"
    del parallel
    gc.collect()
    assert _functions() == now, "a copy is alive"
    del second
    gc.collect()
    assert _functions() == before


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
