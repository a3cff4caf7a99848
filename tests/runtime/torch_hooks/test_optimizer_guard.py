"""Optimizers of parallel models: right, or an Error on every rank; ranks that drift apart are seen."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Checks, run_ranks, silence
from small_models import STEPS, Normed, X, expect_equal_state, pair
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from trainers import batch, started

import autotp
from autotp.runtime.torch_hooks.optimizer_guard import EVERY

checks = Checks()
FLOAT64 = torch.float64


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(autotp.Error) as raised:
        call()
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(raised.value))
    assert set(texts) == {texts[0]}, "the same on every rank"
    return texts[0]


def stepped(model: Any, optimizer: Optimizer, step: int = 0, change: Callable[[], Any] = lambda: None) -> None:
    """One step; `change` happens behind backward."""
    optimizer.zero_grad()
    model(X[next(model.parameters()).dtype] * (1 + step)).backward()
    change()
    optimizer.step()


# ---- optimizers that work element by element

ELEMENTWISE: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
}


@checks.on(2)
@checks.on(3, rare=True)
def elementwise_optimizers_equal_one_device(rank: int, n: int) -> None:
    for make in ELEMENTWISE.values():
        whole, parallel = pair(n)
        optimizers = [make(m.parameters()) for m in (whole, parallel)]
        for step in range(STEPS):
            for model, optimizer in zip((whole, parallel), optimizers, strict=True):
                stepped(model, optimizer, step)
        expect_equal_state(whole, parallel, 1e-12)


@checks.on(2)
def two_optimizers_one_made_before_equal_one_device(rank: int, n: int) -> None:
    torch.manual_seed(0)
    whole = Normed().double()
    later = copy.deepcopy(whole)
    optimizers = [[torch.optim.AdamW(m.up.parameters())] for m in (whole, later)]
    parallel = autotp.parallelize(later, n, example_inputs=X[FLOAT64])
    for some, model in zip(optimizers, (whole, parallel), strict=True):
        some.append(torch.optim.SGD([*model.down.parameters(), *model.norm.parameters()], lr=0.1))
        for step in range(STEPS):
            model.zero_grad()
            model(X[FLOAT64] * (1 + step)).backward()
            for optimizer in some:
                optimizer.step()
    expect_equal_state(whole, parallel, 1e-12)


@checks.on(2)
def compiled_optimizer_step_compares_gradients(rank: int, n: int) -> None:
    _, parallel = pair(n)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    parallel(X[FLOAT64]).backward()
    step()
    parallel.norm.bias.grad += rank
    assert "the gradient of `norm.bias` differs between ranks" in message(step)


# ---- optimizers that look at a matrix, or at all


class Lamb(torch.optim.AdamW):
    """The step of each parameter by its norm, under a name and after a step of torch's own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in held]
        super().step()
        for p, old in zip(held, before, strict=True):
            change = p - old
            p.copy_(old + change * (old.norm() / (change.norm() + 1e-6)).clamp(max=2) * 0.1)


class AdamW(torch.optim.AdamW):
    """A cautious one under torch's name: it keeps the part of a step that agrees with the gradient, and scales it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"], state["rows"] = torch.zeros_like(p), p.new_zeros(p.shape[:1])
                state["average"].lerp_(p.grad, 0.1)
                state["rows"].lerp_(p.grad.square().view(len(p), -1).mean(1), 0.1)
                mask = (state["average"] * p.grad > 0).to(p.dtype)
                update = state["average"] * mask / mask.mean().clamp(min=1e-3)
                rows = state["rows"].sqrt().view(-1, *[1] * (p.dim() - 1))
                p.add_(update / (rows + 1e-8), alpha=-group["lr"])


OF_MATRICES: dict[str, Callable[[Any], Optimizer]] = {
    "Muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.02),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.02),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.3, max_iter=3),
    "Lamb": lambda m: Lamb(m.parameters(), lr=0.02),
    "AdamW": lambda m: AdamW(m.parameters(), lr=0.02),
    "SAM": lambda m: SAM(m.parameters(), torch.optim.SGD, lr=0.1),
}


@checks.on(2)
@checks.on(3, rare=True)
def matrix_optimizers_equal_one_device(rank: int, n: int) -> None:
    """Whatever they are called: norms, means, rows and products of parameters are those of one device."""
    for name, make in OF_MATRICES.items():
        whole, parallel = pair(n)
        with silence():
            for model in (whole, parallel):
                optimizer = make(model)
                for step in range(STEPS):

                    def closure(model: Any = model, optimizer: Optimizer = optimizer, step: int = step) -> Tensor:
                        optimizer.zero_grad()
                        loss: Tensor = model(X[FLOAT64] * (1 + step))
                        loss.backward()
                        return loss

                    closure()
                    optimizer.step(closure)
        for (path, mine), theirs in zip(parallel.named_parameters(), whole.parameters(), strict=True):
            told = partial("{} {}: {}".format, name, path)
            # Muon computes in bfloat16.
            near = 1e-2 if name == "Muon" else 1e-9
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=near, atol=near, msg=told)


class ByAllNorms(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


def over_a_pipeline(rank: int, n: int) -> tuple[str, str]:
    trainer, _ = started((1, 2, 1))
    trainer.step(**batch(0))
    torch.optim.SGD(trainer.parameters(), lr=0.1).step()
    by_norms, lbfgs = ByAllNorms(trainer.parameters(), lr=0.1), torch.optim.LBFGS(trainer.parameters())
    return message(by_norms.step), message(lambda: lbfgs.step(lambda: None))


def test_what_goes_by_all_gradients_is_refused_over_a_pipeline() -> None:
    """A rank has some of the layers only. LBFGS fails in the trial before that: it needs a closure."""
    for by_norms, lbfgs in run_ranks(over_a_pipeline, 2):
        assert by_norms == (
            "ByAllNorms.step: a rank of the pipeline has some of the parameters, and ByAllNorms uses the gradients of "
            "several parameters at once\n  try      AdamW, SGD, Lion or the like; or pp=1"
        )
        assert lbfgs == (
            "LBFGS.step: LBFGS does not step a small tensor without a closure: TypeError: LBFGS.step() missing 1 "
            "required positional argument: 'closure'\n"
            "  try      an optimizer that steps each element by itself, such as torch.optim.AdamW"
        )


# ---- ranks that drift apart


@checks.on(4)
def replicas_that_nobody_averages_are_an_error(rank: int, n: int) -> None:
    """tp=2 of four processes, in a loop that averages no gradients: rows of their own are an error on all ranks."""
    torch.manual_seed(rank)
    x = X[torch.float32]
    parallel: Any = autotp.parallelize(Normed(), 2, example_inputs=x)
    weight = autotp.gather(next(parallel.parameters()))
    first = weight.clone()
    dist.broadcast(first, 0)
    assert torch.equal(weight, first), "every replica begins with the first rank's values"
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    stepped(parallel, optimizer)  # The same rows: each replica computes what one would.
    with pytest.raises(autotp.Error) as raised:
        stepped(parallel, optimizer, step=rank // 2)
    told = str(raised.value).splitlines()
    assert told[0].startswith("SGD.step: the gradient of `") and told[0].endswith(": they would drift apart")
    assert told[1:] == [
        "  likely   nobody averaged the gradients of the replicas that `tp` below the number of processes makes",
        "  try      transformers.Trainer or Accelerator.prepare, which average them",
        "  or       in a loop of your own: parallelize(model, mesh=mesh) with the dimensions ('dp', 'tp'), and "
        "DistributedDataParallel(model, process_group=mesh['dp'].get_group())",
    ]


@checks.on(4)
def another_model_in_a_replica_is_an_error(rank: int, n: int) -> None:
    """Another model in a replica is an error in all."""
    model = Normed() if rank < 2 else nn.Linear(8, 8)
    with pytest.raises(autotp.Error, match="replica rank 1 would run another graph than rank 0"):
        autotp.parallelize(model, 2, example_inputs=X[torch.float32])


class SAM(Optimizer):
    """Foret et al. 2021: a step up by the norm over all gradients, then one down from there."""

    def __init__(self, parameters: Any, base: type, **given: Any) -> None:
        super().__init__(parameters, given)
        self.base = base(self.param_groups, **given)

    @torch.no_grad()
    def step(self, closure: Any) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        before = [p.clone() for p in held]
        for p in held:
            p.add_(p.grad * (0.05 / norm))
        torch.enable_grad()(closure)()
        for p, old in zip(held, before, strict=True):
            p.copy_(old)
        self.base.step()


def local(x: Any) -> Tensor:
    """This rank's part."""
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part


def parts_of(state: Any) -> Any:
    """An optimizer's state as files of this rank's parts have it."""
    return pytree.tree_map(lambda x: local(x).clone() if isinstance(x, Tensor) else x, state)


def own_norm(parallel: Any, rank: int) -> None:
    norm = torch.stack([local(p.grad).norm() for p in parallel.parameters()]).norm()
    for p in parallel.parameters():
        p.grad *= 0.1 / norm


def noise(parallel: Any, rank: int) -> None:
    parallel.norm.weight.grad[0] += 1e-3 * rank


def written(parallel: Any, rank: int) -> None:
    with torch.no_grad():
        parallel.norm.weight[0] += 1e-3 * rank


def undefined(parallel: Any, rank: int) -> None:
    if rank:
        parallel.norm.weight.grad[0] = torch.nan


@checks.on(2)
def drift_between_ranks_is_an_error_before_the_step(rank: int, n: int) -> None:
    """In the first step and in the fourth; of what is clipped by a rank's own norm, of noise, of values."""
    changes = {
        own_norm: "the gradient of `down.bias`",
        noise: "the gradient of `norm.weight`",
        written: "`norm.weight`",
    }
    for change, what in {**changes, undefined: "the gradient of `norm.weight`"}.items():
        for at in (0, 3):
            _, parallel = pair(n)
            optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
            for step in range(at):
                stepped(parallel, optimizer, step)
            before = parallel.up.weight.clone()
            found = message(lambda: stepped(parallel, optimizer, at, lambda: change(parallel, rank)))  # noqa: B023
            first, *facts = found.splitlines()
            assert first.startswith(f"AdamW.step: {what} differs between ranks by "), found
            assert first.endswith(" of its largest element: they would drift apart"), found
            assert facts == [
                "  likely   each rank changed it by another number: the norm of its own gradients, its batch, noise",
                "  try      autotp.clip_grad_norm_(model, ...); a number that all ranks share, from one all_reduce",
            ]
            assert torch.equal(parallel.up.weight, before), "nothing was stepped"


@checks.on(2)
def later_drift_is_seen_at_the_next_comparison(rank: int, n: int) -> None:
    """What begins behind the first steps is seen within as many as are between two comparisons, or in each."""
    for check, seen in (("first", EVERY), ("always", 10), ("never", None)):
        torch.manual_seed(0)
        parallel = autotp.parallelize(Normed().double(), n, example_inputs=X[FLOAT64], check_inputs=check)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-2)
        parallel(X[FLOAT64]).backward()
        for step in range(EVERY + 3):
            if step == 10:
                parallel.norm.bias.grad += rank
            if step == seen:
                found = message(optimizer.step)
                break
            optimizer.step()
        assert seen is None or "`norm.bias` differs between ranks" in found


@checks.on(2)
def loading_another_rank_s_optimizer_state_is_an_error(rank: int, n: int) -> None:
    """All ranks load the first rank's file: one error on all, where torch's broadcast fails on the second alone."""
    torch.manual_seed(0)
    model = Normed()
    model.up, model.down = nn.Linear(8, 31), nn.Linear(31, 8)
    parallel = autotp.parallelize(model.double(), n, example_inputs=X[FLOAT64])
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    stepped(parallel, optimizer)
    states: list[Any] = [None] * n
    with warnings.catch_warnings(action="ignore"):
        dist.all_gather_object(states, parts_of(optimizer.state_dict()))
    optimizer.load_state_dict(states[0])
    assert message(lambda: stepped(parallel, optimizer)) == (
        "AdamW.step: the state of `up.weight` has the shape of another rank's part\n"
        "  on       tp rank 1\n"
        "  try      each rank loads the optimizer's state that it saved; or autotp.save_checkpoint, with "
        "autotp.distribute, saves the whole for any layout"
    )
    optimizer.load_state_dict(states[rank])
    stepped(parallel, optimizer)


@checks.on(2)
def another_rank_s_state_in_equal_parts_is_an_error(rank: int, n: int) -> None:
    """Also in a step that is not compared otherwise; a state that some ranks load is an error, too."""
    torch.manual_seed(0)
    parallel = autotp.parallelize(Normed().double(), n, example_inputs=X[FLOAT64])
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for step in range(6):
        stepped(parallel, optimizer, step)
    states: list[Any] = [None] * n
    with warnings.catch_warnings(action="ignore"):
        dist.all_gather_object(states, parts_of(optimizer.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(states[rank]))
    stepped(parallel, optimizer)
    optimizer.load_state_dict(copy.deepcopy(states[0]))
    assert message(lambda: stepped(parallel, optimizer)) == (
        "AdamW.step: tp ranks 0, 1 have the same state, which is of one rank's parts\n"
        "  try      each rank loads the optimizer's state that it saved; or autotp.save_checkpoint, with "
        "autotp.distribute, saves the whole for any layout"
    )
    fresh = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    stepped(parallel, fresh)
    if rank == 0:
        fresh.load_state_dict(states[0])
    assert message(lambda: stepped(parallel, fresh)) == (
        "AdamW.step: only tp rank 0 loaded a state into the optimizer\n"
        "  try      optimizer.load_state_dict on all ranks"
    )


@checks.on(2)
def optimizer_steps_that_differ_between_ranks_are_errors(rank: int, n: int) -> None:
    def lr(parallel: Any, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 + rank

    def none(parallel: Any, optimizer: Optimizer) -> None:
        if rank:
            parallel.norm.bias.grad = None

    def left_out(parallel: Any, optimizer: Optimizer) -> None:
        group = optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if rank == 0 or p is not parallel.norm.bias]

    def lr_of_a_part(parallel: Any, optimizer: Optimizer) -> None:
        """In a group that has nothing but cut parameters."""
        group = optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if p is not parallel.up.weight]
        optimizer.add_param_group({"params": [parallel.up.weight], "lr": 0.2 + rank})

    def part_without(parallel: Any, optimizer: Optimizer) -> None:
        if rank:
            parallel.up.weight.grad = None

    def part_left_out(parallel: Any, optimizer: Optimizer) -> None:
        group = optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if rank == 0 or p is not parallel.up.weight]

    for change, problem, got in (
        (lr, "the settings differ", "'lr': 1.1"),
        (lr_of_a_part, "the settings differ", "'lr': 1.2"),
        (part_without, "`up.weight` does not have a gradient on all ranks", "none on tp rank 1"),
        (part_left_out, "`up.weight` is not stepped on all ranks", "left out on tp rank 1"),
        (none, "`norm.bias` does not have a gradient on all ranks", "none on tp rank 1"),
        (left_out, "`norm.bias` is not stepped on all ranks", "left out on tp rank 1"),
    ):
        _, parallel = pair(n)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        found = message(lambda: stepped(parallel, optimizer, 0, lambda: change(parallel, optimizer)))  # noqa: B023
        assert found.startswith(f"SGD.step: {problem}\n  expected "), found
        assert got in found.splitlines()[2], found


@checks.on(2)
def round_off_between_ranks_is_mended_with_one_warning(rank: int, n: int) -> None:
    """The last bit of a sum in another order: all ranks take the first one's, and a warning says so once."""
    for dtype in X:
        _, parallel = pair(n, dtype)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)

        def last_bit(parallel: Any = parallel, eps: float = torch.finfo(dtype).eps) -> None:
            parallel.norm.weight.grad *= 1 + 2 * eps * rank

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                stepped(parallel, optimizer, step, last_bit)
        (warning,) = [str(w.message) for w in caught if "round-off" in str(w.message)]
        assert warning.startswith("the gradient of `norm.weight` differed between ranks by ")
        both = [torch.empty_like(parallel.norm.weight) for _ in range(n)]
        dist.all_gather(both, parallel.norm.weight.detach())
        assert torch.equal(*both)


@checks.on(2)
def drift_of_bfloat16_and_sparse_gradients_is_seen(rank: int, n: int) -> None:
    """Numbers of any kind are compared; gradients that lie sparse, too."""
    torch.manual_seed(0)
    parallel = autotp.parallelize(Normed().bfloat16(), n, example_inputs=X[torch.float32].bfloat16())
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel(X[torch.float32].bfloat16()).backward()
    optimizer.step()
    parallel.norm.weight.grad[0] += 1.0 * rank
    assert "the gradient of `norm.weight`" in message(optimizer.step)
    parallel.norm.weight.grad = torch.eye(8)[rank].bfloat16().to_sparse()
    assert "the gradient of `norm.weight`" in message(optimizer.step)


@checks.on(2)
def optimizers_of_one_rank_are_never_compared(rank: int, n: int) -> None:
    """Other optimizers, and models of one rank, are never compared: ranks may do what they want."""
    mesh = init_device_mesh("cpu", (n, 1), mesh_dim_names=("dp", "tp"))
    _, parallel = pair(n)
    alone = autotp.parallelize(Normed().double(), mesh=mesh["tp"], example_inputs=X[FLOAT64])
    other = nn.Linear(8, 1).double()
    assert alone.mesh.size == 1
    for model in (alone, other):
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1 * (1 + rank))
        for _ in range(1 + rank):
            optimizer.zero_grad()
            (model(X[FLOAT64]).sum() * (1 + rank)).backward()
            optimizer.step()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    stepped(parallel, optimizer)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


# ---- a rank that does not step


def steps_alone(rank: int, n: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=2))
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    torch.manual_seed(0)
    parallel = autotp.parallelize(Normed().double(), mesh=mesh, example_inputs=X[FLOAT64])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    stepped(parallel, optimizer)
    parallel(X[FLOAT64]).backward()
    with pytest.raises(autotp.Error) as raised:
        if rank == 0:
            optimizer.step()
        parallel(X[FLOAT64]).backward()
    return str(raised.value)


@pytest.mark.system
def test_a_rank_that_does_not_step_is_named() -> None:
    first, other = run_ranks(steps_alone, 2)
    assert first == (
        "SGD.step: step 1 is not taken by all ranks: tp rank 1 did not make this call within the group's timeout\n"
        "  try      call step on all ranks: decide by a value that is the same on all whether to step"
    )
    assert "failed on rank 1 of 2" in other


# ---- replicas of a trainer, and tied weights


def stepping(layout: tuple[int, int, int], change: Callable[[Any, Optimizer, int], Any], **more: Any) -> str:
    """The error of five steps, on every rank the same; `change` happens behind each backward."""
    trainer, _ = started(layout, **more)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    replicas, rank = trainer.mesh["dp"].size(), trainer.mesh["dp"].get_local_rank()

    def run() -> None:
        for step in range(5):
            trainer.step(**{name: x.chunk(replicas)[rank] for name, x in batch(step).items()})
            change(trainer, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()

    return message(run)


def other_lr(trainer: Any, optimizer: Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()


def own_scale(trainer: Any, optimizer: Optimizer, step: int) -> None:
    for p in trainer.parameters():
        p.grad *= 1 + dist.get_rank()


def own_noise(trainer: Any, optimizer: Optimizer, step: int) -> None:
    with torch.no_grad():
        for p in trainer.parameters():
            p += dist.get_rank() * 0.1


def frozen(trainer: Any, optimizer: Optimizer, step: int) -> None:
    """Another one of two parameters that are as large."""
    names = ("h.0.ln_1.weight", "h.0.ln_2.weight")
    trainer.get_parameter(names[dist.get_rank()]).requires_grad_(False)


def replicas_drift(rank: int, n: int) -> None:
    dp = (1, 1, 2)
    assert stepping(dp, other_lr).startswith("SGD.step: the settings differ\n  expected ")
    assert stepping(dp, other_lr, zero=1).startswith("SGD.step: the settings differ\n  expected ")
    found = stepping(dp, own_scale)
    assert found.startswith("SGD.step: the gradient of `") and " differs between ranks by " in found
    found = stepping(dp, own_noise)
    assert found.startswith("SGD.step: `") and " differs between ranks by " in found
    found = stepping(dp, frozen)
    assert found.startswith("Trainer.step: dp rank 1 has other parameters frozen than dp rank 0\n"), found


def tied_weights_drift(rank: int, n: int) -> None:
    found = stepping((1, 2, 1), other_lr)
    assert found.startswith("SGD.step: the settings differ\n  expected ") and "on pp rank 1" in found


def test_trainer_replicas_that_drift_apart_are_an_error() -> None:
    run_ranks(replicas_drift, 2)


def test_tied_weights_that_drift_apart_are_an_error() -> None:
    run_ranks(tied_weights_drift, 2)


def replica_skips(rank: int, n: int) -> str:
    trainer, optimizer = started((1, 1, 2), timeout=timedelta(seconds=3))
    rows = [{name: x.chunk(2)[rank] for name, x in batch(step).items()} for step in range(3)]
    with pytest.raises(autotp.Error) as raised:
        for step in range(3):
            trainer.step(**rows[step])
            if (rank, step) != (1, 1):
                optimizer.step()
            optimizer.zero_grad()
    return str(raised.value)


@pytest.mark.system
def test_a_replica_that_does_not_step_is_named() -> None:
    first, other = run_ranks(replica_skips, 2)
    assert first.startswith(
        "AdamW.step: step 1 is not taken by all ranks: dp rank 1 did not make this call within the "
    )
    assert "Trainer.step" in other


# ---- beside replicas


def beside_replicas(rank: int, n: int, how: str) -> None:
    """Ten steps, clipped by torch's function, of two or three replicas, whose parts do not divide."""
    dp = n // 2
    mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = Normed().double()
    x = torch.randn(6, 8, dtype=FLOAT64)
    model = parallel = autotp.parallelize(copy.deepcopy(whole), mesh=mesh, example_inputs=x[:2])
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(parallel, process_group=mesh["dp"].get_group())
    else:
        torch.distributed.fsdp.fully_shard(parallel, mesh=mesh["dp"])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (whole, model)]
    for _ in range(STEPS):
        norms = []
        for each, optimizer, rows in ((whole, optimizers[0], x), (model, optimizers[1], x.chunk(dp)[rank // 2])):
            optimizer.zero_grad()
            each(rows).backward()
            norms.append(nn.utils.clip_grad_norm_(each.parameters(), 0.05))
            optimizer.step()
        torch.testing.assert_close(norms[1], norms[0].to(norms[1]), rtol=1e-12, atol=0)
    for name, value in autotp.full_state_dict(model).items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("how", "n"),
    [("ddp", 4), pytest.param("fsdp", 4, marks=pytest.mark.rare), pytest.param("ddp", 6, marks=pytest.mark.rare),
     pytest.param("fsdp", 6, marks=pytest.mark.rare)],
)  # fmt: skip
def test_optimizer_guard_beside_ddp_or_fsdp(how: str, n: int) -> None:
    run_ranks(beside_replicas, n, how, timeout=120)
