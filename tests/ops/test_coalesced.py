"""coalesced: several parameters read in copy: one exchange for all their gradients, in every way of differentiating."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from ranks import Checks, Collectives
from small_models import Branches, normed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.ops.coalesced import begin_sums, together
from autotp.ops.collectives import copy as one

checks = Checks()
WHERE = (None, (0, ((1, 3),)), None)


def group() -> str:
    return torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]


def parameters() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (3, 4, 2)]


def loss(xs: Any, scale: float) -> Any:
    return sum(((i + 1) * scale * x**3).sum() for i, x in enumerate(xs))


@checks.on(2, 3)
def coalesced_gradients_are_summed_in_one_collective(rank: int, n: int) -> None:
    """The sums over ranks, at the positions that they hold together; one collective."""
    for late in (False, True):
        xs = parameters()
        with Collectives() as sent:
            loss(together(xs, group(), WHERE, late), rank + 1.0).backward()
        assert sent.counts == {"all-reduce-coalesced": 1}
        total, own = n * (n + 1) / 2, rank + 1.0
        for i, x in enumerate(xs):
            expected = 3 * (i + 1) * total * x.detach() ** 2
            if i == 1:
                expected[[0, 3]] *= own / total
            torch.testing.assert_close(x.grad, expected)


@checks.on(2)
def coalesced_skips_frozen_and_unreached_parameters(rank: int, n: int) -> None:
    """A frozen one is not summed, nor is one that the loss does not reach."""
    for late in (False, True):
        xs = parameters()
        xs[0].requires_grad_(False)
        found = together(xs, group(), WHERE, late)
        assert found[0] is xs[0] and not found[0].requires_grad
        loss(found[:2], 1.0).backward()
        assert xs[1].grad is not None and xs[2].grad is None
        assert together([x.detach() for x in xs], group(), WHERE, late)[1].grad_fn is None
        assert all(a is b for a, b in zip(together(xs, None, WHERE, late), xs, strict=True))


@checks.on(2)
def coalesced_under_transforms(rank: int, n: int, late: bool = False) -> None:
    """Second derivatives, forward mode, torch.func and its maps, torch.compile: what each by itself gives."""

    def alike(xs: Any) -> Any:
        return loss(together(xs, group(), (None,) * 3, late), rank + 1.0)

    def each(xs: Any) -> Any:
        return loss([one(x, group()) for x in xs], rank + 1.0)

    xs = tuple(parameters())
    same = torch.testing.assert_close
    first, second = (torch.autograd.grad(f(xs), xs, create_graph=True) for f in (alike, each))
    same(first, second)
    same(*(torch.autograd.grad(sum(g.sum() for g in found), xs) for found in (first, second)))
    plain = tuple(x.detach() for x in xs)
    same(torch.func.grad(alike)(plain), torch.func.grad(each)(plain))
    same(torch.func.jvp(alike, (plain,), (plain,)), torch.func.jvp(each, (plain,), (plain,)))
    rows = tuple(torch.stack([x, 2 * x], 1) for x in plain)
    mapped = [torch.vmap(torch.func.grad(f), in_dims=((1, 1, None),))((*rows[:2], plain[2])) for f in (alike, each)]
    same(*mapped)
    compiled = torch.compile(alike, fullgraph=True, backend="aot_eager")
    same(torch.autograd.grad(compiled(xs), xs), second)
    kept = alike(xs)  # Backward twice, of all and of one.
    same(torch.autograd.grad(kept, xs, retain_graph=True), second)
    same(torch.autograd.grad(kept, xs[1:2], retain_graph=True), second[1:2])
    with pytest.warns(match="Anomaly"), torch.autograd.detect_anomaly():
        same(torch.autograd.grad(kept, xs), second)


@checks.on(2)
def coalesced_late_sums_under_transforms(rank: int, n: int) -> None:
    coalesced_under_transforms(rank, n, True)


@checks.on(2)
def coalesced_late_sums_end_after_the_next_began(rank: int, n: int) -> None:
    """Each sum ends after the next has started; the last of backward ends before what was recorded earlier runs."""
    seen: list[str] = []
    before = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    x = Noted.apply(before, seen, "before the graph")
    begin_sums()
    xs = [parameters() for _ in range(3)]
    for i, each in enumerate(xs):
        read = together(each, group(), (None,) * 3, True)
        x = Noted.apply(x * read[0].sum() + read[1].sum() + read[2].sum(), seen, f"block {i}")
        each[0].register_post_accumulate_grad_hook(lambda p, i=i: seen.append(f"gradients {i}"))
    with Starts(seen):
        x.sum().backward()
    assert seen == [
        "block 2", "start", "block 1", "start", "gradients 2", "block 0", "start", "gradients 1", "gradients 0",
        "before the graph",
    ]  # fmt: skip


class Noted(torch.autograd.Function):
    """The identity, which notes its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[str], mark: str) -> Tensor:
        ctx.note = lambda: seen.append(mark)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.note()
        return grad, None, None


class Starts(TorchDispatchMode):
    """Notes that a collective starts."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += ["start"] * ("all_reduce_coalesced" in str(op))
        return op(*args, **(kwargs or {}))


@checks.on(2)
def coalesced_sums_weight_and_bias_of_each_norm(rank: int, n: int) -> None:
    """Two norms of one value: in backward one exchange for it, and one for the weight and bias of each (`norms.0`)."""
    torch.manual_seed(0)
    whole, x = Branches(normed, normed).double(), torch.randn(3, 5, 16, dtype=torch.float64)
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=x, check_inputs="never")
    for model in (whole, parallel):
        y = model(x).square().sum()
        with Collectives() as sent:
            y.backward()
    assert sent.counts == {"all-reduce": 1, "all-reduce-coalesced": 2}
    for name, parameter in parallel.named_parameters():
        expected = whole.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, expected, msg=lambda m, name=name: f"{name}: {m}")
    norm: nn.Module = parallel.norms[0]
    norm.requires_grad_(False)
    parallel.zero_grad()
    parallel(x).square().sum().backward()
    assert norm.weight.grad is None and parallel.norms[1].weight.grad is not None


@checks.on(2)
def loss_of_uncut_values_alone_counts_once(rank: int, n: int) -> None:
    """A loss of what all ranks compute alike, and of nothing that is cut: backward meets on all, and counts once."""
    torch.manual_seed(0)
    whole, x = Branches(normed, normed, returned=lambda y: y).double(), torch.randn(3, 5, 16, dtype=torch.float64)
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=x, check_inputs="never")
    for model in (whole, parallel):
        model(x)[1].square().sum().backward()
    for name, parameter in whole.named_parameters():
        own = parallel.get_parameter(name).grad
        expected = None if parameter.grad is None else parameter.grad
        assert (own is None or not own.any()) if expected is None else torch.allclose(own, expected), name


@checks.on(2, 3)
def coalesced_sums_gradients_that_some_ranks_lack(rank: int, n: int) -> None:
    """The ranks that have it are summed, on all ranks; where none has it, it is None, and zeros are not."""
    for has, expected in ((lambda i: i == 0, 1.0), (lambda i: False, None), (lambda i: True, float(n))):
        for scale, late in itertools.product((1.0, 0.0), (False, True)):
            xs = parameters()
            found = together(xs, group(), (None,) * 3, late)
            kept = [found[0], found[1] if has(rank) else Nothing.apply(found[1]), Nothing.apply(found[2])]
            with Collectives() as sent:
                (kept[0].sum() + scale * kept[1].sum() + kept[2].sum()).backward()
            assert sent.counts == {"all-reduce-coalesced": 1}
            assert torch.equal(xs[0].grad, torch.full_like(xs[0], n)) and xs[2].grad is None
            wanted = None if expected is None else xs[1].new_full((4, 2), expected * scale)
            assert xs[1].grad is wanted is None or torch.equal(xs[1].grad, wanted)


@checks.on(2)
def coalesced_includes_a_rank_without_gradients(rank: int, n: int) -> None:
    """It meets the others all the same, also in double backward."""
    for late in (False, True):
        xs = parameters()
        found = together(xs, group(), WHERE, late)
        (sum(x.square().sum() for x in found) if rank else sum(Nothing.apply(x).sum() for x in found)).backward()
        for i, x in enumerate(xs):
            every = 2 * x.detach()
            every[[0, 3] if i == 1 else []] *= rank
            torch.testing.assert_close(x.grad, every)


class Nothing(torch.autograd.Function):
    """The identity, whose gradient is None, as torch leaves it out where there is nothing to compute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
