"""Pretrains a GPT on text, as the Megatron papers did, tensor-parallel, in a pipeline and on replicas.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py
    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --size 355M --data TEXT.jsonl --tp 2 --pp 2 --microbatches 4

The tokenizer is a byte-level BPE, trained on the text; a tenth of the text is held out. The options of the papers'
sizes are those of Shoeybi et al. 2019, section 4.2. At the end the folder has `model.pt`, `config.json` and
`tokenizer.json`, which `evaluate_lm.py` reads, and `log.csv`, TensorBoard's events and `loss.png`.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pretraining import logs, loop, recipes
from pretraining.loop import Batch
from pretraining.recipes import Recipe
from support import training
from support.training import say
from text.tokens import GPT as KIND
from tokenizers import Tokenizer
from torch.utils.data import Dataset, Subset

import autotp
from autotp.models.configs import GPT_SIZES, GPT_SIZES_2021
from autotp.models.gpt import GPT, GPTConfig

SIZES = {
    "small": GPTConfig(block_size=128, vocab_size=4096, n_layer=4, n_head=4, n_embd=128),
    **GPT_SIZES,
    **GPT_SIZES_2021,
}
SMALL = Recipe(batch=16, steps=800, warmup=80, lr=3e-3, min_lr=3e-4, dropout=0.0, beta2=0.95)
PAPER = Recipe(batch=512, steps=300_000, warmup=3000, lr=1.5e-4, min_lr=1e-5)


class Windows(Dataset[Batch]):
    """Sequences of tokens that follow each other, and as labels the next token of each: both [block] int64."""

    def __init__(self, values: Any, block: int) -> None:
        self.values, self.block = values, block

    def __len__(self) -> int:
        return max(0, len(self.values) - 1) // self.block

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self.block
        found = torch.from_numpy(self.values[start : start + self.block + 1].astype("int64"))
        return {"tokens": found[:-1], "labels": found[1:]}


def arguments() -> Namespace:
    """Returns the common flags and those of this script."""
    parser = recipes.parser("Pretrains a GPT on text.", SIZES)
    parser.set_defaults(out=Path("out/gpt"))
    parser.add_argument(
        "--target",
        type=float,
        default=120.0,
        help="upper limit of the held-out perplexity; checked if the small size takes all its steps",
    )
    parser.add_argument(
        "--prompt", nargs="*", default=["def main(", "import ", "class "], help="starts of the text samples"
    )
    parser.add_argument("--sample", type=int, default=60, help="tokens in each sample")
    return recipes.parse(parser, SIZES, SMALL, PAPER)


def finish(args: Namespace, config: GPTConfig, tokenizer: Tokenizer, state: dict[str, torch.Tensor]) -> None:
    """Saves the model, draws its losses, and prints a sample for each prompt."""
    torch.save(state, args.out / "model.pt")
    rows = logs.read(args.out / "log.csv")
    logs.plot(args.out / "loss.png", rows, f"GPT, {args.size}")
    model = GPT(config).eval()
    model.load_state_dict(state)
    torch.manual_seed(args.seed)
    for prompt in args.prompt:
        found = model.generate(torch.tensor([tokenizer.encode(prompt).ids]), args.sample, temperature=0.8, top_k=40)
        say(f"---- {prompt!r}\n{tokenizer.decode(found[0].tolist())}")


def main() -> None:
    """Trains, and asserts that the model has learnt."""
    args = arguments()
    tokenizer, text = loop.text_of(args, KIND)
    size = tokenizer.get_vocab_size()
    config = replace(SIZES[args.size], vocab_size=size, block_size=args.block, dropout=args.dropout)
    loop.begin(args, tokenizer, text, config)
    windows = Windows(text.values, args.block)
    parts = [Subset(windows, numbers) for numbers in loop.parted(len(windows))]
    torch.manual_seed(args.seed)
    with torch.device("meta"):  # No rank ever holds the whole model.
        model = GPT(config)
    trainer, scaler = loop.distributed(model, args, parts[0])
    unseen = partial(loop.held_out_loss, trainer, parts[1], args, ("tokens", "labels"))
    loss = loop.Run(trainer, scaler, args, parts[0], unseen).train()
    state = autotp.full_state_dict(trainer)
    if training.rank() == 0:
        finish(args, config, tokenizer, state)
    say(f"held out    {loss:.3f} nats a token, perplexity {math.exp(loss):.1f}")
    assert math.exp(loss) < args.target or not args.asked, f"it has not learnt: {loss:.3f} nats a token"


if __name__ == "__main__":
    main()
