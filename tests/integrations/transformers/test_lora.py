"""LoRA adapters of `peft` on cut layers: cut by the same axes, reduced together with their layer, trained alone."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hugging_face import RANK, TARGETS, adapted, tiny
from ranks import Checks, run_ranks
from torch import nn

import autotp
from autotp.diagnostics.double import all_double
from autotp.diagnostics.verify import Trial, make_trial
from autotp.passes.capture.python_state.code_names import named

checks = Checks()
on_both = pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.rare)])


@on_both
@pytest.mark.parametrize(
    ("tp", "dropout"), [(2, 0.1), *(pytest.param(tp, 0.0, marks=pytest.mark.rare) for tp in (2, 3))]
)
def test_lora_equals_one_device(family: str, tp: int, dropout: float) -> None:
    model, inputs = adapted(family, dropout)
    report = autotp.verify(model, tp, example_inputs=inputs)
    assert report.ok, report


def test_lora_adds_few_names_that_a_call_compares() -> None:
    """A call compares what the model's code names; the code of peft, outside of its modules, is not the user's."""
    model, _ = adapted("gpt2")
    before, after = (len(list(named(it, {"weight", "config"}))) for it in (tiny("gpt2")[0], model))
    assert before < after < 4 * before


def test_adapters_of_transformers_are_not_saved_as_a_model(tmp_path: Path) -> None:
    """transformers saves adapters of `add_adapter` alone, so the whole model in their place would be another thing."""
    peft = pytest.importorskip("peft")
    model: Any = tiny("gpt2")[0]
    try:
        model.add_adapter(peft.LoraConfig(r=RANK, target_modules=TARGETS["gpt2"], fan_in_fan_out=True))
    except ValueError as error:
        pytest.skip(str(error))  # This transformers asks for a newer peft.
    parallel = autotp.parallelize(model, 1)
    with pytest.raises(autotp.Error, match="the model has adapters of `add_adapter`") as raised:
        autotp.save_pretrained(parallel, tmp_path / "saved")
    assert "examples/hf_lora.py" in str(raised.value) and not (tmp_path / "saved").exists()


def test_adapters_of_parameters_are_cut_as_these() -> None:
    """peft takes the parameter out of its module in each call: a graph adds to it."""
    model, inputs = adapted("llama", target_modules=["q_proj"], target_parameters=["mlp.up_proj.weight"])
    names = list(model.state_dict())
    report = autotp.verify(model, 2, example_inputs=inputs)
    assert report.ok, report
    assert list(model.state_dict()) == names


@cache
def llama_and_twin(n: int) -> tuple[nn.Module, Any]:
    """One model for all that changes nothing of it."""
    whole, inputs = adapted("llama")
    return whole, autotp.parallelize(copy.deepcopy(whole), n, example_inputs=inputs)


@checks.on(2)
def what_is_done_before(rank: int, n: int) -> None:
    """Adapters of a parallel model are not merged or taken out: one error, that says what to do."""
    _, parallel = llama_and_twin(n)
    for name in ("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload", "add_weighted_adapter"):
        with pytest.raises(autotp.Error, match="adapters of a parallel model are not merged or taken out"):
            getattr(parallel, name)()


def saved_and_read(rank: int, n: int, folder: Path) -> list[float]:
    """peft reads what a parallel model saved."""
    peft = pytest.importorskip("peft")
    whole, inputs = adapted("llama", modules_to_save=["lm_head"])
    parallel: Any = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=inputs)
    losses = [float(it(**inputs).loss.detach()) for it in (whole, parallel)]  # Saving changes peft's configuration.
    parallel.save_pretrained(folder / "parallel")
    dist.barrier()
    model = peft.PeftModel.from_pretrained(tiny("llama")[0], folder / "parallel", is_trainable=True)
    found = model.state_dict()
    assert list(found) == list(whole.state_dict())
    for name, value in whole.state_dict().items():
        assert torch.equal(found[name], value), name
    return [*losses, float(model(**inputs).loss.detach())]


def test_adapters_are_saved_whole(tmp_path: Path) -> None:
    for losses in run_ranks(saved_and_read, 2, tmp_path, timeout=100):
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {it.name for it in (tmp_path / "parallel").iterdir()}


def read_again(rank: int, n: int, folder: Path) -> None:
    """A model reads its adapter again, as a resumed Trainer does; or one more. Not an adapter of another kind."""
    whole, inputs = adapted("llama", modules_to_save=["lm_head"])
    first: Any = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=inputs)
    expected = {name: value.clone() for name, value in first.state_dict().items()}
    first.save_pretrained(folder / "own")
    dist.barrier()
    loss = first(**inputs).loss
    with torch.no_grad():
        for p in first.parameters():
            if p.requires_grad:
                p.mul_(0.5)
    assert not torch.equal(first(**inputs).loss, loss)
    first.load_adapter(folder / "own", "default", is_trainable=True)
    for name, value in first.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert first.training and torch.equal(first(**inputs).loss, loss)
    first.load_adapter(folder / "own", "default")
    assert not first.training  # As peft does it.
    with pytest.raises(autotp.Error, match="there is no folder"):
        first.load_adapter(folder / "nothing", "default")
    second: Any = autotp.parallelize(adapted("llama")[0], n, example_inputs=inputs)
    before = {name: value.clone() for name, value in second.state_dict().items()}
    with pytest.raises(autotp.Error, match="the adapter 'default' of the model is of another kind"):
        second.load_adapter(folder / "own", "default")
    assert all(torch.equal(value, before[name]) for name, value in second.state_dict().items())
    second.load_adapter(folder / "own", "other")
    second.set_adapter("other")
    assert torch.equal(second(**inputs).loss, first(**inputs).loss)


@pytest.mark.timeout(240)
def test_adapters_are_read_again(tmp_path: Path) -> None:
    run_ranks(read_again, 2, tmp_path, timeout=200)


def resumed(rank: int, n: int, folder: Path) -> list[list[dict[str, float]]]:
    """The losses of a Trainer that goes through, and of one that goes on in the middle."""
    transformers = pytest.importorskip("transformers")
    tokens = torch.arange(24 * 8).view(24, 8) * 7 % 90 + 3
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=4, save_steps=2, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    found = []
    for start in (None, str(folder / "checkpoint-2")):
        model, inputs = adapted("llama")
        model = autotp.parallelize(model, n, example_inputs=inputs) if n > 1 else model
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=start)
        kept = ("loss", "grad_norm")
        found.append([{key: row[key] for key in kept if key in row} for row in trainer.state.log_history])
    return found


@pytest.mark.timeout(200)
def test_a_trainer_resumes(tmp_path: Path) -> None:
    expected = resumed(0, 1, tmp_path / "one")
    assert len(expected[0]) > 4 and "loss" in expected[0][3]
    for found in run_ranks(resumed, 2, tmp_path / "two", timeout=150):
        for through in (*found, expected[1]):
            for row, other in zip(through, expected[0], strict=True):
                assert row == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        pytest.param("gpt2", True, id="gpt2-merge_adapter", marks=pytest.mark.rare),
        pytest.param("llama", False, id="llama-merge_and_unload"),
        pytest.param("gpt2", False, id="gpt2-merge_and_unload", marks=pytest.mark.rare),
        pytest.param("llama", True, id="llama-merge_adapter", marks=pytest.mark.rare),
    ],
)
def test_merged_lora_costs_nothing_more(family: str, kept: bool) -> None:
    """The product is in the weights: it costs and gives what the model without adapters does."""
    model, inputs = adapted(family)
    model.merge_adapter() if kept else (model := model.merge_and_unload())
    model.requires_grad_()
    report = autotp.verify(model, 2, example_inputs=inputs)
    assert report.ok, report
    found, expected = report.plan.traffic, trial(family, plain=True).plan.traffic
    assert (found.forward, found.backward, found.forward_bytes) == (
        expected.forward, expected.backward, expected.forward_bytes,
    )  # fmt: skip


@pytest.mark.rare
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_lora_of_other_kinds_equals_one_device(family: str) -> None:
    """Of the rank's square root; of embeddings and head; whole modules trained beside; biases too."""
    head = {"gpt2": ["wte"], "llama": ["embed_tokens", "lm_head"]}[family]
    for given in (
        {"use_rslora": True, "bias": "lora_only"},
        {"target_modules": [*TARGETS[family], *head]},
        {"modules_to_save": head[-1:]},
    ):
        model, inputs = adapted(family, **given)
        report = autotp.verify(model, 2, example_inputs=inputs)
        assert report.ok, (given, report)


# ---- what is cut, and what it costs


@cache
def trial(family: str, plain: bool = False) -> Trial:
    model, inputs = tiny(family) if plain else adapted(family)
    return make_trial(model, (), inputs, 2)


COLUMNS = {"c_attn", "c_fc", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


@on_both
def test_adapters_are_cut_by_their_layers_axes(family: str) -> None:
    """`B` of a column-parallel layer on its output, `A` of a row-parallel one on its input; the rank nowhere."""
    layouts = {name: layout for name, layout in trial(family).analysis.layouts.items() if "lora_" in name}
    assert len(layouts) == 2 * 2 * len(TARGETS[family]) + (4 if family == "gpt2" else 0)  # two modules are a c_proj
    for name, layout in layouts.items():
        layer, which = name.split(".")[-4], name.split(".")[-3]
        where = {"lora_A": None, "lora_B": 0} if layer in COLUMNS else {"lora_A": 1, "lora_B": None}
        assert layout.dim == where[which], name
        assert layout.dim is None or layout.shape[layout.dim] != RANK


@on_both
def test_lora_needs_one_reduction_for_layer_and_adapter(family: str) -> None:
    """Forward as without adapters; backward one all-reduce more in each of the two layers.

    An adapter has one matrix that is whole on every rank, and of which every rank uses a part: a column-parallel
    layer's `B` is cut and reads all of `A(x)`, a row-parallel layer's `A` gives every rank a partial sum, of which
    `B` makes another. The gradient of the whole matrix is a sum over ranks, and those of a layer travel together.
    """
    plain, lora = (trial(family, plain).plan.traffic for plain in (True, False))
    assert lora.forward == plain.forward
    assert lora.backward == {"all-reduce": plain.backward["all-reduce"] + 2}


# ---- training


@checks.on(2)
@checks.on(3, rare=True)
def only_adapters_train(rank: int, n: int) -> None:
    """Gradients and parameters after steps of AdamW, its decay too, are one device's; nothing else has moved."""
    with all_double():  # transformers computes its losses in float32
        train_both("llama", rank, n)


@checks.on(2, 3, rare=True)
def only_adapters_of_fused_weights_train(rank: int, n: int) -> None:
    with all_double():
        train_both("gpt2", rank, n)


def train_both(family: str, rank: int, n: int) -> None:
    whole, inputs = adapted(family, dropout=0.1)
    whole.double()
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=inputs, randomness="exact")
    before = autotp.full_state_dict(parallel)
    models: tuple[nn.Module, ...] = whole, parallel
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in models]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(**inputs).loss.backward()
        expect_gradients(whole, parallel)
        for optimizer in optimizers:
            optimizer.step()
    after = autotp.full_state_dict(parallel)
    for name, tensor in whole.state_dict().items() if rank == 0 else ():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
        assert torch.equal(after[name], before[name]) == ("lora_" not in name), name


def expect_gradients(whole: nn.Module, parallel: Any) -> None:
    """Adapters have one device's, to 1e-12 of the largest; nothing else has any."""
    scale = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    for (name, a), b in zip(whole.named_parameters(), parallel.parameters(), strict=True):
        assert (b.grad is None) == (a.grad is None) == ("lora_" not in name), name
        if a.grad is not None:
            mine = a.grad
            assert a.grad.any(), name
            torch.testing.assert_close(b.grad, mine, rtol=0, atol=1e-12 * scale, msg=lambda m, n=name: f"{n}: {m}")


@checks.on(2)
def adapters_alone_are_gathered(rank: int, n: int) -> None:
    whole, parallel = llama_and_twin(n)
    found = autotp.full_state_dict(parallel, lambda name: "lora_" in name)
    expected = {name: tensor for name, tensor in whole.state_dict().items() if "lora_" in name and rank == 0}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
