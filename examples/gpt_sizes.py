"""Trains GPTs of three sizes on the same text from the same seeds, and compares how fast they converge.

    torchrun --nproc-per-node 2 examples/gpt_sizes.py               # 12 minutes on two busy cores, tensor-parallel
    python examples/gpt_sizes.py                                    # the same on one device

Megatron (Shoeybi et al. 2019, section 5.2 and figure 6) found: larger language models converge noticeably faster, and
to lower validation perplexities. Here three sizes see the same bytes in the same order, with the same schedule.
docs/figures/gpt_sizes.png shows the held-out perplexity over steps and tokens, and the tokens after which each size
has reached a perplexity.
"""

from __future__ import annotations

import csv
import itertools
import math
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from support import training
from support.training import Batch, rank, say
from text import corpus
from torch import nn

import autotp
from autotp.models.gpt import GPT, GPTConfig

VOCABULARY = 256  # Bytes.
MARKS = (24.0, 16.0, 12.0, 10.0, 8.0, 7.0, 6.0, 5.0)  # Perplexities on the right of the figure.


@dataclass(frozen=True)
class Size:
    """A size of GPT, and the number of its parameters."""

    layers: int
    width: int
    parameters: int

    def __str__(self) -> str:
        return f"{self.parameters / 1e6:.2g}M ({self.layers} layers of {self.width})"


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        steps: the steps after which the held-out perplexity was measured.
        perplexities: for each held-out byte.
    """

    size: Size
    seed: int
    steps: list[int]
    perplexities: list[float]

    def steps_until(self, perplexity: float) -> int | None:
        """Returns the first measured step at which the perplexity was reached; None if it never was."""
        pairs = zip(self.steps, self.perplexities, strict=True)
        return next((step for step, found in pairs if found <= perplexity), None)


def arguments() -> Namespace:
    """Returns the flags of the command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", nargs="*", default=[], help="files or folders of text; default: Python's source code")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure and the table")
    parser.add_argument("--device", help='such as "cuda:0"; default: a GPU if there is one, else the CPU')
    parser.add_argument("--sizes", nargs="+", default=["2x48", "4x96", "6x192"], help="layers x width of each size")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="seeds of the weights and the batches")
    parser.add_argument("--head", type=int, default=24, help="width of an attention head")
    parser.add_argument("--block", type=int, default=64, help="bytes in a window")
    parser.add_argument("--batch", type=int, default=32, help="windows in a step")
    parser.add_argument("--steps", type=int, default=600, help="steps of each run; a shorter run asserts nothing")
    parser.add_argument("--every", type=int, default=20, help="steps between two measurements")
    parser.add_argument("--held-out", type=int, default=64, help="windows of held-out text in a measurement")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate of AdamW, for all sizes")
    parser.add_argument("--warmup", type=int, default=60, help="steps in which the learning rate rises linearly")
    args = parser.parse_args()
    if args.steps < args.every or args.warmup >= args.steps:
        parser.error(f"--steps {args.steps} must be --every, {args.every}, at least, and more than --warmup")
    args.short = args.steps < parser.get_default("steps")
    return args


def build(size: str, seed: int, args: Namespace) -> tuple[Size, GPT]:
    """Returns a size, such as "4x96" (layers x width), and an ordinary GPT of it over bytes."""
    layers, width = map(int, size.split("x"))
    torch.manual_seed(seed)
    heads = max(1, width // args.head)
    model = GPT(GPTConfig(args.block, VOCABULARY, n_layer=layers, n_head=heads, n_embd=width, dropout=0.0))
    return Size(layers, width, sum(p.numel() for p in model.parameters())), model


def pair(windows: torch.Tensor) -> Batch:
    """Returns tokens, and as labels the bytes that follow them. windows: [batch block + 1]"""
    return windows[:, :-1], windows[:, 1:]


def fit(model: nn.Module, text: corpus.Corpus, name: str, seed: int, args: Namespace) -> tuple[list[int], list[float]]:
    """Trains the model; returns the steps of the measurements, and the held-out perplexities."""
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, args.warmup), (args.steps - step) / (args.steps - args.warmup))
    )
    held_out = [pair(rows) for rows in corpus.spread(text.held_out, args.block + 1, args.held_out).split(args.batch)]
    steps, found = list[int](), list[float]()
    with training.progress(name, args.steps * args.batch * args.block) as bar:
        for step in range(1, args.steps + 1):
            model.train()
            windows = corpus.windows(text.train, args.block + 1, args.batch, step, seed)
            tokens, labels = training.to_device(pair(windows), model)
            loss = model(tokens, labels=labels)
            optimizer.zero_grad()
            loss.backward()
            autotp.clip_grad_norm_(model, training.MAX_NORM)
            optimizer.step()
            schedule.step()
            bar.update(tokens.numel())
            if step % args.every == 0:
                steps.append(step)
                found.append(math.exp(training.held_out_loss(model, held_out)))
                bar.set_postfix(perplexity=f"{found[-1]:.2f}", refresh=False)
    return steps, found


def write(file: Path, runs: Sequence[Run], tokens: int) -> None:
    """Writes a table with a row for each measurement. tokens: bytes in a step"""
    with file.open("w", newline="") as opened:
        rows = csv.writer(opened, lineterminator="\n")
        rows.writerow(["layers", "width", "parameters", "seed", "step", "tokens", "perplexity"])
        for run in runs:
            for step, perplexity in zip(run.steps, run.perplexities, strict=True):
                size = run.size
                row = size.layers, size.width, size.parameters, run.seed, step, step * tokens, f"{perplexity:.4f}"
                rows.writerow(row)


def plot(file: Path, runs: Sequence[Run], tokens: int) -> None:
    """Draws the perplexities over steps and tokens, and the tokens until a perplexity. tokens: bytes in a step"""
    import matplotlib

    matplotlib.use("Agg")  # No display is needed.
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    sizes = list(dict.fromkeys(run.size for run in runs))
    for color, size in enumerate(sizes):
        mine = [run for run in runs if run.size == size]
        for i, run in enumerate(mine):
            label = str(size) if i == 0 else None
            left.plot(run.steps, run.perplexities, color=f"C{color}", alpha=0.85, label=label)
            reached = [(mark, step * tokens / 1e6) for mark in MARKS if (step := run.steps_until(mark)) is not None]
            right.plot([m for m, _ in reached], [n for _, n in reached], "o-", color=f"C{color}", alpha=0.85)
    left.set(xlabel="step", ylabel="held-out perplexity of a byte", yscale="log")
    shown = [mark for mark in (128.0, 64.0, 32.0, *MARKS[1:]) if mark <= max(max(run.perplexities) for run in runs)]
    left.set_yticks(shown, [f"{mark:g}" for mark in shown])
    left.minorticks_off()
    left.legend(title="parameters")
    above = left.secondary_xaxis("top", functions=(lambda x: x * tokens / 1e6, lambda x: x * 1e6 / tokens))
    above.set_xlabel("million tokens (bytes)")
    right.set(xlabel="held-out perplexity", ylabel="million tokens until it is reached", title="fewer is faster")
    right.invert_xaxis()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def check(runs: Sequence[Run]) -> None:
    """Asserts the finding of the paper, for each seed: each larger size ends lower, and is faster at the smaller's end.

    Faster means: it needs at most three quarters of the steps for the last perplexity of the smaller one.
    """
    for seed in {run.seed for run in runs}:
        mine = sorted((run for run in runs if run.seed == seed), key=lambda run: run.size.parameters)
        for small, large in itertools.pairwise(mine):
            last = small.perplexities[-1]
            assert large.perplexities[-1] < last, f"seed {seed}: {large.size} does not end below {small.size}"
            steps = large.steps_until(last)
            assert steps is not None and steps <= 0.75 * small.steps[-1], (
                f"seed {seed}: {large.size} needs {steps} steps for the perplexity of {small.size}"
            )


def main() -> None:
    """Trains each size and seed, and writes the table and the figure."""
    args = arguments()
    text, where, tokens = corpus.load(args.data), training.device(args), args.batch * args.block
    say(text)
    runs: list[Run] = []
    for size in args.sizes:
        for seed in args.seeds:
            found, model = build(size, seed, args)
            parallel = autotp.parallelize(model, device=where)
            runs.append(Run(found, seed, *fit(parallel, text, f"{size}, seed {seed}", seed, args)))
            say(f"{found!s:<28} seed {seed}   {runs[-1].perplexities[-1]:.3f}")
    if rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        write(args.out / "gpt_sizes.csv", runs, tokens)
        plot(args.out / "gpt_sizes.png", runs, tokens)
    if not args.short:
        check(runs)


if __name__ == "__main__":
    main()
