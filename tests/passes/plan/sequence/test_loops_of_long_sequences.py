"""Around a model whose sequences are cut: generation after training, its files, other layouts, transformers.Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_models import gpt
from torch import Tensor, nn

import autotp

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.system


def gpt2() -> Any:
    sizes = {"n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 4, "pad_token_id": 0, "eos_token_id": 60}
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _seeded(transformers.GPT2LMHeadModel, transformers.GPT2Config(vocab_size=61, **sizes, **without))


def llama() -> Any:
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=61, **sizes, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=60
    )
    return _seeded(transformers.LlamaForCausalLM, config)


def _seeded(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return kind(config)


MODELS = {"gpt2": gpt2, "llama": llama}


def tokens(rows: int = 2, seed: int = 3) -> Tensor:
    return torch.randint(61, (rows, 9), generator=torch.Generator().manual_seed(seed))


def trained_and_used(rank: int, n: int, name: str, layout: tuple[int, int], folder: str) -> None:
    tp, cp = layout
    x = tokens()
    whole = MODELS[name]()
    cut: Any = autotp.parallelize(MODELS[name](), tp, cp=cp, example_inputs={"input_ids": x, "labels": x})
    for model in (whole, cut):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(input_ids=x, labels=x).loss.backward()
            if model is cut:
                autotp.clip_grad_norm_(model, 0.5)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
    same_tokens(whole, cut, x)
    near = {"rtol": 1e-4, "atol": 1e-5}
    expected = whole(input_ids=x).logits
    torch.testing.assert_close(autotp.gather(cut(input_ids=x).logits), expected, **near)
    cut.save_pretrained(folder)
    for again in (autotp.from_pretrained(folder, tp=n), autotp.from_pretrained(folder, tp=1, cp=n)):
        torch.testing.assert_close(autotp.gather(again(input_ids=x).logits), expected, **near)
    if rank == 0:
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(plain(input_ids=x).logits, expected, **near)


def same_tokens(whole: Any, cut: Any, x: Tensor) -> None:
    """The tokens of one device: the likeliest with each kind of cache, and drawn ones."""
    ways: list[dict[str, Any]] = [{}, {"use_cache": False}, {"cache_implementation": "static"}]
    for how in [*({"do_sample": False, **way} for way in ways), {"do_sample": True, "top_k": 10}]:
        found = []
        for model in (whole, cut):
            torch.manual_seed(4)
            found.append(model.generate(x[:, :4], max_new_tokens=9, **how))
        assert torch.equal(*found), how


@pytest.mark.parametrize("layout", [(1, 2), pytest.param((2, 2), marks=pytest.mark.rare)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_over_cp_generate_and_save_after_training(name: str, layout: tuple[int, int], tmp_path: Path) -> None:
    run_ranks(trained_and_used, layout[0] * layout[1], name, layout, str(tmp_path / "saved"), timeout=110)


SIZES = {"block_size": 16, "vocab_size": 61, "n_layer": 4, "n_head": 4, "n_embd": 16}


def goes_on(rank: int, n: int, layout: dict[str, Any], folder: str) -> Any:
    """Loads what another layout saved, trains three steps and saves."""
    x = tokens(8)
    trainer = autotp.distribute(gpt(seed=0, **SIZES).double(), **layout, example_inputs=(x[:2], x[:2]))
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    replicas = trainer.mesh["dp"]
    mine = x.chunk(replicas.size())[replicas.get_local_rank()]
    start = autotp.load_checkpoint(folder, trainer, optimizer)
    for _ in range(3):
        trainer.step(mine, mine)
        optimizer.step()
        optimizer.zero_grad()
    autotp.save_checkpoint(folder, trainer, optimizer, step=start + 3)
    state = autotp.full_state_dict(trainer)
    return state if rank == 0 else None


def test_a_checkpoint_over_cp_resumes_in_other_layouts(tmp_path: Path) -> None:
    whole, x = gpt(seed=0, **SIZES).double(), tokens(8)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    layouts: list[dict[str, Any]] = [
        {"cp": 2, "dp": 2, "zero": 1}, {"tp": 2, "cp": 2}, {"cp": 2, "pp": 2, "microbatches": 2}, {"tp": 4}, {"cp": 4},
    ]  # fmt: skip
    for layout in layouts:
        state = run_ranks(goes_on, 4, layout, str(tmp_path / "saved"), timeout=100)[0]
        for _ in range(3):
            whole(x, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, tensor in whole.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9, msg=f"{layout} {name}")


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = tokens(1, i)[0]
        return {"input_ids": row, "labels": row}


def losses_of_trainer(rank: int, n: int, layout: tuple[int, int] | None, batch: int, folder: str) -> list[float]:
    """The losses of transformers.Trainer: on tp x cp ranks and their replicas, or on one device (None)."""
    model, x = gpt2(), tokens()
    if layout is not None:
        model = autotp.parallelize(model, layout[0], cp=layout[1], example_inputs={"input_ids": x, "labels": x})
    else:
        dist.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    arguments = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=batch, max_steps=4, learning_rate=1e-2, report_to=[], seed=1,
        save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
        optim="sgd",
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("layout", "ranks", "batch"),
    [((1, 2), 2, 4), ((1, 2), 4, 8), pytest.param((2, 2), 4, 4, marks=pytest.mark.rare)],
    ids=["cp", "cp and replicas", "tp and cp"],
)
def test_transformers_trainer_over_cp_has_one_device_s_losses(
    layout: tuple[int, int], ranks: int, batch: int, tmp_path: Path
) -> None:
    """The ranks of one model have the same rows; replicas divide them."""
    alone = run_ranks(losses_of_trainer, 1, None, batch, str(tmp_path / "one"), timeout=100)[0]
    replicas = ranks // (layout[0] * layout[1])
    for found in run_ranks(losses_of_trainer, ranks, layout, batch // replicas, str(tmp_path / "many"), timeout=100):
        assert found in ([], pytest.approx(alone, abs=2e-4))
    assert len(alone) == 4


def steps_of_accelerate(rank: int, n: int, tp: int) -> tuple[list[float], Any]:
    """The losses of a loop with accelerate, on tp x 2 ranks and their replicas; and the whole state, on one rank."""
    accelerate = pytest.importorskip("accelerate")
    accelerator, x = accelerate.Accelerator(cpu=True), tokens()
    model = autotp.parallelize(llama().double(), tp, cp=2, example_inputs={"input_ids": x, "labels": x})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows: Any = torch.utils.data.DataLoader(Rows(), batch_size=8 // (n // (2 * tp)))
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    losses = []
    for batch in rows:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
    state = accelerator.get_state_dict(model)
    return losses, state if rank == 0 else None


@pytest.mark.parametrize(("tp", "ranks"), [(1, 4), pytest.param(2, 4, marks=pytest.mark.rare)], ids=["replicas", "tp"])
def test_accelerate_over_cp_steps_as_one_device(tp: int, ranks: int) -> None:
    """As one device: the ranks of one model have the same rows, and replicas divide them."""
    alone, losses = llama().double(), []
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(Rows(), batch_size=8):
        losses.append(alone(**batch).loss)
        losses[-1].backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    every = run_ranks(steps_of_accelerate, ranks, tp, timeout=100)
    for found, _ in every:
        assert found == pytest.approx([loss.item() for loss in losses], abs=1e-6)
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(every[0][1][name], tensor, rtol=1e-7, atol=1e-8)
