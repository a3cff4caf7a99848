"""`autotp convert`: from each format to each other, without a change of a bit; and what is told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autotp
from autotp.integrations.transformers.files.tensor_sources import InMemory, read_whole
from autotp.tools.conversion.content import Content, Format
from autotp.tools.conversion.formats import read_content, write_content

SIZES: dict[str, Any] = {"vocab_size": 37, "n_embd": 12, "n_layer": 2, "n_head": 4, "n_positions": 10}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: read_whole(source) for name, source in read_content(path).tensors.items()}


def expect_equal(path: Path, other: Path) -> None:
    mine, its = tensors(path), tensors(other)
    assert mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in its)


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A small GPT-2 in a folder, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    return tmp_path / "hf"


@pytest.mark.parametrize("way", ["torch", "training"])
def test_convert_there_and_back_changes_no_bit(autotp_command, gpt2: Path, tmp_path: Path, way: str) -> None:
    """Its configuration and tokenizer go along, where the format has a place for them."""
    there, back = tmp_path / ("model.pt" if way == "torch" else way), tmp_path / "back"
    done = autotp_command("convert", gpt2, there, "--to", way)
    assert done.status == 0, done.err
    assert done.out.startswith(f"{there}: {way}, 28 tensors") and done.out.endswith("from safetensors\n")
    done = autotp_command("convert", there, back, "--config", gpt2)
    assert done.status == 0, done.err
    expect_equal(back, gpt2)
    config = json.loads((back / "config.json").read_text())
    assert config["n_head"] == 4 and config["architectures"] == ["GPT2LMHeadModel"]
    assert autotp_command("convert", "--diff", gpt2, there).out == "equal: the same names, shapes, dtypes and values\n"
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert type(model).__name__ == "GPT2LMHeadModel"


def test_convert_takes_along_what_is_beside_safetensors(autotp_command, gpt2: Path, tmp_path: Path) -> None:
    given = "--dtype", "bfloat16", "--max-shard-size", "5KB", "--json"
    done = autotp_command("convert", gpt2, tmp_path / "half", *given)
    assert done.json["target"] == "safetensors" and done.json["tensors"] == 28
    assert {tensor.dtype for tensor in tensors(tmp_path / "half").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    names = {path.name for path in (tmp_path / "half").iterdir()}
    assert names >= {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    done = autotp_command("convert", tmp_path / "half" / "config.json", tmp_path / "x")
    assert done.status == 1 and "config.json" in done.err


@pytest.mark.parametrize("to_config", [Path("."), Path("config.json")], ids=["folder", "file"])
def test_convert_of_float32_masters_writes_the_dtype_of_config(
    autotp_command, gpt2: Path, tmp_path: Path, to_config: Path
) -> None:
    """A training in bfloat16 has masters in float32. A server wants what config.json says, and a tokenizer."""
    assert autotp_command("convert", gpt2, tmp_path / "masters", "--to", "training").status == 0
    settings = json.loads((gpt2 / "config.json").read_text()) | {"dtype": "bfloat16"}
    (gpt2 / "config.json").write_text(json.dumps(settings))
    (gpt2 / "generation_config.json").write_text('{"max_new_tokens": 7}')
    done = autotp_command("convert", tmp_path / "masters", tmp_path / "out", "--config", gpt2 / to_config)
    assert done.status == 0 and "float32 is written as bfloat16, the dtype of config.json" in done.err
    assert {tensor.dtype for tensor in tensors(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    if to_config == Path("."):
        assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"max_new_tokens": 7}
        assert (tmp_path / "out" / "tokenizer.json").is_file()
    whole = "--config", gpt2 / to_config, "--dtype", "float32"
    done = autotp_command("convert", tmp_path / "masters", tmp_path / "whole", *whole)
    assert {tensor.dtype for tensor in tensors(tmp_path / "whole").values()} == {torch.float32} and not done.err


def test_experts_have_other_names_in_files(autotp_command, tmp_path: Path) -> None:
    """Mixtral's are apart in files, and stacked in modules."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=37, hidden_size=12, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path / "hf")
    assert autotp_command("convert", tmp_path / "hf", tmp_path / "ckpt", "--to", "training").status == 0
    assert tensors(tmp_path / "ckpt").keys() == model.state_dict().keys()
    done = autotp_command("convert", tmp_path / "ckpt", tmp_path / "back", "--config", tmp_path / "hf")
    assert done.status == 0, done.err
    expect_equal(tmp_path / "back", tmp_path / "hf")
    assert tensors(tmp_path / "ckpt").keys() != tensors(tmp_path / "back").keys()


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.down(self.up(x).relu()), y)


@pytest.fixture
def alone() -> Any:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_convert_reads_and_writes_trainings(autotp_command, tmp_path: Path, alone: None) -> None:
    """What a training saved, as a file; and a file, loaded into a training."""
    x, y = torch.randn(2, 4), torch.randn(2, 1)
    model = Regression()
    trainer = autotp.distribute(model, tp=1, example_inputs=(x, y))
    optimizer = torch.optim.AdamW(trainer.parameters())
    trainer.step(x, y)
    optimizer.step()
    autotp.save_checkpoint(tmp_path / "ckpt", trainer, optimizer, 3)
    done = autotp_command("convert", tmp_path / "ckpt", tmp_path / "model.pt")
    assert done.status == 0 and done.err == "autotp: warning: the optimizer's state is not written\n"
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    other = Regression()
    other.load_state_dict(state)
    assert autotp_command("convert", tmp_path / "model.pt", tmp_path / "again", "--to", "training").status == 0
    trainer.step(x, y)
    optimizer.step()
    autotp.save_checkpoint(tmp_path / "later", trainer, optimizer, 4)
    assert autotp.load_checkpoint(tmp_path / "again", trainer) == 0
    found = autotp.full_state_dict(trainer)
    assert all(torch.equal(found[name], state[name]) for name in state)
    with pytest.raises(autotp.Error) as raised:
        autotp.load_checkpoint(tmp_path / "again", trainer, optimizer)
    assert str(raised.value) == (
        f"load_checkpoint: {tmp_path / 'again' / 'step-00000000'} has the state of no optimizer, and this is AdamW\n"
        "  try      the parameters alone, with an optimizer that begins anew: load_checkpoint(folder, trainer)\n"
        "  or       an optimizer of the class that was saved"
    )
    done = autotp_command("convert", "--diff", tmp_path / "ckpt", tmp_path / "later", "--json")
    names = {row["name"] for row in done.json["differences"]}
    assert done.status == 1 and names >= {"up.weight", "optimizer|up.weight|exp_avg"}
    done = autotp_command("convert", tmp_path / "model.pt", tmp_path / "again", "--to", "training")
    assert done.status == 1 and "is there already" in done.err


def test_convert_diff_prints_what_differs(autotp_command, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "1.pt")
    torch.save({"a": torch.tensor([1.0, 1.5]), "c": torch.ones(1)}, tmp_path / "2.pt")
    done = autotp_command("convert", "--diff", tmp_path / "1.pt", tmp_path / "2.pt")
    assert done.status == 1 and done.out.splitlines() == [
        "3 tensors differ",
        "b  only in the first: float32 [2]",
        "c  only in the second: float32 [1]",
        "a  values: float32 [2], 1 elements, largest 5.0e-01",
    ]
    torch.save({"a": torch.tensor([1.25, 1.5]), "b": torch.ones(2)}, tmp_path / "3.pt")
    done = autotp_command("convert", "--diff", "--atol", "0.5", tmp_path / "1.pt", tmp_path / "3.pt")
    assert done.status == 0 and done.out.strip().endswith("dtypes and values that differ by at most 0.5")


@pytest.mark.parametrize(
    ("args", "status", "told"),
    [
        (("nowhere", "x"), 1, "there is no"),
        (("model.pt", "x.safetensors"), 2, "is a folder for safetensors"),
        (("model.pt", "x", "--to", "gguf"), 2, "Invalid value for '--to'"),
        (("model.pt", "x", "--atol", "1"), 2, "--atol is for --diff"),
        (("model.pt", "x", "--dtype", "int99"), 2, "torch has no such dtype"),
        (("empty", "x"), 1, "is no checkpoint"),
    ],
    ids=["nowhere", "suffix", "format", "atol", "dtype", "empty"],
)
def test_convert_refuses_wrong_use(
    autotp_command, tmp_path: Path, monkeypatch: Any, args: tuple[str, ...], status: int, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(2)}, "model.pt")
    (tmp_path / "empty").mkdir()
    done = autotp_command("convert", *args)
    assert done.status == status and told in done.err and not (tmp_path / "x").exists()


def test_without_a_configuration_it_says_so(autotp_command, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt")
    done = autotp_command("convert", tmp_path / "model.pt", tmp_path / "out")
    assert done.status == 0 and "no config.json is written" in done.err
    expect_equal(tmp_path / "out", tmp_path / "model.pt")
    expect_equal(tmp_path / "out" / "model.safetensors", tmp_path / "model.pt")


class Unreadable(InMemory):
    def read(self, box: Any) -> torch.Tensor:
        raise OSError("the disk does not answer")


@pytest.mark.parametrize("to", ["training", "torch", "safetensors"])
def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, to: Format) -> None:
    content = Content("torch", {"x": InMemory(torch.ones(2)), "y": Unreadable(torch.ones(2))})
    with pytest.raises(autotp.Error, match="the disk does not answer"):
        write_content(content, tmp_path / "written", to)
    assert [path for path in tmp_path.rglob("*") if path.name != "written"] == []


@pytest.mark.parametrize("to", ["training", "torch", "safetensors"])
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, to: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = list[str]()

    def noted(name: str, event: str) -> None:
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, **more: (events.append(event), original(*args, **more))[1])

    for name in ("rename", "replace"):
        noted(name, "named")
    noted("fsync", "on the disk")
    write_content(Content("torch", {"x": InMemory(torch.ones(2))}), tmp_path / "written", to)
    assert events[-3:] == ["on the disk", "named", "on the disk"]
