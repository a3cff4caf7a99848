"""Public functions refuse a wrong argument with an Error that names it, whichever argument it is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from errors import message
from ranks import run_ranks, shared
from small_models import Regression

import autotp
from autotp.arguments import expect_arguments

X = torch.ones(2, 4)
TAKE_ALL = {
    "gather.output",
    "opaque.code",
    "save_checkpoint.more",
    "load_checkpoint.more",
    "rule.op",
    "suggest_rule.op",
    "suggest_rule.args",
    "suggest_rule.kwargs",
}
"""What takes every value, several values, or has messages of its own."""


def right(folder: Path) -> dict[str, dict[str, Any]]:
    """Function -> arguments that it takes. Every public function is here."""
    transformers = pytest.importorskip("transformers")
    sizes = transformers.GPT2Config(
        vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(sizes).save_pretrained(folder / "gpt2")
    torch.manual_seed(0)
    trainer = autotp.distribute(Regression(), example_inputs=X)
    optimizer = torch.optim.AdamW(trainer.parameters())
    parallel = autotp.parallelize(Regression(), tp=1, example_inputs=X)
    model: dict[str, Any] = {"model": Regression(), "tp": 1, "example_inputs": X}
    estimate = autotp.estimate(Regression(), gpu="h100-80gb", batch=2, example_inputs=X)
    return {
        "parallelize": model,
        "explain": model,
        "verify": model,
        "stages": model,
        "distribute": {"model": Regression(), "example_inputs": X},
        "from_pretrained": {"path": folder / "gpt2", "tp": 1},
        "save_pretrained": {"model": parallel, "path": folder / "out"},
        "save_checkpoint": {"folder": folder, "trainer": trainer, "optimizer": optimizer, "step": 1},
        "load_checkpoint": {"folder": folder, "trainer": trainer, "optimizer": optimizer},
        "full_state_dict": {"model": parallel},
        "load_full_state_dict": {"model": parallel, "state": Regression().state_dict()},
        "clip_grad_norm_": {"model": parallel, "max_norm": 1.0},
        "weight_decay_groups": {"model": parallel, "weight_decay": 0.1},
        "Throughput": {"estimate": estimate},
        "Sampler": {"size": 4, "batch_size": 2, "trainer": trainer},
        "rule": {"op": torch.ops.aten.kron, "factors": "a b, c d -> (a c) (b d)"},
        "suggest_rule": {"op": torch.ops.aten.relu, "args": X, "kwargs": {}},
        "opaque": {"code": Regression(), "rows": True},
        "gather": {"output": X},
        "is_first_rank": {},
        "estimate": {"model": Regression(), "gpu": "h100-80gb", "batch": 2, "example_inputs": X},
        "calibrate": {"gpu": "cpu-gloo", "seconds": 1.0},
        "save_page": {"found": estimate, "path": folder / "page.html"},
        "save_trace": {"estimate": estimate, "path": folder / "trace.json"},
        "whole_matrices": {"kind": torch.optim.Muon},
        "low_memory": {"kind": torch.optim.AdamW},
        "search": {"model": Regression(), "gpus": 1, "gpu": "h100-80gb", "batch": 2, "example_inputs": X},
    }


def test_public_functions_refuse_any_wrong_argument(tmp_path: Path, registry: None) -> None:
    table = right(tmp_path)
    functions = {name for name in autotp.__all__ if inspect.isfunction(getattr(autotp, name))}
    functions |= {"Sampler", "Throughput"}
    assert set(table) == functions
    for name, given in table.items():
        function = getattr(autotp, name)
        for wrong in set(inspect.signature(function).parameters):
            if f"{name}.{wrong}" not in TAKE_ALL:
                value = object()
                with pytest.raises(autotp.Error) as raised:
                    function(**{**given, wrong: value})
                assert re.search(rf"\b{wrong}\b|{value}", str(raised.value)), f"{name}: {raised.value}"


def folder_of(path: Any) -> Any:
    return lambda: expect_arguments(autotp.save_checkpoint, folder=path)


@pytest.mark.parametrize("path", [None, "", "a\0b", b"a", 3, Path])
def test_folder_of_refuses_what_is_no_path(path: Any) -> None:
    assert message(folder_of(path)).startswith("folder is ")
    folder_of("a")(), folder_of(Path("a"))()


def takes(
    a: int | None, b: float, c: bool, d: Literal["x", "y"], e: Callable[[int], int], f: dict[str, Any]
) -> None: ...


def test_expect_arguments_follows_annotations() -> None:
    fit = {
        "a": (None, 3),
        "b": (1, 2.0, X[0, 0]),
        "c": (True, 0),
        "d": ("x",),
        "e": (len,),
        "f": ({"k": 1},),
    }
    other = {
        "a": (1.5, "3", True),
        "b": ("1", None, X),
        "c": ("no", None, 2),
        "d": ("z", None),
        "e": (3,),
        "f": ({1: 2},),
    }
    for name, value in ((name, value) for name, values in fit.items() for value in values):
        expect_arguments(takes, **{name: value})
    for name, value in ((name, value) for name, values in other.items() for value in values):
        with pytest.raises(autotp.Error):
            expect_arguments(takes, **{name: value})


def wrong_on_the_last(rank: int, n: int) -> list[str]:
    """What each rank is told if the last one's arguments are wrong."""
    trainer = autotp.distribute(Regression(), tp=n, example_inputs=X)
    optimizer, folder, last = torch.optim.AdamW(trainer.parameters()), shared(rank), rank == n - 1
    calls = [
        lambda: autotp.save_checkpoint(None if last else folder, trainer, optimizer, 1),  # type: ignore[arg-type]
        lambda: autotp.save_checkpoint(folder, trainer, optimizer, 1, schedule=3 if last else optimizer),
        lambda: autotp.load_checkpoint("a\0b" if last else folder, trainer),
        lambda: autotp.full_state_dict(trainer, "up" if last else len),  # type: ignore[arg-type]
    ]
    return [message(call) for call in calls]


def test_a_wrong_argument_of_one_rank_is_told_to_all() -> None:
    one, other = run_ranks(wrong_on_the_last, 2)
    assert all(text.partition("\n  on ")[0] == told for text, told in zip(one, other, strict=True))
