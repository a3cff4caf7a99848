"""Trains a tensor-parallel GPT on bytes of real text, and shows that it learns exactly as on one device.

    torchrun --nproc-per-node 2 examples/train_gpt.py

First a single process trains the same model on the same batches for 50 steps. The parallel run repeats these steps,
and its losses must be the same to 1e-4. Then it continues to the end. Without torchrun there is one process.
"""

from __future__ import annotations

from argparse import Namespace

import torch
from support import training
from support.training import Batch, say
from text import corpus
from torch import nn

import autotp
from autotp.models.gpt import GPT, GPTConfig


def arguments() -> Namespace:
    """Returns the common flags and those of this script."""
    parser = training.parser("Trains a byte-level GPT, tensor-parallel over all of torchrun's processes.")
    parser.add_argument("--target", type=float, default=2.2, help="upper limit of the held-out loss, in nats per byte")
    parser.add_argument("--prompt", default="def main(", help="prompt of the text sample, default: %(default)r")
    parser.add_argument("--sample", type=int, default=300, help="bytes of text to generate at the end")
    return training.parse(parser)


def build(args: Namespace) -> GPT:
    """Returns an ordinary GPT over bytes, with the same weights on every rank and in every run."""
    torch.manual_seed(args.seed)
    return GPT(
        GPTConfig(
            block_size=args.block, vocab_size=256, n_layer=args.layers, n_head=args.heads, n_embd=args.width,
            dropout=args.dropout,
        )
    )  # fmt: skip


def shifted(windows: torch.Tensor) -> Batch:
    """Returns the tokens, and the byte that follows each. windows: [batch block+1]; both results: [batch block]"""
    return windows[:, :-1], windows[:, 1:]


def held_out(text: corpus.Corpus, args: Namespace, count: int = 512) -> list[Batch]:
    """Returns `count` windows over the held-out text, in batches."""
    windows = corpus.spread(text.held_out, args.block + 1, count)
    return [shifted(some) for some in windows.split(args.batch)]


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, count: int, block: int, temperature: float = 0.8) -> bytes:
    """Returns the prompt and `count` bytes more: the same on every rank, as logits and generators are equal."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    where = next(model.parameters()).device
    tokens = torch.tensor([list(prompt)])
    for _ in range(count):
        logits = model(tokens[:, -block:].to(where))[:, -1].cpu()  # [1 vocab]
        drawn = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        tokens = torch.cat((tokens, drawn), 1)
    return bytes(tokens[0].tolist())


def main() -> None:
    """Trains in one process and tensor-parallel, compares, and asserts that the model has learnt."""
    args = arguments()
    text = corpus.load(args.data)
    unseen = held_out(text, args)
    say(text)

    def batches(step: int) -> Batch:
        return shifted(corpus.windows(text.train, args.block + 1, args.batch, step, args.seed))

    where = training.device(args)
    alone = training.fit(
        build(args).to(where), batches, args, name="single process", steps=args.compare, clip=training.clip_one_device
    )
    model = autotp.parallelize(build(args), device=where, randomness="exact")  # exact: dropout as on one device
    say(model.plan)
    together = training.fit(model, batches, args, name="tensor-parallel", steps=args.steps, clip=autotp.clip_grad_norm_)
    loss = training.held_out_loss(model, unseen)
    sample = generate(model, args.prompt.encode(), args.sample, args.block)
    say(f"\n{sample.decode(errors='replace')}\n")
    difference = training.report(args, "train_gpt", alone, together, loss)
    assert difference <= args.tolerance, f"tensor-parallel losses differ by {difference:.1e}"
    assert loss < args.target or args.short, f"it has not learnt: {loss:.3f} nats a byte"


if __name__ == "__main__":
    main()
