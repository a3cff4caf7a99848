"""The calls that take long have a line: capture, verify, halving, proof, reading and writing files.

Nothing waits here for five seconds: the delay is 0, and a step of the call waits until the terminal shows the line.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp import compiler
from autotp.checkpoint import read, write
from autotp.diagnostics import mesh_proof, verify
from autotp.display import progress
from autotp.integrations.transformers.files import weights
from autotp.options import DEFAULTS
from autotp.passes.program import canonicalized, planned
from autotp.tools import bisect

SECONDS = 30
"""The most that a line may take to be shown."""


class Terminal(io.StringIO):
    """A stderr that is a terminal, and can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.more = threading.Condition()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self.more:
            count = super().write(text)
            self.more.notify_all()
        return count

    def shows(self, line: str) -> bool:
        """Waits until a line is shown: a regular expression."""
        with self.more:
            return self.more.wait_for(lambda: re.search(line, self.getvalue()) is not None, SECONDS)


class Slow:
    """Makes functions wait for a line of the terminal."""

    def __init__(self, patch: pytest.MonkeyPatch, terminal: Terminal) -> None:
        self.patch, self.terminal, self.seen = patch, terminal, dict[str, bool]()

    def until(self, line: str, module: ModuleType, name: str, call: int = 1) -> None:
        """Makes a function of a module wait, in its first call or in another, until the terminal shows a line."""
        self.patch.setattr(sys, "stderr", self.terminal)  # pytest has its own after the setup.
        real, calls = getattr(module, name), itertools.count(1)

        def run(*args: object, **given: object) -> object:
            if next(calls) == call:
                self.seen[line] = self.terminal.shows(line)
            return real(*args, **given)

        self.patch.setattr(module, name, run)

    def expect(self, *lines: str) -> None:
        """Asserts that these lines were waited for, and shown; and that no line is left."""
        assert self.seen == dict.fromkeys(lines, True), self.terminal.getvalue()[-300:]
        assert not [thread for thread in threading.enumerate() if thread.name == "autotp.progress"]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    return Slow(monkeypatch, Terminal())


class Mlp(nn.Module):
    """A loss, so that it can be trained; two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # x: [batch 4]
        for block in self.h:
            x = x + block(x)
        return x.square().mean()


X = torch.ones(2, 4)


def test_explain_shows_the_running_stage_of_capture(slow: Slow) -> None:
    """It names the stage that runs."""
    slow.until("capture of Mlp: ", compiler, "captured_program")
    slow.until("capture of Mlp: canonicalize: ", canonicalized, "canonical_order")
    slow.until("capture of Mlp: plan: ", planned, "layouts_of_outputs")
    autotp.explain(Mlp(), 2, example_inputs=X)
    slow.expect("capture of Mlp: ", "capture of Mlp: canonicalize: ", "capture of Mlp: plan: ")


def test_parallelize_shows_progress_of_capture(slow: Slow) -> None:
    slow.until("capture of Mlp: ", compiler, "captured_program")
    autotp.parallelize(Mlp(), tp=1, example_inputs=X)
    slow.expect("capture of Mlp: ")


def test_verify_shows_progress_of_capture_and_run(slow: Slow) -> None:
    """The capture is a part of its line; then the ranks run."""
    slow.until(r"verify\(Mlp, tp=2\): capture of Mlp: +0%.* 0/2 ", compiler, "captured_program")
    slow.until(r"verify\(Mlp, tp=2\): run: +50%.* 1/2 ", verify, "run_and_compare")
    autotp.verify(Mlp(), 2, example_inputs=X)
    slow.expect(r"verify\(Mlp, tp=2\): capture of Mlp: +0%.* 0/2 ", r"verify\(Mlp, tp=2\): run: +50%.* 1/2 ")


def test_bisect_shows_progress_of_halving(slow: Slow) -> None:
    slow.until(r"halving of Mlp, tp=2: trial 1: verify\(Mlp, tp=2\): ", verify, "make_trial")
    assert bisect.bisect(Mlp(), ((X,), {}), 2, DEFAULTS) is None
    slow.expect(r"halving of Mlp, tp=2: trial 1: verify\(Mlp, tp=2\): ")


def test_verify_of_a_layout_shows_progress_of_its_proof(slow: Slow) -> None:
    slow.until("proof of 8 ranks: tp rank 0: ", mesh_proof, "staged", call=1)
    slow.until("proof of 8 ranks: tp rank 1: ", mesh_proof, "staged", call=2)
    autotp.verify(Mlp(), 2, pp=2, dp=2, example_inputs=X)
    slow.expect("proof of 8 ranks: tp rank 0: ", "proof of 8 ranks: tp rank 1: ")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder of transformers with weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=99, num_hidden_layers=1, max_position_embeddings=64, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["model_type"] == "llama"
    return tmp_path / "llama"


def test_from_pretrained_and_save_pretrained_show_progress_in_bytes(slow: Slow, llama: Path) -> None:
    """In bytes."""
    reading, writing = r"reading: +0%.* 0\.00/\d+\.?\d*k ", r"writing: +0%.* 0\.00/\d+\.?\d*k "
    slow.until(reading, weights, "read_part")
    model = autotp.from_pretrained(llama, tp=1)
    slow.expect(reading)
    slow.until(writing, weights, "_write_shard")
    autotp.save_pretrained(model, llama.parent / "saved")
    slow.expect(reading, writing)


def test_save_and_load_checkpoint_show_progress(slow: Slow, tmp_path: Path) -> None:
    trainer = autotp.distribute(Mlp(), tp=1, example_inputs=X)
    optimizer = torch.optim.AdamW(trainer.parameters())
    trainer.step(X)
    optimizer.step()
    folder = re.escape(str(tmp_path))
    writing, reading = rf"writing {folder}.*: +0%.* 0/\d+ ", rf"reading {folder}.*: +0%.* 0/\d+ "
    slow.until(writing, write, "write_pieces")
    autotp.save_checkpoint(tmp_path / "ckpt", trainer, optimizer, 1)
    slow.expect(writing)
    slow.until(reading, read, "_part")
    assert autotp.load_checkpoint(tmp_path / "ckpt", trainer, optimizer) == 1
    slow.expect(writing, reading)
