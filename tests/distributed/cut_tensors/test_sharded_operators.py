"""sharded_operators, whole_operators: an operator gives what one device gives, with its gradient, cut or whole."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Checks
from torch import Tensor

import autotp
from autotp.distributed.cut_tensors.sharded_tensor import Sharded, sharded
from autotp.distributed.mesh import Mesh, make_mesh
from autotp.ops import collectives
from autotp.sharding.layout import Layout

checks = Checks()
PIECES = (((0, 2), (6, 8)), ((2, 5),), ((5, 6), (8, 11)), ())
"""11 words on four ranks: two ranges on a rank, and none."""
GENERATOR = torch.Generator().manual_seed(0)
WHOLE = torch.randn(2, 5, 11, dtype=torch.float64, generator=GENERATOR)
BIAS = torch.linspace(-1, 1, 11, dtype=torch.float64)
MASK = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 1, 1]]).bool()
LABELS = torch.tensor([[1, 0, 10, 1, 0], [0, 7, 1, 3, 1]])
RANKS = range(4)
LOGITS = Layout((-1, -1, 11), 2, PIECES, "vocab")


def layout_of(n: int, dim: int = 2) -> Layout:
    """11 words on two or four ranks."""
    return Layout((-1, -1, 11), dim, PIECES if n == 4 else (((0, 2), (6, 11)), ((2, 6),)), "vocab")


def on(rank: int, whole: Tensor = WHOLE, dim: int = 2, mesh: Mesh | None = None, n: int = 4) -> tuple[Tensor, Sharded]:
    """A rank's part, which requires a gradient, and the cut tensor. [2 5 11@tp]"""
    layout = replace(layout_of(n, dim), shape=tuple(whole.shape))
    part = layout.take(whole, rank).requires_grad_()
    return part, sharded(part, layout, mesh or Mesh(size=4, rank=rank))


def _written(x: Tensor) -> Tensor:
    copied = x.clone()
    copied[:, 0] = 0.5
    copied[MASK] = -1
    copied += BIAS
    return copied.mul_(2).masked_fill_(MASK[..., None], 3).clamp_(-4, 4)


RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    # What loops do with logits.
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "type": lambda x: x.type(torch.float32),
    "bfloat16": lambda x: x.bfloat16().double(),
    "cpu": lambda x: x.cpu().contiguous(),
    "last": lambda x: x[:, -1],
    "last-kept": lambda x: x[:, -1:, :],
    "shifted": lambda x: x[..., :-1, :].contiguous().view(-1, 11),
    "reshaped": lambda x: x[:, 1:].reshape(-1, 11),
    "flat": lambda x: x.flatten(0, 1),
    "masked-rows": lambda x: x[MASK],
    "chosen-rows": lambda x: x[:, torch.tensor([0, 2])],
    "index-select": lambda x: x.index_select(0, torch.tensor([1, 0, 1])),
    "temperature": lambda x: x / 0.7,
    "tensor-temperature": lambda x: x / torch.tensor(0.7, dtype=torch.float64),
    "softcap": lambda x: 30 * torch.tanh(x / 30),
    "clamp": lambda x: x.clamp(-1, 1).nan_to_num(),
    "with-itself": lambda x: x * x.exp(),
    "no-part-in-it": lambda x: torch.zeros_like(x) + x,
    # What is whole on every rank gives the rank's slice of it.
    "bias": lambda x: x + BIAS,
    "bias-first": lambda x: BIAS - x,
    "rows-of-bias": lambda x: x * BIAS.expand(2, 1, 11),
    "whole": lambda x: x - WHOLE,
    "one-word": lambda x: x + torch.ones(1, dtype=torch.float64),
    "where": lambda x: torch.where(MASK[..., None], x, BIAS),
    "masked-fill": lambda x: x.masked_fill(~MASK[..., None], -1),
    "compared": lambda x: (x > BIAS).double() * x,
    # Beside the cut.
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean((0, 1)),
    "maximum": lambda x: x.amax(0),
    "softmax-of-rows": lambda x: x.softmax(1),
    "log-softmax-of-rows": lambda x: x.log_softmax(0),
    "cumsum": lambda x: x.cumsum(1),
    "flip": lambda x: x.flip(1).roll(1, 0),
    "topk-of-rows": lambda x: x.topk(2, 1)[0],
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "unsqueeze": lambda x: x[:, None].expand(2, 3, 5, 11),
    "repeat": lambda x: x.repeat_interleave(2, 0),
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "stack": lambda x: torch.stack([x, x]),
    "pieces": lambda x: x.split(2, 1)[0] + x.chunk(3, 1)[1],
    "rows": lambda x: list(x)[1],
    "pad": lambda x: F.pad(x, (0, 0, 1, 1)),
    "product": lambda x: torch.ones(3, 5, dtype=torch.float64) @ x,
    "gather-of-rows": lambda x: x.gather(1, torch.zeros(2, 1, 11, dtype=torch.int64)),
    "activations": lambda x: F.gelu(x) + F.silu(x) + F.softplus(x) + F.elu(x) + F.leaky_relu(x) + F.mish(x),
    # In place, also through views.
    "written": _written,
    "deepcopy": lambda x: copy.deepcopy(x.detach()) + x,
}


@pytest.mark.parametrize("name", RIGHT)
def test_sharded_operators_equal_one_device(name: str) -> None:
    """The part of one device's result, and of its gradient; also on a rank that holds nothing."""
    for rank in RANKS:
        leaf = WHOLE.clone().requires_grad_()
        part, cut = on(rank)
        expected, found = RIGHT[name](leaf), RIGHT[name](cut)
        assert type(found) is Sharded and (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.stride() == expected.stride() and found.requires_grad
        layout = Layout(tuple(expected.shape), found.cut[0], PIECES)
        torch.testing.assert_close(found.part, layout.take(expected.detach(), rank))
        slope = torch.linspace(1, 2, expected.numel(), dtype=expected.dtype).view(expected.shape)
        expected.backward(slope)
        found.to_local().backward(layout.take(slope, rank))
        assert leaf.grad is not None
        torch.testing.assert_close(part.grad, LOGITS.take(leaf.grad, rank), atol=1e-6, rtol=1e-5)


OF_WHOLES: dict[str, Callable[[Tensor], Any]] = {
    "cross-entropy": lambda x: F.cross_entropy(x.view(-1, 11), LABELS.view(-1)),
    "softmax": lambda x: torch.softmax(x, -1),
    "log-softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "argmax": lambda x: x.argmax(-1),
    "topk": lambda x: x.topk(2)[0],
    "sort": lambda x: x.sort(-1)[0],
    "sum": lambda x: x.sum(),
    "sum-of-words": lambda x: x.sum((0, -1), keepdim=True),
    "mean": lambda x: x.mean(-1),
    "mean-in-half": lambda x: x.bfloat16().mean().double(),
    "max": lambda x: x.max(),
    "amin": lambda x: x.amin((1, 2)),
    "norm": lambda x: x.norm(),
    "norm-of-words": lambda x: torch.linalg.vector_norm(x, 3, dim=2),
    "largest": lambda x: torch.linalg.vector_norm(x, torch.inf),
    "smallest": lambda x: torch.linalg.vector_norm(x, -torch.inf, dim=-1),
    "nonzero-words": lambda x: torch.linalg.vector_norm(x.clamp(min=0), 0),
    "variance": lambda x: x.var(),
    "deviation": lambda x: x.std(2, correction=0, keepdim=True),
    "nan": lambda x: torch.where(x == x.max(), torch.nan, x).amax(),
    "any": lambda x: (x > 2).any(-1),
    "every": lambda x: (x > -9).all(),
    "count": lambda x: (x > 0).count_nonzero(),
    "cosine": lambda x: F.cosine_similarity(x, x * x, -1),
    "contains": lambda x: 3.0 in x,
    "equal": lambda x: torch.equal(x, WHOLE),
    "allclose": lambda x: torch.allclose(x, x),
    "one-word": lambda x: x[..., 0],
    "some-words": lambda x: x[..., 2:5],
    "labels": lambda x: torch.gather(x, -1, LABELS[..., None]),
    "mask-of-the-whole": lambda x: x[x > 0],
    "places": lambda x: x.nonzero(),
    "cat": lambda x: torch.cat([x, x], -1),
    "split": lambda x: x.split(3, -1)[1],
    "product": lambda x: x @ torch.ones(11, 2, dtype=torch.float64),
    "with-itself": lambda x: x @ x.transpose(1, 2),
    "view": lambda x: x.view(2, 55),
    "memory": lambda x: x.as_strided((2,), (1,)),
    "into-a-plain-one": lambda x: torch.zeros(2, 5, 11, dtype=torch.float64).add_(x),
    "into-a-row-of-a-plain-one": lambda x: _set(torch.zeros(3, 2, 5, 11, dtype=torch.float64), 0, x),
    "out": lambda x: torch.add(WHOLE, WHOLE, out=x.detach().clone()),
    "transposed": lambda x: x.detach().clone().transpose_(0, 2) * 2,
    "dropout": lambda x: F.dropout(x, 0.5),
    "noise": lambda x: x + torch.rand_like(x),
    "draws": lambda x: x.detach().clone().bernoulli_(0.4),
    "foreach": lambda x: torch._foreach_norm([x, BIAS])[0],
    "foreach-pairs": lambda x: torch._foreach_mul([x, BIAS], [x, BIAS])[0],
    "foreach-into-plain": lambda x: _first_of(torch._foreach_add_, torch.zeros_like(WHOLE), x),
    "histogram": lambda x: torch.histc(x.detach()),
    "another-cut": lambda x: (
        x
        + on(MESH.get().rank, WHOLE.transpose(1, 2), 1, MESH.get(), MESH.get().size)[1].detach().transpose(1, 2).flip(2)
    ),
    "no-operator-of-ours": lambda x: torch.special.airy_ai(x).cummax(-1)[0],
    "a-word-written": lambda x: _set(x.detach().clone(), (..., 3), 7.0),
    "places-written": lambda x: _set(x.detach().clone(), torch.arange(1), x[1:]),
    "a-view-written": lambda x: _written_through(x.detach().clone()),
    # Numbers.
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "float-of": lambda x: float(x[0, 0, 10]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().cpu().numpy().sum(),
    "asarray": lambda x: numpy.asarray(x.detach()).max(),
    "format": lambda x: f"{x.sum():.3f}",
    "save": lambda x: _saved(x.detach()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "dlpack": lambda x: torch.from_dlpack(x.detach()),
}
"""What needs more than a part: a number of all ranks, or the whole."""


def _set(x: Tensor, index: Any, value: Any) -> Tensor:
    x[index] = value
    return x


def _first_of(operator: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    operator([x], [y])
    return x


def _written_through(x: Tensor) -> Tensor:
    """A view shows what is written into the tensor later, and what is written into the view is in the tensor."""
    words = x[..., 2:4]
    x.mul_(2)
    words.add_(1)
    words[0].zero_()
    x.add_(words.sum())
    return x


def _saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    found: Tensor = torch.load(file)["x"]
    return found


MESH: ContextVar[Mesh] = ContextVar("mesh")


@checks.on(2, 4)
def as_one_device(rank: int, n: int) -> None:
    """On a rank with two ranges, and on one that holds nothing; results and gradients."""
    MESH.set(make_mesh(n))
    for name, compute in OF_WHOLES.items():
        leaf = WHOLE.clone().requires_grad_()
        part, cut = on(rank, WHOLE, 2, MESH.get(), n)
        results = []
        for x in (leaf, cut):
            torch.manual_seed(3 + (rank if x is cut else 0))  # The first rank's numbers are those of all.
            results.append(compute(x))
        expected, found = results
        if isinstance(expected, float | bool | str | list | numpy.number):
            assert found == pytest.approx(expected) if not isinstance(expected, str | list) else found == expected, name
            continue
        whole = autotp.gather(found)
        assert type(whole) is Tensor, name
        torch.testing.assert_close(whole.detach(), expected.detach(), rtol=1e-12, atol=1e-12, equal_nan=True, msg=name)
        assert found.requires_grad == expected.requires_grad, name
        if expected.requires_grad:
            slope = torch.linspace(1, 2, expected.numel(), dtype=expected.dtype).view(expected.shape)
            expected.backward(slope)
            whole.backward(slope)
            mine, theirs = (torch.zeros_like(x) if x.grad is None else x.grad for x in (part, leaf))
            torch.testing.assert_close(
                mine, layout_of(n).take(theirs, rank), rtol=1e-12, atol=1e-12, equal_nan=True, msg=name
            )


@checks.on(2)
def beside_a_whole_tensor_with_a_gradient(rank: int, n: int) -> None:
    """Its gradient is whole, and the same on all ranks."""
    for combine in (torch.mul, lambda x, y: x * y.exp(), lambda x, y: torch.softmax(x + y, -1), lambda x, y: y.sub(x)):
        leaf, factors = WHOLE.clone().requires_grad_(), [BIAS.clone().requires_grad_() for _ in range(2)]
        part, cut = on(rank, WHOLE, 2, make_mesh(n), n)
        for x, factor in zip((leaf, cut), factors, strict=True):
            (combine(x, factor * 2) ** 2).sum().backward()
        assert type(factors[1].grad) is Tensor
        torch.testing.assert_close(factors[1].grad, factors[0].grad)
        torch.testing.assert_close(part.grad, layout_of(n).take(leaf.grad, rank))


@checks.on(2)
def what_is_counted(rank: int, n: int) -> None:
    """A reduction sends one number, and elementwise operators nothing; a line that gathers much is told of, once."""
    cut = on(rank, WHOLE, 2, make_mesh(n), n)[1].detach()
    with counted() as sent:
        (cut * 2 + cut.abs()).clamp_(min=0)
        assert sent == []
        cut.norm()
        cut.sum()
        assert [x.numel() for x in sent] == [1, 1]
    with patch("autotp.distributed.cut_tensors.whole_operators.LARGE", 100):
        with pytest.warns(UserWarning, match=r"this line gathers a tensor \[2, 5, 11\] of 0.0 GiB") as told:
            for _ in range(2):
                cut.softmax(-1)
        assert [warning.filename for warning in told] == [__file__]


@contextmanager
def counted() -> Iterator[list[Tensor]]:
    """The tensors that collectives send."""
    sent = list[Tensor]()

    def noted(name: str, x: Tensor, *rest: Any) -> Tensor:
        sent.append(x)
        return collectives.communicate.__wrapped__(name, x, *rest)  # type: ignore[attr-defined,no-any-return]

    noted.__wrapped__ = collectives.communicate  # type: ignore[attr-defined]
    with patch.object(collectives, "communicate", noted):
        collectives.communicate.__wrapped__ = noted.__wrapped__  # type: ignore[attr-defined]
        yield sent


@checks.on(4)
def copies_that_differ(rank: int, n: int) -> None:
    """Where two ranks hold the same rows, a comparison looks at both: a sum counts one of them."""
    whole, mesh = torch.arange(1.0, 33).view(4, 8), make_mesh(n)
    layout = Layout((4, 8), 0, (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)), "rows")
    part = layout.take(whole, rank).clone()
    cut = sharded(part, layout, mesh)
    comparisons: list[Callable[[Tensor], Any]] = [
        lambda x: torch.equal(x, whole),
        lambda x: torch.equal(whole, x),
        lambda x: torch.allclose(x, whole),
        lambda x: bool((x == whole).all()),
        lambda x: not (x != whole).any(),
        lambda x: not (x - whole).abs().max(),
        lambda x: not (x - whole).amin(),
    ]
    assert all(same(cut) for same in comparisons) and cut.sum() == whole.sum()
    torch.testing.assert_close(cut, whole)
    if rank == 3:
        part[1, 3] -= 1
    assert not any(same(cut) for same in comparisons) and cut.sum() == whole.sum()
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(cut, whole)
    assert not torch.equal(cut, whole[:2])


@checks.on(2)
def what_is_refused(rank: int, n: int) -> None:
    cut = on(rank, WHOLE, 2, make_mesh(n), n)[1].detach()
    for use in (
        lambda: setattr(cut, "data", WHOLE),
        lambda: cut.untyped_storage(),
        lambda: cut.share_memory_(),
        lambda: cut.set_(WHOLE),
        lambda: dist.all_reduce(cut),
        lambda: cut.resize_(3),
    ):
        with pytest.raises(autotp.Error, match=r"of which each rank holds a part|have different parts"):
            use()
    with pytest.raises(autotp.Error, match=r"`as_strided_` changes the shape of a tensor of which each rank holds a"):
        cut.as_strided_((3,), (1,))


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


def test_new_tensors_are_whole_unless_they_have_the_size_of_the_cut_dimension() -> None:
    _, cut = on(1)
    assert type(cut.new_zeros(3)) is Tensor and type(cut.new_full((2, 4, 5), 1.0)) is Tensor
    assert [x.to_local().shape for x in (cut.new_zeros(7, 1, 11), torch.ones_like(cut))] == [(7, 1, 3), (2, 5, 3)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["float", "last", "shifted", "temperature", "bias", "masked-rows", "reshaped"])
def test_sharded_operators_are_right_in_inference_mode(name: str) -> None:
    """There torch gives a type composed operators, as `view` of a `reshape`, as they are."""
    with torch.inference_mode():
        found, expected = RIGHT[name](on(1)[1]), RIGHT[name](WHOLE)
        torch.testing.assert_close(found.part, Layout((), found.cut[0], PIECES).take(expected, 1))  # type: ignore[attr-defined]
