"""stores: memory in another form gives back what it took."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from errors import message

from autotp.passes.emit.kept_values.stores import Bits, HostCopy, ShortNumbers, flat_memory, pinned, tensor_at


@pytest.mark.parametrize("count", [0, 1, 7, 8, 1001])
def test_stores_give_back_what_they_took(count: int) -> None:
    """Views, too; the memory is another."""
    torch.manual_seed(count)
    for x, store in (
        (torch.rand(count) > 0.5, Bits),
        (torch.randint(-5, 2**31, (count,)), ShortNumbers),
        (torch.rand(count), HostCopy),
    ):
        taken = store(x)
        assert taken.flat().equal(flat_memory(x)) and taken.flat().equal(x)
        assert taken.flat().data_ptr() != x.data_ptr() or not count
    x = torch.randn(3, 4, dtype=torch.complex64)
    view = x.T[1:, 1:]
    store = HostCopy(view)
    assert tensor_at(store.flat(), view.dtype, view.shape, view.stride(), view.storage_offset()).equal(view)
    real = torch.view_as_real(x)
    assert tensor_at(store.flat(), real.dtype, real.shape, real.stride(), 0).equal(real)


def test_a_host_without_pinned_memory_is_an_error() -> None:
    with patch.object(torch, "empty_like", side_effect=RuntimeError("out of memory")):
        text = message(pinned, torch.ones(2**19))
    assert text == (
        "the host has no 2 MiB of pinned memory left for a value that backward needs: out of memory\n"
        '  try      recompute="full" in place of memory=\n'
        "  or       a host with more memory, or a higher limit: ulimit -l unlimited"
    )
