"""The hyperparameters for each model size of the pretraining scripts, and the flags that change them."""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from support import training

from autotp.models.bert import BERTConfig
from autotp.models.gpt import GPTConfig

DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCHEDULES = ("1F1B", "interleaved", "GPipe", "zero-bubble", "zero-bubble-v")


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a training.

    Attributes:
        batch: sequences in a step, of all replicas together.
        warmup: steps in which the learning rate grows to `lr`; then it falls to `min_lr`, as a cosine.
    """

    batch: int
    steps: int
    warmup: int
    lr: float
    min_lr: float
    dropout: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    beta2: float = 0.999


def parser(description: str, sizes: Iterable[str]) -> ArgumentParser:
    """Returns the flags that the scripts share. Flags without a default here get the recipe's value in `parse`."""
    new = ArgumentParser(description=description, formatter_class=ArgumentDefaultsHelpFormatter)
    new.add_argument(
        "--size", choices=tuple(sizes), default="small", help="sizes of the model; all except small are from papers"
    )
    new.add_argument("--data", nargs="*", default=[], help="files or folders of text; default: Python's source code")
    new.add_argument("--cache", type=Path, default=Path("out/tokens"), help="folder for tokenizers and tokens")
    new.add_argument("--out", type=Path, help="folder of the run, which continues from the newest checkpoint there")
    new.add_argument("--seed", type=int, default=0, help="seed of the weights, the batches and the dropout")
    new.add_argument("--eval-every", type=int, default=100, help="steps between two evaluations on the held-out text")
    new.add_argument("--eval-batches", type=int, default=8, help="most batches of held-out text in an evaluation")
    new.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    new.add_argument("--keep", type=int, default=2, help="number of the newest checkpoints that are kept")
    _add_recipe(new)
    _add_layout(new)
    return new


def _add_recipe(parser: ArgumentParser) -> None:
    for name, kind, text in (
        ("vocabulary", int, "largest size of the vocabulary, in tokens"),
        ("block", int, "tokens in a sequence"),
        ("batch", int, "sequences in a step, of all replicas together"),
        ("steps", int, "steps of the optimizer"),
        ("warmup", int, "steps in which the learning rate grows"),
        ("lr", float, "the highest learning rate"),
        ("min-lr", float, "the learning rate at the end"),
        ("dropout", float, "probability of all dropouts"),
        ("weight-decay", float, "for matrices, not for biases and norms"),
        ("clip", float, "the largest norm of a gradient"),
        ("beta2", float, "beta2 of AdamW"),
    ):
        parser.add_argument(f"--{name}", type=kind, help=text)


def _add_layout(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--tp", type=int, help="ranks that share each operator; default: all ranks, divided by --pp and --dp"
    )
    parser.add_argument("--pp", type=int, default=1, help="ranks that the blocks are divided among")
    parser.add_argument("--dp", type=int, default=1, help="replicas of these ranks")
    parser.add_argument("--microbatches", type=int, default=1, help="microbatches of a replica's batch")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B", help="schedule of the pipeline")
    parser.add_argument("--sequence-parallel", action="store_true", help="cut norms and dropouts along the sequence")
    parser.add_argument(
        "--recompute", choices=("none", "selective", "full"), default="none", help="what backward computes again"
    )
    parser.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        default=0,
        help="stage of ZeRO: what each replica keeps only a part of",
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="dtype of the computations")


def parse(
    parser: ArgumentParser, sizes: Mapping[str, GPTConfig] | Mapping[str, BERTConfig], small: Recipe, paper: Recipe
) -> Namespace:
    """Returns the flags of the command line; ends the program with a message if they contradict each other."""
    first = ArgumentParser(add_help=False)  # Defaults depend on these flags, and --help shows the defaults.
    first.add_argument("--size", choices=tuple(sizes), default="small")
    first.add_argument("--steps", type=int)
    given = first.parse_known_args()[0]
    recipe, config = small if given.size == "small" else paper, sizes[given.size]
    parser.set_defaults(**asdict(recipe), block=config.block_size, vocabulary=config.vocab_size)
    if given.steps is not None:
        parser.set_defaults(warmup=max(2, recipe.warmup * given.steps // recipe.steps))
    args = parser.parse_args()
    if args.tp is None:
        args.tp = max(1, training.world() // (args.pp * args.dp))
    if min(args.keep, args.save_every, args.eval_every) < 1:
        parser.error("--keep, --save-every and --eval-every must be 1 or more")
    if args.batch % (args.dp * args.microbatches):
        parser.error(f"--batch {args.batch} does not divide into {args.dp} x {args.microbatches} microbatches")
    if not 1 < args.warmup < args.steps:
        parser.error(f"--warmup {args.warmup} must be from 2 to less than --steps, which is {args.steps}")
    args.asked = args.size == "small" and args.steps >= recipe.steps  # whether to assert that it has learnt
    return args
