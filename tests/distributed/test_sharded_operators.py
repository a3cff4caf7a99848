"""sharded_operators: an operator gives the rank's part of what one device gives, with its gradient, or an Error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autotp
from autotp.distributed.mesh import Mesh
from autotp.distributed.sharded_tensor import Sharded, sharded
from autotp.sharding.layout import Layout

PIECES = (((0, 2), (6, 8)), ((2, 5),), ((5, 6), (8, 11)), ())
"""11 words on four ranks: two ranges on a rank, and none."""
GENERATOR = torch.Generator().manual_seed(0)
WHOLE = torch.randn(2, 5, 11, dtype=torch.float64, generator=GENERATOR)
BIAS = torch.linspace(-1, 1, 11, dtype=torch.float64)
MASK = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 1, 1]]).bool()
LABELS = torch.tensor([[1, 0, 10, 1, 0], [0, 7, 1, 3, 1]])
RANKS = range(4)
LOGITS = Layout((-1, -1, 11), 2, PIECES, "vocab")


def on(rank: int, whole: Tensor = WHOLE, dim: int = 2) -> tuple[Tensor, Sharded]:
    """A rank's part, which requires a gradient, and the cut tensor. [2 5 11@tp]"""
    layout = Layout(tuple(whole.shape), dim, PIECES, "vocab")
    part = layout.take(whole, rank).requires_grad_()
    return part, sharded(part, layout, Mesh(size=4, rank=rank))


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
def test_right(name: str) -> None:
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


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "cross-entropy": lambda x: F.cross_entropy(x.float().view(-1, 11), LABELS.view(-1)),
    "softmax": lambda x: torch.softmax(x, -1),
    "log-softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "argmax": lambda x: x.argmax(-1),
    "topk": lambda x: x.topk(2),
    "sort": lambda x: x.sort(-1),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(-1),
    "max": lambda x: x.max(),
    "norm": lambda x: x.norm(),
    "variance": lambda x: x.var(),
    "cosine": lambda x: F.cosine_similarity(x, x, -1),
    "any": lambda x: 3.0 in x,
    "equal": lambda x: torch.equal(x, WHOLE),
    "allclose": lambda x: torch.allclose(x, x),
    "one-word": lambda x: x[..., 0],
    "some-words": lambda x: x[..., 2:5],
    "labels": lambda x: torch.gather(x, -1, LABELS[..., None]),
    "mask-of-the-whole": lambda x: x[x > 0],
    "places": lambda x: x.nonzero(),
    "cat": lambda x: torch.cat([x, x], -1),
    "split": lambda x: x.split(3, -1),
    "product": lambda x: x @ torch.ones(11, 2, dtype=torch.float64),
    "view": lambda x: x.view(2, 55),
    "memory": lambda x: x.as_strided((2,), (1,)),
    "into-a-plain-one": lambda x: torch.zeros(2, 5, 11, dtype=torch.float64).add_(x),
    "into-a-row-of-a-plain-one": lambda x: torch.zeros(3, 2, 5, 11, dtype=torch.float64).__setitem__(0, x),
    "out": lambda x: torch.add(WHOLE, WHOLE, out=x),
    "resized": lambda x: x.transpose_(0, 1),
    "dropout": lambda x: F.dropout(x, 0.5),
    "noise": lambda x: x + torch.rand_like(x),
    "draws": lambda x: x.bernoulli_(),
    "foreach": lambda x: torch._foreach_norm([x]),
    "histogram": lambda x: torch.histc(x),
    "another-cut": lambda x: x + on(1, WHOLE.transpose(1, 2), dim=1)[1].detach().transpose(1, 2).flip(2),
    "no-operator-of-ours": lambda x: torch.special.airy_ai(x).cummax(-1),
    # Numbers of this rank.
    "item": lambda x: x.item(),
    "bool": lambda x: bool(x),
    "float-of": lambda x: float(x),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.cpu().numpy(),
    "asarray": lambda x: numpy.asarray(x),
    "format": lambda x: f"{x.sum():.3f}",
    "save": lambda x: torch.save({"x": x}, io.BytesIO()),
    "pickle": lambda x: pickle.dumps(x),
    "copy": lambda x: copy.copy(x),
    "data": lambda x: setattr(x, "data", WHOLE),
    "data-ptr": lambda x: x.data_ptr(),
    "storage": lambda x: x.untyped_storage(),
    "dlpack": lambda x: torch.from_dlpack(x),
    "shared": lambda x: x.share_memory_(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """On every rank, with gradients and without."""
    for rank in RANKS:
        for cut in (on(rank)[1].detach(), on(rank)[1].detach().float().double()):
            with pytest.raises(autotp.Error, match=r"of which each rank holds a part(.|\n)*autotp\.gather"):
                REFUSED[name](cut)


def test_the_message() -> None:
    with pytest.raises(autotp.Error) as raised:
        on(1)[1].argmax(-1)
    assert str(raised.value) == (
        "`argmax` of a tensor [2, 5, 11@tp] of which each rank holds a part\n"
        "  try      autotp.gather(tensor) on all ranks, which is whole, with its gradient\n"
        '  or       parallelize(..., outputs="full")'
    )


def test_a_whole_tensor_that_requires_a_gradient() -> None:
    """Each rank would have a part of its gradient."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    with pytest.raises(autotp.Error, match=r"requires a gradient, beside one of which each rank holds a part"):
        on(1)[1] * scale
    assert isinstance(on(1)[1] * scale.detach(), Sharded)
    with torch.no_grad():
        assert isinstance(on(1)[1] * scale, Sharded)
    with pytest.raises(autotp.Error, match=r"autotp\.gather\(tensor\)\.backward"):
        on(1)[1].backward(torch.ones_like(WHOLE))


def test_new_tensors_are_whole_unless_they_have_the_size_of_the_cut_dimension() -> None:
    _, cut = on(1)
    assert type(cut.new_zeros(3)) is Tensor and type(cut.new_full((2, 4, 5), 1.0)) is Tensor
    assert [x.to_local().shape for x in (cut.new_zeros(7, 1, 11), torch.ones_like(cut))] == [(7, 1, 3), (2, 5, 3)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["float", "last", "shifted", "temperature", "bias", "masked-rows", "reshaped"])
def test_in_inference_mode(name: str) -> None:
    """There torch gives a type composed operators, as `view` of a `reshape`, as they are."""
    with torch.inference_mode():
        found, expected = RIGHT[name](on(1)[1]), RIGHT[name](WHOLE)
        torch.testing.assert_close(found.part, Layout((), found.cut[0], PIECES).take(expected, 1))  # type: ignore[attr-defined]
    with torch.inference_mode(), pytest.raises(autotp.Error, match=r"autotp\.gather"):
        F.cross_entropy(on(1)[1].flatten(0, 1), LABELS.flatten())
