"""distribute(ep=): mixtures of transformers train as one device does, and are read from folders by their ranks."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from errors import message
from hugging_face import expect_same, files_of
from ranks import Checks, shared
from small_models import assert_values_close
from torch import Tensor

import autotp
from autotp.integrations.transformers.files.safetensors_files import Stored

transformers: Any = pytest.importorskip("transformers")
checks = Checks(timeout=280, fresh=True)  # torch caches device meshes with the groups of the run before.
CLOSE = {"rtol": 0, "atol": 1e-7}
"""Norms, routers and losses of transformers compute in float32; `test_experts_over_replicas.py` has 1e-10."""
OF_LOSS = {"rtol": 2**-21, "atol": 0}
"""A loss is a number of float32, a sum over up to eight parts: four units in its last place."""
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
FOUR: dict[str, Any] = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
WIDTHS: dict[str, Any] = SIZES | {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
DEEPSEEK: dict[str, Any] = WIDTHS | {
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", FOUR),
    "qwen3_moe": ("Qwen3Moe", WIDTHS | {"num_experts": 4, "head_dim": 8}),
    "olmoe": ("Olmoe", SIZES | {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),  # A shared expert; a sigmoid router with a bias; one layer is dense.
    "gpt_oss": ("GptOss", FOUR | {"head_dim": 8}),
    "granite": ("GraniteMoe", FOUR),
    "ernie": ("Ernie4_5_Moe", SIZES | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12}),
    "qwen2_moe": ("Qwen2Moe", WIDTHS | {"num_experts": 4, "shared_expert_intermediate_size": 12}),
    "glm4_moe": ("Glm4Moe", WIDTHS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": 8}),
}


def of_class(name: str, **more: Any) -> Any:
    head, sizes = FAMILIES[name]
    return getattr(transformers, f"{head}ForCausalLM")(getattr(transformers, f"{head}Config")(**sizes | more))


def built(name: str, **more: Any) -> Any:
    """A model in float64 that loops over its experts: it needs no product in groups, which has no float64."""
    torch.manual_seed(0)
    model = of_class(name, **more)
    model.set_experts_implementation("eager")
    return model.double().train()


def rows(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(1, 64, (8, 6), generator=torch.Generator().manual_seed(step))[: 8 - 4 * (step == 1)]
    return {"input_ids": tokens, "labels": tokens}


def trains_as_one_device(name: str, kernel: str, **layout: Any) -> None:
    """Three steps: the loss, every gradient, and at last the parameters."""
    whole = built(name)
    model = copy.deepcopy(whole)
    model.set_experts_implementation(kernel)
    example = {key: x[: 8 // (layout["dp"] * layout.get("microbatches", 1))] for key, x in rows(0).items()}
    trainer = autotp.distribute(model, example_inputs=example, **layout)
    replica, of_one = trainer.mesh["dp"].get_local_rank(), dict(whole.named_parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-4) for m in (whole, trainer)]
    for step in range(3):
        batch = rows(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole(**batch).loss.backward()
        trainer.step(**{key: x.chunk(layout["dp"])[replica] for key, x in batch.items()})
        for key, parameter in trainer.named_parameters():
            assert (parameter.grad is None) == (of_one[key].grad is None), key
            if parameter.grad is not None:
                grad: Any = parameter.grad
                text = f"{name}, {key}: {{}}".format
                assert_values_close(grad.full_tensor(), of_one[key].grad, **CLOSE, msg=text)
        for optimizer in optimizers:
            optimizer.step()
    state = autotp.full_state_dict(trainer)
    for key, tensor in whole.state_dict().items() if not torch.distributed.get_rank() else ():
        assert_values_close(state[key], tensor, **CLOSE)


def of_family(name: str, kernel: str = "grouped_mm", rare: bool = True) -> Callable[[int, int], None]:
    def check(rank: int, n: int) -> None:
        trains_as_one_device(name, kernel, dp=2, ep=2)

    check.__name__ = check.__qualname__ = f"{name}_with_{kernel}_trains_as_one_device".replace("-", "_")
    globals()[check.__name__] = check  # It is sent to ranks by its name.
    return checks.on(2, rare=rare)(check)


for family in FAMILIES:
    of_family(family, rare=family not in ("mixtral", "deepseek_v3"))
of_family("qwen3_moe", "batched_mm", rare=False)  # transformers#48687: routers had wrong gradients with this kernel.


# ---- all layouts


class Step(NamedTuple):
    """What one device computes in a step, and with the parameters after it."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    norm: Tensor
    evaluated: Tensor


def layouts_of(ranks: int) -> list[dict[str, int]]:
    """All of tp, cp, pp, dp and ep on a number of ranks."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    axes = ("tp", "cp", "pp", "dp")
    meshes = [dict(zip(axes, row, strict=True)) for row in product(sizes, repeat=4) if math.prod(row) == ranks]
    # DeepSeek has eight experts in two groups, and the others have four.
    return [mesh | {"ep": ep} for mesh in meshes for ep in (1, 2, 4) if mesh["dp"] * mesh["cp"] % ep == 0]


def steps_of_one_device(whole: Any) -> list[Step]:
    """Three steps of AdamW on a balanced loss, with clipping. A small `eps` would enlarge the round-off of float32."""
    optimizer, steps = torch.optim.AdamW(whole.parameters(), lr=0.01, eps=0.01), []
    for number in range(3):
        optimizer.zero_grad()
        loss = whole(**rows(2 * number)).loss
        loss.backward()
        gradients = {key: None if p.grad is None else p.grad.clone() for key, p in whole.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():
            evaluated = whole.eval()(**rows(2 * number)).loss
        whole.train()
        steps.append(Step(loss.detach(), gradients, norm, evaluated))
    return steps


def expect_steps(name: str, model: Any, steps: list[Step], after: dict[str, Tensor], layout: dict[str, int]) -> None:
    """Loss, gradients, norm and evaluation of each step; at last parameters and buffers."""
    example = {key: x[: 8 // layout["dp"] // layout["pp"]] for key, x in rows(0).items()}
    torch.manual_seed(0)  # Replicas of the trainer before have seeds of their own.
    trainer = autotp.distribute(copy.deepcopy(model), microbatches=layout["pp"], example_inputs=example, **layout)
    optimizer, replica = torch.optim.AdamW(trainer.parameters(), lr=0.01, eps=0.01), trainer.mesh["dp"].get_local_rank()
    text = " ".join(f"{axis}={size}" for axis, size in layout.items())
    for number, step in enumerate(steps):
        batch = {key: x.chunk(layout["dp"])[replica] for key, x in rows(2 * number).items()}
        optimizer.zero_grad()
        where = f"{name}, {text}, step {number}: {{}}"
        assert_values_close(trainer.step(**batch), step.loss, **OF_LOSS, msg=f"loss of {where}".format)
        for key, parameter in trainer.named_parameters():
            grad: Any = parameter.grad
            assert (grad is None) == (step.gradients[key] is None), f"{key} of {where}"
            if grad is not None:
                whole_grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                assert_values_close(whole_grad, step.gradients[key], **CLOSE, msg=f"{key} of {where}".format)
        assert_values_close(autotp.clip_grad_norm_(trainer, 0.5), step.norm, **CLOSE, msg=f"norm of {where}".format)
        optimizer.step()
        assert_values_close(trainer.evaluate(**batch), step.evaluated, **OF_LOSS, msg=f"evaluation of {where}".format)
    state = autotp.full_state_dict(trainer)
    for key, tensor in after.items() if not torch.distributed.get_rank() else ():
        assert_values_close(state[key], tensor, **CLOSE, msg=f"{key} of {name}, {text}: {{}}".format)


def in_all_layouts(name: str, ranks: int) -> None:
    by_layers = {max(2, layout["pp"]): list[dict[str, int]]() for layout in layouts_of(ranks)}
    for layout in layouts_of(ranks):
        by_layers[max(2, layout["pp"])].append(layout)  # Each stage of a pipeline has a block.
    for layers, layouts in by_layers.items():
        whole = built(name, num_hidden_layers=layers, **BALANCED.get(name, {}))
        model = copy.deepcopy(whole)
        model.set_experts_implementation("grouped_mm")
        steps = steps_of_one_device(whole)
        for layout in layouts:
            expect_steps(name, model, steps, whole.state_dict(), layout)


AUX: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
BALANCED = dict.fromkeys(("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granite", "qwen2_moe"), AUX)
every_layout = Checks(timeout=3000, fresh=True)


def family_in_all_layouts(name: str, ranks: int) -> None:
    def check(rank: int, n: int) -> None:
        in_all_layouts(name, n)

    check.__name__ = check.__qualname__ = f"{name}_in_all_layouts_of_{ranks}_ranks"
    globals()[check.__name__] = check
    every_layout.on(ranks, rare=True)(check)


for family in FAMILIES:
    for ranks in (4, 8):
        family_in_all_layouts(family, ranks)


@checks.on(4)
def stages_of_a_pipeline_send_rows_to_their_replicas(rank: int, n: int) -> None:
    trains_as_one_device("mixtral", "grouped_mm", dp=2, ep=2, pp=2, microbatches=2)


@contextmanager
def counted_reads() -> Iterator[Counter[bool]]:
    """A region that counts the bytes that this rank reads of experts (True), and of all else."""
    counted, read = Counter[bool](), Stored.read

    def counting(stored: Stored, box: Any) -> Tensor:
        counted[".experts." in stored.name] += math.prod(b - a for a, b in box) * stored.dtype.itemsize
        return read(stored, box)

    with patch.object(Stored, "read", counting):
        yield counted


@checks.on(2)
def folders_are_read_and_written_by_experts(rank: int, n: int) -> None:
    """Each rank reads the rows of its experts, which the files have one by one, or in stacks; all write the whole."""
    example = {key: x[:4] for key, x in rows(0).items()}
    for name in ("mixtral", "gpt_oss"):
        folder, written, whole = shared(rank) / "read", shared(rank) / "written", built(name)
        if rank == 0:
            whole.save_pretrained(folder)
        torch.distributed.barrier()
        with counted_reads() as counted:
            trainer = autotp.distribute(str(folder), dp=2, ep=2, example_inputs=example)
        sizes = Counter[bool]()
        for path, tensor in whole.named_parameters():
            sizes[".experts." in path] += tensor.nbytes
        assert counted == {True: sizes[True] / 2, False: sizes[False]}, name
        state = autotp.full_state_dict(trainer)
        for path, tensor in whole.state_dict().items() if rank == 0 else ():
            assert torch.equal(state[path], tensor), path
        autotp.save_pretrained(trainer, written)
        if rank == 0:
            expect_same(files_of(written), files_of(folder))


@checks.on(2)
def a_trainer_generates_by_both_ways_of_its_error(rank: int, n: int) -> None:
    """The tokens are those of one device with the parameters that the trainer has."""
    folder, model, parallel = shared(rank) / "trained", of_class("mixtral"), of_class("mixtral")
    example = {key: x[:4] for key, x in rows(0).items()}
    trainer = autotp.distribute(model, dp=2, ep=2, example_inputs=example)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.5)
    for step in range(3):
        trainer.step(**{key: x.chunk(2)[rank] for key, x in rows(step).items()})
        optimizer.step()
        optimizer.zero_grad()
    tokens, how = rows(0)["input_ids"][:2], {"do_sample": False, "max_new_tokens": 6, "use_cache": True}
    error = message(trainer.generate, tokens)
    assert "autotp.load_full_state_dict(model, autotp.full_state_dict(trainer))" in error
    assert "autotp.save_pretrained(trainer, path), and autotp.from_pretrained(path, tp)" in error
    parallel = autotp.parallelize(parallel, 2)
    untrained = parallel.generate(tokens, **how)
    autotp.load_full_state_dict(parallel, autotp.full_state_dict(trainer))
    generated = parallel.generate(tokens, **how)
    autotp.save_pretrained(trainer, folder)
    again = autotp.from_pretrained(folder, 2).generate(tokens, **how)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = whole.generate(tokens, **how)
    assert torch.equal(generated, expected) and torch.equal(again, expected)
    assert not torch.equal(untrained, expected)


@checks.on(2)
def a_model_on_meta_draws_what_one_device_draws(rank: int, n: int) -> None:
    def on_meta(**layout: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = of_class("qwen3_moe")
        torch.manual_seed(7)
        example = {key: x[:4] for key, x in rows(0).items()}
        return autotp.full_state_dict(autotp.distribute(model, example_inputs=example, **layout))

    state, expected = on_meta(dp=2, ep=2), on_meta(dp=2)
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


@pytest.mark.timeout(3100)
@pytest.mark.parametrize(("n", "name"), every_layout.cases())
def test_families_in_all_layouts(n: int, name: str) -> None:
    every_layout.expect(n, name)
