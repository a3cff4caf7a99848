"""TRL's trainers with adapters of peft, and those of other kinds, are those of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from graphs import small
from hugging_face import LLAMA, expect_close, on_cpu, texts, words
from ranks import run_ranks

import autotp
from autotp.passes.lower.losses import linear_cross_entropy

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
KEPT = (
    "loss", "grad_norm", "entropy", "mean_token_accuracy", "rewards/margins", "rewards/accuracies", "logps/chosen",
    "accuracy", "kl", "reward", "eval_loss",
)  # fmt: skip
Trained = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


class Case:
    """A training: of a new model on `n` ranks, in a folder.

    Args:
        kind: the trainer and its settings begin with this name.
        rows: the kind of its rows.
        adapters: "none"; "before": peft before autotp; "given": peft_config, for a model that is parallel already.
        given: further settings.
        more: makes further arguments of the trainer, on `n` ranks.
        cp: the ranks that cut a sequence.
        in_chunks: whether the vocabulary counts as a large one, so that ranks compute logits in chunks of rows.
    """

    def __init__(
        self,
        kind: str,
        rows: str,
        adapters: str = "none",
        given: dict[str, Any] | None = None,
        more: Callable[[int], dict[str, Any]] = lambda n: {},
        cp: int = 1,
        in_chunks: bool = False,
    ) -> None:
        self.kind, self.rows, self.adapters, self.given, self.more = kind, rows, adapters, given or {}, more
        self.cp, self.in_chunks = cp, in_chunks

    def write_rows(self, folder: Path) -> None:
        """Writes the rows to files, which all processes share."""
        from datasets import Dataset

        Dataset.from_list(texts(self.rows)).save_to_disk(str(folder / f"{self.kind}-rows"))

    def read_rows(self, folder: Path) -> Any:
        """Returns the rows; with `precompute_ref_log_probs` from files, as TRL writes its own file beside them."""
        from datasets import Dataset

        if "precompute_ref_log_probs" in self.given:
            return Dataset.load_from_disk(str(folder / f"{self.kind}-rows"))
        return Dataset.from_list(texts(self.rows))

    def run(self, n: int, folder: Path) -> Trained:
        scores = self.kind == "Reward"
        model, more = whole_model(scores=scores), self.more(n)
        torch.manual_seed(4)
        if self.adapters == "before":
            model = peft.get_peft_model(model, lora(scores))
            for name, p in model.named_parameters():
                if "lora_B" in name:  # What was trained before: TRL keeps a copy as the reference.
                    torch.nn.init.normal_(p, std=0.3)
        elif self.adapters == "given":
            more["peft_config"] = lora(scores)
        settings: dict[str, Any] = {
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "logging_steps": 1,
            "report_to": [], "use_cpu": on_cpu(n > 1), "bf16": False, "disable_tqdm": True, "learning_rate": 1e-2,
            "adam_epsilon": 1e-2, "save_strategy": "no",
        }  # fmt: skip
        arguments = getattr(trl, f"{self.kind}Config")(str(folder), **(settings | self.given))
        model = autotp.parallelize(model, n // self.cp, cp=self.cp) if n > 1 else model
        torch.manual_seed(4)
        trainer = getattr(trl, f"{self.kind}Trainer")(
            model=model, args=arguments, train_dataset=self.read_rows(folder.parent), processing_class=words(), **more
        )  # fmt: skip
        trainer.train()
        log = [{key: row[key] for key in KEPT if key in row} for row in trainer.state.log_history]
        model = trainer.model
        state = autotp.full_state_dict(model) if n > 1 else model.state_dict()
        return log, {name: x for name, x in state.items() if "lora_" in name or "modules_to_save" in name}


def whole_model(seed: int = 0, scores: bool = False) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**LLAMA, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    if not scores:
        return transformers.LlamaForCausalLM(config).double()
    config.num_labels = 1
    return transformers.LlamaForSequenceClassification(config).double()


def other_model(n: int, scores: bool = False) -> Any:
    model = whole_model(1, scores)
    return autotp.parallelize(model, n) if n > 1 else model


def lora(scores: bool) -> Any:
    return peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"],
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
    )  # fmt: skip


def many_words(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


GENERATED: dict[str, Any] = {"num_generations": 2, "max_completion_length": 5, "use_vllm": False}
PACKED: dict[str, Any] = {"packing": True, "max_length": 24}
PADDING_FREE: dict[str, Any] = {"padding_free": True, "max_length": None}
CASES = {
    "sft-given": Case("SFT", "text", "given"),  # With gradient checkpointing, as all of them by TRL's default.
    "dpo-given": Case("DPO", "chosen", "given"),
    "dpo-before": Case("DPO", "chosen", "before"),
    "sft-before": Case("SFT", "text", "before"),
    "sft-packed": Case("SFT", "text", "given", PACKED),
    "sft-packed-cp": Case("SFT", "text", "given", PACKED, cp=2),
    "sft-padding-free": Case("SFT", "text", "given", PADDING_FREE),
    "sft-padding-free-cp": Case("SFT", "text", "given", PADDING_FREE, cp=2),
    "dpo-computed-before": Case("DPO", "chosen", "given", {"precompute_ref_log_probs": True}),
    "dpo-synced": Case(
        "DPO", "chosen", given={"sync_ref_model": True, "ref_model_sync_steps": 1},
        more=lambda n: {"ref_model": other_model(n)},
    ),
    "reward": Case("Reward", "chosen"),
    "reward-given": Case("Reward", "chosen", "given"),
    "reward-before": Case("Reward", "chosen", "before"),
    "kto": Case("KTO", "label", more=lambda n: {"ref_model": other_model(n)}),
    "kto-given": Case("KTO", "label", "given"),
    "kto-before": Case("KTO", "label", "before", {"precompute_ref_log_probs": True}),
    "grpo": Case("GRPO", "prompt", given=GENERATED, more=lambda n: {"reward_funcs": many_words}),
    "grpo-given": Case(
        "GRPO", "prompt", "given", GENERATED | {"beta": 0.1}, lambda n: {"reward_funcs": many_words}
    ),
    "grpo-before": Case(
        "GRPO", "prompt", "before", GENERATED | {"beta": 0.1},
        lambda n: {"reward_funcs": other_model(n, scores=True).float(), "reward_processing_classes": words()},
    ),
    "kto-chunks": Case(
        "KTO", "label", given={"max_steps": 10}, more=lambda n: {"ref_model": other_model(n)}, in_chunks=True
    ),
    "grpo-chunks": Case(
        "GRPO", "prompt", given=GENERATED | {"max_steps": 10}, more=lambda n: {"reward_funcs": many_words},
        in_chunks=True,
    ),
    "rloo-given": Case("RLOO", "prompt", "given", GENERATED, lambda n: {"reward_funcs": many_words}),
}  # fmt: skip
GROUPS = (
    ("sft-given",), ("dpo-before",),
    ("sft-packed", "sft-packed-cp", "sft-padding-free", "sft-padding-free-cp"),
    ("dpo-given", "sft-before"), ("dpo-computed-before", "dpo-synced"),
    ("reward", "reward-given", "reward-before"), ("kto", "kto-given", "kto-before"),
    ("grpo", "grpo-given"), ("grpo-before", "rloo-given"), ("kto-chunks",), ("grpo-chunks",),
)  # fmt: skip


def trained(rank: int, n: int, folder: Path, names: Sequence[str]) -> dict[str, Trained]:
    return {name: run_in_chunks(CASES[name], n, folder / name) for name in names}


def run_in_chunks(case: Case, n: int, folder: Path) -> Trained:
    """Returns what a case does; if it is one of chunks, on ranks that read logits in chunks."""
    if n == 1 or not case.in_chunks:
        return case.run(n, folder)
    with small(), patch.object(linear_cross_entropy, "write_reader", wraps=linear_cross_entropy.write_reader) as writer:
        result = case.run(n, folder)
    assert "pick" in {call.args[2].name for call in writer.call_args_list}
    return result


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    "names",
    [pytest.param(names, id=names[0], marks=[pytest.mark.rare] * (names in GROUPS[3:])) for names in GROUPS],
)
def test_trl_trainers_of_each_kind_are_one_devices(names: Sequence[str], tmp_path: Path) -> None:
    """Losses, norms and what else they log, and the adapters after the training."""
    for name in names:
        for folder in ("one", "two"):
            CASES[name].write_rows(tmp_path / folder)
    expected = trained(0, 1, tmp_path / "one", names)
    found = run_ranks(trained, 2, tmp_path / "two", names, timeout=250, fresh=True)
    for name in names:
        log, adapters = expected[name]
        assert len(log) == CASES[name].given.get("max_steps", 3) + 1 and log[0].keys() >= {"loss", "grad_norm"}
        assert bool(adapters) == (CASES[name].adapters != "none")
        for each in found:
            expect_close(each[name][0], log)
        expect_close(found[0][name][1], adapters)
