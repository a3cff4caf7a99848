"""Trains on the cards as users do, and compares with one device: optimizers, precision, pipelines, replicas, files."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autotp
from first_day.checks import Check, Differs, Place, Skipped
from first_day.equal import (
    EXACT,
    SINGLE,
    Inputs,
    compiled,
    compiled_blocks,
    expect_equal,
    gpt,
    llama,
    no_change,
    stepped,
)

STEPS = 4


def plain_model(place: Place, make: Callable[[], tuple[nn.Module, Inputs]] = gpt, dtype: Any = torch.float64) -> Any:
    """Returns a model on the card and its batch, on the CPU, as a loader gives it."""
    torch.manual_seed(0)
    model, inputs = make()
    return model.to(place.device, dtype), inputs


def on_card(inputs: Inputs, place: Place) -> Inputs:
    """Returns the batch on the card."""
    return {name: x.to(place.device) for name, x in inputs.items()}


def trained(model: nn.Module, inputs: Inputs, make_optimizer: Callable[[Any], Any]) -> list[float]:
    """Returns the losses of a few steps, with gradients clipped."""
    optimizer, losses = make_optimizer(model.parameters()), []
    for _ in range(STEPS):
        losses.append(stepped(model, inputs).item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def optimizer(make_optimizer: Callable[[Any], Any], limit: float = 1e-7) -> Callable[[Place], str]:
    """Returns a check: the losses and the parameters after a few steps."""

    def check(place: Place) -> str:
        plain, inputs = plain_model(place)
        parallel = autotp.parallelize(copy.deepcopy(plain), device=place.device)
        expected = trained(plain, on_card(inputs, place), make_optimizer)
        actual = trained(parallel, inputs, make_optimizer)
        worst = expect_equal({"losses": torch.tensor(expected)}, {"losses": torch.tensor(actual)}, limit)
        whole = dict(plain.named_parameters())
        return f"losses {worst:.1e}, parameters {expect_equal(whole, autotp.full_state_dict(parallel), limit):.1e}"

    return check


def autocast(place: Place) -> str:
    """A step under bfloat16 beside the model's own under it: numbers of the same scale."""
    plain, inputs = plain_model(place, dtype=torch.float32)
    parallel = autotp.parallelize(copy.deepcopy(plain), device=place.device)
    with torch.autocast(place.device.type, torch.bfloat16):
        expected, actual = stepped(plain, on_card(inputs, place)), stepped(parallel, inputs)
    return f"loss {expect_equal({'loss': expected}, {'loss': actual}, 0.02):.1e} of 2e-02"


def scaler(place: Place) -> str:
    """float16 with GradScaler: a finite loss that falls, and one scale on all ranks."""
    plain, inputs = plain_model(place, dtype=torch.float32)
    parallel = autotp.parallelize(plain, device=place.device)
    scale = torch.amp.GradScaler(place.device.type)
    chosen = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        with torch.autocast(place.device.type, torch.float16):
            loss = parallel(**inputs)
        scale.scale(loss).backward()
        scale.unscale_(chosen)
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        scale.step(chosen)
        scale.update()
        chosen.zero_grad()
        losses.append(loss.item())
    scales: list[Any] = [None] * place.ranks
    dist.all_gather_object(scales, (scale.get_scale(), losses))
    if len({repr(each) for each in scales}) > 1 or not losses[-1] < losses[0]:
        raise Differs(f"scales and losses of the ranks: {scales}")
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"


def fast_dropout(change: Callable[[Any], Any]) -> Callable[[Place], str]:
    """Returns the check of dropout as it is by default: ranks agree on the loss, which is near that without dropout."""

    def check(place: Place) -> str:
        plain, inputs = plain_model(place, lambda: gpt(0.1))
        parallel = change(autotp.parallelize(copy.deepcopy(plain), device=place.device))
        loss = stepped(parallel, on_card(inputs, place))
        losses: list[Any] = [None] * place.ranks
        dist.all_gather_object(losses, loss.item())
        same = torch.tensor([loss.item()] * place.ranks)
        worst = expect_equal({"ranks": same}, {"ranks": torch.tensor(losses)}, 1e-12)
        near = expect_equal({"loss": stepped(plain.eval(), on_card(inputs, place))}, {"loss": loss}, 0.1)
        return f"ranks {worst:.0e}, near the loss without dropout: {near:.1e}"

    return check


def generate(place: Place) -> str:
    """Greedy and sampled tokens of a Llama, with left padding, are those of one card."""
    plain, inputs = plain_model(place, llama, torch.float32)
    prompt = {"input_ids": inputs["input_ids"][:2, :8], "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    prompt["attention_mask"][0, :3] = 0
    on = on_card(prompt, place)
    parallel = autotp.parallelize(copy.deepcopy(plain).eval(), device=place.device)
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
        torch.manual_seed(0)
        expected = plain.eval().generate(**on, max_new_tokens=16, pad_token_id=0, **options)
        torch.manual_seed(0)
        actual = parallel.generate(**on, max_new_tokens=16, pad_token_id=0, **options)
        if not torch.equal(expected, actual):
            raise Differs(f"tokens with {options}: {actual.tolist()} instead of {expected.tolist()}")
    return "greedy and sampled tokens are equal"


def trainer_bf16(place: Place) -> str:
    """`transformers.Trainer(bf16=True)`, then `generate`: all ranks choose the same tokens, of the whole vocabulary."""
    from transformers import Trainer, TrainingArguments

    plain, inputs = plain_model(place, llama, torch.float32)
    parallel = autotp.parallelize(plain, device=place.device)
    rows = [{"input_ids": row, "labels": row} for row in inputs["input_ids"].repeat(4, 1)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=3, per_device_train_batch_size=4, report_to=[], save_strategy="no", bf16=True,
            disable_tqdm=True, dataloader_pin_memory=True,
        )  # fmt: skip
        output = Trainer(model=parallel, args=arguments, train_dataset=rows).train()
    with torch.no_grad():
        whole = autotp.gather(parallel.eval()(input_ids=inputs["input_ids"][:1, :8].to(place.device)).logits)
    tokens = parallel.generate(inputs["input_ids"][:1, :8].to(place.device), max_new_tokens=8, do_sample=False)
    every: list[Any] = [None] * place.ranks
    dist.all_gather_object(every, (tokens.tolist(), whole[0, -1].argmax().item()))
    if len({repr(each) for each in every}) > 1 or tokens[0, 8].item() != every[0][1]:
        raise Differs(f"tokens of the ranks: {every}")
    return f"loss {output.training_loss:.3f}, the same tokens on all ranks"


def muon(place: Place) -> str:
    """Muon through `whole_matrices`: the loss of one device."""

    def make(parameters: Any) -> Any:
        return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01)

    plain, inputs = plain_model(place, dtype=torch.float32)
    parallel = autotp.parallelize(copy.deepcopy(plain), device=place.device)
    expected = trained(plain, on_card(inputs, place), make)
    actual = trained(parallel, inputs, lambda parameters: autotp.whole_matrices(torch.optim.Muon)(
        [p for p in parameters if p.dim() == 2], lr=0.01
    ))  # fmt: skip
    worst = expect_equal({"losses": torch.tensor(expected)}, {"losses": torch.tensor(actual)}, 1e-3)
    return f"losses {worst:.1e} of 1e-03"


def files(place: Place) -> str:
    """A saved model opens as it was, and a checkpoint of a trainer continues with the same losses."""
    plain, inputs = plain_model(place, llama, torch.float32)
    parallel = autotp.parallelize(copy.deepcopy(plain), device=place.device)
    trainer = autotp.distribute(plain, tp=place.ranks, microbatches=2)
    chosen = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
    folder = [tempfile.mkdtemp() if place.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    try:
        autotp.save_pretrained(parallel, f"{folder[0]}/model")
        opened = autotp.from_pretrained(f"{folder[0]}/model", device=place.device).train()
        losses = stepped(parallel, inputs), stepped(opened, inputs)
        _trainer_steps(trainer, chosen, inputs)
        autotp.save_checkpoint(f"{folder[0]}/training", trainer, chosen, trainer.steps)
        expected = _trainer_steps(trainer, chosen, inputs)
        autotp.load_checkpoint(f"{folder[0]}/training", trainer, chosen)
        again = _trainer_steps(trainer, chosen, inputs)
    finally:
        dist.broadcast_object_list(folder)  # All ranks have read.
        if place.rank == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    read = expect_equal({"opened": losses[0]}, {"opened": losses[1]}, SINGLE)
    continued = expect_equal({"continued": expected}, {"continued": again}, SINGLE)
    return f"losses of the opened model {read:.1e}, of the continued training {continued:.1e}"


def _trainer_steps(trainer: autotp.Trainer, optimizer: torch.optim.Optimizer, inputs: Inputs) -> torch.Tensor:
    """Returns the losses of a few steps."""
    losses = []
    for _ in range(STEPS):
        losses.append(trainer.step(**inputs))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def layouts(ranks: int) -> dict[str, dict[str, Any]]:
    """Returns the layouts of `distribute` that are tried on so many ranks, by name."""
    found: dict[str, dict[str, Any]] = {
        f"tp={ranks}": {"tp": ranks},
        f"pp={ranks} 1F1B": {"pp": ranks},
        f"pp={ranks} interleaved": {"pp": ranks, "schedule": "interleaved", "interleave": 2},
        f"pp={ranks} zero-bubble": {"pp": ranks, "schedule": "zero-bubble"},
        f"tp={ranks} sequence_parallel recompute=full": {"tp": ranks, "sequence_parallel": True, "recompute": "full"},
        **{f"dp={ranks} zero={zero}": {"dp": ranks, "zero": zero} for zero in range(4)},
    }
    if ranks >= 4:
        found["tp=2 pp=2"] = {"tp": 2, "pp": 2, "dp": ranks // 4}
        found["tp=2 dp zero=1"] = {"tp": 2, "dp": ranks // 2, "zero": 1}
    return found


def distribute(number: int) -> Callable[[Place], str]:
    """Returns the check of the layout of this number: losses and parameters after a few steps, batches on the CPU."""

    def check(place: Place) -> str:
        every = list(layouts(place.ranks).items())
        if number >= len(every):
            raise Skipped("there is no such layout on so few ranks")
        name, layout = every[number]
        plain, inputs = plain_model(place, lambda: _deep(place.ranks))
        parts = max(2, layout.get("pp", 1))
        trainer = autotp.distribute(copy.deepcopy(plain).cpu(), microbatches=parts, **layout)
        chosen, losses = torch.optim.AdamW(trainer.parameters(), lr=1e-3), []
        dp, replica = trainer.mesh["dp"].size(), trainer.mesh["dp"].get_local_rank()
        for _ in range(STEPS):
            losses.append(trainer.step(**{name: x.chunk(dp)[replica] for name, x in inputs.items()}).item())
            autotp.clip_grad_norm_(trainer, 1.0)
            chosen.step()
            chosen.zero_grad()
        expected = trained(plain, on_card(inputs, place), lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
        worst = expect_equal({"losses": torch.tensor(expected)}, {"losses": torch.tensor(losses)}, 1e-7)
        whole = expect_equal(dict(plain.named_parameters()), autotp.full_state_dict(trainer), 1e-6)
        return f"{name}: losses {worst:.1e}, parameters {whole:.1e}"

    return check


def _deep(ranks: int) -> tuple[nn.Module, Inputs]:
    """Returns a GPT with two blocks for each rank, for schedules with two stages on each, and a batch of 16 rows."""
    from autotp.models.gpt import GPT, GPTConfig

    x = torch.randint(257, (16, 32))
    sizes: dict[str, Any] = {"block_size": 32, "vocab_size": 257, "n_head": 8, "n_embd": 64, "dropout": 0.0}
    return GPT(GPTConfig(n_layer=2 * ranks, **sizes)), {"tokens": x, "labels": x.roll(-1, 1)}


def verified(place: Place) -> str:
    """`autotp.verify` of a model on the card."""
    plain, inputs = plain_model(place)
    report = autotp.verify(plain, tp=4, example_inputs=on_card(inputs, place))
    if not report.ok:
        raise Differs(str(report))
    return "equal to one device"


def adamw(**options: Any) -> Callable[[Any], Any]:
    """Returns what makes an AdamW with these options."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **options)


CHECKS = [
    Check("AdamW", optimizer(adamw())),
    Check("AdamW fused", optimizer(adamw(fused=True))),
    Check("SGD", optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1), EXACT)),
    Check("autocast bfloat16", autocast),
    Check("GradScaler float16", scaler),
    Check("dropout fast", fast_dropout(no_change)),
    Check("dropout fast, torch.compile", fast_dropout(compiled), seconds=150),
    Check("dropout fast, compile_blocks", fast_dropout(compiled_blocks()), seconds=150),
    Check("generate", generate, seconds=90),
    Check("Trainer bf16, generate", trainer_bf16, seconds=120),
    Check("Muon, whole_matrices", muon),
    Check("save_pretrained, checkpoints", files, seconds=90),
    Check("verify", verified, (1,), 90),
    *[Check(f"distribute {i}", distribute(i), (2, 4, 8), 90) for i in range(len(layouts(8)))],
]
