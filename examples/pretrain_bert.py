"""Pretrains a BERT on text, as the Megatron paper did, tensor-parallel, in a pipeline and on replicas.

    torchrun --nproc-per-node 2 examples/pretrain_bert.py
    torchrun --nproc-per-node 8 examples/pretrain_bert.py --size 334M --data TEXT.jsonl --pairing order --tp 2 --dp 4

The model learns to predict masked tokens, and whether a pair of segments is right (`masking.py`, `segments.py`); each
line of the text is a sentence. The tokenizer is a WordPiece, trained on the text; a tenth of the text is held out. The
options of the papers' sizes are those of Shoeybi et al. 2019, section 4.2; only the learning rate differs: it falls as
a cosine. At the end the folder has `model.pt`, `config.json`, `tokenizer.json`, `log.csv`, TensorBoard's events and
`loss.png`.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from pretraining import logs, loop, recipes
from pretraining.loop import Batch
from pretraining.recipes import Recipe
from support import training
from support.training import say
from text import masking
from text.segments import MARKS, Pairs, runs
from text.tokens import BERT as KIND
from text.tokens import MASK, id_of
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import default_collate

import autotp
from autotp.models.bert import BERT, BERTConfig
from autotp.models.configs import BERT_SIZES

SIZES = {
    "small": BERTConfig(block_size=32, vocab_size=2048, n_layer=2, n_head=4, n_embd=128),
    **BERT_SIZES,
}
SMALL = Recipe(batch=64, steps=1500, warmup=150, lr=2e-3, min_lr=2e-5, dropout=0.0, beta2=0.95)
PAPER = Recipe(batch=1024, steps=2_000_000, warmup=10_000, lr=1e-4, min_lr=0.0)


def arguments() -> Namespace:
    """Returns the common flags and those of this script."""
    parser = recipes.parser("Pretrains a BERT on text.", SIZES)
    parser.set_defaults(out=Path("out/bert"))
    parser.add_argument("--pairing", choices=("next", "order"), default="next", help="how pairs are made wrong")
    parser.add_argument("--target", type=float, default=120.0, help="upper limit of the held-out perplexity")
    parser.add_argument("--fill", type=int, default=5, help="held-out pairs to fill in at the end")
    return recipes.parse(parser, SIZES, SMALL, PAPER)


@torch.no_grad()
def pairs_told_apart(model: BERT, pairs: Sequence[Batch], batch: int = 32) -> float:
    """Returns the share of pairs that the model classifies correctly as right or wrong."""
    right = 0
    for start in range(0, len(pairs), batch):
        some = default_collate(list(pairs[start : start + batch]))
        _, answers = model(some["tokens"], some["types"], some["mask"])  # [batch 2]
        right += int((answers.argmax(-1) == some["next_sentence"]).sum())
    return right / len(pairs)


@torch.no_grad()
def filled(model: BERT, pair: Batch, tokenizer: Tokenizer) -> list[str]:
    """Returns a line for each masked place: the original token, the text around it, and the three best guesses."""
    mask, whole = id_of(tokenizer, MASK), pair["labels"].where(pair["labels"] != masking.IGNORED, pair["tokens"])
    places = (pair["tokens"] == mask).nonzero()[:, 0].tolist()
    logits, _ = model(*(pair[name][None] for name in ("tokens", "types", "mask")))  # [1 block vocab]
    found = []
    for at in places:
        best = [tokenizer.id_to_token(int(i)) for i in logits[0, at].topk(3).indices]
        near = [tokenizer.decode(whole[part].tolist()) for part in (slice(max(0, at - 6), at), slice(at + 1, at + 6))]
        found.append(f"{near[0]} [{tokenizer.id_to_token(int(whole[at]))}] {near[1]}: {', '.join(map(repr, best))}")
    return found


def finish(
    args: Namespace, config: BERTConfig, tokenizer: Tokenizer, state: dict[str, Tensor], pairs: Sequence[Batch]
) -> None:
    """Saves the model, draws its losses, and prints its predictions for held-out pairs."""
    torch.save(state, args.out / "model.pt")
    logs.plot(args.out / "loss.png", logs.read(args.out / "log.csv"), f"BERT, {args.size}: held out without the pairs")
    model = BERT(config).eval()
    model.load_state_dict(state)
    say("what stood at masked places, and the three best guesses:")
    for pair in pairs[: args.fill]:
        say(*(f"    {line}" for line in filled(model, pair, tokenizer)), sep="\n")
    say(f"pairs       {pairs_told_apart(model, pairs):.1%} of {len(pairs)} told apart")


def main() -> None:
    """Trains, and asserts that the model has learnt."""
    args = arguments()
    tokenizer, text = loop.text_of(args, KIND)
    size = tokenizer.get_vocab_size()
    config = replace(SIZES[args.size], vocab_size=size, block_size=args.block, dropout=args.dropout)
    loop.begin(args, tokenizer, text, config)
    found = runs(text, args.block - MARKS)
    train, unseen = (
        Pairs(text, tokenizer, found[part.start : part.stop], args.block, pairing=args.pairing, seed=args.seed)
        for part in loop.parted(len(found))
    )
    torch.manual_seed(args.seed)
    with torch.device("meta"):  # No rank ever holds the whole model.
        model = BERT(config)
    trainer, scaler = loop.distributed(model, args, train)
    masked = partial(loop.held_out_loss, trainer, unseen, args, ("tokens", "types", "mask", "labels"))
    loss = loop.Run(trainer, scaler, args, train, masked).train()
    state = autotp.full_state_dict(trainer)
    if training.rank() == 0:
        numbers = loop.evenly(len(unseen), args.batch, args.eval_batches)
        finish(args, config, tokenizer, state, [unseen[i] for some in numbers for i in some])
    say(f"held out    {loss:.3f} nats a masked token, perplexity {math.exp(loss):.1f}")
    assert math.exp(loss) < args.target or not args.asked, f"it has not learnt: {loss:.3f} nats a masked token"


if __name__ == "__main__":
    main()
