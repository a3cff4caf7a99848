"""node_text: dtypes, sizes and types as text."""

from __future__ import annotations

import pytest
import torch

from autotp.diagnostics.node_text import dtype_text, size_text, type_text


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (torch.float32, "f32"),
        (torch.bfloat16, "bf16"),
        (torch.int64, "i64"),
        (torch.bool, "bool"),
        (torch.uint8, "ui8"),
    ],
)
def test_types(dtype: torch.dtype, text: str) -> None:
    assert dtype_text(dtype) == text
    assert type_text(dtype, ["b", "768@tp"]) == f"{text}[b, 768@tp]"


def test_sizes() -> None:
    letters = {"s0": "b", "s77": "s"}
    assert [size_text(size, letters) for size in (7, "s0", "s0*s77 + 1", "s1")] == ["7", "b", "b*s + 1", "s1"]
