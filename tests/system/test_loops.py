"""Training loops as others write them, on a parallel model: ten steps are one device's, in float64."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hugging_face import on_cpu
from ranks import Checks, run_ranks, silence
from small_models import STEPS, X, assert_values_close, expect_equal_state, pair
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autotp

accelerate = pytest.importorskip("accelerate")
checks = Checks()
FLOAT64 = torch.float64


def loss_of(model: Any, step: int) -> Tensor:
    loss: Tensor = model(X[FLOAT64].to(next(model.parameters()).device) * (1 + step))
    return loss


def trained(model: Any, optimizer: Optimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def accumulated_and_clipped(model: Any) -> None:
    """Gradients of three batches, clipped by norm and by value; zeroed, not freed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for part in range(3):
            (loss_of(model, step + part) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def scheduled(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [3])
    for step in range(STEPS):
        trained(model, optimizer, range(step, step + 1))
        schedule.step()


def grouped_by_dimensions(model: Any) -> None:
    matrices, rest = ([p for p in model.parameters() if (p.ndim >= 2) is yes] for yes in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]
    trained(model, torch.optim.AdamW(groups, lr=1e-2))


def frozen_and_unfrozen(model: Any) -> None:
    trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(3))
    model.up.requires_grad_(False)
    model.norm.weight.requires_grad_(False)
    trained(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), range(3))
    model.requires_grad_(True)
    model.down.weight.requires_grad_(False)
    trained(model, torch.optim.SGD(model.parameters(), lr=1e-2), range(4))


def averaged(model: Any) -> None:
    """torch's averages, and one written by hand, whose values the model has in the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    averages = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
    mine = {name: p.data.clone() for name, p in model.named_parameters()}
    for step in range(STEPS):
        trained(model, optimizer, range(step, step + 1))
        for average in averages:
            average.update_parameters(model)
        for name, p in model.named_parameters():
            mine[name] = mine[name] * 0.9 + p.data * 0.1
    for name, p in model.named_parameters():
        both = [dict(average.module.named_parameters())[name] for average in averages]
        p.data.copy_(mine[name] + both[0].data * 0.5 + both[1].data * 0.25)


def taught(model: Any) -> None:
    """A copy of the model teaches it, and follows it."""
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        ((loss_of(model, step) - loss_of(teacher, step) * 0.5) ** 2).backward()
        optimizer.step()
        with torch.no_grad():
            for p, now in zip(teacher.parameters(), model.parameters(), strict=True):
                p.data.mul_(0.9).add_(now.data, alpha=0.1)


def ascended_first(model: Any) -> None:
    """Foret et al. 2021, with the norm of all gradients from torch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad * (0.05 / norm))
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old)
        optimizer.step()


class Lion(Optimizer):
    """Chen et al. 2023, as such optimizers are written."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = average.clone().mul_(0.9).add(p.grad, alpha=0.1).sign_()
                p.data.mul_(1 - 0.1 * group["lr"])
                p.add_(update, alpha=-group["lr"])
                average.mul_(0.99).add_(p.grad, alpha=0.01)


def with_an_optimizer_of_ones_own(model: Any) -> None:
    """Its state goes through a file."""
    optimizer = Lion(model.parameters(), 1e-3)
    trained(model, optimizer)
    with tempfile.TemporaryFile() as file:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # The file has this rank's parts.
            torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file, weights_only=True))
    trained(model, optimizer)


LOOPS: list[Callable[[Any], None]] = [
    accumulated_and_clipped,
    scheduled,
    grouped_by_dimensions,
    frozen_and_unfrozen,
    averaged,
    taught,
    ascended_first,
    with_an_optimizer_of_ones_own,
]


@checks.on(2)
@checks.on(4, rare=True)
def training_loops_of_others_equal_one_device(rank: int, n: int) -> None:
    for loop in LOOPS:
        whole, parallel = pair(n)
        whole.to(parallel.mesh.device)  # Elsewhere torch averages weights by other operators.
        with silence():
            for model in (whole, parallel):
                loop(model)
        try:
            expect_equal_state(whole, parallel, 1e-11)
        except AssertionError as error:
            raise AssertionError(loop.__name__) from error


def trained_before(model: Any, optimizer: Optimizer) -> Tensor:
    """Some steps on one device, a gradient of which nothing was made yet, and an output that somebody keeps."""
    trained(model, optimizer, range(3))
    kept = loss_of(model, 5)
    loss_of(model, 6).backward()
    return kept


def old_weight_norm(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        for name in ("up", "down"):
            nn.utils.weight_norm(getattr(model, name))
    return model


@checks.on(2)
@checks.on(3, rare=True)
def training_continues_from_one_device_s_gradients_and_state(rank: int, n: int) -> None:
    """What was computed before the model is parallel: its graph, gradients and the optimizer's state are taken over."""
    for prepare, kind in ((nn.Module.train, torch.optim.AdamW), (old_weight_norm, torch.optim.Adagrad)):
        models: list[Any] = [prepare(pair(n)[0]) for _ in range(2)]
        optimizers = [kind(model.parameters(), lr=1e-2) for model in models]
        kept = [trained_before(*each) for each in zip(models, optimizers, strict=True)]
        autotp.parallelize(models[1], tp=n, example_inputs=X[FLOAT64])
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, 7).backward()
            optimizer.step()
            trained(model, optimizer)
        expect_equal_state(models[0], models[1], 1e-11)
        assert torch.equal(*kept)


@checks.on(2)
def optimizer_loads_the_state_of_one_device(rank: int, n: int) -> None:
    """An optimizer's state of the whole model, given after many steps of the parallel one, is cut."""
    whole, parallel = pair(n)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (whole, parallel)]
    for model, optimizer in zip((whole, parallel), optimizers, strict=True):
        trained(model, optimizer)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip((whole, parallel), optimizers, strict=True):
        trained(model, optimizer)
    expect_equal_state(whole, parallel, 1e-11)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


def accelerated_bfloat16(rank: int, n: int) -> None:
    """accelerate's autocast, which it puts around `forward`, is the same as autocast around the call."""
    whole, parallel = pair(n, torch.float32)
    _, plain = pair(n, torch.float32)
    made = accelerate.Accelerator(cpu=on_cpu(True), mixed_precision="bf16")
    model, x, device = made.prepare_model(parallel), X[torch.float32], made.device.type
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (whole, plain, parallel)]
    for _ in range(STEPS):
        assert not torch.equal(plain(x), model(x)), "autocast is on"
        with torch.autocast("cpu", torch.bfloat16):
            losses = [whole(x)]
        with torch.autocast(device, torch.bfloat16):
            losses.append(plain(x))
        losses.append(model(x))
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert_values_close(losses[2], losses[0], rtol=2e-3, atol=0)
        assert torch.equal(losses[2], losses[1])
    other = copy.deepcopy(parallel)  # A copy is in the same precision, and runs its own weights.
    with torch.no_grad():
        for p in parallel.parameters():
            p.zero_()
        with torch.autocast(device, torch.bfloat16):
            expected = plain(x)
        assert torch.equal(other(x), expected)
    inner = parallel.forward
    parallel.forward = lambda *args: inner(*args) * 2
    with pytest.raises(autotp.Error, match=r"autocast|automatic mixed precision"):
        model(x)
    with torch.no_grad():
        made.unwrap_model(other, keep_fp32_wrapper=False)
        assert torch.equal(other(x), plain(x))
    assert dist.get_world_size() == n


def test_accelerate_bf16_equals_autocast_of_one_device() -> None:
    run_ranks(accelerated_bfloat16, 2, alone=True)
