"""`autotp convert` of what two ranks wrote: to safetensors and back, without a change of a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import autotp
from autotp.integrations.transformers.files.tensor_sources import read_whole
from autotp.tools.conversion.formats import read_content

SIZES: dict[str, Any] = {
    "vocab_size": 37, "n_embd": 12, "n_layer": 2, "n_head": 4, "n_positions": 10, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "microbatches": 2},
    "pp": {"pp": 2, "microbatches": 2},
    "dp": {"dp": 2, "zero": 1, "microbatches": 1},
}
"""Cut parameters; parameters of a stage each; an optimizer's state that is divided."""


def gpt2() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))


def train(rank: int, n: int, folder: Path, layout: dict[str, Any]) -> dict[str, Tensor]:
    """Trains for two steps and saves; returns the whole parameters and buffers, as the ranks have them together."""
    tokens = torch.arange(4 * 8).reshape(4, 8) % SIZES["vocab_size"]
    inputs = {"input_ids": tokens, "labels": tokens}
    trainer = autotp.distribute(gpt2(), **{"tp": 1, **layout}, example_inputs=inputs)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.01)
    for _ in range(2):
        rows = tokens[2 * rank : 2 * rank + 2] if layout.get("dp") else tokens
        trainer.step(input_ids=rows, labels=rows)
        optimizer.step()
        optimizer.zero_grad()
    autotp.save_checkpoint(folder, trainer, optimizer, 2)
    return autotp.full_state_dict(trainer)


def tensors(path: Path) -> dict[str, Tensor]:
    return {name: read_whole(source) for name, source in read_content(path).tensors.items()}


def expect_equal(path: Path, other: Path) -> None:
    mine, its = tensors(path), tensors(other)
    assert mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in its)
    assert all(mine[name].dtype == its[name].dtype for name in its)


@pytest.fixture(scope="module", params=LAYOUTS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of two ranks (`ckpt`), and the trained model as transformers saves it (`hf`)."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp(request.param)
    state, *_ = run_ranks(train, 2, folder / "ckpt", LAYOUTS[request.param], timeout=100)
    model, before = gpt2(), gpt2().state_dict()
    model.load_state_dict(state)
    assert all(not torch.equal(state[name], x) for name, x in before.items() if name in state), (
        "every tensor is trained"
    )
    model.save_pretrained(folder / "hf")
    assert len(list((folder / "ckpt").glob("step-*/*"))) == 3, "each rank wrote a file, and there is the manifest"
    return folder


def test_convert_of_two_ranks_changes_no_bit(autotp_command, trained: Path, tmp_path: Path) -> None:
    done = autotp_command("convert", trained / "ckpt", tmp_path / "out", "--config", trained / "hf")
    assert (done.status, done.err) == (0, "autotp: warning: the optimizer's state is not written\n")
    expect_equal(tmp_path / "out", trained / "hf")
    done = autotp_command("convert", tmp_path / "out", tmp_path / "again", "--to", "training")
    assert done.status == 0, done.err
    expect_equal(tmp_path / "again", trained / "ckpt")
    for other in ("again", "out"):
        done = autotp_command("convert", "--diff", trained / "ckpt", tmp_path / other)
        assert (done.status, done.out) == (0, "equal: the same names, shapes, dtypes and values\n")
