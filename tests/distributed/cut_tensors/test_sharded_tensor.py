"""sharded_tensor: one type that every operator, autograd, torch.compile and torch.func see; whole to look at."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cards.spies import host_waits
from ranks import Checks
from small_models import gpt
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import autotp
from autotp.distributed.cut_tensors.sharded_tensor import Sharded, as_sharded, cut_output, sharded
from autotp.distributed.gather import gather_all
from autotp.distributed.mesh import Mesh
from autotp.sharding.layout import Layout

checks, on_cards = Checks(), Checks(cards=True)
PIECES = (((0, 2),), ((2, 4),), ((4, 6),), ())  # 6 heads on 4 ranks
LAYOUT = Layout((-1, 6, -1, 3), 1, PIECES, "heads")
WHOLE = torch.arange(2 * 6 * 5 * 3).view(2, 6, 5, 3).double()


def cut(rank: int, part: Tensor | None = None) -> Sharded:
    """[2 6@tp 5 3]"""
    return sharded(LAYOUT.take(WHOLE, rank) if part is None else part, LAYOUT, Mesh(size=4, rank=rank))


@pytest.mark.parametrize("rank", range(4))
def test_it_is_whole_to_look_at(rank: int) -> None:
    """Also on a rank that holds nothing."""
    x = cut(rank)
    assert x.shape == WHOLE.shape and x.stride() == WHOLE.stride() and len(x) == 2 and x.numel() == WHOLE.numel()
    assert (x.dtype, x.device, x.cut, x.is_contiguous()) == (WHOLE.dtype, WHOLE.device, (1, PIECES), True)
    assert str(x) == repr(x.data) == "Sharded([2, 6@tp, 5, 3], torch.float64)"


def test_its_memory_has_the_order_of_the_part() -> None:
    turned = cut(1, LAYOUT.take(WHOLE, 1).transpose(0, 3).contiguous().transpose(0, 3))
    assert turned[:, :, 1].stride() == WHOLE.transpose(0, 3).contiguous().transpose(0, 3)[:, :, 1].stride()


def test_a_copy_has_memory_of_its_own() -> None:
    x = cut(0)
    copied = copy.deepcopy({"x": x, "again": x})
    copied["x"].zero_()
    assert copied["x"] is copied["again"] and not copied["x"].part.any()
    x.detach()[:, :, 0] = 7
    assert (x.part[:, :, 0] == 7).all() and torch.equal(x.part[:, :, 1:], WHOLE[:, :2, 1:])


def test_sharded_tensor_has_gradients_that_are_cut_as_it_is() -> None:
    """Hooks, leaves, `torch.autograd.grad`, and a second derivative; gradients are cut as the tensor is."""
    part = LAYOUT.take(WHOLE, 1).requires_grad_()
    x, seen = cut(1, part), list[Any]()
    assert x.requires_grad and not x.is_leaf and x.grad_fn is not None
    x.register_hook(lambda gradient: seen.append(gradient))
    (slope,) = torch.autograd.grad((x**3).to_local().sum(), x, create_graph=True)
    assert isinstance(slope, Sharded) and seen and isinstance(seen[0], Sharded)
    (second,) = torch.autograd.grad(slope.to_local().sum(), part)
    torch.testing.assert_close(second, 6 * part.detach())
    leaf = x.detach().requires_grad_()
    (leaf * 2).to_local().sum().backward()
    assert isinstance(leaf.grad, Sharded) and (leaf.grad.part == 2).all()
    with torch.no_grad():
        assert not cut(1, part).requires_grad


def test_sharded_tensor_stays_one_in_maps_of_outputs() -> None:
    """As accelerate's, Lightning's and torch's own do."""
    output = {"loss": torch.ones(()), "logits": [cut(1).bfloat16()], "text": "text"}
    mapped: Any = pytree.tree_map_only(Tensor, lambda x: x.detach().to("cpu").float(), output)
    assert isinstance(mapped["logits"][0], Sharded) and mapped["logits"][0].dtype is torch.float32


# ---- compiled code


MAKER = cut_output(LAYOUT, Mesh(size=4, rank=1))


def model(part: Tensor) -> dict[str, Tensor]:
    """[2 2 5 3]"""
    hidden = part * 2
    return {"loss": hidden.sum(), "out": MAKER.of(hidden)}


def cast(part: Tensor) -> dict[str, Tensor]:
    """The output as accelerate returns it."""
    return pytree.tree_map(lambda x: x.float(), model(part))


def computed(part: Tensor) -> Any:
    out = model(part)["out"]
    assert out.shape == (2, 6, 5, 3)
    return (out.float() / 2)[:, :, -1].detach()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [model, cast], ids=lambda f: f.__name__)
def test_sharded_tensor_is_returned_by_compiled_code(
    function: Callable[[Tensor], dict[str, Any]], backend: str
) -> None:
    """In one graph; a backward of the loss alone, and one of both."""
    torch._dynamo.reset()
    fast, part = torch.compile(function, fullgraph=True, backend=backend), torch.ones(2, 2, 5, 3, requires_grad=True)
    fast(part)["loss"].backward()
    assert part.grad is not None and (part.grad == 2).all()
    found = fast(part)
    out = found["out"]
    assert isinstance(out, Tensor) and out.shape == (2, 6, 5, 3) and out.requires_grad and as_sharded(out).cut[0] == 1
    for use in (Tensor.data_ptr, lambda x: setattr(x, "data", WHOLE)):
        with pytest.raises(autotp.Error, match=r"of which each rank holds a part"):
            use(out)
    assert str(out) == f"Sharded([2, 6@tp, 5, 3], {out.dtype})" and copy.deepcopy(out.detach()).shape == out.shape
    (found["loss"] + (out * 3).to_local().sum()).backward()  # type: ignore[attr-defined]
    assert (part.grad == 2 + 2 + 6).all()
    assert isinstance(out[0] + 1, Sharded) and isinstance(gather_all([as_sharded(out.mul_(2))])[0], Tensor) is True


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_sharded_tensor_is_computed_with_in_compiled_code(backend: str) -> None:
    torch._dynamo.reset()
    part = torch.ones(2, 2, 5, 3, requires_grad=True)
    found = torch.compile(computed, fullgraph=True, backend=backend)(part)
    assert isinstance(found, Sharded) and found.shape == (2, 6, 3) and (found.part == 1).all()


# ---- on ranks


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt(n_layer=1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """[batch seq], [batch seq] -> [], [batch seq vocab]"""
        logits = self.gpt(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}


def both(n: int, **settings: Any) -> tuple[nn.Module, autotp.ParallelModule, dict[str, Tensor]]:
    torch.manual_seed(0)
    whole = WithLoss().double().train()
    given = {"x": torch.arange(12).view(2, 6), "y": torch.arange(12).view(2, 6) + 1}
    return whole, autotp.parallelize(copy.deepcopy(whole), n, example_inputs=given, **settings), given


def expect_gradients(whole: nn.Module, parallel: Any, gradients: dict[str, Tensor | None] | None = None) -> None:
    for name, p in parallel.named_parameters():
        expected = whole.get_parameter(name).grad
        torch.testing.assert_close(p.grad if gradients is None else gradients[name], expected, check_device=False)


def penalty(model: Any, given: dict[str, Tensor]) -> Tensor:
    """A loss of the model's, and one of its logits: cast, shifted, divided, gathered."""
    out = model(**given)
    logits = autotp.gather((out["logits"].float().double() / 0.7)[:, :-1])
    return out["loss"] + logits.logsumexp(-1).square().mean()


@checks.on(2)
@checks.on(3, rare=True)
def a_loss_of_cast_logits(rank: int, n: int) -> None:
    """Its value and every gradient; also through DistributedDataParallel, and where the caller is compiled."""
    whole, parallel, given = both(n)
    penalty(whole, given).backward()
    alone = dist.new_group([rank], use_local_synchronization=True)
    wrapped = DistributedDataParallel(parallel, process_group=alone, find_unused_parameters=True)
    compiled = torch.compile(parallel, backend="aot_eager", fullgraph=True)
    for model in (parallel, wrapped, compiled):
        parallel.zero_grad()
        loss = penalty(model, given)
        torch.testing.assert_close(loss, penalty(whole, given))
        loss.backward()
        expect_gradients(whole, parallel)
    for model in (whole, parallel, wrapped):  # Nobody reads the logits.
        model.zero_grad()
        model(**given)["loss"].backward()
    expect_gradients(whole, parallel)
    for model in (whole, parallel):  # Without a word of cut logits.
        model.zero_grad()
        logits = model(**given)["logits"].flatten(0, 1)
        (nn.functional.cross_entropy(logits, given["y"].flatten()) + (logits / logits.norm())[:, 3].sum()).backward()
    expect_gradients(whole, parallel)


@checks.on(2)
def logits_in_mixed_precision(rank: int, n: int) -> None:
    """In bfloat16 and float16, cast as wrappers around a model cast what it returns: they stay cut."""
    for dtype in (torch.bfloat16, torch.float16):
        whole, parallel, given = both(n)
        whole, parallel = whole.float(), parallel.float()
        with torch.autocast("cpu", dtype):
            expected, found = whole(**given)["logits"], parallel(**given)["logits"]
        assert isinstance(found, Sharded) and found.dtype == dtype
        for cast in (found.float(), found.to(torch.float32), found.detach().clone(), found.type_as(torch.ones(1))):
            assert isinstance(cast, Sharded) and cast.shape == expected.shape
            torch.testing.assert_close(autotp.gather(cast).float(), expected.float(), rtol=0.02, atol=0.02)
        assert torch.equal(found.float().argmax(-1), autotp.gather(found).float().argmax(-1))


class AsOfDDP(torch.autograd.Function):
    """Stands between a model and its caller, as DDP's own function does; DDP itself needs NCCL's events."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(x.clone() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return gradients


@on_cards.on(2)
def logits_that_nobody_reads(rank: int, n: int) -> None:
    """Their backward runs with no gradient. A card need not tell what a gradient is."""
    whole, parallel, given = both(n)
    whole(**given)["loss"].backward()
    given = {name: x.to(parallel.mesh.device) for name, x in given.items()}
    loss, _ = AsOfDDP.apply(*parallel(**given).values())
    with host_waits() as traffic:
        loss.backward()
    assert not traffic.waits, traffic
    expect_gradients(whole, parallel)
    for model in (whole, parallel):  # A whole gradient of logits that are cut.
        model.zero_grad()
        place = next(model.parameters()).device
        logits = model(**{name: x.to(place) for name, x in given.items()})["logits"]
        torch.autograd.backward([logits], [torch.ones(logits.shape, dtype=logits.dtype, device=logits.device)])
    expect_gradients(whole, parallel)


@checks.on(2)
def a_compiled_loop(rank: int, n: int) -> None:
    """That gathers in one graph, and one with a break between the model and what is done with its logits."""
    whole, parallel, given = both(n)
    parallel(**given)
    penalty(whole, given).backward()

    def broken(x: Tensor, y: Tensor) -> Tensor:
        out = parallel(x, y)
        torch._dynamo.graph_break()
        return out["loss"] + autotp.gather(out["logits"].float().double()[:, :-1] / 0.7).logsumexp(-1).square().mean()

    loops = [(lambda x, y: penalty(parallel, {"x": x, "y": y}), "aot_eager"), (broken, "eager")]
    for loop, backend in loops:
        torch._dynamo.reset()
        parallel.zero_grad()
        loss = torch.compile(loop, backend=backend, fullgraph=loop is not broken)(**given)
        torch.testing.assert_close(loss, penalty(whole, given))
        loss.backward()
        expect_gradients(whole, parallel)


@checks.on(2)
def in_transforms(rank: int, n: int) -> None:
    """A box: gathered it has its derivatives; what computes with it is an Error; what ignores it is right."""
    whole, parallel, given = both(n)
    parameters = {name: p.detach() for name, p in parallel.named_parameters()}
    call = lambda p: functional_call(parallel, p, kwargs=given)  # noqa: E731
    penalty_of = lambda out: out["loss"] + autotp.gather(out["logits"]).square().mean()  # noqa: E731
    expected = whole(**given)
    (expected["loss"] + expected["logits"].square().mean()).backward()
    expect_gradients(whole, parallel, grad(lambda p: penalty_of(call(p)))(parameters))
    slopes, out = grad(lambda p: (penalty_of(call(p)), call(p)), has_aux=True)(parameters)
    expect_gradients(whole, parallel, slopes)
    torch.testing.assert_close(autotp.gather(out["logits"].float() * 2), expected["logits"].detach().float() * 2)
    for computes in (torch.Tensor.float, torch.Tensor.sum, lambda x: x[:, -1]):
        with pytest.raises(autotp.Error, match=r"inside a transform of torch\.func"):
            vjp(lambda p, computes=computes: computes(call(p)["logits"]), parameters)
    with pytest.raises(autotp.Error, match=r"inside a transform of torch\.func"):
        vmap(lambda x: parallel(x[None], x[None])["logits"])(given["x"])
    rows = vmap(lambda x: autotp.gather(parallel(x[None], x[None])["logits"]))(given["x"])
    torch.testing.assert_close(rows, torch.stack([whole(x[None], x[None])["logits"] for x in given["x"]]))


@pytest.mark.parametrize(("n", "name"), on_cards.cases())
def test_on_cards(n: int, name: str) -> None:
    on_cards.expect(n, name)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
