"""Adapters of experts (peft's `target_parameters`) and of routers: they train as on one device, and are saved whole."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Checks, shared
from small_models import assert_values_close
from torch import Tensor

import autotp
from autotp.compiler import analyse
from autotp.options import DEFAULTS
from autotp.passes.capture.skeleton import skeleton_of

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")
checks = Checks(timeout=280, fresh=True)  # torch caches device meshes with the groups of the run before.
CLOSE, LOSS = {"rtol": 0, "atol": 1e-7}, {"rtol": 5e-7, "atol": 0}
"""Routers and losses of transformers compute in float32."""
STACKS, ROUTER = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "mlp.gate.weight"
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def mixture(kernel: str) -> Any:
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES))
    model.set_experts_implementation(kernel)
    return model.double().train()


def adapted(kernel: str) -> Any:
    """Adapters of all stacks of experts, of routers, and of a projection of attention, none of them zero."""
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=[*STACKS, ROUTER])
    model = peft.get_peft_model(mixture(kernel), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.double().train()


def twin(whole: Any, kernel: str) -> Any:
    """A copy that multiplies rows of experts in another way: torch has no product in groups in float64."""
    model = copy.deepcopy(whole)
    model.get_base_model().set_experts_implementation(kernel)
    return model


def rows(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(1, 64, (8, 6), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("kernel", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("experts", ["width", "expert"])
def test_adapters_are_cut_with_their_experts(experts: Any, kernel: str) -> None:
    """A stack and its adapter lie on the same ranks, and what is trained equals one device's."""
    model, settings = adapted(kernel), replace(DEFAULTS, experts=experts)
    report = autotp.verify(model, 2, example_inputs=rows(0), experts=experts)
    assert report.ok, report
    program = analyse(skeleton_of(model), (), rows(0), 2, settings)
    dims = [program.layouts[f"base_model.model.model.layers.0.{path}"].dim for path in NAMES]
    # By width, B of the first stack is cut along its output, and A of the second one along its input.
    assert dims == {"width": [1, 2, 0, 1], "expert": [0, 0, 1, 0]}[experts]


BASE = "mlp.experts.base_layer"
NAMES = (
    f"{BASE}.base_layer.gate_up_proj", f"{BASE}.base_layer.down_proj", f"{BASE}.lora_B.default.weight",
    "mlp.experts.lora_A.default.weight",
)  # fmt: skip


def ten_steps(model: Any, step: Any, optimizer: Any, whole: Any) -> None:
    """Trains a model on this rank's rows beside `whole` on all rows, and compares gradients and parameters."""
    of_one = dict(whole.named_parameters())
    reference = torch.optim.AdamW([p for p in whole.parameters() if p.requires_grad], lr=0.01, eps=1e-4)
    for number in range(10):
        batch = rows(number)
        reference.zero_grad()
        optimizer.zero_grad()
        expected = whole(**batch).loss
        expected.backward()
        assert_values_close(step(batch), expected.detach(), **LOSS)
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == ("lora_" not in name), name
            if parameter.grad is not None:
                grad = autotp.gather(parameter.grad)
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                assert_values_close(grad, of_one[name].grad, **CLOSE, msg=f"{name}: {{}}".format)
        reference.step()
        optimizer.step()


def trained(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def over_replicas(layout: dict[str, int], rank: int) -> None:
    whole = adapted("eager")
    example = {key: x[:4] for key, x in rows(0).items()}
    trainer = autotp.distribute(twin(whole, "grouped_mm"), example_inputs=example, **layout)
    replica, dp = trainer.mesh["dp"].get_local_rank(), layout["dp"]

    def step(batch: dict[str, Tensor]) -> Tensor:
        return trainer.step(**{key: x.chunk(dp)[replica] for key, x in batch.items()})

    ten_steps(trainer, step, torch.optim.AdamW(trained(trainer), lr=0.01, eps=1e-4), whole)
    stack = trainer.get_parameter(f"base_model.model.model.layers.0.{NAMES[0]}")
    assert len(stack.to_local()) == 2 and not stack.requires_grad
    state = autotp.full_state_dict(trainer)
    for name, tensor in whole.state_dict().items() if rank == 0 else ():
        assert_values_close(state[name], tensor, **CLOSE, msg=f"{name}: {{}}".format)
    folder = shared(rank)
    autotp.save_pretrained(trainer, folder)
    dist.barrier()
    read = peft.PeftModel.from_pretrained(mixture("eager"), folder)
    assert_values_close(read(**rows(0)).loss, whole(**rows(0)).loss, **LOSS)
    merged = read.merge_and_unload()
    assert_values_close(merged(**rows(0)).loss, whole(**rows(0)).loss, **LOSS)


@checks.on(2)
def adapters_of_experts_over_replicas_train_as_one_device(rank: int, n: int) -> None:
    over_replicas({"dp": 2, "ep": 2}, rank)


@checks.on(4)
def adapters_of_experts_over_replicas_and_tp_train_as_one_device(rank: int, n: int) -> None:
    """Experts that are cut over `ep`, and by width over `tp` (Megatron-Bridge#5634)."""
    over_replicas({"tp": 2, "dp": 2, "ep": 2}, rank)


@checks.on(2)
def adapters_of_cut_experts_train_as_one_device(rank: int, n: int) -> None:
    """By width, and by expert."""
    options: Any
    for options in ({"experts": "width"}, {"experts": "expert"}):
        whole = adapted("eager")
        parallel: Any = autotp.parallelize(twin(whole, "batched_mm"), n, example_inputs=rows(0), **options)

        def step(batch: dict[str, Tensor], parallel: Any = parallel) -> Tensor:
            loss: Tensor = parallel(**batch).loss
            loss.backward()
            return loss.detach()

        ten_steps(parallel, step, torch.optim.AdamW(trained(parallel), lr=0.01, eps=1e-4), whole)
        folder = shared(rank)
        autotp.save_pretrained(parallel, folder)
        dist.barrier()
        read = peft.PeftModel.from_pretrained(mixture("eager"), folder)
        assert_values_close(read(**rows(0)).loss, whole(**rows(0)).loss, **LOSS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
