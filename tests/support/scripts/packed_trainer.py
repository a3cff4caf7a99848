"""Ten steps under Trainer in bfloat16 of texts in one row, on one device or as ranks of torchrun; writes the losses.

packed_trainer.py FOLDER IMPLEMENTATION TP CP WITH_ENDS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from kernel_packages import usable_in_transformers
from torch import Tensor

import autotp


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """40 texts of 3 to 13 words."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": torch.randint(1, 97, (3 + i * 7 % 11,), generator=torch.Generator().manual_seed(i))}


def train(folder: Path, implementation: str, tp: int, cp: int, with_ends: bool) -> list[dict[str, float]]:
    """Each step has another number of tokens, and other documents. Returns what Trainer logs."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, pad_token_id=0, attn_implementation=implementation,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    if tp * cp > 1:
        model = autotp.parallelize(model, tp, cp=cp)
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=10, logging_steps=1, bf16=True, learning_rate=1e-3,
        report_to=[], use_cpu=tp * cp == 1 or not torch.cuda.is_available(), disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=with_ends)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts(), data_collator=collator)
    trainer.train()
    return [{key: row[key] for key in ("loss", "grad_norm") if key in row} for row in trainer.state.log_history]


if __name__ == "__main__":
    folder, implementation, tp, cp, with_ends = sys.argv[1:]
    with usable_in_transformers():
        log = train(Path(folder), implementation, int(tp), int(cp), with_ends == "True")
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(log))
