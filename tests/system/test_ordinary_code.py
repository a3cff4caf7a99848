"""Whole models of ordinary code: each is on two real ranks what it is on one device, and `verify` says so.

Compared in float64: every output, the gradient of every parameter and input, what the call does to its arguments.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from ranks import Checks
from small_models import Plain, assert_values_close, expect_gradients
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autotp

checks = Checks()
Given = dict[str, Any]
NO_KERNEL = "the pretended device has no kernel of such convolutions"


def ordinary(make: Callable[[], tuple[nn.Module, list[Given]]], not_on_cards: str = "") -> Callable[[int, int], None]:
    """A check on two ranks of the model that `make` returns, called with each of these arguments."""

    def check(rank: int, n: int) -> None:
        expect_as_on_one_device(*make(), rank, n)

    check.__name__ = check.__qualname__ = make.__name__
    return checks.on(2, not_on_cards=not_on_cards)(check)


def rarely_run(make: Callable[[], tuple[nn.Module, list[Given]]]) -> Callable[[int, int], None]:
    """The same, for a further case of a mechanism."""

    def check(rank: int, n: int) -> None:
        expect_as_on_one_device(*make(), rank, n)

    check.__name__ = check.__qualname__ = make.__name__
    return checks.on(2, rare=True)(check)


def expect_as_on_one_device(model: nn.Module, calls: list[Given], rank: int, n: int) -> None:
    whole = model.double().train()
    # `verify` simulates all ranks, wherever it runs.
    report = autotp.verify(whole, tp=n, example_inputs=copy.deepcopy(calls[0])) if rank == 0 else None
    split = autotp.parallelize(copy.deepcopy(whole), n, randomness="exact", example_inputs=copy.deepcopy(calls[0]))
    for step, given in enumerate(calls):
        expected, found = (_done(one, copy.deepcopy(given), step) for one in (whole, split))
        for a, b in zip(expected, found, strict=True):
            assert_values_close(b, a, rtol=1e-12, atol=1e-12)
        expect_gradients(whole, split)
    assert report is None or report.ok, report  # At the end, for the other rank is in step till here.


def _done(model: nn.Module, given: Given, step: int) -> list[Any]:
    """What comes out of a call and its backward: outputs, arguments as they are now, their gradients, buffers."""
    model.zero_grad()
    torch.manual_seed(step)
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    outputs = [x for x in pytree.tree_leaves(model(**given)) if isinstance(x, Tensor)]
    _loss(outputs).backward()
    gradients = [x.grad for x in tensors if x.grad is not None]
    return [x.detach() for x in (*outputs, *tensors, *gradients, *model.buffers())]


def _loss(outputs: list[Tensor]) -> Tensor:
    floats = [x for x in outputs if x.is_floating_point()]
    weights = [torch.linspace(0.5, 1.5, x.numel(), device=x.device).view(x.shape) for x in floats]
    return sum(((x * weight).sum() for x, weight in zip(floats, weights, strict=True)), torch.zeros(()))


def numbers(*shape: int, grad: bool = True) -> Tensor:
    found = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).cos().roll(sum(shape)).view(shape)
    return found.requires_grad_(grad)


class Attention(nn.Module):
    """`x: [batch seq 8]`, four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


# ---- modules


class Listed(nn.Module):
    """Each layer is a list of its parts (x-transformers, vit-pytorch), or a dictionary of them."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        parts = [{"attention": Attention(), "mlp": Plain()} for _ in range(3)]
        self.layers = nn.ModuleList([nn.ModuleDict(p) if named else nn.ModuleList(p.values()) for p in parts])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            attention, mlp = layer.values() if isinstance(layer, nn.ModuleDict) else layer
            x = x + attention(x)
            x = x + mlp(x)
        return x


@ordinary
def layers_that_are_lists() -> tuple[nn.Module, list[Given]]:
    return Listed(named=False), [{"x": numbers(2, 5, 8)}, {"x": numbers(3, 7, 8)}]


@ordinary
def layers_that_are_dictionaries() -> tuple[nn.Module, list[Given]]:
    return Listed(named=True), [{"x": numbers(2, 5, 8)}, {"x": numbers(3, 7, 8)}]


# ---- sizes


class PartsOfSizes(nn.Module):
    """Takes slices as long as a length's parts are, and divides by its root."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Plain()

    def forward(self, x: Tensor) -> Tensor:
        n, x = x.shape[1], self.mlp(x)
        return x[:, : math.ceil(n * 0.7)].sum(1) + x[:, : math.floor(n / 2)].sum(1) / n**0.5


@ordinary
def parts_of_sizes() -> tuple[nn.Module, list[Given]]:
    return PartsOfSizes(), [{"x": numbers(2, n, 8)} for n in (9, 16, 25)]


class Patches(nn.Module):
    """Reads places as a square (DiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Plain()

    def forward(self, x: Tensor) -> Tensor:
        side = torch.sym_int(x.shape[1] ** 0.5)
        return self.mlp(x).unflatten(1, (side, side)).transpose(1, 2).flatten(1, 2)


@ordinary
def roots_of_sizes() -> tuple[nn.Module, list[Given]]:
    return Patches(), [{"x": numbers(2, n, 8)} for n in (9, 16, 25)]


class Relative(nn.Module):
    """Attention whose scores know how far apart places are. x: [batch seq 8]"""

    def __init__(self, relative: nn.Module) -> None:
        super().__init__()
        self.qkv, self.out, self.relative = nn.Linear(8, 24), nn.Linear(8, 8), relative

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.mT + self.relative(q), -1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Shifted(nn.Module):
    """Scores of distances counted down, brought to their places by a view (Transformer-XL). q: [batch 4 seq 2]"""

    def __init__(self) -> None:
        super().__init__()
        self.distances = nn.Linear(2, 8, bias=False)

    def forward(self, q: Tensor) -> Tensor:
        b, h, n, d = q.shape
        distance = torch.arange(n - 1, -1, -1.0, dtype=q.dtype)
        keys = self.distances(torch.stack([distance.sin(), distance.cos()], -1)).view(n, h, d)
        scores = torch.cat([q.new_zeros(b, h, n, 1), torch.einsum("bhnd,mhd->bhnm", q, keys)], -1)
        return scores.view(b, h, n + 1, n)[:, :, 1:].reshape(b, h, n, n)


class Skewed(nn.Module):
    """Scores of the 2 n - 1 distances of n places, skewed (Music Transformer). q: [batch 4 seq 2]"""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(numbers(63, 2).detach())

    def forward(self, q: Tensor) -> Tensor:
        b, h, n, _ = q.shape
        scores = F.pad(q @ self.rows[32 - n : 31 + n].mT, (0, 1)).flatten(2)
        return F.pad(scores, (0, n - 1)).view(b, h, n + 1, 2 * n - 1)[:, :, :n, n - 1 :]


@ordinary
def sizes_that_are_sums() -> tuple[nn.Module, list[Given]]:
    return Relative(Skewed()), [{"x": numbers(2, n, 8)} for n in (5, 7, 3)]


@rarely_run
def a_relative_shift() -> tuple[nn.Module, list[Given]]:
    return Relative(Shifted()), [{"x": numbers(2, n, 8)} for n in (5, 7, 3)]


# ---- arguments that are no tensors


class Scaled(nn.Module):
    """Is given numbers of numpy's."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Plain()

    def forward(self, x: Tensor, scale: Any, by: Any) -> Tensor:
        return self.mlp(x) * torch.from_numpy(scale).to(x.device) * float(by)


@ordinary
def arguments_of_numpy() -> tuple[nn.Module, list[Given]]:
    scale, x, two = numpy.linspace(0, 1, 8), numbers(2, 5, 8), numpy.float64(2)
    return Scaled(), [{"x": x, "scale": scale + i, "by": two} for i in (0, 0, 1, 0)] + [
        {"x": x, "scale": scale, "by": two + 1}
    ]


@checks.on(2)
def numpy_array_arguments_are_read_in_each_call(rank: int, n: int) -> None:
    x, scale = numbers(2, 5, 8), numpy.ones(8)
    split = autotp.parallelize(Scaled().double(), n, example_inputs={"x": x, "scale": scale, "by": 1.0})
    first = split(x, scale, 1.0)
    scale += 1
    assert_values_close(split(x, scale, 1.0), 2 * first)
    assert_values_close(split(x, numpy.ones(8), 1.0), first)


class Narrowed(nn.Module):
    """Uses as much of its width as it is told, and weighs it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8)

    def forward(self, x: Tensor, n: int, weight: float) -> Tensor:
        inner = F.gelu(F.linear(x, self.up.weight[:n]))
        return F.linear(inner, self.down.weight[:, :n], self.down.bias) * weight


@ordinary
def an_int_that_slices_a_weight() -> tuple[nn.Module, list[Given]]:
    return Narrowed(), [{"x": numbers(2, 5, 8), "n": n, "weight": n / 7} for n in (8, 20, 32, 8)]


# ---- torch's own layers


def causal(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)


def padding(batch: int, length: int) -> Tensor:
    """The last place of all rows but the first is padding."""
    found = torch.zeros(batch, length, dtype=torch.bool)
    found[1:, -1] = True
    return found


@ordinary
def a_transformer_with_masks() -> tuple[nn.Module, list[Given]]:
    model, calls = a_transformer_with_masks_of_all_kinds()
    return model, calls[-1:]


@rarely_run
def a_transformer_with_all_masks() -> tuple[nn.Module, list[Given]]:
    return a_transformer_with_masks_of_all_kinds()


def a_transformer_with_masks_of_all_kinds() -> tuple[nn.Module, list[Given]]:
    model = nn.Transformer(8, 4, 1, 1, 16, dropout=0.1, batch_first=True)
    source, target, padded = numbers(2, 5, 8), numbers(2, 6, 8), {"src_key_padding_mask": padding(2, 5)}
    padded |= {"memory_key_padding_mask": padding(2, 5), "tgt_key_padding_mask": padding(2, 6)}
    masks: list[Given] = [
        {"tgt_mask": causal(6), "tgt_is_causal": True},
        {"src_mask": causal(5), "tgt_mask": causal(6), "memory_mask": numbers(6, 5, grad=False)},
        {"src_mask": padding(5, 5), "tgt_mask": causal(6) < 0, **padded},
    ]
    return model, [{"src": source, "tgt": target, **more} for more in masks]


@ordinary
def a_frozen_encoder_in_evaluation() -> tuple[nn.Module, list[Given]]:
    layer = nn.TransformerEncoderLayer(8, 4, 16, batch_first=True, norm_first=False)
    model = Evaluated(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).requires_grad_(False))
    x = numbers(2, 5, 8)
    return model, [
        {"x": x, "padding": padding(2, 5)},
        {"x": x, "padding": None},
        {"x": numbers(3, 7, 8), "padding": None},
    ]


class Evaluated(nn.Module):
    """An encoder that is not trained, and a layer behind it that is."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.mlp = encoder, Plain()

    def train(self, mode: bool = True) -> Evaluated:
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        with torch.no_grad():
            x = self.encoder(x, src_key_padding_mask=padding)
        return self.mlp(x)


class Depthwise(nn.Module):
    """Each channel of the width is convolved by itself (Mamba)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(32, 8)
        self.conv = nn.Conv1d(32, 32, 4, groups=32, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.up(x).mT.chunk(2, 1)
        return self.down((F.silu(self.conv(inner)[..., : x.shape[1]]) * F.silu(gate)).mT)


@partial(ordinary, not_on_cards=NO_KERNEL)
def depthwise_convolutions() -> tuple[nn.Module, list[Given]]:
    return Depthwise(), [{"x": numbers(2, 5, 8)}, {"x": numbers(3, 7, 8)}]


class Residual(nn.Module):
    """Convolutions around a norm, as in residual networks and autoencoders. x: [batch 8 height width]"""

    def __init__(self, norm: nn.Module, groups: int = 1) -> None:
        super().__init__()
        self.norm = norm
        self.first = nn.Conv2d(8, 24, 3, padding=1, groups=groups)
        self.second = nn.ConvTranspose2d(24, 8, 3, stride=2, padding=1, output_padding=1, groups=groups)
        self.last = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return F.avg_pool2d(F.interpolate(x + self.last(self.second(inner)), scale_factor=2, mode="bilinear"), 3)


@partial(ordinary, not_on_cards=NO_KERNEL)
def convolutions_and_batch_norm() -> tuple[nn.Module, list[Given]]:
    return Residual(nn.BatchNorm2d(24)), [{"x": numbers(2, 8, 4, 6)}, {"x": numbers(3, 8, 6, 8)}]


@rarely_run
def grouped_convolutions_and_group_norm() -> tuple[nn.Module, list[Given]]:
    return Residual(nn.GroupNorm(4, 24), groups=4), [{"x": numbers(2, 8, 4, 6)}, {"x": numbers(3, 8, 6, 8)}]


class Sound(nn.Module):
    """Two convolutions (Whisper), one along places whose weight is normed (wav2vec 2.0). x: [batch 8 length]"""

    def __init__(self, normed: Callable[..., nn.Module] = nn.utils.parametrizations.weight_norm) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(8, 32, 3, padding=1), nn.Conv1d(32, 32, 3, stride=2, padding=1)
        self.along = normed(nn.Conv1d(32, 32, 16, padding="same", groups=4), name="weight", dim=2)
        self.out = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.second(F.gelu(self.first(x))))
        return self.out((inner + F.gelu(F.instance_norm(self.along(inner)))).mT)


@rarely_run
def convolutions_of_sound() -> tuple[nn.Module, list[Given]]:
    return Sound(), [{"x": numbers(2, 8, 18)}, {"x": numbers(3, 8, 22)}]


def weight_normed(dim: int | None = 0) -> nn.Module:
    model = Plain()
    nn.utils.parametrizations.weight_norm(model.up)
    nn.utils.parametrizations.weight_norm(model.down, dim=dim)
    return model


@ordinary
def weight_norm() -> tuple[nn.Module, list[Given]]:
    return weight_normed(), [{"x": numbers(2, 5, 8)}, {"x": numbers(3, 7, 8)}]


def spectral_normed(normed: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, list[Given]]:
    """It writes the vectors of its power iteration into buffers, and those of `normalize` into `out=`."""
    model = Plain()
    normed(model.up)
    return model, [{"x": numbers(2, 5, 8)}, {"x": numbers(3, 7, 8)}]


@ordinary
def spectral_norm() -> tuple[nn.Module, list[Given]]:
    return spectral_normed(nn.utils.parametrizations.spectral_norm)


@pytest.mark.parametrize(
    ("make", "tp", "shape", "more"),
    [
        pytest.param(Depthwise, 2, (2, 5, 8), 0.1, id="depthwise"),
        pytest.param(Depthwise, 5, (2, 5, 8), 0.1, id="depthwise-on-5"),
        pytest.param(weight_normed, 2, (2, 5, 8), 0.1, id="weight-norm"),
        pytest.param(lambda: weight_normed(1), 3, (2, 5, 8), 0.1, id="weight-norm-of-columns"),
        pytest.param(lambda: weight_normed(None), 2, (2, 5, 8), 0.1, id="weight-norm-of-all"),
        pytest.param(lambda: Residual(nn.BatchNorm2d(24)), 3, (2, 8, 4, 6), 0.1, id="convolutions"),
        pytest.param(lambda: Residual(nn.Identity()).eval(), 5, (2, 8, 4, 6), 0.1, id="convolutions-on-5"),
        pytest.param(lambda: Residual(nn.GroupNorm(4, 24), 4), 3, (2, 8, 4, 6), 0.2, id="groups"),
        pytest.param(lambda: Residual(nn.BatchNorm2d(24), 4), 5, (2, 8, 4, 6), 0.1, id="groups-on-5"),
        pytest.param(Sound, 2, (2, 8, 18), 0.2, id="sound"),
        pytest.param(lambda: Sound(old_weight_norm), 4, (2, 8, 18), 0.2, id="sound-on-4"),
    ],
)
def test_convolutions_and_channel_norms_are_cut(
    make: Callable[[], nn.Module], tp: int, shape: tuple[int, ...], more: float
) -> None:
    report = autotp.verify(make(), tp, example_inputs=numbers(*shape))
    assert report.ok, report
    assert report.plan.bytes_rank < (1 / tp + more) * report.plan.bytes_total


def old_weight_norm(module: nn.Module, name: str, dim: int) -> nn.Module:
    """The one before parametrizations, a hook before `forward`, which torch advises against and many models have."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return nn.utils.weight_norm(module, name, dim)


# ---- what writes in place


class Dropping(nn.Module):
    """Leaves out branches row by row, as timm's DropPath and torchvision's StochasticDepth do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Plain(), Plain()

    def forward(self, x: Tensor) -> Tensor:
        for branch in (self.first, self.second):
            kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.6)
            x = x + branch(x) * kept.div_(0.6)
        noise = torch.empty(x.shape[-1], dtype=x.dtype, device=x.device).normal_(1.0, 0.1)
        return x * noise * torch.empty_like(x).uniform_(0.5, 1.5)


@ordinary
def random_numbers_in_place() -> tuple[nn.Module, list[Given]]:
    return Dropping(), [{"x": numbers(6, 5, 8)}, {"x": numbers(7, 3, 8)}]


class Writing(nn.Module):
    """Brings its inputs in order in place, and returns one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mlp = nn.Embedding(20, 8), Plain()

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids[ids < 0] = 0
        ids[:, 0].add_(1)
        x.clamp_(-0.5, 0.5)
        y = self.mlp(x + self.words(ids))
        x[:, 0] = y[:, 0]
        return y, x


def ids(batch: int, length: int) -> Tensor:
    return torch.arange(batch * length).view(batch, length) % 13 - 3


@ordinary
def arguments_that_are_written_into() -> tuple[nn.Module, list[Given]]:
    return Writing(), [{"x": numbers(2, n, 8, grad=False), "ids": ids(2, n)} for n in (5, 7)]


@checks.on(2)
def an_argument_written_into_keeps_its_gradient(rank: int, n: int) -> None:
    """A tensor that was computed before the call goes on as what the call made of it."""
    whole = Writing().double()
    split = autotp.parallelize(copy.deepcopy(whole), n, example_inputs={"x": numbers(2, 5, 8), "ids": ids(2, 5)})
    found = []
    for model in (whole, split):
        start = numbers(2, 5, 8)
        x = start * 2
        y, same = model(x, ids(2, 5))
        assert same is x
        _loss([y, x * x]).backward()
        found.append((y.detach(), x.detach(), start.grad))
    for a, b in zip(*found, strict=True):
        assert_values_close(b, a, rtol=1e-12, atol=1e-12)
    expect_gradients(whole, split)
    with pytest.raises(autotp.Error, match="writes into an argument that requires a gradient"):
        split(numbers(2, 5, 8), ids(2, 5))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
