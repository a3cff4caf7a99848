"""priced_forms: what a sum over rows costs in each of its two forms: gradients in forward, or logits again in backward.

    Before: e, z = linear_class_terms(w, x, t, 0, 151936)
    After:  in forward 6.1 ms and 1.1 GiB kept, again in backward 4.4 ms and 0.1 MiB kept: the second on this device

A forward that knows the gradients reads and writes all of the weight's gradient with every chunk of rows. So it is the
slower form where a chunk has few rows and products are fast: on GPUs, for large vocabularies. Both grow with the rows,
and so the choice is that of any number of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from autotp.costs.hardware import Hardware, hardware_at
from autotp.costs.work import Work
from autotp.ops.losses import chunks
from autotp.ops.losses.linear_cross_entropy import MOST, linear_class_terms, linear_loss_sum
from autotp.ops.losses.linear_mixed_terms import mix_of
from autotp.rules.call import arguments_of, elements_of, parameters

ROWS = 4096
"""The rows whose price decides, as an example may have fewer than a batch: further ones have the same price."""


@dataclass(frozen=True)
class PricedForm:
    """What a form takes.

    Attributes:
        rows: the rows whose price it is.
        seconds: of forward and backward.
        flops: of products in both.
        bytes: what forward keeps for backward, beside its arguments.
    """

    rows: int
    seconds: float
    flops: float
    bytes: float

    def at(self, rows: int, fewer: PricedForm) -> PricedForm:
        """Returns the price of more rows, which grows by as much for each as from `fewer`."""
        factor = (rows - self.rows) / (self.rows - fewer.rows)
        of_all, of_fewer = ((form.seconds, form.flops, form.bytes) for form in (self, fewer))
        return PricedForm(rows, *(y + (y - x) * factor for x, y in zip(of_fewer, of_all, strict=True)))


def forms_of(terms: fx.Node) -> tuple[PricedForm, PricedForm]:
    """Returns the price of a sum over rows with gradients in forward, and with logits again in backward.

    terms: an operator that makes terms with all classes, of which rows are summed, or their sum
    """
    names = {"classes", *parameters(mix_of)}
    sizes = {name: _size_of(name, value) for name, value in arguments_of(terms).items() if name in names}
    return _forms(tuple(sizes.items()), hardware_at(terms.meta["val"].device), chunks.CHUNK, ROWS)


def is_faster_in_forward(terms: fx.Node) -> bool:
    """True if a sum over rows is faster with gradients in forward; if both are as fast, if it keeps no more bytes."""
    in_forward, again = forms_of(terms)
    return (in_forward.seconds, in_forward.bytes) <= (again.seconds, again.bytes)


def _size_of(name: str, value: Any) -> Any:
    """Returns the shape and the dtype of a tensor, without the sizes of rows; other values as they are."""
    if not isinstance(value, fx.Node):
        return value
    x = value.meta["val"]
    is_of_rows = name in ("x", "second_x", "low_x", "second_low_x", "classes") or (name == "shares" and x.dim() > 1)
    after = () if name == "classes" else x.shape[-1:] if is_of_rows else x.shape
    return is_of_rows, tuple(elements_of([n]) for n in after), x.dtype


@cache
def _forms(
    sizes: tuple[tuple[str, Any], ...], device: Hardware, chunk: int, rows: int
) -> tuple[PricedForm, PricedForm]:
    _, (classes, _), dtype = dict(sizes)["weight"]
    # Of 16 bits `linear_loss_sum` has one form for more rows.
    rows = rows if dtype.itemsize >= 4 else max(min(rows, MOST * chunk // classes), 1)
    some = [min(number * max(chunk // classes, 1), rows) for number in (2, 3)]
    (fewer, fewer_again), (in_forward, again) = (_forms_of_rows(sizes, device, n) for n in some)
    return (in_forward, again) if some[1] == rows else (in_forward.at(rows, fewer), again.at(rows, fewer_again))


def _forms_of_rows(sizes: tuple[tuple[str, Any], ...], device: Hardware, rows: int) -> tuple[PricedForm, PricedForm]:
    def operand(name: str, value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        is_of_rows, shape, dtype = value
        shape, learns = (rows,) * is_of_rows + shape, name not in ("classes", "shares")
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=learns)

    operands = {name: operand(name, value) for name, value in sizes}
    weight, factors = operands["weight"], dict[str, Tensor]()

    def again() -> Tensor:
        terms = linear_class_terms(start=0, size=len(weight), **operands)
        numbers = torch.empty_like(terms, requires_grad=False)
        factors.update(zip(("of_lse", "of_class", "of_total", "of_second_lse"), numbers, strict=False))
        return (terms * numbers).sum()

    priced = _priced(again, operands, rows, device)
    return _priced(lambda: linear_loss_sum(**operands, **factors), operands, rows, device), priced


def _priced(form: Callable[[], Tensor], operands: dict[str, Any], rows: int, device: Hardware) -> PricedForm:
    """Returns what a form takes that is run on tensors without data."""
    arguments = {x.untyped_storage()._cdata for x in operands.values() if isinstance(x, Tensor)}
    bytes_by_storage: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        if x.untyped_storage()._cdata not in arguments:
            bytes_by_storage[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with torch.enable_grad(), Work(device) as work:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            total = form()
        total.backward()
    for x in operands.values():
        if isinstance(x, Tensor):
            x.grad = None  # The next form makes a new one, as this one did.
    return PricedForm(rows, work.seconds, work.flops, sum(bytes_by_storage.values()))
