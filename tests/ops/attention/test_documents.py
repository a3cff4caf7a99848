"""documents: where packed documents begin and end, and the first key that each rank's queries read."""

from __future__ import annotations

import pytest
import torch

import autotp
from autotp.ops.attention.documents import first_keys, known_documents, read_documents


def test_first_keys_are_those_of_documents_and_windows() -> None:
    assert first_keys(9, 2, 100, [0, 3, 5, 9]) == (0, 5)
    assert first_keys(9, 2, 100, [0, 5, 9]) == (0, 5)
    assert first_keys(9, 2, 2, [0, 9]) == (0, 3)
    assert first_keys(9, 3, 1, None) == (0, 2, 5)
    assert first_keys(2, 4, 1, None) == (0, 0, 2, 2)  # The last two have no query, and read nothing.


def test_ends_without_values_are_not_read() -> None:
    """As in compiled code; then the longest document bounds the halo."""
    ends = torch.tensor([0, 3, 9], dtype=torch.int32)
    assert known_documents(ends, 9) == [0, 3, 9]
    assert known_documents(ends.to("meta"), 9) is None and known_documents(None, 9) is None
    assert read_documents(ends.to("meta"), 9) is None and read_documents(ends, 9) == [0, 3, 9]


def test_ends_of_other_tokens_are_an_error() -> None:
    with pytest.raises(autotp.Error, match="the ends of 2 packed documents are"):
        known_documents(torch.tensor([0, 3, 9], dtype=torch.int32), 8)
