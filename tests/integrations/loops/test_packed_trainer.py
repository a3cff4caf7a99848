"""Packed rows under Trainer in bfloat16, on ranks of torchrun, beside one device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kernel_packages import usable_in_transformers
from ranks import job

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from scripts.packed_trainer import train


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("implementation", "tp", "cp", "with_ends"),
    [
        ("flash_attention_2", 1, 2, True),
        pytest.param(
            "flex_attention", 1, 2, False, marks=pytest.mark.not_on_cards("the kernel of flex_attention is Triton's")
        ),
        pytest.param("flash_attention_2", 2, 1, True, marks=pytest.mark.rare),
        pytest.param("flash_attention_2", 1, 2, False, marks=pytest.mark.rare),
        pytest.param("sdpa", 1, 2, False, marks=pytest.mark.rare),
    ],
)
def test_ten_steps_of_packed_rows_are_one_devices(
    implementation: str, tp: int, cp: int, with_ends: bool, tmp_path: Path
) -> None:
    with usable_in_transformers():
        # torch's flex_attention has no backward on CPUs.
        of_one = "sdpa" if implementation == "flex_attention" else implementation
        expected = train(tmp_path / "one", of_one, 1, 1, with_ends)
    with job(tmp_path / "two", "packed_trainer.py", [implementation, str(tp), str(cp), str(with_ends)], 0) as ranks:
        said, _ = ranks.communicate(timeout=250)
    assert ranks.returncode == 0, said[-3000:]
    for rank in range(2):
        log = json.loads((tmp_path / "two" / f"{rank}.json").read_text())
        assert len(log) == len(expected) == 11
        for row, other in zip(log, expected, strict=True):
            assert row == pytest.approx(other, rel=0.02, abs=0.02)
