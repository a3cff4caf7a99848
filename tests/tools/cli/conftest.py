"""What tests of commands share: a command in this process, and a small configuration of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from autotp.tools.cli.app import run

Run = Callable[..., "Done"]
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 99, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Done:
    """What a command left: its exit status, and what it printed."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def autotp_command(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `autotp ARGS...` in this process."""

    def call(*args: object) -> Done:
        status = run(list(map(str, args)))
        return Done(status, *capsys.readouterr())

    return call


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with the configuration of a small Llama, without weights."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A file with factories of models, and of inputs."""
    file = tmp_path / "own_models.py"
    file.write_text(FACTORIES)
    return file


FACTORIES = """
import sys

import torch
from torch import nn


def mlp(width=16, layers=1):
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 4)) for _ in range(layers)))


def inputs():
    return torch.ones(3, 4)


def fails():
    raise ValueError("no such size")


def exits():
    sys.exit()


def reads_a_value():
    model = mlp()
    assert model[0][0].weight.abs().sum().item() > 0
    return model


class Branches(nn.Module):
    def forward(self, x):
        return x if (x * 2).unique().numel() > 1 else -x


made, number = mlp(), 3
"""
