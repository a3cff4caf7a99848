"""adapters: peft around a model that is parallel already, and in it: equal to one device, or one Error."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hugging_face import RANK, TARGETS, expect_close, tiny
from ranks import Checks, run_ranks
from torch import nn

import autotp
from autotp.diagnostics.double import all_double
from autotp.distributed.live_models import models
from autotp.integrations.transformers.adapters import _undone_on_failure

peft = pytest.importorskip("peft")
checks = Checks()


def lora(family: str = "llama", **given: Any) -> Any:
    settings = {"target_modules": TARGETS[family], "fan_in_fan_out": family == "gpt2", "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**({"r": RANK, "lora_alpha": 8} | settings | given))


def around(model: Any, config: Any) -> Any:
    """What a user writes, with adapters that change what the model computes."""
    torch.manual_seed(5)
    return noisy(peft.get_peft_model(model, config))


def noisy(model: Any) -> Any:
    """New adapters begin as zero: those of the active adapter are changed, each by the same numbers in each layout."""
    generator = torch.Generator().manual_seed(7)
    for name, p in model.named_parameters():
        if p.requires_grad and "modules_to_save" not in name:
            with torch.no_grad():
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.3)
    return model.train()


def parallel(model: Any) -> bool:
    return isinstance(model, autotp.ParallelModule)


def pair(n: int, config: Any, family: str = "llama", **given: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A model of one device under adapters, a parallel model under the same adapters, and the arguments of a call."""
    base, inputs = tiny(family)
    base.double()
    cut = autotp.parallelize(copy.deepcopy(base), n, example_inputs=inputs, **given)
    whole, other = around(base, copy.deepcopy(config)), around(cut, copy.deepcopy(config))
    assert parallel(other) and not parallel(cut) and models()[-1] is other
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in whole.named_parameters()]
    return whole, other, inputs


def expect_equal(whole: Any, other: Any, inputs: Any) -> None:
    """The loss, and the gradients: the same parameters have one, each the part of one device's."""
    losses = []
    for model in (whole, other):
        model.zero_grad()
        torch.manual_seed(3)
        losses.append(model(**inputs).loss)
        if losses[-1].requires_grad:
            losses[-1].backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-12)
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in other.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-12)


def step(model: Any) -> None:
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()


def equal_around(n: int, config: Any, family: str = "llama") -> Any:
    """Two steps."""
    with all_double():
        whole, other, inputs = pair(n, config, family, randomness="exact")
        for _ in range(2):
            expect_equal(whole, other, inputs)
            step(whole)
            step(other)
        expect_equal(whole, other, inputs)
    return other


@checks.on(2)
@checks.on(3, rare=True)
def lora_is_equal_to_one_device(rank: int, n: int) -> None:
    """Each new parameter is whole. Those of gpt2's layers have sizes that peft reads from weights."""
    other = equal_around(n, lora(lora_dropout=0.1))
    new = [layout for name, layout in other.layouts.items() if "lora_" in name]
    assert len(new) == 2 * 2 * len(TARGETS["llama"]) and all(layout.dim is None for layout in new)
    assert any(layout.dim is not None for layout in other.layouts.values())
    equal_around(n, lora("gpt2"), "gpt2")


@checks.on(2)
def modules_that_are_copied_stay_cut(rank: int, n: int) -> None:
    """`modules_to_save` trains a copy of a part; it is a part, of this model."""
    other = equal_around(n, lora(modules_to_save=["lm_head"], bias="all"))
    copied = other.base_model.model.lm_head.modules_to_save["default"]
    layout = other.layout_of("base_model.model.lm_head.modules_to_save.default.weight")
    assert layout.dim is not None and copied.weight.to_local().shape == layout.local_shape(rank)
    assert vars(copied)["_autotp"].tree is vars(other)["_autotp"].tree


@checks.on(2, rare=True)
def other_adapters_are_equal(rank: int, n: int) -> None:
    kinds = {
        "vera": peft.VeraConfig(r=3, target_modules=["q_proj"]),
        "ia3": peft.IA3Config(target_modules=TARGETS["llama"], feedforward_modules=["down_proj"]),
        "hra": peft.HRAConfig(r=4, target_modules=TARGETS["llama"]),
        "prompts": peft.PromptTuningConfig(num_virtual_tokens=3),
        "oft": peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"]),
        "fourier": peft.FourierFTConfig(n_frequency=10, target_modules=["q_proj", "o_proj"]),
        "embeddings": lora(target_modules=["embed_tokens", "lm_head"], use_rslora=True),
    }
    for config in kinds.values():
        config.task_type = "CAUSAL_LM"
        equal_around(n, config)


@checks.on(2)
def adapters_of_values_are_equal(rank: int, n: int) -> None:
    """PiSSA takes singular values of a weight out of it. peft makes these in float32 only."""
    for given in ({"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}):
        base, inputs = tiny("llama")
        models = [base, autotp.parallelize(copy.deepcopy(base), n, example_inputs=inputs, randomness="exact")]
        for i, model in enumerate(models):
            torch.manual_seed(5)
            models[i] = peft.get_peft_model(model, lora(**given))
        for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(q, p, msg=lambda text, name=name: f"{name}: {text}")
        losses = [model(**inputs).loss for model in models]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
        for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            if p.requires_grad:
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5, msg=name)


@checks.on(2)
def adapters_of_cut_values_are_whole(rank: int, n: int) -> None:
    """Of rows of a table, and of DoRA's norms of layers that it leaves as they are cut."""
    for config in (
        lora(trainable_token_indices=[1, 5]),
        lora(target_modules=["embed_tokens", "lm_head", "down_proj"], use_dora=True),
    ):
        other = equal_around(n, config)
        new = {name: layout.dim for name, layout in other.layouts.items() if "default" in name}
        assert new and not any(dim is not None for dim in new.values())


# ---- what is refused


@checks.on(2)
def what_does_not_fit_is_refused(rank: int, n: int) -> None:
    """DoRA computes with whole weights in each call. Where peft fails, the model is as before."""
    base, inputs = tiny("llama")
    cut = autotp.parallelize(copy.deepcopy(base), n, example_inputs=inputs)
    names, flags = [name for name, _ in cut.named_modules()], [p.requires_grad for p in cut.parameters()]
    loss = cut(**inputs).loss.item()
    for given, told in (
        ({"target_modules": ["no_such_layer"]}, "Target modules"),
        ({"init_lora_weights": "orthogonal"}, "rank to be even"),
    ):
        with pytest.raises(ValueError, match=told):
            peft.get_peft_model(cut, lora(**given))
        assert [name for name, _ in cut.named_modules()] == names and not hasattr(cut, "peft_config")
        assert [p.requires_grad for p in cut.parameters()] == flags and parallel(cut) and models()[-1] is cut
        assert cut(**inputs).loss.item() == loss
    assert peft.get_peft_model(cut, lora())(**inputs).loss.item() == pytest.approx(loss, rel=1e-6)
    other = peft.get_peft_model(autotp.parallelize(base, n, example_inputs=inputs), lora(use_dora=True))
    with pytest.raises(autotp.Error, match=r"does not fit its cut(.|\n)*as peft does, before autotp.parallelize"):
        other(**inputs)


@checks.on(2)
def prompts_are_not_switched_off(rank: int, n: int) -> None:
    base, inputs = tiny("llama")
    prompts = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    other = peft.get_peft_model(autotp.parallelize(base, n, example_inputs=inputs), prompts)
    with pytest.raises(autotp.Error, match="prompts of a parallel model are not switched off"):
        other.disable_adapter()


# ---- adapters that are switched, added and counted


def switched(n: int, first: bool) -> Any:
    """Off and on again, to another one, which is added later, and back; `first`: peft before autotp."""
    with all_double():
        base, inputs = tiny("llama")
        base.double()
        plain = base(**inputs).loss.item()
        whole = around(copy.deepcopy(base), lora())
        if first:
            other = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=inputs)
        else:
            other = around(autotp.parallelize(base, n, example_inputs=inputs), lora())
        for model in (whole, other):
            with model.disable_adapter(), torch.no_grad():
                assert model(**inputs).loss.item() == pytest.approx(plain, rel=1e-12)
        expect_equal(whole, other, inputs)
        for model in (whole, other):
            torch.manual_seed(9)
            model.add_adapter("second", lora(r=2, target_modules=["q_proj", "o_proj"]))
            model.set_adapter("second")
            noisy(model)
        expect_equal(whole, other, inputs)
        layouts = {name.partition(".layers.0.self_attn.")[2]: layout.dim for name, layout in other.layouts.items()}
        for model in (whole, other):
            model.set_adapter("default")
            model.delete_adapter("second")
        expect_equal(whole, other, inputs)
        assert not any(".second." in name for name in other.layouts)
    return [layouts[f"{name}.second.weight"] for name in ("q_proj.lora_A", "q_proj.lora_B", "o_proj.lora_A")]


@checks.on(2)
def adapters_in_a_parallel_model_are_switched(rank: int, n: int) -> None:
    """A new one is cut as the others are."""
    assert switched(n, True) == [None, 0, 1]


@checks.on(2)
def adapters_around_a_parallel_model_are_switched(rank: int, n: int) -> None:
    assert switched(n, False) == [None] * 3


@checks.on(2)
def counts_are_of_the_whole(rank: int, n: int) -> None:
    base, inputs = tiny("llama")
    whole = peft.get_peft_model(copy.deepcopy(base), lora())
    for other in (
        peft.get_peft_model(autotp.parallelize(copy.deepcopy(base), n, example_inputs=inputs), lora()),
        autotp.parallelize(copy.deepcopy(whole), n, example_inputs=inputs),
    ):
        assert other.get_nb_trainable_parameters() == whole.get_nb_trainable_parameters()
        assert other.get_model_status() == whole.get_model_status()
        assert other.get_layer_status() == whole.get_layer_status()


# ---- the parallel model itself


@checks.on(2)
def the_outer_model_is_the_parallel_one(rank: int, n: int) -> None:
    """It is of peft's class, and copied as a parallel model; the inner one is a part, which can be called itself."""
    base, inputs = tiny("llama")
    plain = base(**inputs).loss.item()
    cut = autotp.parallelize(base, n, example_inputs=inputs)
    other = peft.get_peft_model(cut, lora(target_modules=["q_proj"]))
    assert isinstance(other, peft.PeftModelForCausalLM) and type(other) == peft.PeftModelForCausalLM  # noqa: E721
    assert other.get_base_model() is cut and type(cut).__name__ == "LlamaForCausalLM"
    assert other.mesh.size == n
    assert cut(**inputs).loss.item() == pytest.approx(plain, rel=1e-6)
    copied = copy.deepcopy(other)
    noisy(copied)
    assert copied(**inputs).loss.item() != pytest.approx(plain, rel=1e-6)
    assert other(**inputs).loss.item() == pytest.approx(plain, rel=1e-6)
    assert other.plan.traffic.forward


@checks.on(2)
def what_ran_around_a_call_goes_on(rank: int, n: int) -> None:
    """A hook on the parallel model runs in the outer one. Functions of a loop around its calls would be lost."""
    base, inputs = tiny("llama")
    base.register_forward_hook(lambda module, args, output: 2 * output.loss)
    expected = base(**inputs).item()
    cut = autotp.parallelize(tiny("llama")[0], n, example_inputs=inputs)
    handle = cut.register_forward_hook(lambda module, args, output: 2 * output.loss)
    assert cut(**inputs).item() == pytest.approx(expected, rel=1e-6)
    other = peft.get_peft_model(cut, lora(target_modules=["q_proj"]))
    assert other(**inputs).item() == pytest.approx(expected, rel=1e-6)
    handle.remove()
    assert other(**inputs).loss.item() == pytest.approx(expected / 2, rel=1e-6)
    accelerate = pytest.importorskip("accelerate")
    cut = autotp.parallelize(tiny("llama")[0], n, example_inputs=inputs)
    cut = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(cut)
    with pytest.raises(autotp.Error, match="go through functions of a training loop"):
        peft.get_peft_model(cut, lora())
    assert parallel(cut) and "peft_config" not in vars(cut)
    cut(**inputs)


@checks.on(2)
def transformers_puts_adapters_in(rank: int, n: int) -> None:
    """`model.add_adapter` of transformers' own."""
    base, inputs = tiny("gpt2")
    base.eval()
    cut: Any = autotp.parallelize(copy.deepcopy(base), n, example_inputs=inputs)
    losses = []
    for model in (base, cut):
        torch.manual_seed(5)
        model.add_adapter(lora("gpt2", init_lora_weights=False))  # type: ignore[operator]
        losses.append(model(**inputs).loss)
        losses[-1].backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for (name, p), other in zip(base.named_parameters(), cut.parameters(), strict=True):
        assert (p.grad is None) == (other.grad is None) == ("lora_" not in name), name
        if p.grad is not None:
            torch.testing.assert_close(other.grad, p.grad, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_is_recomputation() -> None:
    """peft's model passes the calls of a Trainer on to the model in it, and has no inputs that need gradients."""
    base, inputs = tiny("llama")
    cut = autotp.parallelize(peft.get_peft_model(base, lora()), 1, example_inputs=inputs)
    cut.gradient_checkpointing_enable()
    assert cut.recompute == "full" and cut.is_gradient_checkpointing
    cut.enable_input_require_grads()
    cut(**inputs).loss.backward()
    cut.gradient_checkpointing_disable()
    assert cut.recompute == "none" and not cut.is_gradient_checkpointing


# ---- files


def filed(rank: int, n: int, folder: Path) -> dict[str, Any]:
    """Adapters of one device are read around a parallel model, trained, and saved; one device reads them."""
    base, inputs = tiny("llama")
    config = lora(modules_to_save=["lm_head"])
    whole = around(copy.deepcopy(base), config)
    if rank == 0:
        whole.save_pretrained(folder / "one")
    dist.barrier()
    cut = autotp.parallelize(copy.deepcopy(base), n, example_inputs=inputs)
    other = peft.PeftModel.from_pretrained(cut, folder / "one", is_trainable=True, low_cpu_mem_usage=True)
    assert parallel(other)
    other.train()
    expect = whole(**inputs).loss.item()
    assert other(**inputs).loss.item() == pytest.approx(expect, rel=1e-6)
    for model in (whole, other):
        model(**inputs).loss.backward()
        step(model)
    other.save_pretrained(folder / "two")
    whole.save_pretrained(folder / f"rank-{rank}")
    other.load_adapter(folder / "one", "another")
    other.set_adapter("another")
    assert other.eval()(**inputs).loss.item() == pytest.approx(expect, rel=1e-6)
    dist.barrier()
    read = peft.PeftModel.from_pretrained(tiny("llama")[0], folder / "two").state_dict()
    expected = peft.PeftModel.from_pretrained(tiny("llama")[0], folder / f"rank-{rank}").state_dict()
    expect_close(read, expected)
    return {name: x for name, x in read.items() if "lora_" in name or "modules_to_save" in name}


def test_files_of_adapters_are_one_devices(tmp_path: Path) -> None:
    found = run_ranks(filed, 2, tmp_path, timeout=100)
    assert len(found[0]) == 2 * 2 * len(TARGETS["llama"]) + 1
    expect_close(found[1], found[0])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


def test_a_failure_leaves_tables_of_modules_as_they_were() -> None:
    model = nn.BatchNorm1d(3)
    model.register_forward_hook(print)
    before = {name: value.copy() for name, value in vars(model).items() if isinstance(value, dict | set)}
    with pytest.raises(ZeroDivisionError), _undone_on_failure(model):
        model.register_buffer("scaling", torch.ones(3), persistent=False)
        del model.running_mean
        model.register_forward_pre_hook(print)
        model._forward_hooks.clear()
        raise ZeroDivisionError
    assert {name: vars(model)[name] for name in before} == before
