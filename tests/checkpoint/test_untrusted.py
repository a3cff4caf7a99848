"""Checkpoints that somebody else wrote: whatever they say, nothing of them is run, fetched or asked."""

from __future__ import annotations

import builtins
import functools
import json
import math
import os
import pickle
import shutil
import socket
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from errors import message
from hugging_face import family
from ranks import run_ranks
from trainers import edited, started, trained

import autotp


class Command:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


class Schedule:
    """Takes whatever it is given."""

    def state_dict(self) -> dict[str, Any]:
        return {"last": 1, "rates": (0.1, 0.2), "tensor": torch.arange(40)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def saved(folder: Path) -> Path:
    trainer, optimizer = started((1, 1, 1))
    trained(trainer, optimizer, range(1))
    autotp.save_checkpoint(folder, trainer, optimizer, 1, schedule=Schedule())
    return folder / "step-00000001"


def with_code(step: Path, bad: bytes) -> dict[str, Callable[[], Any]]:
    """Every place from which a checkpoint's bytes are made into values, with code in it."""
    file, text = step / "rank-00000.tensors", bad.decode("latin-1")

    def in_tensors(content: dict[str, Any]) -> None:
        """Each tensor's bytes begin as a pickle, and the checksums are right."""
        data = bytearray(file.read_bytes())
        for dtype, _, pieces in content["tensors"].values():
            for piece in pieces:
                start, size = piece[3], math.prod(piece[1]) * getattr(torch, dtype).itemsize
                data[start : start + size] = (bad * size)[:size]
                piece[4] = zlib.crc32(data[start : start + size])
        file.write_bytes(data)

    def sealed_pickle() -> None:
        before = bad + b',\n"crc32": '
        (step / "manifest.json").write_bytes(before + f'"{zlib.crc32(before):08x}"}}\n'.encode())

    def about(**values: Any) -> Callable[[], Any]:
        return lambda: edited(step, lambda content: content["about"].update(values))

    places: dict[str, Callable[[], Any]] = {
        "format 1": lambda: ((step / ".metadata").write_bytes(bad), (step / "manifest.json").unlink()),
        "format 1, values": lambda: (step / "__0_0.distcp").write_bytes(bad),
        "manifest": lambda: (step / "manifest.json").write_bytes(bad),
        "manifest, sealed": sealed_pickle,
        "tensors": lambda: edited(step, in_tensors),
        "a file's bytes": lambda: file.write_bytes(bad),
        "a key": lambda: edited(step, lambda content: content["tensors"].update({text: ["float32", [1], []]})),
        "a dtype": lambda: edited(step, lambda content: content["tensors"].update(x=["load", [1], []])),
    }
    for kind in ("bytes", "object", "os.system", "tensor", "array", "device", "dtype", "tuple", "dict", "__class__"):
        places |= {f"more, {kind}": about(more={"schedule": {"": kind, "of": text, "scalar": True}})}
        places |= {f"values, {kind}": about(values={"optimizer|h.0.ln_1.weight|exp_avg": {"": kind, "of": text}})}
    return places


def tried(rank: int, n: int, folder: str) -> dict[str, str]:
    """What each place with code in it gives: an error, or values; the code has not run, and nothing was unpickled."""
    events: list[str] = []
    sys.addaudithook(lambda event, args: events.append(event))
    good, mark, found = saved(Path(folder) / "good").parent, Path(folder) / "it-ran", {}
    bad = pickle.dumps(Command(mark))
    assert pickle.loads(bad) is None and mark.exists()
    mark.unlink()
    trainer, optimizer = started((1, 1, 1))
    schedule = Schedule()
    assert autotp.load_checkpoint(Path(folder) / "none", trainer) == 0  # The first call reads its own annotations.
    for i, name in enumerate(with_code(good, bad)):
        copy = Path(shutil.copytree(good, Path(folder) / str(i)))
        with_code(copy / "step-00000001", bad)[name]()
        for given in (None, optimizer):
            events.clear()
            try:
                autotp.load_checkpoint(copy, trainer, given, schedule=schedule)
                found[name] = "loaded"
            except autotp.Error as error:
                found[name] = str(error).splitlines()[0].replace(str(copy), "")
            assert not {"pickle.find_class", "os.system", "subprocess.Popen", "exec"} & set(events), name
            assert not mark.exists(), name
    return found


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    (found,) = run_ranks(tried, 1, str(tmp_path), timeout=100)
    # What nobody reads, or what is a text.
    loaded = {name for name, text in found.items() if text == "loaded"}
    assert loaded == {"format 1, values", "more, tuple", "values, tuple"}, "\n".join(map(repr, found.items()))


def test_pickles_of_format_1_are_never_opened(tmp_path: Path) -> None:
    """The format before this one was torch.distributed.checkpoint's: pickles, which are not opened any more."""
    step, mark = tmp_path / "step-00000001", tmp_path / "it-ran"
    step.mkdir()
    (step / ".metadata").write_bytes(pickle.dumps(Command(mark)))
    text = run_ranks(refused, 1, str(tmp_path), timeout=100)[0]
    assert not mark.exists()
    assert text.startswith(f"load_checkpoint: {step} is of format 1, and this autotp reads 2\n")


def refused(rank: int, n: int, folder: str) -> str:
    trainer, optimizer = started((1, 1, 1))
    return message(lambda: autotp.load_checkpoint(folder, trainer, optimizer))


# ---- checkpoints of transformers


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    family("llama")[0].save_pretrained(folder)
    return folder


KERNEL, BESIDE = "somebody/attention", "evil.EvilConfig"
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "code beside a known model": ({"auto_map": {"AutoConfig": BESIDE}}, "has code of its own (auto_map)"),
    "code of an unknown model": (
        {"model_type": "evil", "auto_map": {"AutoConfig": BESIDE, "AutoModelForCausalLM": "evil.Evil"}},
        "the checkpoint has code of its own (auto_map)",
    ),
    "code in a hub": ({"auto_map": {"AutoConfig": f"somebody/model--{BESIDE}"}}, "has code of its own (auto_map)"),
    "code of a part": ({"text_config": {"auto_map": {"AutoConfig": BESIDE}}}, "has code of its own (auto_map)"),
    "an attention in a hub": ({"attn_implementation": KERNEL}, f"names code in a hub (attn_implementation: {KERNEL})"),
    "another attention": ({"_attn_implementation": KERNEL}, f"names code in a hub (_attn_implementation: {KERNEL})"),
    "an attention of a part in a hub": (
        {"attn_implementation": {"": KERNEL}}, f"names code in a hub (attn_implementation: {KERNEL})",
    ),
    "an attention inside": (
        {"_attn_implementation_internal": KERNEL}, f"names code in a hub (_attn_implementation_internal: {KERNEL})",
    ),
    "an attention without end": (
        {"attn_implementation": functools.reduce(lambda inner, _: {"a": inner}, range(700), KERNEL)},
        "the configuration cannot be read: maximum recursion depth",
    ),
    "no number": ({"rms_norm_eps": float("nan")}, "the configuration cannot be read: NaN is no number"),
    "a number without end": ({"rms_norm_eps": float("inf")}, "the configuration cannot be read: Infinity is no number"),
    "no number, as transformers writes it": (
        {"rms_norm_eps": {"__float__": "NaN"}}, "the configuration cannot be read: NaN is no number",
    ),
    "a number that is too large": ({"rms_norm_eps": 1e308}, "the configuration cannot be read: 1e999 is no number"),
    "a file that is not compared": (
        {"configuration_files": ["config.4.0.0.json"]},
        "the configuration names other files (configuration_files), which are not read",
    ),
    "layers without end": (
        {"num_hidden_layers": 10**9},
        "the configuration says num_hidden_layers=1000000000, and a model has at most 10,000",
    ),
    "labels without end": (
        {"num_labels": 10**10}, "the configuration says num_labels=10000000000, and a model has at most 1,000,000",
    ),
    "experts without end": (
        {"text_config": {"num_local_experts": 10**10}}, "the configuration says num_local_experts=10000000000, and",
    ),
    "no model": ({"architectures": ["Trainer"]}, "config.json names Trainer, which is no model that transformers has"),
    "no class": ({"architectures": ["pipeline"]}, "config.json names pipeline, which is no model"),
    "a backbone": (
        {
            "model_type": "detr", "architectures": ["DetrModel"], "backbone": "microsoft/resnet-50",
            "use_timm_backbone": False, "use_pretrained_backbone": True, "backbone_config": None,
        },
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_that_name_code_are_refused_unrun(
    case: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error; nobody is asked, nothing is run, no other machine is called."""
    folder, (values, text) = Path(shutil.copytree(llama, tmp_path / "copy")), CONFIGS[case]
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config).replace("1e+308", "1e999"))
    (folder / "config.4.0.0.json").write_text(json.dumps(config | {"attn_implementation": KERNEL}))
    (folder / "evil.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'it-ran')!r}).touch()")
    calls: list[Any] = []
    for owner, name in ((builtins, "input"), (socket.socket, "connect"), (socket, "getaddrinfo")):
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: calls.append(args) or (_ for _ in ()).throw(OSError()))
    assert text in message(lambda: autotp.from_pretrained(folder)).splitlines()[0]
    assert not calls and not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_sparse_configuration_of_many_bytes_is_refused(name: str, llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "copy"))
    os.truncate(folder / name, 2**36)
    with pytest.raises(autotp.Error, match=r"the configuration cannot be read: .*it has 68,719,476,736 bytes"):
        autotp.from_pretrained(folder)


@pytest.mark.system
def test_auto_map_is_overruled_by_the_class_of_transformers(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text()) | {
        "auto_map": {"AutoConfig": BESIDE, "AutoModel": BESIDE}
    }
    (folder / "config.json").write_text(json.dumps(config))
    for kind in (None, transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        model = autotp.from_pretrained(folder, config={"auto_map": {}}, model_class=kind)
        assert isinstance(model, transformers.LlamaForCausalLM)
