"""keys: names of folders and entries, and an optimizer's parameters by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from errors import message
from torch import nn

from autotp.checkpoint.keys import entry_key, names_as_text, names_held, names_of, path_of, random_states


class Parts:
    """What is asked of the parts that a rank holds."""

    def __init__(self, model: nn.Module) -> None:
        self.held = dict(model.named_parameters())
        self.saved = {"weight": "weight", "again": "weight", "elsewhere": "other"}


def test_step_folders_and_entry_keys_are_spelled() -> None:
    assert path_of(Path("ckpt"), 1000) == Path("ckpt/step-00001000")
    assert entry_key("optimizer", "h.0.weight", "exp_avg") == "optimizer|h.0.weight|exp_avg"
    assert entry_key("rank", 3) == "rank|3"


@pytest.mark.parametrize(
    ("names", "text"), [([], ""), (["a"], "a"), (list("abc"), "a, b, c"), (list("abcde"), "a, b, c and 2 more")]
)
def test_names_as_text_shortens_long_lists(names: list[str], text: str) -> None:
    assert names_as_text(names) == text


def test_names_held_are_those_of_this_rank() -> None:
    """Each once, and none of another rank."""
    parts: Any = Parts(nn.Linear(2, 2))
    assert names_held(parts) == ["weight"]


def test_names_of_maps_an_optimizer_s_parameters_or_refuses() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    parts: Any = Parts(model)
    optimizer = torch.optim.AdamW([{"params": [model.bias]}, {"params": [model.weight]}])
    assert names_of(optimizer, parts) == {model.bias: "bias", model.weight: "weight"}
    optimizer.add_param_group({"params": [other.bias]})
    assert message(lambda: names_of(optimizer, parts)) == (
        "the optimizer has parameters that the trainer does not have\n  try      AdamW(trainer.parameters())"
    )


def test_random_states_replay_the_next_draws() -> None:
    torch.manual_seed(3)
    states = random_states(torch.device("cpu"))
    expected = torch.rand(2)
    torch.set_rng_state(states["cpu"])
    assert torch.rand(2).equal(expected) and list(states) == ["cpu"]
