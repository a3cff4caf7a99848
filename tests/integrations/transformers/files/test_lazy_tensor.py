"""lazy_tensor: what was done to a tensor that is not there is done to the part that is read, and no more is read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import message
from torch import Tensor
from trainers import Given

import autotp
from autotp.checkpoint.files.checksums import EARLIER
from autotp.integrations.transformers.files.lazy_tensor import Lazy
from autotp.integrations.transformers.files.safetensors_files import Stored
from autotp.integrations.transformers.files.tensor_sources import Box, sliceable


def tensors(count: int, *shape: int) -> list[Tensor]:
    numbers = torch.arange(count * math.prod(shape), dtype=torch.float32)
    return list(numbers.view(count, *shape).unbind())


INPUTS = {"one": tensors(1, 6, 4), "three": tensors(3, 4, 5), "cube": tensors(1, 2, 3, 4), "thin": tensors(2, 1, 4, 1)}

PARTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "itself": ("one", lambda x: x[...].contiguous().detach()),
    "stack": ("three", lambda *x: torch.stack(x)),
    "stack-last": ("three", lambda *x: torch.stack(x, -1)),
    "cat": ("three", lambda *x: torch.cat(x, 1)),
    "cat-uneven": ("three", lambda x, y, z: torch.cat([x, y[:1], z[1:]])),
    "stack-then-cat": ("three", lambda x, y, z: torch.cat([torch.stack([x, y]), torch.stack([z, x])], 1)),
    "transpose": ("cube", lambda x: x.transpose(0, 2)),
    "t": ("one", lambda x: x.t()),
    "permute": ("cube", lambda x: x.permute(2, 0, 1).contiguous()),
    "chunk": ("one", lambda x: x.chunk(2, 1)),
    "chunk-rest": ("one", lambda x: x.chunk(4, 0)),
    "split": ("one", lambda x: x.split([1, 3, 2])),
    "split-and-squeeze": ("cube", lambda x: [part.squeeze() for part in x.chunk(2)]),
    "unbind": ("cube", lambda x: x.unbind(1)),
    "select": ("cube", lambda x: x[:, -1]),
    "slice": ("one", lambda x: x[-4:-1, 1:]),
    "squeeze": ("thin", lambda x, y: [x.squeeze(), x.squeeze(0), y.squeeze((0, 2))]),
    "unsqueeze": ("one", lambda x: x.unsqueeze(-1).unsqueeze(0)),
    "view": ("thin", lambda x, y: x.view(4, 1, 1, 1)),
    "cast": ("one", lambda x: x.to("cpu", torch.float64).to(torch.float64)),
    "merged-experts": ("three", lambda *x: torch.cat([torch.stack(x), torch.stack(x)], 1).transpose(1, 2)),
}
WHOLE: dict[str, tuple[str, Callable[..., Any]]] = {
    "interleave": ("one", lambda x: x.reshape(3, 2, 4).transpose(0, 1).reshape(6, 4)),
    "step": ("one", lambda x: x[::2]),
    "scaled": ("one", lambda x: (2 * x).chunk(2)[1]),
    "with-another": ("one", lambda x: torch.cat([x, torch.ones(1, 4)])),
    "two-outputs": ("one", lambda x: torch.sort(x)),
}


def lazily(name: str, run: Callable[..., Any]) -> tuple[list[Given], list[Lazy], list[Tensor]]:
    """The sources, what is lazy of the outputs, and what it must be."""
    given = [Given(x) for x in INPUTS[name]]
    with torch.no_grad():
        found, expected = run(*map(Lazy, given)), run(*INPUTS[name])
    if isinstance(found, Tensor):
        found, expected = [found], [expected]
    return given, list(found), list(expected)


def boxes(shape: tuple[int, ...]) -> list[Box]:
    ranges = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    return [tuple(box) for box in itertools.product(*ranges)]


@pytest.mark.parametrize(("inputs", "run"), PARTS.values(), ids=PARTS)
def test_lazy_part_reads_only_the_elements_it_needs(inputs: str, run: Callable[..., Any]) -> None:
    given, found, expected = lazily(inputs, run)
    for lazy, tensor in zip(found, expected, strict=True):
        assert isinstance(lazy, Lazy) and (lazy.shape, lazy.dtype) == (tensor.shape, tensor.dtype)
        assert sliceable(lazy.source)
        for box in boxes(tuple(tensor.shape)):
            for one in given:
                one.counts.clear()
            part = tensor[tuple(slice(a, b) for a, b in box)]
            assert torch.equal(lazy.source.read(box), part), box
            assert sum(sum(one.counts) for one in given) == part.numel()


@pytest.mark.parametrize(("inputs", "run"), WHOLE.values(), ids=WHOLE)
def test_lazy_operators_without_parts_are_computed_whole(inputs: str, run: Callable[..., Any]) -> None:
    _, found, expected = lazily(inputs, run)
    for lazy, tensor in zip(found, expected, strict=True):
        assert (lazy.shape, lazy.dtype) == (tensor.shape, tensor.dtype)
        assert not sliceable(lazy.source)
        for box in boxes(tuple(tensor.shape)):
            assert torch.equal(lazy.source.read(box), tensor[tuple(slice(a, b) for a, b in box)])


def test_a_parameter_of_a_lazy_tensor_reads_nothing() -> None:
    given = Given(torch.ones(2, 3))
    parameter = torch.nn.Parameter(Lazy(given))
    assert isinstance(parameter, Lazy) and parameter.requires_grad and parameter.source is given
    assert repr(Lazy(given)) == "Lazy([2, 3], torch.float32)"
    assert not given.counts


def test_torch_equal_reads_both_lazy_tensors() -> None:
    a, b = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3)
    assert torch.equal(Lazy(Given(a)), Lazy(Given(b))) and torch.equal(Lazy(Given(a)), b)
    b[1, 2] = 7
    assert not torch.equal(Lazy(Given(a)), Lazy(Given(b))) and not torch.equal(b, Lazy(Given(a)))
    assert not torch.equal(Lazy(Given(a)), Lazy(Given(a[:1])))


def test_stacking_lazy_tensors_of_unlike_shapes_names_both() -> None:
    stored = [Lazy(Stored(Path("x/y"), f"w.{n}", (2, n), torch.float32)) for n in (3, 3, 4)]
    text = f"`w.3` in y of [2, 3] and `w.4` in y of [2, 4] cannot be joined\n  try      {EARLIER}"
    assert message(lambda: torch.stack(stored)) == text


def test_writing_into_a_lazy_tensor_is_refused() -> None:
    lazy = Lazy(Given(torch.ones(2)))
    with pytest.raises(autotp.Error) as raised:
        lazy.mul_(2)
    assert str(raised.value) == "aten.mul_.Tensor writes into a tensor that is only read\n  try      clone it first"
