"""Checkpoints of transformers in a world of one: what is refused, and what is said of it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from errors import message
from hugging_face import expect_same, family, files_of
from safetensors.torch import load_file, save_file
from small_models import gpt
from torch import nn
from transformers.utils import logging as theirs

import autotp
from autotp.checkpoint.files.checksums import EARLIER

theirs.disable_progress_bar()
theirs.set_verbosity_error()


# ---- one process


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    family("llama")[0].save_pretrained(folder)
    return folder


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))


def test_pretrained_in_a_world_of_one_changes_no_bit(llama: Path, tmp_path: Path) -> None:
    parallel = autotp.from_pretrained(llama)
    autotp.save_pretrained(parallel, tmp_path / "out")
    expect_same(files_of(tmp_path / "out"), files_of(llama))


def test_another_model_takes_no_memory_to_refuse(copied: Path) -> None:
    """Its parameters would be 2 TB."""
    edit(copied, hidden_size=48 * 2**12, intermediate_size=2**18)
    text = message(lambda: autotp.from_pretrained(copied))
    assert text.splitlines()[0] == f"from_pretrained({copied}): the tensors are not those of LlamaForCausalLM"


def test_from_pretrained_refuses_configurations_that_make_no_model(copied: Path) -> None:
    file = copied / "config.json"
    call = f"from_pretrained({copied})"
    edit(copied, architectures=None)
    remedy = "  try      model_class=transformers.AutoModelForCausalLM, or the class itself"
    assert message(lambda: autotp.from_pretrained(copied)) == (
        f"{call}: config.json names no class\n  at       {file}\n{remedy}"
    )
    edit(copied, architectures=["MyLlama"])
    assert message(lambda: autotp.from_pretrained(copied)) == (
        f"{call}: config.json names MyLlama, which is no model that transformers has\n  at       {file}\n{remedy}"
    )
    edit(copied, quantization_config={"quant_method": "gptq", "bits": 4})
    assert message(lambda: autotp.from_pretrained(copied)) == (
        f"{call}: the checkpoint is quantized\n  at       {file}\n  try      a checkpoint of floating tensors"
    )
    other = copied / "generation_config.json"
    right = other.read_text()
    other.write_text("{")
    edit(copied, architectures=["LlamaForCausalLM"], quantization_config=None)
    assert message(lambda: autotp.from_pretrained(copied)).startswith(f"{call}: the configuration cannot be read: ")
    other.write_text(right)
    file.write_text("{")
    assert message(lambda: autotp.from_pretrained(copied)).startswith(f"{call}: the configuration cannot be read: ")
    file.unlink()
    assert message(lambda: autotp.from_pretrained(copied)) == (
        f"{call}: no checkpoint of transformers: config.json is not there\n  at       {copied}\n"
        "  try      the folder that save_pretrained wrote"
    )


def test_from_pretrained_refuses_tensors_of_another_kind(copied: Path) -> None:
    """The header says whole numbers where the model has floating ones: as many bytes, that mean another thing."""
    file = copied / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float().view(torch.int32)
    save_file(tensors, file, {"format": "pt"})
    for given in ({}, {"dtype": torch.float32}):
        text = message(lambda given=given: autotp.from_pretrained(copied, **given))  # type: ignore[misc]
        assert "`model.norm.weight` in model.safetensors" in text and " is torch.int32" in text


def test_from_pretrained_refuses_an_adapter(copied: Path) -> None:
    (copied / "adapter_config.json").write_text("{}")
    first, *facts = message(lambda: autotp.from_pretrained(copied)).splitlines()
    assert first == f"from_pretrained({copied}): an adapter is beside the model: adapter_config.json"
    assert "peft" in facts[-1]


def test_from_pretrained_names_experts_of_different_sizes(tmp_path: Path) -> None:
    """What cannot be put together is named, though transformers only logs what went wrong."""
    model, _, given = family("mixtral")
    model.save_pretrained(tmp_path)
    tensors = files_of(tmp_path)
    first, second = (f"model.layers.0.block_sparse_moe.experts.{i}.w1.weight" for i in (0, 1))
    save_file(tensors | {second: tensors[second][:5].clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert message(lambda: autotp.from_pretrained(tmp_path, **given)) == (
        f"from_pretrained({tmp_path}): `{first}` in model.safetensors of [80, 48] and "
        f"`{second}` in model.safetensors of [5, 48] cannot be joined\n  try      {EARLIER}"
    )


def test_from_pretrained_refuses_other_choices(llama: Path) -> None:
    call = f"from_pretrained({llama})"
    assert message(lambda: autotp.from_pretrained(llama, missing="skip")) == (  # type: ignore[arg-type]
        f"{call}: missing='skip' is not one of its values\n  expected 'error' or 'init'"
    )
    assert message(lambda: autotp.from_pretrained(llama, unexpected=None)) == (  # type: ignore[arg-type]
        f"{call}: unexpected=None is not one of its values\n  expected 'error' or 'ignore'"
    )
    text = message(lambda: autotp.from_pretrained(llama, model_class=transformers.AutoModelForImageClassification))
    assert " makes no model of LlamaConfig: " in text


def test_save_pretrained_refuses_sizes_that_are_none(llama: Path) -> None:
    parallel, folder = autotp.from_pretrained(llama), llama.parent / "no"
    sizes: tuple[Any, ...] = (0, -5, True, "5", "GB", "0MB", "5 parsecs", None)
    for size in sizes:
        assert message(lambda size=size: autotp.save_pretrained(parallel, folder, max_shard_size=size)) == (
            f"save_pretrained(LlamaForCausalLM, {folder}): max_shard_size={size!r} is no size\n"
            '  expected a number of bytes, or a text as "5GB"'
        )


def test_save_pretrained_refuses_other_models(tmp_path: Path) -> None:
    model = autotp.parallelize(gpt())
    assert message(lambda: autotp.save_pretrained(model, tmp_path)) == (
        f"save_pretrained(GPT, {tmp_path}): a GPT is no model of transformers\n"
        "  try      autotp.full_state_dict(model), and torch.save on the first rank"
    )
    assert message(lambda: autotp.save_pretrained(nn.Linear(2, 2), tmp_path)) == (
        "save_pretrained: a Linear is not a parallel model\n"
        "  try      save_pretrained(model, ...), with the model that autotp.parallelize returned"
    )


def test_transformers_is_not_imported_before_it_is_needed() -> None:
    import subprocess

    code = "import autotp, sys; sys.exit('transformers' in sys.modules or 'safetensors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
