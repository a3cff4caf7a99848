"""staging: copies that training does not change. What the host waits for: `test_checkpoints_on_cards.py`."""

from __future__ import annotations

import pytest
import torch
from ranks import Checks

from autotp.checkpoint.files.staging import Staging, copy_into

checks = Checks(cards=True)


def test_on_the_cpu_a_copy_is_there_at_once() -> None:
    staging, x = Staging(), torch.arange(4.0)
    copied = staging.copy(x)
    x.zero_()
    staging.end()
    staging.wait()
    assert copied.tolist() == [0.0, 1.0, 2.0, 3.0] and not copied.is_pinned() and not staging.arrivals


def test_a_parameter_is_copied_without_its_gradient() -> None:
    copied = Staging().copy(torch.nn.Parameter(torch.ones(2)))
    assert not copied.requires_grad


@checks.on(1)
def a_copy_of_a_card_is_what_the_tensor_was(rank: int, n: int) -> None:
    """Also of a slice, whose memory has holes; what is written afterwards is not in it."""
    staging, x = Staging(), torch.arange(12.0, device="cuda").view(3, 4)
    copies = [staging.copy(part) for part in (x, x[:, 1:3], x.t(), x[0, 0])]
    expected = [part.cpu().clone() for part in (x, x[:, 1:3], x.t(), x[0, 0])]
    staging.end()
    x.zero_()
    staging.wait()
    assert all(copied.is_pinned() and torch.equal(copied, e) for copied, e in zip(copies, expected, strict=True))


@checks.on(1)
def a_card_gets_any_tensor_of_the_cpu(rank: int, n: int) -> None:
    target, rows = torch.zeros(3, 4, device="cuda"), torch.arange(24.0).view(3, 8)
    for source in (rows[:, ::2], rows[:, :4].pin_memory(), rows.pin_memory()[:, 4:]):
        copy_into(target, source)
        assert torch.equal(target.cpu(), source)
        copy_into(target[:, 1:3], source[:, :2])
        assert torch.equal(target[:, 1:3].cpu(), source[:, :2])


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_cards(n: int, name: str) -> None:
    checks.expect(n, name)
