"""weights: sizes as people write them. Whole checkpoints are read and written in `test_pretrained.py`."""

from __future__ import annotations

import pytest

from autotp.checkpoint.weights import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [(1, 1), ("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("200KiB", 204_800), ("7B", 7), ("0.5TiB", 2**39)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size
