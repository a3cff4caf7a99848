"""wrappers: what is wrapped, sharded or compiled is refused before it is made parallel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from errors import message
from torch import nn

from autotp.runtime.torch_hooks.wrappers import expect_unwrapped, install

SCRIPT = pytest.mark.filterwarnings("ignore:`torch.jit")
CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "wrapper": (
        lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))),
        "`0`, a DataParallel, is a wrapper around a model\n"
        "  try      parallelize the model itself; the ranks of one model need no wrapper, replicas mesh=",
    ),
    "compiled": (
        lambda: torch.compile(nn.Linear(2, 2)),  # type: ignore[return-value]
        "the model is compiled already, and the parallel model would not be\n"
        "  try      torch.compile(autotp.parallelize(model, ...)), or model.compile_blocks()",
    ),
    "scripted": (
        lambda: torch.jit.script(nn.Linear(2, 2)),
        "the RecursiveScriptModule is compiled by torch.jit\n  try      parallelize the Python module",
    ),
}


@SCRIPT
@pytest.mark.parametrize("name", CASES)
def test_expect_unwrapped_refuses_wrapped_sharded_or_compiled_models(name: str) -> None:
    make, text = CASES[name]
    assert message(lambda: expect_unwrapped(make())) == text


def test_expect_unwrapped_accepts_ordinary_modules() -> None:
    expect_unwrapped(nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.ReLU()])))


def test_wrapper_registration_hook_is_removed_by_undo() -> None:
    registered = nn.modules.module._global_module_registration_hooks
    before = len(registered)
    undo = install()
    assert len(registered) == before + 1
    nn.Sequential(nn.Linear(2, 2))  # Without a process group it is none of ours.
    undo()
    assert len(registered) == before
