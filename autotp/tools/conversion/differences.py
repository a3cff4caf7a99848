"""differences: compares the tensors of two checkpoints, of whatever formats, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from autotp.display.sheet import Code, Sheet, Shown
from autotp.integrations.transformers.files.tensor_sources import Source, read_whole
from autotp.tools.conversion.content import Content

What = Literal["only in the first", "only in the second", "shape", "dtype", "values"]


@dataclass(frozen=True)
class Unlike:
    """A difference of one tensor.

    Attributes:
        name: the tensor.
        what: what differs; of several the first.
        first, second: its dtype and shape in each checkpoint; "" where it is not there.
        largest: the largest difference of an element; infinite where one is no number.
        count: the number of elements that differ.
    """

    name: str
    what: What
    first: str
    second: str
    largest: float = 0.0
    count: int = 0

    def __str__(self) -> str:
        of_both = " and ".join(filter(None, (self.first, self.second if self.second != self.first else "")))
        elements = f", {self.count} elements, largest {self.largest:.1e}" if self.count else ""
        return f"{self.name}  {self.what}: {of_both}{elements}"


@dataclass(frozen=True, repr=False)
class CheckpointDifferences(Shown):
    """How two checkpoints differ.

    Attributes:
        atol: elements that differ by no more than this are equal.
        differences: a row for each tensor that differs.
    """

    DATA = ("ok", "atol", "differences")

    atol: float
    differences: tuple[Unlike, ...]

    @property
    def ok(self) -> bool:
        """True if they are equal."""
        return not self.differences

    def summary(self) -> str:
        """Returns whether they are equal."""
        values = f"values that differ by at most {self.atol:g}" if self.atol else "values"
        count = len(self.differences)
        return f"{count} tensors differ" if count else f"equal: the same names, shapes, dtypes and {values}"

    def sheet(self) -> Sheet:
        """Returns a line for each difference."""
        lines = Code(tuple((str(row), "whole") for row in self.differences))
        return Sheet(self.summary(), (lines,) * bool(self.differences), "good" if self.ok else "bad", apart=False)


def differences(first: Content, second: Content, atol: float = 0.0) -> Iterator[Unlike]:
    """Yields the differences of two checkpoints: of the models, and of the states if both have one.

    Values of different dtypes are compared in float64; elements that are not a number equal each other.

    Args:
        atol: elements that differ by no more than this are equal.
    """
    yield from _of(first.tensors, second.tensors, atol)
    if first.state and second.state:
        yield from _of(first.state, second.state, atol)


def _of(first: Mapping[str, Source], second: Mapping[str, Source], atol: float) -> Iterator[Unlike]:
    # Not a difference of sets: it has another order in each process.
    for name in (name for name in first if name not in second):
        yield Unlike(name, "only in the first", _text(first[name]), "")
    for name in (name for name in second if name not in first):
        yield Unlike(name, "only in the second", "", _text(second[name]))
    for name in (name for name in first if name in second):
        a, b = first[name], second[name]
        if tuple(a.shape) != tuple(b.shape):
            yield Unlike(name, "shape", _text(a), _text(b))
            continue
        largest, count = _compared(read_whole(a), read_whole(b), atol)
        if count or a.dtype != b.dtype:
            yield Unlike(name, "values" if count else "dtype", _text(a), _text(b), largest, count)


def _compared(a: Tensor, b: Tensor, atol: float) -> tuple[float, int]:
    """Returns the largest difference, and the number of elements that differ by more than `atol`."""
    # NaN differs from itself: two of them are alike.
    unlike = ~((a == b) | ((a != a) & (b != b)))
    dtype = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    gap = torch.nan_to_num((a.to(dtype) - b.to(dtype)).abs()[unlike], nan=float("inf"))
    gap = gap[gap > atol] if atol else gap  # Large whole numbers that differ may be one number in float64.
    return (float(gap.max()), gap.numel()) if gap.numel() else (0.0, 0)


def _text(source: Source) -> str:
    return f"{str(source.dtype).removeprefix('torch.')} {list(source.shape)}"
