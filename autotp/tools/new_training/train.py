"""Trains a model with tensor, pipeline and data parallelism. `autotp init` wrote this file: change it as you like.

A start goes on from the newest checkpoint, also in another layout. After a SIGTERM it saves and ends.
`autotp convert checkpoints model.pt` makes one file of the newest checkpoint.
"""

from __future__ import annotations

import math
import signal
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

import autotp

#: if transformers
MODEL = "path/to/model"
#: else
FOLDER = "path/to/folder"  # of the file of the model
#: endif
TP = 2  # ranks that share each operator
PP = 1  # ranks that the blocks are divided among
DP = 1  # replicas
MICROBATCHES = 1  # parts of a replica's batch, so that pipeline ranks work at the same time
BATCH = 8  # rows in a step, of all replicas together
#: if tokens
TEXT = ""  # a text file to train on; "" stands for random tokens: they show that all runs, and nothing can be learnt
VOCABULARY = 256  # tokens
SEQUENCE = 128  # tokens in a row
#: endif
STEPS = 1000
WARMUP = max(1, STEPS // 10)  # steps
LEARNING_RATE = 3e-4
SAVE_EVERY = 100  # steps
PRINT_EVERY = 10  # steps
# A large model needs more options of autotp.distribute: `autotp search` prints those of a layout that fits, such as
# {"zero": 1, "sequence_parallel": True, "recompute": "full"}. MICROBATCHES is its batch / dp / micro_batch.
MORE: dict[str, Any] = {}
CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"  # a folder that all machines share


#: if tokens
class TokenRows(Dataset[dict[str, Tensor]]):
    """The data: row -> the arguments of `forward`. Put yours here."""

    def __init__(self) -> None:
        if TEXT:
            text = Path(TEXT).read_text(encoding="utf-8")
            #: if transformers
            from transformers import AutoTokenizer

            self.tokens = torch.tensor(AutoTokenizer.from_pretrained(MODEL)(text)["input_ids"])
            #: else
            self.tokens = torch.tensor(list(text.encode()))  # A token is a byte.
            #: endif
        else:
            generator = torch.Generator().manual_seed(0)  # the same on all ranks
            self.tokens = torch.randint(VOCABULARY, (64 * BATCH * SEQUENCE + 1,), generator=generator)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // SEQUENCE

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        tokens = self.tokens[row * SEQUENCE :][: SEQUENCE + 1]
        #: if transformers
        return {"input_ids": tokens[:-1], "labels": tokens[:-1]}  # The model itself moves labels by one token.
        #: else
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}
        #: endif


#: else
class ExampleRows(Dataset[dict[str, Tensor]]):
    """The data: row -> the arguments of `forward`. These are the example inputs, again and again: put yours here."""

    def __init__(self) -> None:
        import sys

        sys.path.insert(0, FOLDER)
        from autotp.models.gpt import GPTConfig

        self.inputs: dict[str, Tensor] = vars(GPTConfig())

    def __len__(self) -> int:
        return 64 * BATCH

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: values[row % len(values)] for name, values in self.inputs.items()}


#: endif
#: if not weights
def new_model() -> torch.nn.Module:
    """Returns the model, with float32 parameters."""
    #: if transformers
    from transformers import AutoConfig, LlamaForCausalLM

    with torch.device("meta"):  # Each rank draws the weights of its part alone.
        return LlamaForCausalLM(AutoConfig.from_pretrained(MODEL)).float()
    #: else
    import sys

    sys.path.insert(0, FOLDER)
    from autotp.models.gpt import GPT, GPTConfig

    return GPT(GPTConfig()).float()
    #: endif


#: endif
def learning_rate(step: int) -> float:
    """Returns the part of LEARNING_RATE in a step: it grows in WARMUP steps, then falls as a cosine to a tenth."""
    done = min(1.0, (step - WARMUP) / max(1, STEPS - WARMUP))
    return (step + 1) / WARMUP if step < WARMUP else 0.55 + 0.45 * math.cos(math.pi * done)


def on_any_rank(fact: bool) -> bool:
    """Returns on all ranks whether a fact is true on one: a signal comes to each of them in another step."""
    flag = torch.tensor(int(fact))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def main() -> None:
    """Trains to step STEPS."""
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():  # Ray Train calls this in another one.
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    torch.manual_seed(0)  # the same weights on all ranks
    data = TokenRows()
    options: dict[str, Any] = {"tp": TP, "pp": PP, "dp": DP, "microbatches": MICROBATCHES, **MORE}
    options["example_inputs"] = default_collate([data[0], data[1]])  # Rows may be more, and sequences longer.
    if torch.cuda.is_available():
        options["compute_dtype"] = torch.bfloat16  # Parameters, their gradients and the optimizer stay in float32.
    #: if weights
    trainer = autotp.distribute(MODEL, dtype=torch.float32, **options)  # Each rank reads its part of the weights.
    #: else
    trainer = autotp.distribute(new_model(), **options)
    #: endif
    optimizer = torch.optim.AdamW(autotp.weight_decay_groups(trainer, 0.1), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    began = autotp.load_checkpoint(CHECKPOINTS, trainer, optimizer, schedule=schedule)  # 0 if there is none
    if autotp.is_first_rank():
        print(f"begins at step {began}", flush=True)
    device = next(trainer.parameters()).device
    rows = autotp.Sampler(len(data), BATCH, trainer)  # this replica's rows; those of a step depend on the step alone
    stopped = False
    for batch in DataLoader(data, batch_sampler=rows, generator=torch.Generator()):
        if trainer.steps >= STEPS or stopped:
            break
        loss = trainer.step(**{name: value.to(device) for name, value in batch.items()})  # forward and backward
        autotp.clip_grad_norm_(trainer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        last = trainer.steps == STEPS
        if (trainer.steps % PRINT_EVERY == 0 or last) and autotp.is_first_rank():
            print(f"step {trainer.steps}: loss {loss.item():.3f}", flush=True)
        stopped = on_any_rank(stop.is_set())  # A launcher kills the ranks some minutes after the SIGTERM.
        if trainer.steps % SAVE_EVERY == 0 or last or stopped:  # A thread writes; the program ends after it.
            autotp.save_checkpoint(CHECKPOINTS, trainer, optimizer, trainer.steps, wait=False, schedule=schedule)


if __name__ == "__main__":
    main()
