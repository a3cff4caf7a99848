"""fingerprint: other batches differ; the same batch does not, whatever round-off it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autotp.distributed.fingerprint import SAMPLED, fingerprint, may_be_one_batch


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ints_of(*arguments: Any) -> list[int]:
    return fingerprint(arguments).as_ints()


def alike(one: Any, other: Any) -> bool:
    return may_be_one_batch(ints_of(one), ints_of(other))


TOKENS = torch.arange(12).view(3, 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TOKENS, TOKENS + 1),
        (TOKENS > 3, TOKENS > 4),
        ({"x": [TOKENS, drawn(0, 5)]}, {"x": [TOKENS, drawn(1, 5)]}),
        (drawn(0, 4, 3, 64, 64), drawn(1, 4, 3, 64, 64)),
        (drawn(0, 4, 64).to(torch.complex64), drawn(1, 4, 64).to(torch.complex64)),
        (torch.tensor(0.2), torch.tensor(0.3)),
        (TOKENS, drawn(0, 5)),
        (TOKENS, None),
        ((TOKENS, 3), (TOKENS, 4)),
    ],
    ids=["tokens", "mask", "nested", "images", "complex", "scalar", "kind", "none", "position"],
)
def test_fingerprints_of_other_arguments_differ(one: Any, other: Any) -> None:
    assert not alike(one, other)
    assert alike(one, one)


def test_fingerprints_of_round_off_are_alike() -> None:
    x = drawn(0, 3, SAMPLED + 7).half()
    assert alike(x, x + 1e-3 * drawn(1, *x.shape).half())
    assert len(ints_of(x)) == 3


def test_fingerprints_of_what_has_no_numbers_are_alike() -> None:
    assert alike(torch.full((4,), torch.nan), torch.ones(4))
    for one in (torch.empty(0, 3), torch.ones(4, device="meta"), drawn(0, 3).to_sparse()):
        assert alike(one, one)


def test_fingerprints_ignore_gradients_and_transforms() -> None:
    x = torch.nn.Parameter(drawn(0, 3))
    assert alike(x, x.detach())
    found = []
    torch.func.vmap(lambda row: (found.append(ints_of(row)), row)[1])(drawn(0, 2, 3))
    assert found == [[0]]
