"""Mixed precision of training loops casts and wraps outputs: what is cut stays cut, and tokens are one device's."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hugging_face import LLAMA, Rows, on_cpu
from ranks import run_ranks
from small_models import assert_values_close
from torch import Tensor

import autotp
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.integrations.transformers import generation

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

NEW = 5


def llama() -> Any:
    """A Llama that follows word i by word i + 7, whatever its layers add: bfloat16 has no ties to break."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA | {"hidden_size": 64, "initializer_range": 0.01}, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(7, 0))
    return model


def is_parallel(model: Any) -> bool:
    return isinstance(model, autotp.ParallelModule)


def tokens_of(model: Any, **how: Any) -> list[list[int]]:
    prompt = {"input_ids": torch.tensor([[3, 40, 9], [90, 2, 55]]), "attention_mask": torch.ones(2, 3).long()}
    torch.manual_seed(1)
    prompt = {name: x.to(model.device) for name, x in prompt.items()}
    found = model.generate(**prompt, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0, **how)
    tokens: list[list[int]] = (found if isinstance(found, Tensor) else found.sequences).tolist()
    return tokens


FORMS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 2.0, "top_k": 3},
    "scores": {"do_sample": False, "output_scores": True, "return_dict_in_generate": True},
}


def forms_of(model: Any) -> dict[str, list[list[int]]]:
    """The tokens of each form of decoding. Those of a parallel model are chosen from cut logits."""
    got: list[type] = []

    def noted(processors: Any, tokens: Tensor, logits: Any) -> Any:
        got.append(type(logits))
        return process(processors, tokens, logits)

    process = generation.process_logits
    with patch.object(generation, "process_logits", noted):
        found = {name: tokens_of(model, **how) for name, how in FORMS.items()}
    assert got == ([Sharded] * 2 * NEW + [Tensor] * NEW if is_parallel(model) else [])
    return found


def by_trainer(model: Any, folder: Path) -> list[Any]:
    """Tokens in the middle of training, as GRPO draws them, and after it; what it evaluates."""
    inside: list[Any] = []

    class Generates(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            with torch.no_grad():
                inside.append(tokens_of(model, do_sample=False))

    arguments = transformers.TrainingArguments(
        str(folder), bf16=True, use_cpu=on_cpu(is_parallel(model)), max_steps=2,
        per_device_train_batch_size=2, learning_rate=1e-5,
        per_device_eval_batch_size=2, report_to=[], disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    seen: list[tuple[str, tuple[int, ...]]] = []

    def preprocess(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append((type(logits).__name__, tuple(logits.shape)))
        return logits.argmax(-1)

    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Rows(8), eval_dataset=Rows(4), callbacks=[Generates()],
        preprocess_logits_for_metrics=preprocess,
        compute_metrics=lambda it: {"words": it.predictions.tolist(), "rows": len(it.label_ids)},
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    return [inside, forms_of(model), metrics["eval_words"], metrics["eval_rows"], seen]


def by_accelerator(model: Any, folder: Path) -> list[Any]:
    """And the logits beside the loss of a step, which accelerate casts to float32."""
    made = accelerate.Accelerator(cpu=on_cpu(is_parallel(model)), mixed_precision="bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    wrapped, optimizer = made.prepare(model, optimizer)
    rows = torch.stack([Rows(2)[i]["input_ids"] for i in range(2)])
    out = wrapped.train()(input_ids=rows, labels=rows)
    if is_parallel(model):
        assert isinstance(out.logits, Sharded) and out.logits.dtype is torch.float32
        torch.testing.assert_close(uses_of(out.logits, rows), uses_of(autotp.gather(out.logits), rows))
    logits = out.logits
    (out.loss + (logits[:, :-1] / 2).logsumexp(-1).square().mean()).backward()
    optimizer.step()
    norms = {name: p.grad.float().norm().item() for name, p in model.named_parameters() if p.grad is not None}
    return [forms_of(model.eval()), logits.argmax(-1).tolist(), norms]


def uses_of(logits: Tensor, labels: Tensor) -> list[Any]:
    torch.save(logits, file := io.BytesIO())
    file.seek(0)
    return [
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.to(logits.device).flatten()),
        logits.argmax(-1), logits[:, -1].softmax(-1), (logits / 2).sum(), logits.tolist(),
        logits.detach().cpu().numpy(), torch.load(file),
    ]  # fmt: skip


def losses_of(model: Any, folder: Path) -> list[float]:
    arguments = transformers.TrainingArguments(
        str(folder), bf16=True, use_cpu=True, max_steps=3, learning_rate=1e-2, logging_steps=1, report_to=[],
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows(8))
    trainer.train()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.not_on_cards("one process that sees several cards: Trainer would use DataParallel")
def test_one_process_trains_without_logits_as_plain_torch(tmp_path: Path) -> None:
    """accelerate searches the outputs for tensors in bfloat16; autotp copies the model that accelerate has prepared."""
    parallel = autotp.parallelize(llama(), 1, outputs="loss")
    torch.testing.assert_close(losses_of(parallel, tmp_path), losses_of(llama(), tmp_path), rtol=2e-3, atol=1e-3)


def on_ranks(rank: int, n: int, folder: Path) -> tuple[Any, ...]:
    """By each loop in turn, and in a region of autocast."""
    found = []
    for train in (by_trainer, by_accelerator):
        model = llama()
        model = autotp.parallelize(model, n) if n > 1 else model
        found.append(train(model, folder / str(n)))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    model = llama().eval()
    with torch.autocast("cpu" if on_cpu(n > 1) else "cuda", torch.bfloat16):
        return *found, forms_of(autotp.parallelize(model, n) if n > 1 else model)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.rare)])
def test_tokens_are_those_of_one_device(n: int, tmp_path: Path) -> None:
    one = on_ranks(0, 1, tmp_path)
    *words, norms = one[1]
    for found in run_ranks(on_ranks, n, tmp_path, timeout=250, fresh=True):
        assert (found[0], found[1][:-1], found[2]) == (one[0], words, one[2])
        assert_values_close(found[1][-1], norms, rtol=2e-2, atol=1e-3)  # Products of bfloat16.
