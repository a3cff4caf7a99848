"""Trains a tensor-parallel BERT to fill in masked bytes, and shows that it learns exactly as on one device.

    torchrun --nproc-per-node 2 examples/train_bert.py

Bytes are masked as in the paper (`masking.py`).
"""

from __future__ import annotations

from argparse import Namespace

import torch
from support import training
from support.training import Batch, say
from text import corpus, masking
from torch import Tensor

import autotp
from autotp.models.bert import BERT, BERTConfig

MASK = 256  # The only token that is not a byte.


def arguments() -> Namespace:
    """Returns the common flags and those of this script."""
    parser = training.parser("Trains a BERT on masked bytes, tensor-parallel over all of torchrun's processes.")
    parser.add_argument(
        "--norm", choices=("pre", "post"), default="pre", help="place of the norms: pre as in Megatron, post as in BERT"
    )
    parser.add_argument(
        "--gain", type=float, default=0.4, help="least gain of context over byte frequencies, in nats per byte"
    )
    parser.set_defaults(layers=2, block=32, batch=64, steps=700, lr=2e-3)
    return training.parse(parser)


def build(args: Namespace) -> BERT:
    """Returns an ordinary BERT over bytes, with the same weights on every rank and in every run."""
    torch.manual_seed(args.seed)
    return BERT(
        BERTConfig(
            block_size=args.block, vocab_size=MASK + 1, n_layer=args.layers, n_head=args.heads, n_embd=args.width,
            dropout=args.dropout, norm=args.norm,
        )
    )  # fmt: skip


def masked(windows: Tensor, seed: int) -> Batch:
    """Returns the tokens, some of them masked, and as labels the original tokens there; all three: [batch block]"""
    return masking.masked(windows, torch.Generator().manual_seed(seed), mask=MASK, others=range(MASK))


def held_out(text: corpus.Corpus, args: Namespace, count: int = 512) -> list[Batch]:
    """Returns `count` windows over the held-out text, in batches, with the same masks in each call."""
    windows = corpus.spread(text.held_out, args.block, count)
    return [masked(some, seed) for seed, some in enumerate(windows.split(args.batch))]


def frequencies_loss(text: corpus.Corpus) -> float:
    """Returns the loss of predicting each byte from byte frequencies alone, without context, in nats for each byte."""
    share = torch.bincount(text.train.long(), minlength=256).double() / len(text.train)
    return float(torch.special.entr(share).sum())


def main() -> None:
    """Trains in one process and tensor-parallel, compares, and asserts that the model has learnt."""
    args = arguments()
    text = corpus.load(args.data)
    unseen = held_out(text, args)
    say(text)

    def batches(step: int) -> Batch:
        return masked(corpus.windows(text.train, args.block, args.batch, step, args.seed), step)

    where = training.device(args)
    alone = training.fit(
        build(args).to(where), batches, args, name="single process", steps=args.compare, clip=training.clip_one_device
    )
    model = autotp.parallelize(build(args), device=where, randomness="exact")  # exact: dropout as on one device
    say(model.plan)
    together = training.fit(model, batches, args, name="tensor-parallel", steps=args.steps, clip=autotp.clip_grad_norm_)
    loss = training.held_out_loss(model, unseen)
    difference = training.report(args, "train_bert", alone, together, loss)
    without_context = frequencies_loss(text)
    say(f"without context           {without_context:.3f} nats a byte")
    assert difference <= args.tolerance, f"tensor-parallel losses differ by {difference:.1e}"
    learnt = loss < without_context - args.gain
    assert learnt or args.short, f"it has not learnt from context: {loss:.3f} nats a byte"


if __name__ == "__main__":
    main()
