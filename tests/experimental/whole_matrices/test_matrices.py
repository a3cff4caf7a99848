"""matrices: what ranks tell each other before a step, what moves in it, and what other code does between steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Checks, Collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import autotp
from autotp.checkpoint.whole_optimizer import whole_state_dicts
from autotp.distributed.mesh import make_mesh
from autotp.experimental.whole_matrices import matrices as module
from autotp.experimental.whole_matrices.owners import Move
from autotp.ops import collectives

checks = Checks()
FLOAT64 = torch.float64
X = torch.linspace(-1, 1, 40, dtype=FLOAT64).view(5, 8)


class Net(nn.Module):
    """A norm, which is whole, and two matrices, which are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)
        self.unused = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x)))).square().sum()


def pair(n: int) -> tuple[Net, Any]:
    """The model on one device, and its parts."""
    torch.manual_seed(0)
    whole = Net().double()
    return whole, autotp.parallelize(copy.deepcopy(whole), n, example_inputs=X)


class ByRow(Optimizer):
    """Divides by the norm of the whole, as LARS and LAMB do, with momentum; float64 throughout."""

    def __init__(self, params: Any, lr: Any = 0.1, momentum: float = 0.9, maximize: bool = False) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["moment"] = group["momentum"] * state.get("moment", torch.zeros_like(p)) + p.grad
                state["steps"] = state.get("steps", 0) + 1
                size = group["lr"] * p.norm() / state["moment"].norm().clamp(min=1e-12)
                p.add_(state["moment"], alpha=float(size if group["maximize"] else -size))


class Shampoo(Optimizer):
    """Keeps statistics of another shape than the parameter's."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                rows = p.grad if p.dim() == 2 else p.grad.unsqueeze(0)
                state = self.state[p]
                state["left"] = state.get("left", torch.eye(len(rows), dtype=p.dtype)) + rows @ rows.T
                p.add_(torch.linalg.solve(state["left"], rows).view_as(p), alpha=-group["lr"])


MAKE: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Optimizer]]] = {
    "adafactor": lambda wrap: lambda p: wrap(torch.optim.Adafactor)(p, lr=0.05),
    "by-row": lambda wrap: lambda p: wrap(ByRow)(p, lr=torch.tensor(0.05, dtype=FLOAT64)),
    "by-row-maximize": lambda wrap: lambda p: wrap(ByRow)(p, lr=0.01, maximize=True),
    "shampoo": lambda wrap: lambda p: wrap(Shampoo)(p),
    "adamw": lambda wrap: lambda p: wrap(torch.optim.AdamW)(p, lr=0.01),
}


def step(model: Any, optimizer: Optimizer, number: int = 0) -> None:
    optimizer.zero_grad()
    model(X * (1 + number)).backward()
    optimizer.step()


def expect_equal(whole: nn.Module, parallel: Any, tolerance: float = 1e-12) -> None:
    for name, p in parallel.named_parameters():
        expected = whole.get_parameter(name).detach()
        torch.testing.assert_close(
            p.detach().as_subclass(Tensor),
            expected,
            rtol=0,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(autotp.Error) as raised:
        call()
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(raised.value))
    assert set(texts) == {texts[0]}, "the same on every rank"
    return texts[0]


@checks.on(2, 3)
def other_optimizers_of_matrices(rank: int, n: int) -> None:
    for make in MAKE.values():
        whole, parallel = pair(n)
        optimizers = [make(lambda kind: kind)(whole.parameters()), make(autotp.whole_matrices)(parallel.parameters())]
        for number in range(10):
            for model, optimizer in zip((whole, parallel), optimizers, strict=True):
                step(model, optimizer, number)
        expect_equal(whole, parallel)


def count(number: list[int]) -> Callable[..., Any]:
    before = collectives.communicate

    def counted(name: str, *args: Any) -> Any:
        found = before(name, *args)
        number.append(args[0].numel() - args[2][dist.get_rank()])
        return found

    return counted


@contextmanager
def bytes_sent() -> Iterator[list[int]]:
    """The bytes that each all-to-all of this rank sends to others."""
    sent: list[int] = []
    before = module.communicate
    module.communicate = count(sent)
    try:
        yield sent
    finally:
        module.communicate = before


@checks.on(2, 3, 4)
def collectives_and_bytes_of_a_step(rank: int, n: int) -> None:
    """Gradients go to the owners, new parameters come back: at most the bytes of one all-gather of the matrices.

    The first step also sends the parameters.
    """
    _, parallel = pair(n)
    optimizer = autotp.whole_matrices(ByRow)([parallel.up.weight, parallel.down.weight])
    step(parallel, optimizer)
    for number in range(6):  # The guard compares ranks in the first four steps.
        optimizer.zero_grad()
        parallel(X * (1 + number)).backward()
        with Collectives() as seen, bytes_sent() as sent:
            optimizer.step()
    assert seen.counts == {"all-to-all-single": 2, "all-reduce": 1}
    total = torch.tensor(sum(sent))
    dist.all_reduce(total)
    every = 2 * 8 * 12 * 8  # bytes of two matrices
    parts = [layout.lengths() for name, layout in parallel.layouts.items() if name in ("up.weight", "down.weight")]
    own = [parts[i][owner] * 8 * 8 for i, owner in enumerate(owners(optimizer, ("up.weight", "down.weight")))]
    assert int(total) == 2 * (every - sum(own)) <= (n - 1) * every


def owners(optimizer: Any, names: tuple[str, ...]) -> list[int]:
    (matrices,) = optimizer._models.values()
    return [matrices.plan.owners[name] for name in names]


@checks.on(2)
def parameters_are_sent_where_other_code_wrote_them(rank: int, n: int) -> None:
    """Through `.data`, on one rank, by a loop behind each step, or by another state dict."""
    whole, parallel = pair(n)
    optimizers = [ByRow(whole.parameters()), autotp.whole_matrices(ByRow)(parallel.parameters())]
    for number in range(4):
        for model, optimizer in zip((whole, parallel), optimizers, strict=True):
            step(model, optimizer, number)
    seen = []
    for number in range(3):
        with bytes_sent() as sent:
            for model, optimizer in zip((whole, parallel), optimizers, strict=True):
                step(model, optimizer, number)
        seen.append(len(sent))
        if number == 0:
            for model in (whole, parallel):
                for p in model.parameters():
                    p.data.clamp_(-0.2, 0.2)
    assert seen == [2, 3, 2]
    expect_equal(whole, parallel)
    whole.up.weight.data[:2] = whole.up.weight.data[:2].flip(0)
    if rank == 0:  # Two rows in another order.
        own = parallel.up.weight.to_local().detach()
        own[:2] = own[:2].flip(0)
    for model, optimizer in zip((whole, parallel), optimizers, strict=True):
        step(model, optimizer)
    expect_equal(whole, parallel)
    state = {name: torch.roll(x, 1, 0) for name, x in whole.state_dict().items()}
    whole.load_state_dict(state)
    autotp.load_full_state_dict(parallel, state)
    for model, optimizer in zip((whole, parallel), optimizers, strict=True):
        step(model, optimizer)
    expect_equal(whole, parallel)


@checks.on(2)
def one_element_on_one_rank(rank: int, n: int) -> None:
    whole, parallel = pair(n)
    optimizers = [ByRow(whole.parameters()), autotp.whole_matrices(ByRow)(parallel.parameters())]
    for number in range(2):
        for model, optimizer in zip((whole, parallel), optimizers, strict=True):
            step(model, optimizer, number)
    whole.up.weight.data[0, 3] += 1e-9
    if rank == 0:
        parallel.up.weight.to_local().detach()[0, 3] += 1e-9
    for model, optimizer in zip((whole, parallel), optimizers, strict=True):
        step(model, optimizer)
    expect_equal(whole, parallel, 1e-13)


@checks.on(2)
def a_gradient_on_some_ranks(rank: int, n: int) -> None:
    _, parallel = pair(n)
    optimizer = autotp.whole_matrices(ByRow)(parallel.parameters())
    parallel(X).backward()
    if rank:
        parallel.up.weight.grad = None
    assert message(optimizer.step) == (
        "ByRow.step: `up.weight` does not have a gradient on all ranks\n"
        "  expected one, as on tp rank 0\n"
        "  got      none on tp rank 1\n"
        "  try      one backward for all ranks"
    )
    _, parallel = pair(n)
    parallel = autotp.parallelize(Net().double(), n, example_inputs=X, check_inputs="never")
    optimizer = autotp.whole_matrices(ByRow)(parallel.parameters())
    parallel(X).backward()
    if rank:
        parallel.up.weight.grad = None
    assert message(optimizer.step) == (
        "ByRow.step: `up.weight` does not have a gradient on all ranks that hold a part of it\n"
        "  expected one, as on tp rank 0\n"
        "  got      none on tp rank 1\n"
        "  try      one backward for all ranks"
    )


@checks.on(2)
def other_parameters_on_some_ranks(rank: int, n: int) -> None:
    parallel = autotp.parallelize(Net().double(), n, example_inputs=X, check_inputs="never")
    some = [parallel.up.weight, parallel.down.weight][: 2 - rank]
    optimizer = autotp.whole_matrices(ByRow)(some)
    parallel(X).backward()
    assert "the ranks that step `down.weight` together hold 48 of its 96 elements" in message(optimizer.step)


@checks.on(2)
def closures_hooks_schedules_and_groups(rank: int, n: int) -> None:
    """A closure runs once; hooks run once; a schedule reaches the step; a group may be added later."""
    whole, parallel = pair(n)
    log: list[str] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: log.append("every"))
    try:
        for model, wrap in ((whole, lambda kind: kind), (parallel, autotp.whole_matrices)):
            optimizer = wrap(ByRow)([model.up.weight])
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: log.append("before"))
            optimizer.register_step_post_hook(lambda optimizer, args, kwargs: log.append("after"))

            def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
                log.append("closure")
                optimizer.zero_grad()
                loss = model(X)
                loss.backward()
                return loss

            for number in range(4):
                if model is parallel:
                    loss = optimizer.step(closure)
                    assert loss.requires_grad and loss.dtype is FLOAT64
                else:  # `ByRow` does not run it.
                    closure()
                    optimizer.step()
                schedule.step()
                if number == 1:
                    optimizer.add_param_group({"params": [model.down.weight, model.norm.weight], "lr": 0.3})
                    schedule.base_lrs.append(0.3)
            assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
            if model is parallel:
                assert log == ["before", "closure", "after", "every"] * 4
            log.clear()
    finally:
        handle.remove()
    expect_equal(whole, parallel)


@checks.on(2)
def what_has_no_gradient_is_left(rank: int, n: int) -> None:
    """A parameter without a gradient is not decayed, has no state, and needs no communication."""
    whole, parallel = pair(n)
    before = parallel.unused.weight.detach().clone()
    for model, wrap in ((whole, lambda kind: kind), (parallel, autotp.whole_matrices)):
        optimizer = wrap(torch.optim.AdamW)(model.parameters(), lr=0.1, weight_decay=0.5)
        step(model, optimizer)
        optimizer.zero_grad()
        optimizer.step()
    assert torch.equal(before, parallel.unused.weight)
    assert not optimizer.state.get(parallel.unused.weight)
    expect_equal(whole, parallel)


@checks.on(2)
def a_parameter_may_lack_a_gradient_in_one_step(rank: int, n: int) -> None:
    """It is then stepped with the values that it has, also if other code wrote them meanwhile."""
    whole, parallel = pair(n)
    optimizers = [ByRow(whole.parameters()), autotp.whole_matrices(ByRow)(parallel.parameters())]
    for number in range(6):
        for model, optimizer in zip((whole, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            model(X * (1 + number)).backward()
            if number in (0, 3):
                model.down.weight.grad = None
                model.down.weight.data.clamp_(-0.2, 0.2)
            optimizer.step()
    expect_equal(whole, parallel)


@checks.on(2)
def copies_are_equal_bit_for_bit(rank: int, n: int) -> None:
    """What ranks hold alike comes from one rank, whatever each would have computed."""
    torch.manual_seed(0)
    _, parallel = pair(n)
    optimizer = autotp.whole_matrices(ByRow)(parallel.parameters())
    for number in range(3):
        step(parallel, optimizer, number)
    alike = [parallel.norm.weight.detach().clone() for _ in range(1)]
    every = [torch.empty_like(alike[0]) for _ in range(n)]
    dist.all_gather(every, alike[0])
    assert torch.equal(every[0], every[1])
    (matrices,) = optimizer._models.values()
    assert (optimizer.state.get(parallel.norm.weight) is not None) == ("norm.weight" in matrices.wholes)


# ---- moves

DTYPES = {"a": torch.float64, "b": torch.bfloat16, "c": torch.float64}


@checks.on(2, 3)
def boxes_of_several_dtypes_reach_their_places(rank: int, n: int) -> None:
    """Each rank gives the next one a row and a column, itself a row, and nothing to others."""
    mesh = make_mesh(n)
    sources = {name: (torch.arange(20.0).view(4, 5) + 100 * rank).to(dtype) for name, dtype in DTYPES.items()}
    targets = {name: torch.full((4, 5), -1.0).to(dtype) for name, dtype in DTYPES.items()}
    moves = []
    for source in range(n):
        after = (source + 1) % n
        row, last_row, corner = ((1, 2), (0, 5)), ((3, 4), (0, 5)), ((3, 4), (3, 4))
        moves += [
            Move("a", source, after, row, row), Move("b", source, after, ((0, 4), (2, 3)), ((0, 4), (1, 2))),
            Move("c", source, source, last_row, last_row), Move("a", source, after, corner, corner),
        ]  # fmt: skip
    local = [move for move in moves if rank in (move.source, move.target)]

    with Collectives() as seen:
        module.exchange(local, ["bfloat16", "float64", "float64"], mesh, sources, targets)
    assert seen.counts == {"all-to-all-single": 2}, "one for each dtype"
    before = 100 * ((rank - 1) % n)
    expected = {name: torch.full((4, 5), -1.0).to(dtype) for name, dtype in DTYPES.items()}
    sent = {name: (torch.arange(20.0).view(4, 5) + before).to(dtype) for name, dtype in DTYPES.items()}
    expected["a"][1], expected["a"][3, 3], expected["b"][:, 1] = sent["a"][1], sent["a"][3, 3], sent["b"][:, 2]
    expected["c"][3] = sources["c"][3]
    assert all(torch.equal(targets[name], x) for name, x in expected.items())


@checks.on(2)
def without_boxes_all_ranks_communicate(rank: int, n: int) -> None:
    mesh = make_mesh(n)
    with Collectives() as seen:
        module.exchange([], ["float32"], mesh, {}, {})
    assert seen.counts == {"all-to-all-single": 1}


# ---- states


@checks.on(2)
def a_state_is_whole_on_its_owner(rank: int, n: int) -> None:
    _, parallel = pair(n)
    optimizer = autotp.whole_matrices(ByRow)([parallel.up.weight, parallel.down.weight])
    step(parallel, optimizer)
    shapes = {
        name: optimizer.state[p]["moment"].shape for name, p in parallel.named_parameters() if p in optimizer.state
    }
    assert shapes == [{"down.weight": (8, 12)}, {"up.weight": (12, 8)}][rank]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = optimizer.state_dict()
    other = ["up.weight", "down.weight"][rank]
    assert [str(one.message).partition(". ")[0] for one in caught] == [
        f"`ByRow.state_dict()` has what this rank steps only: the state of `{other}` is on tp rank {1 - rank}"
    ]
    assert kept["of_rank"] == [rank, 2] and list(kept["state"]) == [[1], [0]][rank]


@checks.on(2)
def loaded_states(rank: int, n: int) -> None:
    """A whole state on all ranks, or each rank's own, goes on as before; one rank's on all ranks is refused."""
    whole, parallel = pair(n)
    optimizer = ByRow(whole.parameters())
    for number in range(3):
        step(whole, optimizer, number)
    autotp.load_full_state_dict(parallel, whole.state_dict())
    later = autotp.whole_matrices(ByRow)(parallel.parameters())
    later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, one in ((whole, optimizer), (parallel, later)):
        for number in range(2):
            step(model, one, number)
    expect_equal(whole, parallel)
    with warnings.catch_warnings(action="ignore"):
        kept = copy.deepcopy(later.state_dict())
    again = autotp.whole_matrices(ByRow)(parallel.parameters())
    again.load_state_dict(kept)
    for model, one in ((whole, optimizer), (parallel, again)):
        step(model, one)
    expect_equal(whole, parallel)
    texts: list[Any] = [None] * n
    dist.all_gather_object(texts, kept)
    wrong = autotp.whole_matrices(ByRow)(parallel.parameters())
    wrong.load_state_dict(texts[0])
    parallel(X).backward()
    with pytest.raises(autotp.Error) as raised:
        wrong.step()
    assert raised.value.problem == "the state that was loaded is of rank 0 of 2, and this is rank 1 of 2"
    assert raised.value.facts == {"try": OWN_STATE} | ({"on": "tp rank 1"} if rank == 0 else {})


OWN_STATE = (
    "each rank loads the optimizer's state that it saved; or autotp.save_checkpoint, with autotp.distribute, saves the "
    "whole for any layout"
)


@checks.on(2, 3)
def what_trainer_and_accelerate_save(rank: int, n: int) -> None:
    """The whole state on the first rank, with which torch's class goes on on one device, and the ranks as well."""
    for kind in (ByRow, torch.optim.Adafactor):
        whole, parallel = pair(n)
        optimizer = autotp.whole_matrices(kind)(parallel.parameters(), lr=0.1)
        for number in range(3):
            step(parallel, optimizer, number)
        with whole_state_dicts([optimizer]):
            kept = [copy.deepcopy(optimizer.state_dict())]
        assert "of_rank" not in kept[0] and bool(kept[0]["state"]) == (rank == 0)
        dist.broadcast_object_list(kept, 0)
        state = [autotp.full_state_dict(parallel)]
        dist.broadcast_object_list(state, 0)
        whole.load_state_dict(state[0])
        one = kind(whole.parameters(), lr=0.1)
        one.load_state_dict(copy.deepcopy(kept[0]))
        later = autotp.whole_matrices(kind)(parallel.parameters(), lr=0.1)
        later.load_state_dict(kept[0])
        for model, its in ((whole, one), (parallel, later)):
            step(model, its)
        expect_equal(whole, parallel)


@checks.on(4)
def replicas_of_ranks(rank: int, n: int) -> None:
    """DistributedDataParallel over replicas: each replica steps by itself, and all get the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = Net().double()
    parallel = autotp.parallelize(copy.deepcopy(whole), mesh=mesh, example_inputs=X)
    around = nn.parallel.DistributedDataParallel(
        parallel, process_group=mesh["dp"].get_group(), find_unused_parameters=True
    )
    optimizers = [ByRow(whole.parameters()), autotp.whole_matrices(ByRow)(parallel.parameters())]
    for number in range(3):
        for model, optimizer in zip((whole, around), optimizers, strict=True):
            step(model, optimizer, number)
    expect_equal(whole, parallel)


@checks.on(4)
def shards_of_fully_shard(rank: int, n: int) -> None:
    """Over the ranks of other replicas, which an optimizer of one model does not know."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    parallel = autotp.parallelize(Net().double(), mesh=mesh, example_inputs=X)
    fully_shard(parallel, mesh=mesh["dp"])
    optimizer = autotp.whole_matrices(ByRow)(parallel.parameters())
    parallel(X).backward()
    assert " together hold " in message(optimizer.step)


@checks.on(2)
def copies_and_models_that_are_gone(rank: int, n: int) -> None:
    _, parallel = pair(n)
    optimizer = autotp.whole_matrices(ByRow)(parallel.parameters())
    with pytest.raises(autotp.Error, match="a ByRow of whole matrices cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    copies = copy.deepcopy([*parallel.parameters()])
    later = autotp.whole_matrices(ByRow)(copies)
    for p in copies:
        p.grad = torch.ones_like(p)
    with pytest.raises(autotp.Error, match=r"`up.weight` is a part of a parameter, and of no parallel model"):
        later.step()


@checks.on(2)
def another_dtype_later(rank: int, n: int) -> None:
    whole, parallel = pair(n)
    optimizers = [ByRow(whole.parameters()), autotp.whole_matrices(ByRow)(parallel.parameters())]
    for model, optimizer in zip((whole, parallel), optimizers, strict=True):
        step(model, optimizer)
        model.float()
        optimizer.zero_grad()
        model(X.float()).backward()
        optimizer.step()
    expect_equal(whole, parallel, 1e-6)
    assert parallel.up.weight.dtype is torch.float32


@checks.on(2)
def compiled_and_scaled_steps(rank: int, n: int) -> None:
    """The scaler divides the gradients of the parts; also for an optimizer that would divide them itself."""
    for kind, more in ((ByRow, {}), (torch.optim.Adam, {"lr": 0.01, "fused": True})):
        whole, parallel = pair(n)
        optimizers = [kind(whole.parameters(), **more), autotp.whole_matrices(kind)(parallel.parameters(), **more)]
        for model, optimizer in zip((whole, parallel), optimizers, strict=True):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            compiled = torch.compile(lambda optimizer=optimizer, scaler=scaler: scaler.step(optimizer), backend="eager")
            for number in range(3):
                optimizer.zero_grad()
                scaler.scale(model(X * (1 + number))).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
                compiled()
                scaler.update()
        expect_equal(whole, parallel)


class ByStack(torch.optim.Optimizer):
    """Stacks the gradients of a group, as nanochat's Muon does, and counts steps in the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            gradients = torch.stack([p.grad for p in group["params"]])
            gradients /= gradients.norm(dim=tuple(range(1, gradients.dim())), keepdim=True)
            for p, gradient in zip(group["params"], gradients, strict=True):
                p.sub_(gradient, alpha=0.1)


@checks.on(2)
def groups_of_which_a_rank_owns_nothing(rank: int, n: int) -> None:
    whole, parallel = pair(n)
    for model, kind in ((whole, ByStack), (parallel, autotp.whole_matrices(ByStack))):
        optimizer = kind([{"params": [p]} for p in (model.up.weight, model.down.weight)])
        for number in range(3):
            step(model, optimizer, number)
        assert [group["steps"] for group in optimizer.param_groups] == [3, 3]
    expect_equal(whole, parallel)


@checks.on(2)
def states_of_others(rank: int, n: int) -> None:
    """A state on one rank that is not the owner, and a state of parts."""
    parallel = autotp.parallelize(Net().double(), n, example_inputs=X, check_inputs="never")
    optimizer = autotp.whole_matrices(ByRow)([parallel.up.weight, parallel.down.weight])
    step(parallel, optimizer)
    if rank == 0:  # Its owner is rank 1.
        optimizer.state[parallel.up.weight] = {"moment": torch.zeros(12, 8, dtype=FLOAT64), "steps": 1}
    parallel(X).backward()
    assert message(optimizer.step) == (
        "ByRow.step: the state of `up.weight` was loaded on tp rank 0, and not on its owner, tp rank 1\n"
        "  try      optimizer.load_state_dict(state) on all ranks: the whole state, or what each rank saved\n"
        "  or       autotp.save_checkpoint and autotp.load_checkpoint, with autotp.distribute"
    )
    optimizer.state.pop(parallel.up.weight, None)
    optimizer.state[parallel.up.weight] = {"moment": torch.zeros_like(parallel.up.weight)}
    with pytest.raises(autotp.Error, match=r"`moment` of `up.weight` is \[6, 8\], as this rank's part"):
        optimizer.step()


@checks.on(2)
def a_state_that_is_cleared_begins_anew(rank: int, n: int) -> None:
    whole, parallel = pair(n)
    optimizers = [ByRow(whole.parameters()), autotp.whole_matrices(ByRow)(parallel.parameters())]
    for number in range(4):
        for model, optimizer in zip((whole, parallel), optimizers, strict=True):
            step(model, optimizer, number)
            if number == 1:
                optimizer.state.clear()
    expect_equal(whole, parallel)


@checks.on(2)
def gradients_that_cannot_be_gathered(rank: int, n: int) -> None:
    parallel = autotp.parallelize(Net().double(), n, example_inputs=X, check_inputs="never")
    optimizer = autotp.whole_matrices(ByRow)(parallel.parameters())
    parallel(X).backward()
    parallel.norm.weight.grad = parallel.norm.weight.grad.to_sparse()
    with pytest.raises(autotp.Error, match=r"the gradient of `norm.weight` is sparse, and a whole matrix is not"):
        optimizer.step()


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
