"""The comparison of both orders of BERT's layer norms: alike but for the order, its table, what it asserts."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import bert_layernorm
import pytest
import torch
from bert_layernorm import Run
from ranks import run_ranks


def run(folder: Path, *more: str) -> None:
    """A short run of the script."""
    sizes = ["--width", "16", "--block", "8", "--batch", "4", "--heads", "2", "--steps", "20", "--data", __file__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bert_layernorm.py", "--out", str(folder), *sizes, *more])
        bert_layernorm.main()


def table(folder: Path) -> list[dict[str, str]]:
    """What it wrote."""
    with (folder / "bert_layernorm.csv").open(newline="") as rows:
        return list(csv.DictReader(rows))


def test_both_orders_start_from_the_same_numbers():
    args = type("Args", (), {"block": 8, "heads": 2, "width": 8})
    post, pre = (bert_layernorm.build(norm, 3, 5, args).state_dict() for norm in ("post", "pre"))
    assert set(post) ^ set(pre) == {f"{n}norm.{p}" for n in ("", "embeddings.") for p in ("weight", "bias")}
    for name in set(post) & set(pre):
        scale = 6**0.5 if name.endswith("output.weight") else 1  # the end of a branch, by depth
        torch.testing.assert_close(post[name], pre[name] * scale)


def test_table_has_each_run(tmp_path):
    run(tmp_path, "--depths", "1", "--seeds", "3", "4")
    found = [(row["layers"], row["seed"], row["norm"], row["step"]) for row in table(tmp_path)]
    assert found == [("1", seed, norm, step) for seed in "34" for norm in ("post", "pre") for step in ("10", "20")]
    assert (tmp_path / "bert_layernorm.png").read_bytes().startswith(b"\x89PNG")


def on_a_rank(rank: int, n: int, folder: Path) -> None:
    run(folder, "--depths", "2", "--seeds", "0")


def test_two_ranks_have_the_losses_of_one(tmp_path):
    run_ranks(on_a_rank, 2, tmp_path / "two", timeout=110)
    on_a_rank(0, 1, tmp_path / "one")
    together, alone = ([float(row["loss"]) for row in table(tmp_path / n)] for n in ("two", "one"))
    assert together == pytest.approx(alone, abs=2e-4)


def test_final_loss_is_of_the_last_tenth():
    assert Run("pre", 2, 0, [9.0] * 18 + [2.0, 1.0]).final == 1.5
    assert Run("pre", 2, 0, [9.0, 1.0]).final == 1.0


@pytest.mark.parametrize(
    ("pre", "post", "holds"), [(3.0, 3.24, True), (3.2, 3.24, False), (3.22, 3.5, False), (3.0, 3.04, False)]
)
def test_the_deepest_must_show_the_finding(pre, post, holds):
    shallow = [Run("pre", 2, 0, [9.0]), Run("post", 2, 0, [1.0])]
    runs = [*shallow, *(Run("pre", 4, s, [pre - s]) for s in (0, 1)), *(Run("post", 4, s, [post + s]) for s in (0, 1))]
    if holds:
        bert_layernorm.check(runs, without_context=3.24)
    else:
        with pytest.raises(AssertionError, match=r"^4 layers"):
            bert_layernorm.check(runs, without_context=3.24)


def test_warm_up_must_end(capsys):
    with pytest.raises(SystemExit):
        run(Path(), "--warmup", "20")
    expected = "error: --steps 20 must be 10 at least, and more than --warmup, which is 20\n"
    assert expected in capsys.readouterr().err
