"""Parameters of which replicas have rows (`zero=`, `fully_shard`): user code computes with wholes, as on one device."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Checks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import autotp
from autotp.distributed.cut_tensors.cut_parameter import CutDTensor

checks = Checks()
X = torch.arange(20).view(4, 5) * 7 % 13
Y = X.roll(1, 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 31), nn.Linear(31, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two blocks of an odd width, between an embedding and a head; a call returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.h, self.head = nn.Embedding(13, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, 13)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.emb(x)
        for block in self.h:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def of_other_values() -> Net:
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3).add_(0.1)
    return model


class Lion(torch.optim.Optimizer):
    """An optimizer that is not torch's, and steps each element by itself."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p] or self.state[p].update(m=torch.zeros_like(p)) or self.state[p]
            p.add_((state["m"] * 0.9 + p.grad * 0.1).sign(), alpha=-self.param_groups[0]["lr"])
            state["m"].mul_(0.99).add_(p.grad, alpha=0.01)


def sharded(one: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = autotp.parallelize(copy.deepcopy(one), mesh=mesh, example_inputs=(X[:2], Y[:2]))
    for block in model.h:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda p: p.norm(),
    "square": lambda p: (p**2).mean(),
    "row": lambda p: p[1] + 0,
    "columns": lambda p: p[..., 1:3].abs().amax(),
    "quantile": lambda p: p.flatten().quantile(0.3),
    "foreach": lambda p: torch._foreach_norm([p, p]),
    "vector": lambda p: nn.utils.parameters_to_vector([p, p]),
    "list": lambda p: torch.tensor(p.tolist(), dtype=torch.double),
    "size": lambda p: torch.tensor([*p.shape, p.numel(), len(p)]),
    "copy": lambda p: copy.deepcopy(p).detach().sum(0),
    "gathered": lambda p: autotp.gather(p).detach(),
    "whole": lambda p: (p.full_tensor() if isinstance(p, DTensor) else p).detach(),
    "pickled": lambda p: saved(p).detach(),
    "average": lambda p: torch.lerp(torch.zeros_like(p), p, 0.1),
}


def saved(p: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(p, file)
    return torch.load(io.BytesIO(file.getvalue()))  # type: ignore[no-any-return]


def expect_equal(one: nn.Module, other: nn.Module, of: Callable[[Tensor], Any] = lambda p: p) -> None:
    """Reads each parameter, or what `of` gives of it, in all ways."""
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert isinstance(q, CutDTensor) and isinstance(q, nn.Parameter)
        with torch.no_grad():
            for what, read in READS.items():
                torch.testing.assert_close(read(of(q)), read(of(p)), msg=lambda m, w=what, n=name: f"{w} of {n}: {m}")


def write(model: Any) -> None:
    """Writes as training loops do: in place, into views and slices, over all at once, by `data`, by nn.init."""
    first, last = (block.up.weight for block in (model.h[0], model.h[1]))
    with torch.no_grad():
        first[3] = 0.5
        first[0].mul_(2)
        first.t()[2].add_(1)
        model.h[0].down.weight.mul_(0.9)
        model.h[1].down.weight[:, 2:5].add_(1)
        model.emb.weight.copy_(torch.arange(104.0).view(13, 8) / 100)
        last.data.clamp_(-0.1, 0.1)
        model.h[1].up.bias.data = torch.ones(31).double() / 7
        torch._foreach_mul_([model.h[1].up.bias, model.head.weight], 0.5)
        last.masked_fill_(last.abs() < last.abs().median(), 0.0)
    nn.init.constant_(model.h[0].down.bias, 0.25)
    torch.manual_seed(1)
    nn.init.normal_(model.h[0].up.bias)


@checks.on(4)
def sharded_by_the_user(rank: int, n: int) -> None:
    """Reads, writes, a penalty of parameters in the loss, gradients, states."""
    one = Net()
    model = sharded(one)
    expect_equal(one, model)
    for each in (one, model):
        write(each)
    expect_equal(one, model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (one, model)]
    mine = [x.chunk(2)[rank // 2] for x in (X, Y)]
    for _ in range(3):
        for each, given in ((one, (X, Y)), (model, mine)):
            loss = each(*given) + 0.1 * sum(p.pow(2).sum() for p in each.parameters())
            loss.backward()
            assert isinstance(loss, Tensor)
        expect_equal(one, model, lambda p: p.grad)
        with torch.no_grad():
            for p in (*one.parameters(), *model.parameters()):
                p.grad.mul_(2.0)  # type: ignore[union-attr]
                p.grad = p.grad / p.grad.norm()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
        expect_equal(one, model)
        expect_equal(one, model, lambda p: optimizers[isinstance(p, DTensor)].state[p]["exp_avg"])
        for optimizer in optimizers:
            optimizer.zero_grad()
    state = model.state_dict()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(state[name].norm(), value.norm())
    weight = model.h[0].up.weight
    (gradient,) = torch.autograd.grad(weight.pow(2).sum(), weight)
    torch.testing.assert_close(gradient.norm(), 2 * one.h[0].up.weight.detach().norm())  # type: ignore[union-attr]


def views(p: Tensor) -> list[Tensor]:
    """Views that were taken before other writes show these, and undo none."""
    with torch.no_grad():
        p.fill_(1.0)
        row, columns = p[3:5], p.t()[2:5]
        p.mul_(0.5)
        row.add_(1)
        columns.zero_()
        return [row.sum() + 0, columns.sum() + 0, p.sum() + 0]


def second_derivative(p: Tensor) -> list[Tensor]:
    (g,) = torch.autograd.grad((p**4).sum(), p, create_graph=True)
    (h,) = torch.autograd.grad((g**2).sum() + (p**2).sum(), p)
    return [h.norm()]


@checks.on(4)
def views_and_second_derivatives(rank: int, n: int) -> None:
    one = Net()
    for other in (sharded(one), autotp.distribute(copy.deepcopy(one), tp=2, dp=2, zero=3, example_inputs=(X, Y))):
        for run in (second_derivative, views):
            for name in ("h.0.up.weight", "h.1.down.weight"):
                found, expected = (run(each.get_parameter(name)) for each in (other, copy.deepcopy(one)))
                torch.testing.assert_close(found, expected)


@checks.on(4)
def hooks_after_gradients(rank: int, n: int) -> None:
    """They get a parameter and a gradient that behave as wholes, in the steps of a trainer, too."""

    def noted(model: Any, run: Callable[[], Any]) -> dict[str, tuple[Tensor, Tensor]]:
        norms: dict[str, tuple[Tensor, Tensor]] = {}
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: norms.update({name: (p.detach().norm(), p.grad.norm())})
            )
        run()
        return norms

    one, mine = Net(), [x.chunk(2)[rank // 2] for x in (X, Y)]
    expected = noted(one, lambda: one(X, Y).backward())
    model = sharded(Net())
    torch.testing.assert_close(noted(model, lambda: model(*mine).backward()), expected)
    for zero in (0, 1, 3):
        trainer = autotp.distribute(Net(), tp=2, dp=2, zero=zero, example_inputs=(X, Y))
        found = noted(trainer, lambda trainer=trainer: trainer.step(*mine))
        if zero:  # Without ZeRO the hook runs before the sum over replicas.
            torch.testing.assert_close(found, expected)
        assert found.keys() == expected.keys()


@checks.on(4)
def hooks_that_change_gradients(rank: int, n: int) -> None:
    """In a trainer they get the whole gradient of the batch, and give whole ones."""
    one, mine = Net(), [x.chunk(2)[rank // 2] for x in (X, Y)]
    for p in one.parameters():
        p.register_hook(lambda g: g / g.norm())
    one(X, Y).backward()
    for zero in (1, 3):
        trainer = autotp.distribute(Net(), tp=2, dp=2, zero=zero, example_inputs=(X, Y))
        for p in trainer.parameters():
            p.register_hook(lambda g: g / g.norm())
        trainer.step(*mine)
        expect_equal(one, trainer, lambda p: p.grad)


@checks.on(4)
def loaded_states(rank: int, n: int) -> None:
    """Whole tensors, clones, and what `state_dict` returned, copied or assigned."""
    other = of_other_values()
    model = sharded(Net())
    model.load_state_dict(other.state_dict())
    expect_equal(other, model)
    model.load_state_dict({name: x.detach().clone() / 2 for name, x in model.state_dict().items()})
    with torch.no_grad():
        for p in other.parameters():
            p.div_(2)
    expect_equal(other, model)
    model.load_state_dict(model.state_dict(), assign=True)
    expect_equal(other, model)
    torch.testing.assert_close(model(X, Y).detach(), other(X, Y).detach())


@checks.on(4)
def states_of_a_trainer(rank: int, n: int) -> None:
    """Whole tensors, and what `state_dict` gave; another rank's file is one Error on every rank."""
    other = of_other_values()
    for zero in (0, 3):
        trainer = autotp.distribute(Net(), tp=2, dp=2, zero=zero, example_inputs=(X, Y))
        trainer.load_state_dict(other.state_dict())
        for p, q in zip(other.parameters(), trainer.parameters(), strict=True):
            torch.testing.assert_close(autotp.gather(q).detach(), p.detach())
        trainer.load_state_dict(trainer.state_dict())
        wrong = dict(trainer.state_dict())
        wrong["h.0.up.weight"] = torch.ones(16, 8).double()  # The first rank's part.
        with pytest.raises(autotp.Error, match=r"`h.0.up.weight` is not this rank's part"):
            trainer.load_state_dict(wrong)


@checks.on(4)
def what_rows_refuse(rank: int, n: int) -> None:
    weight = sharded(Net()).h[0].up.weight
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        weight.mul_(2)
    with pytest.raises(autotp.Error, match="a hook on the gradient of `"):
        weight.register_hook(lambda g: g)
    with pytest.raises(autotp.Error, match="redistribute of `"):
        weight.redistribute(weight.device_mesh, weight.placements)
    with pytest.raises(autotp.Error, match=r"a tensor \[3, 8\] as data or gradient"):
        weight.data = torch.ones(3, 8).double()
    assert weight.to_local().shape == ((8, 8) if rank < 3 else (7, 8))  # 31 rows: 16 and 15 of them, in halves.
    torch.testing.assert_close(weight.to_dtensor().full_tensor(), autotp.gather(weight).detach())


@checks.on(4)
def in_a_trainer(rank: int, n: int) -> None:
    """`distribute(zero=)`: gradients that the loop changes, an optimizer of one's own, writes, the state dict."""
    for zero, made in ((1, torch.optim.AdamW), (3, Lion)):
        one = Net()
        trainer = autotp.distribute(copy.deepcopy(one), tp=2, dp=2, zero=zero, example_inputs=(X, Y))
        expect_equal(one, trainer)
        optimizers = [made(each.parameters(), lr=0.01) for each in (one, trainer)]
        for _ in range(2):
            loss = one(X, Y)
            loss.backward()
            mine = trainer.mesh["dp"].get_local_rank()
            torch.testing.assert_close(trainer.step(X.chunk(2)[mine], Y.chunk(2)[mine]), loss.detach())
            expect_equal(one, trainer, lambda p: p.grad)
            with torch.no_grad():
                for p in (*one.parameters(), *trainer.parameters()):
                    p.grad /= 2  # type: ignore[operator]
            for optimizer in optimizers:
                optimizer.step()
            expect_equal(one, trainer)
            for key in optimizers[0].state[next(one.parameters())].keys() - {"step"}:
                states = [optimizer.state for optimizer in optimizers]
                expect_equal(one, trainer, lambda p, key=key, states=states: states[isinstance(p, DTensor)][p][key])
            for optimizer in optimizers:
                optimizer.zero_grad()
        with torch.no_grad():
            for each in (one, trainer):
                each.get_parameter("h.0.up.weight")[3] = 1
                each.get_parameter("head.weight").clamp_(-0.1, 0.1)
        expect_equal(one, trainer)
        state = autotp.full_state_dict(trainer)
        if rank == 0:
            torch.testing.assert_close(state, dict(one.state_dict()))


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
