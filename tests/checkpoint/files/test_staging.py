"""staging: copies that training does not change. What the host waits for: `test_checkpoints_on_cards.py`."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from cards.spies import host_waits
from ranks import Checks

from autotp.checkpoint.files import staging as module
from autotp.checkpoint.files.staging import SMALLEST, Staging, copy_into, on_host

checks = Checks(cards=True)


def test_staging_on_the_cpu_copies_at_once() -> None:
    staging, x = Staging(), torch.arange(4.0)
    copied = staging.copy(x)
    x.zero_()
    staging.end()
    staging.wait()
    assert copied.tolist() == [0.0, 1.0, 2.0, 3.0] and not copied.is_pinned() and not staging.arrivals


def test_staging_copies_a_parameter_without_its_gradient() -> None:
    copied = Staging().copy(torch.nn.Parameter(torch.ones(2)))
    assert not copied.requires_grad


@checks.on(1)
def a_copy_of_a_card_is_what_the_tensor_was(rank: int, n: int) -> None:
    """Also of a slice, whose memory has holes; what is written afterwards is not in it. A transposed one is dense."""
    staging, x = Staging(), torch.arange(12.0, device="cuda").view(3, 4)
    copies = [staging.copy(part) for part in (x, x[:, 1:3], x.t(), x[0, 0])]
    expected = [part.cpu().clone() for part in (x, x[:, 1:3], x.t(), x[0, 0])]
    staging.end()
    x.zero_()
    staging.wait()
    assert all(copied.is_pinned() and torch.equal(copied, e) for copied, e in zip(copies, expected, strict=True))
    assert copies[2].stride() == (1, 4), "else the card would need memory for it"


@checks.on(1)
def copies_share_chunks(rank: int, n: int) -> None:
    """Each request is a power of two, as torch would round it up; together little more than the copies need."""
    sizes = [300_000] * 40 + [1] * 100 + [1_200_000, 5_000_000] + [700_001] * 9
    staging, tensors = Staging(), [torch.arange(size, device="cuda") % 251 for size in sizes]
    tensors = [x.to(torch.uint8) for x in tensors]
    with patch.object(module, "LARGEST", 2**22):
        copies = [staging.copy(x) for x in tensors]
    staging.end()
    staging.wait()
    assert all(torch.equal(copied, x.cpu()) for copied, x in zip(copies, tensors, strict=True))
    chunks = {copied.untyped_storage().data_ptr(): copied.untyped_storage().nbytes() for copied in copies}
    assert all(size.bit_count() == 1 for size in chunks.values())
    assert sorted(chunks.values())[-2:] == [2**22, 2**23], "at most LARGEST, but the largest tensor"
    assert len(chunks) < 10 and sum(chunks.values()) < 1.25 * sum(sizes), "alone: 151 requests, 1.67 times the bytes"


@checks.on(1)
def a_small_state_takes_a_small_chunk(rank: int, n: int) -> None:
    staging = Staging()
    copies = [staging.copy(torch.ones(100, device="cuda")) for _ in range(50)]
    copies.append(staging.copy(torch.ones(0, 3, device="cuda")))
    assert {copied.untyped_storage().nbytes() for copied in copies} == {SMALLEST} and copies[-1].shape == (0, 3)


@checks.on(1)
def any_dtype_has_a_place_in_a_chunk(rank: int, n: int) -> None:
    staging, x = Staging(), torch.tensor([1 + 2j, 3 - 1j], device="cuda")
    tensors = [x.real > 2, x.to(torch.complex128), x.conj(), x.conj().imag, x.real.to(torch.bfloat16)]
    copies = [staging.copy(part) for part in tensors]
    staging.end()
    staging.wait()
    for copied, part in zip(copies, tensors, strict=True):
        assert copied.dtype == part.dtype and torch.equal(copied, part.cpu())


@checks.on(1)
def the_host_waits_only_at_the_end(rank: int, n: int) -> None:
    staging, tensors = Staging(), [torch.full((3,), float(i), device="cuda") for i in range(4)]
    with host_waits() as traffic:
        copies = [staging.copy(x) for x in tensors]
        staging.end()
    assert not traffic.waits and not traffic.count("pageable copy")
    staging.wait()
    assert [copied.tolist() for copied in copies] == [[float(i)] * 3 for i in range(4)]


@checks.on(1)
def a_copy_on_the_host_has_arrived(rank: int, n: int) -> None:
    x = torch.arange(12.0).view(3, 4)
    assert on_host(x) is x
    with host_waits() as traffic:
        copied = on_host(x.cuda().t())
    assert copied.is_pinned() and torch.equal(copied, x.t()) and not traffic.count("pageable copy")


@checks.on(1)
def a_card_gets_any_tensor_of_the_cpu(rank: int, n: int) -> None:
    target, rows = torch.zeros(3, 4, device="cuda"), torch.arange(24.0).view(3, 8)
    for source in (rows[:, ::2], rows[:, :4].pin_memory(), rows.pin_memory()[:, 4:]):
        with host_waits() as traffic:
            copy_into(target, source)
        assert torch.equal(target.cpu(), source) and not traffic.waits and not traffic.count("pageable copy")
        copy_into(target[:, 1:3], source[:, :2])
        assert torch.equal(target[:, 1:3].cpu(), source[:, :2])


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_cards(n: int, name: str) -> None:
    checks.expect(n, name)
