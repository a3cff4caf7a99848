"""documents: where packed documents begin and end, and the first key that each rank's queries read."""

from __future__ import annotations

import pytest
import torch

import autotp
from autotp.ops.attention.documents import keys_seen, known_documents, read_documents


def test_keys_that_are_seen_are_those_of_documents_and_windows() -> None:
    assert keys_seen(9, 2, 100, [0, 3, 5, 9]) == ((0, 5), (5, 9))
    assert keys_seen(9, 2, 100, [0, 5, 9]) == ((0, 5), (5, 9))
    assert keys_seen(9, 2, 2, [0, 9]) == ((0, 5), (3, 9))
    assert keys_seen(9, 3, 1, None) == ((0, 3), (2, 6), (5, 9))
    assert keys_seen(9, 3, 1, None, after=2) == ((0, 5), (2, 8), (5, 9))
    assert keys_seen(9, 3, 100, [0, 4, 4, 9], after=100) == ((0, 4), (0, 9), (4, 9))
    assert keys_seen(2, 4, 1, None, after=1) == ((0, 2), (0, 2), (2, 2), (2, 2))  # The last two have no query.


def test_ends_without_values_are_not_read() -> None:
    """As in compiled code; then the longest document bounds the halo."""
    ends = torch.tensor([0, 3, 9], dtype=torch.int32)
    assert known_documents(ends, 9) == [0, 3, 9]
    assert known_documents(ends.to("meta"), 9) is None and known_documents(None, 9) is None
    assert read_documents(ends.to("meta"), 9) is None and read_documents(ends, 9) == [0, 3, 9]


def test_ends_of_other_tokens_are_an_error() -> None:
    with pytest.raises(autotp.Error, match="the ends of 2 packed documents are"):
        known_documents(torch.tensor([0, 3, 9], dtype=torch.int32), 8)
