"""Checkpoints of transformers: each rank reads its part; what is saved is what transformers would have saved."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from errors import message
from hugging_face import LAYOUTS, expect_same, family, files_of, saved
from ranks import Checks, shared
from safetensors.torch import save_file
from torch import Tensor
from transformers import core_model_loading
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Transpose, WeightConverter
from transformers.utils import logging as theirs

import autotp
from autotp.checkpoint.files.checksums import EARLIER
from autotp.distributed.cut_tensors.cut_parameter import CutTensor
from autotp.integrations.transformers.files.safetensors_files import Stored

checks = Checks(timeout=480)  # Importing transformers alone takes a while on busy cores.
theirs.disable_progress_bar()
theirs.set_verbosity_error()

# ---- there and back


@checks.on(3)
def there_and_back(rank: int, n: int) -> None:
    expect_there_and_back(rank, n, ["gpt2", "mixtral"])


@checks.on(2)
def from_another_working_directory(rank: int, n: int) -> None:
    """The tokenizer's files come along, although the path that was read is none here."""
    root, before = shared(rank), Path.cwd()
    model, _, given = family("gpt2")
    saved(model, root / "a", rank)
    (root / "a" / "tokenizer.json").write_text("{}")
    try:
        os.chdir(root)
        parallel = autotp.from_pretrained("a", n, **given)
        os.chdir(before)
        autotp.save_pretrained(parallel, root / "b")
    finally:
        os.chdir(before)
    assert (root / "b" / "tokenizer.json").read_text() == "{}"


@checks.on(4)
def training_from_a_folder_and_back(rank: int, n: int) -> None:
    """`distribute` reads a folder, each rank the parts of its stages, and `save_pretrained` writes what it has trained.

    Llama has a head of its own; GPT-2's is tied to the embedding, over the ends of the pipeline; Mixtral's experts have
    other names in files.
    """
    root = shared(rank)
    for name in ("llama", "gpt2", "mixtral"):
        model, inputs, _ = family(name)
        first, second = root / name / "a", root / name / "b"
        dtype = torch.float32 if name == "mixtral" else torch.float64  # torch has no grouped product in float64.
        # A trainer draws masks of its own, and refuses a loss of the router, which is of the whole batch.
        model.config.update(
            {key: 0.0 for key in vars(model.config) if "pdrop" in key} | {"output_router_logits": False}
        )
        saved(model, first, rank)
        (first / "tokenizer.json").write_text("{}")
        one = type(model).from_pretrained(first, dtype=dtype)
        tokens = inputs["input_ids"]
        batch = {"input_ids": torch.cat([tokens, tokens]), "labels": torch.cat([tokens, tokens])}
        example = {key: value[: len(tokens)] for key, value in batch.items()}
        trainer = autotp.distribute(str(first), tp=2, pp=2, microbatches=2, dtype=dtype, example_inputs=example)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (one, trainer)]
        for _ in range(2):
            one_loss, loss = one(**batch).loss, trainer.step(**batch)
            one_loss.backward()
            # transformers computes a loss in float32, whatever the dtype of the model is.
            torch.testing.assert_close(
                loss.cpu(),
                one_loss.detach(),
                rtol=1e-5,
                atol=0,
                check_dtype=False,
                msg=lambda text, key=name: f"{key}: {text}",
            )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        autotp.save_pretrained(trainer, second, max_shard_size="60KB")
        assert (second / "tokenizer.json").is_file()
        of_one = files_of(saved(one, root / name / "of_one", rank, max_shard_size="60KB"))
        found = files_of(second)
        assert {key: tensor.shape for key, tensor in found.items()} == {key: t.shape for key, t in of_one.items()}
        again = type(model).from_pretrained(second, dtype=dtype)
        for (key, a), b in zip(one.state_dict().items(), again.state_dict().values(), strict=True):
            torch.testing.assert_close(
                b, a, rtol=1e-5, atol=1e-6, msg=lambda text, key=f"{name} {key}": f"{key}: {text}"
            )
        autotp.save_pretrained(trainer, root / name / "half", dtype=torch.bfloat16)
        config = json.loads((root / name / "half" / "config.json").read_text())
        half = transformers.AutoModelForCausalLM.from_pretrained(root / name / "half")
        assert config["dtype"] == "bfloat16" and half.dtype == torch.bfloat16


@checks.on(2)
def what_is_no_folder_of_a_model(rank: int, n: int) -> None:
    nothing = shared(rank) / "nothing"
    text = message(lambda: autotp.distribute(nothing, tp=2))
    assert text.startswith(f"distribute({nothing}, tp=2, pp=1, dp=1): ") and "nothing" in text
    text = message(lambda: autotp.distribute(family("gpt2")[0], tp=2, dtype=torch.half))
    assert "dtype is for a model that is read from a folder" in text


@checks.on(3, rare=True)
def others_there_and_back(rank: int, n: int) -> None:
    expect_there_and_back(rank, n, list(LAYOUTS))


def expect_there_and_back(rank: int, n: int, names: list[str]) -> None:
    """Parameters and buffers are parts of transformers' own, bit for bit; outputs agree; files are transformers'."""
    root = shared(rank)
    for name in names:
        model, inputs, given = family(name)
        first, second = root / name / "a", root / name / "b"
        saved(model, first, rank)
        whole = type(model).from_pretrained(first)
        parallel = autotp.from_pretrained(first, n, **given)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # What transformers does to a part there is not the user's doing.
            autotp.save_pretrained(parallel, second, max_shard_size="40KB")
        assert not parallel.training
        for key, tensor in whole.named_parameters():
            assert torch.equal(parallel.get_parameter(key), tensor), (name, key)
        for key, tensor in whole.named_buffers():
            assert torch.equal(parallel.get_buffer(key), tensor), (name, key)
        assert len(list(parallel.parameters())) == len(list(whole.parameters())), name
        with torch.no_grad():
            torch.testing.assert_close(parallel(**inputs).loss, whole(**inputs).loss)
        if rank == 0:
            assert (second / "model.safetensors.index.json").exists()
            expect_same(files_of(second), files_of(first))
            expect_same(type(model).from_pretrained(second).state_dict(), whole.state_dict())


@checks.on(2)
def only_slices_are_read(rank: int, n: int) -> None:
    """Of the file, as many elements as the rank holds; what is tied is read once."""
    model, _, given = family("gpt2")
    folder = saved(model, shared(rank), rank)
    counts: list[int] = []
    read = Stored.read

    def counted(tensor: Stored, box: Any) -> Tensor:
        counts.append(math.prod(b - a for a, b in box))
        return read(tensor, box)

    Stored.read = counted  # type: ignore[method-assign]
    try:
        parallel = autotp.from_pretrained(folder, n, **given)
    finally:
        Stored.read = read  # type: ignore[method-assign]
    parts = [p.to_local() if isinstance(p, CutTensor) else p for p in parallel.parameters()]
    assert sum(counts) == sum(p.numel() for p in parts)
    assert parallel.lm_head.weight is parallel.transformer.wte.weight


@checks.on(2)
def trained_and_saved(rank: int, n: int) -> None:
    """A model that was never read from files is saved too; transformers computes what it had learnt."""
    model, inputs, _ = family("llama")
    folder = shared(rank)
    parallel = autotp.parallelize(model, n, example_inputs=inputs)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    parallel(**inputs).loss.backward()
    optimizer.step()
    parallel.save_pretrained(folder / "out")  # The model's own method writes the whole, too, and nothing of a part.
    with pytest.raises(autotp.Error, match="is not saved with safe_serialization"):
        parallel.save_pretrained(folder / "other", safe_serialization=False)
    parallel.save_pretrained(folder / "state", state_dict=parallel.state_dict())
    with torch.no_grad():
        after = parallel.eval()(**inputs).loss
    if rank == 0:
        expect_same(files_of(folder / "state"), files_of(folder / "out"))
        alone = type(model).from_pretrained(folder / "out")
        torch.testing.assert_close(alone(**inputs).loss, after)
        assert json.loads((folder / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


# ---- names that differ between files and modules


@checks.on(2, rare=True)
def names_of_older_files(rank: int, n: int) -> None:
    """No prefix; gamma and beta; a tied weight twice; buffers that are none of the model's any more."""
    root = shared(rank)

    def renamed(old: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): t for k, t in old.items()}

    changes: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
        "no-prefix": ("gpt2", lambda old: {k.removeprefix("transformer."): t for k, t in old.items()}),
        "gamma": ("bert", renamed),
        "tied-twice": ("gpt2", lambda old: old | {"lm_head.weight": old["transformer.wte.weight"].clone()}),
        "inv_freq": ("llama", lambda old: old | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        "masks": ("gpt2", lambda old: old | {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}),
    }
    for case, (name, change) in changes.items():
        model, _, given = family(name)
        folder = saved(model, root / case, rank)
        if rank == 0:
            save_file(change(files_of(folder)), folder / "model.safetensors", {"format": "pt"})
        dist.barrier()
        whole, parallel = type(model).from_pretrained(folder), autotp.from_pretrained(folder, n, **given)
        assert len(list(parallel.parameters())) == len(list(whole.parameters())), case
        for key, tensor in whole.named_parameters():
            assert torch.equal(parallel.get_parameter(key), tensor), (case, key)


@checks.on(2)
def conversions_of_whole_tensors(rank: int, n: int) -> None:
    """Files that hold weights cut, turned and shuffled, of which no part can be computed alone."""
    shuffle = [core_model_loading.Interleave(0)] if hasattr(core_model_loading, "Interleave") else []  # From 5.1 on.
    mapping = [
        WeightConverter(
            "mlp.w13.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], operations=[*shuffle, Chunk(0)]
        ),
        WeightConverter("self_attn.wq.weight", "self_attn.q_proj.weight", operations=shuffle or [Transpose(0, 1)]),
        WeightConverter("mlp.w2.weight", "mlp.down_proj.weight", operations=[Transpose(0, 1)]),
    ]
    register_checkpoint_conversion_mapping("olmo", mapping)  # a family that no other test here has
    model, _, given = family("olmo")
    root = shared(rank)
    whole = type(model).from_pretrained(saved(model, root / "a", rank))
    parallel = autotp.from_pretrained(root / "a", n, **given)
    for key, tensor in whole.named_parameters():
        assert torch.equal(tensor, model.get_parameter(key)), key
        assert torch.equal(parallel.get_parameter(key), tensor), key
    autotp.save_pretrained(parallel, root / "b")
    if rank == 0:
        assert "model.layers.0.mlp.w13.weight" in files_of(root / "b")
        expect_same(files_of(root / "b"), files_of(root / "a"))


@checks.on(2, rare=True)
def other_classes(rank: int, n: int) -> None:
    """A part of the saved model, an Auto class; a head that is in no file, the same on all ranks."""
    folder = saved(family("llama")[0], shared(rank), rank)
    body = autotp.from_pretrained(folder, n, model_class=transformers.LlamaModel, unexpected="ignore")
    assert not hasattr(body, "lm_head")
    auto = autotp.from_pretrained(folder, n, model_class=transformers.AutoModelForCausalLM)
    assert torch.equal(body.embed_tokens.weight, auto.model.embed_tokens.weight)
    torch.manual_seed(rank)
    head = autotp.from_pretrained(
        folder, n, model_class=transformers.AutoModelForSequenceClassification, missing="init", unexpected="ignore"
    )
    scores = autotp.full_state_dict(head)
    if rank == 0:
        torch.manual_seed(0)
        whole = transformers.LlamaForSequenceClassification.from_pretrained(folder)
        expect_same(scores, whole.state_dict())


@checks.on(2, rare=True)
def dtypes(rank: int, n: int) -> None:
    """Kept as the checkpoint has it, or given."""
    model, _, given = family("llama")
    folder = saved(model.to(torch.bfloat16), shared(rank), rank)
    for dtype in (None, torch.float32):
        whole = type(model).from_pretrained(folder, dtype=dtype or "auto")
        parallel = autotp.from_pretrained(folder, n, dtype=dtype, **given)
        assert {p.dtype for p in parallel.parameters()} == {dtype or torch.bfloat16}
        for key, tensor in whole.named_parameters():
            assert torch.equal(parallel.get_parameter(key), tensor), key


@checks.on(2, rare=True)
def what_stays_wide(rank: int, n: int) -> None:
    """In half precision the model keeps some parameters as they were."""
    model, _, given = family("t5")
    folder = saved(model, shared(rank), rank)
    whole = type(model).from_pretrained(folder, dtype=torch.float16)
    parallel = autotp.from_pretrained(folder, n, dtype=torch.float16, **given)
    kinds = {key: p.dtype for key, p in whole.named_parameters()}
    assert {key: p.dtype for key, p in parallel.named_parameters()} == kinds and len(set(kinds.values())) == 2


@checks.on(2, rare=True)
def what_stands_beside(rank: int, n: int) -> None:
    """Configurations and the tokenizer go along; files that were there stay; saving over the source works."""
    model, _, given = family("gpt2")
    model.generation_config.max_new_tokens = 7
    folder = saved(model, shared(rank) / "a", rank)
    if rank == 0:
        (folder / "tokenizer.json").write_text("{}")
        (folder / "spm.model").write_bytes(b"pieces")
        (folder / "notes.txt").write_text("mine")
    dist.barrier()
    parallel = autotp.from_pretrained(folder, n, **given | {"config": {"resid_pdrop": 0.25}})
    assert parallel.generation_config.max_new_tokens == 7
    before = files_of(folder)
    for place in (folder.parent / "b", folder):
        autotp.save_pretrained(parallel, place)
        if rank == 0:
            kept = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "spm.model"}
            kept.add("autotp.checksums.json")
            assert {file.name for file in place.iterdir()} == kept | ({"notes.txt"} if place == folder else set())
            config = type(model).from_pretrained(place).config
            assert config.resid_pdrop == 0.25 and config.dtype == torch.float32
            expect_same(files_of(place), before)


# ---- what is wrong


@checks.on(2)
def wrong_checkpoints(rank: int, n: int) -> None:
    """One error, on every rank, that names the tensor and the file."""
    root = shared(rank)
    model, _, given = family("llama")
    key, other = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    changes: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
        "missing": (lambda old: (old.pop(key), old.pop(other)), f"  missing  `{key}`, `{other}`\n"),
        "too-much": (lambda old: old.update(extra=torch.ones(2)), "  too much `extra` in model.safetensors\n"),
        "shape": (
            lambda old: old.update({other: torch.ones(3)}),
            f"  shape    `{other}` is [3] in model.safetensors, and [48] in the model\n",
        ),
    }
    remedies = {
        "missing": 'missing="init", which initialises them',
        "too-much": 'unexpected="ignore", which leaves them out',
        "shape": "the configuration that the tensors were saved with",
    }
    for case, (change, fact) in changes.items():
        folder = saved(model, root / case, rank)
        if rank == 0:
            tensors = files_of(folder)
            change(tensors)
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        dist.barrier()
        assert message(lambda folder=folder: autotp.from_pretrained(folder, n, **given)) == (
            f"from_pretrained({folder}, tp=2): the tensors are not those of LlamaForCausalLM\n"
            f"{fact}  at       {folder}\n  try      {remedies[case]}"
        )


@checks.on(2)
def wrong_on_one_rank(rank: int, n: int) -> None:
    """Who sees nothing wrong says what the other said, and waits for nobody."""
    model, _, given = family("llama")
    first = saved(model, shared(rank) / "0", rank)
    if rank == 1:
        shutil.copytree(first, first.parent / "1")
        file = first.parent / "1" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-10])
    folder = first.parent / str(rank)
    there = folder.parent / "1" / "model.safetensors"
    assert message(lambda: autotp.from_pretrained(folder, n, **given)) == (
        f"from_pretrained({folder}, tp=2): `model.norm.weight` is cut off: the file is shorter than its header says\n"
        f"  at       {there}\n  try      {EARLIER}" + ("\n  on       tp rank 1" if rank == 0 else "")
    )


@checks.on(2)
def gone_while_it_is_read(rank: int, n: int) -> None:
    """A file that fails after all was agreed on."""
    model, _, given = family("llama")
    folder = saved(model, shared(rank), rank)
    read = Stored.read

    def failing(tensor: Stored, box: Any) -> Tensor:
        gone = rank == 1 and tensor.name == "model.norm.weight"
        return read(replace(tensor, file=folder / "gone") if gone else tensor, box)

    Stored.read = failing  # type: ignore[method-assign]
    try:
        text = message(lambda: autotp.from_pretrained(folder, n, **given))
    finally:
        Stored.read = read  # type: ignore[method-assign]
    assert text.startswith(f"from_pretrained({folder}, tp=2): `model.norm.weight` cannot be read: ")
    assert f"\n  at       {folder / 'gone'}\n  try      a file that this process may read" in text
    assert text.endswith("\n  on       tp rank 1") == (rank == 0)


@checks.on(2)
def full_disk(rank: int, n: int) -> None:
    """The first rank cannot write: an error on every rank, the old checkpoint is whole, nothing is left behind."""
    from autotp.integrations.transformers.files import weights as checkpoint

    model, _, given = family("llama")
    folder = saved(model, shared(rank) / "out", rank)
    parallel = autotp.from_pretrained(folder, n, **given)
    before, write, left = files_of(folder), checkpoint.append_tensor, [9]

    def failing(file: Any, tensor: Tensor) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        write(file, tensor)

    checkpoint.append_tensor = failing
    try:
        text = message(lambda: autotp.save_pretrained(parallel, folder, max_shard_size="50KB"))
    finally:
        checkpoint.append_tensor = write
    first, facts = text.split("\n", 1)
    assert first == (
        f"save_pretrained(LlamaForCausalLM, {folder}): "
        "the checkpoint cannot be written: [Errno 28] No space left on device"
    )
    assert (facts.endswith("\n  on       tp rank 0")) == (rank == 1)
    dist.barrier()
    expect_same(files_of(folder), before)
    assert [file.name for file in folder.parent.iterdir()] == ["out"]


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
