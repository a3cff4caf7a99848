"""What someone who has read the README does wrong at first: each mistake has a message that says what to write.

Each message is on docs/errors.md by its first words, and its traceback has at most two lines of autotp.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

import autotp
from autotp.tracebacks import TRACEBACK

ROWS = torch.ones(4, 16)
INPUTS = {"x": ROWS, "target": ROWS}


class Perceptron(nn.Module):
    """The model of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.5)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        y: Tensor = self.down(self.dropout(self.up(x).relu()))
        return y if target is None else F.mse_loss(y, target)


class Halved(Perceptron):
    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        h = self.up(x)
        while h.max() > 6:
            h = h / 2
        return super().forward(x, target)


def parallel(model: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Perceptron().eval() if model is None else model
    return autotp.parallelize(model, 2, example_inputs=ROWS, timeout=timedelta(seconds=20), **options)


def trainer() -> Any:
    torch.manual_seed(0)
    return autotp.distribute(Perceptron(), tp=2, example_inputs=INPUTS, timeout=timedelta(seconds=20))


def more_ranks_than_processes(rank: int) -> None:
    autotp.parallelize(Perceptron(), tp=3)


def an_option_that_is_misspelt(rank: int) -> None:
    parallel(recompute="ful")


def an_option_that_does_not_exist(rank: int) -> None:
    parallel(recomput="full")


def a_name_that_is_misspelt(rank: int) -> None:
    parallel(cut={"lm_hed": "whole"})


def a_loop_over_values(rank: int) -> None:
    parallel(Halved())


def a_model_in_ddp(rank: int) -> None:
    nn.parallel.DistributedDataParallel(parallel())


def a_part_of_the_batch_for_each_rank(rank: int) -> None:
    parallel()(ROWS * (rank + 1))


def other_shapes_than_the_model_takes(rank: int) -> None:
    parallel()(torch.ones(4, 17))


def another_seed_on_each_rank(rank: int) -> None:
    model = parallel(Perceptron())
    torch.manual_seed(rank)
    model(ROWS)


def a_model_moved_to_another_device(rank: int) -> None:
    parallel().to("meta")(ROWS)


def a_pickled_model(rank: int) -> None:
    torch.save(parallel(), "/dev/null")


def the_state_dict_of_one_rank_for_all(rank: int) -> None:
    model, half = parallel(), Perceptron()
    half.up, half.down = nn.Linear(16, 32), nn.Linear(32, 16)
    model.load_state_dict(half.state_dict())
    model(ROWS)


def a_batch_that_does_not_divide(rank: int) -> None:
    torch.manual_seed(0)
    inputs = {name: x[:3] for name, x in INPUTS.items()}
    autotp.distribute(Perceptron(), tp=2, microbatches=3, example_inputs=inputs).step(**INPUTS)


def no_labels(rank: int) -> None:
    trainer().step(ROWS)


def a_model_that_is_parallel_already(rank: int) -> None:
    parallel(parallel())


def a_call_on_one_rank_only(rank: int) -> None:
    model = parallel()
    if rank == 0:
        autotp.full_state_dict(model)
    else:
        model(ROWS)


MISTAKES: dict[Callable[[int], None], tuple[str, str]] = {
    more_ranks_than_processes: ("tp=3 needs 3 processes, and the world has 2", "torchrun --nproc-per-node 3"),
    an_option_that_is_misspelt: ("recompute='ful' is not one of its values", "'none', 'selective', 'full'"),
    an_option_that_does_not_exist: ("there is no argument", "recompute"),
    a_name_that_is_misspelt: ("no parameter has this name", "model.named_parameters()"),
    a_loop_over_values: ("the model has a loop whose length depends on the values of a tensor", "torch.where"),
    a_model_in_ddp: (
        "over ranks [0, 1] of one tensor-parallel model",
        "parallelize(model, mesh=",
    ),
    a_part_of_the_batch_for_each_rank: ("got other inputs than rank 0", "no DistributedSampler"),
    other_shapes_than_the_model_takes: ("the model does not run on these inputs", "arguments that the original model"),
    another_seed_on_each_rank: ("would draw other random numbers than rank 0", "torch.manual_seed(seed)"),
    a_model_moved_to_another_device: ("parameters are on meta, and the model was made parallel on", 'model.to("'),
    a_pickled_model: ("a parallel model cannot be pickled", "autotp.full_state_dict(model)"),
    the_state_dict_of_one_rank_for_all: ("which is of one rank's parts", "a file for each rank"),
    a_batch_that_does_not_divide: ("a batch of 4 does not divide into 3 microbatches", "drop_last=True"),
    no_labels: ("the model returns no loss", "a model that takes labels"),
    a_model_that_is_parallel_already: ("the model is parallel already", "parallelize the original model once"),
}
"""A mistake -> words of what is wrong, and of what to write."""


def made(rank: int, n: int) -> list[tuple[str, int]]:
    """What each mistake says, and how many lines of autotp its traceback has."""
    told = []
    with patch.dict("os.environ", {TRACEBACK: ""}):
        for mistake in MISTAKES:
            try:
                mistake(rank)
            except autotp.Error as error:
                lines = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
                told.append((str(error), sum(map(_is_autotp, lines))))
            else:
                told.append(("", 0))
    return told


def _is_autotp(frame: Any) -> bool:
    return str(frame.f_globals["__name__"]).startswith("autotp.")


def test_typical_mistakes_say_what_to_write() -> None:
    by_rank = run_ranks(made, 2, timeout=110)
    for told in by_rank:
        silent = [
            (mistake.__name__, text, lines)
            for (mistake, (wrong, right)), (text, lines) in zip(MISTAKES.items(), told, strict=True)
            if wrong not in text or right not in text.partition(wrong)[2] or lines > 2
        ]
        assert silent == []


def called_alone(rank: int, n: int) -> str:
    with pytest.raises(autotp.Error) as raised:
        a_call_on_one_rank_only(rank)
    return str(raised.value)


def test_a_call_on_one_rank_is_named() -> None:
    first, second = run_ranks(called_alone, 2, alone=True)
    for text in (first, second):
        assert "tp rank 0 is in full_state_dict, and tp rank 1 in Perceptron.forward" in text
        assert "none under `if rank == 0`" in text


def test_one_process_is_told_to_start_more() -> None:
    with pytest.raises(autotp.Error, match="tp=2 needs 2 processes, and this is one") as raised:
        autotp.parallelize(Perceptron(), tp=2)
    assert "torchrun --nproc-per-node 2" in str(raised.value)


def test_typical_mistakes_are_on_the_page() -> None:
    page = Path(__file__).resolve().parents[2].joinpath("docs", "errors.md").read_text()
    for wrong, _ in MISTAKES.values():
        fixed = re.split(r"tp=\d+|\d+|meta|recompute='ful'|\[0, 1\]", wrong)
        assert all(words.strip() in page for words in fixed), wrong
