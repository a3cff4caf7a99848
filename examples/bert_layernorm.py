"""Trains BERT with both orders of the layer norms at several depths, and compares the losses.

    python examples/bert_layernorm.py                               # 12 minutes on one core
    torchrun --nproc-per-node 2 examples/bert_layernorm.py          # the same, tensor-parallel

Megatron (Shoeybi et al. 2019, section 5.3 and figure 7) found: with a layer norm after each residual addition, as in
the original, BERT becomes unstable as it grows; with a layer norm before each branch it does not. Here both orders
train on the same masked bytes from the same seeds, without warm-up. docs/figures/bert_layernorm.png shows the result of
the default options: with 4 and 12 layers the original order is a little better, with 24 layers it learns nothing from
context.
"""

from __future__ import annotations

import csv
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from support import training
from support.training import rank, say
from text import corpus
from torch import nn
from train_bert import MASK, frequencies_loss, masked

import autotp
from autotp.models.bert import BERT, BERTConfig

NORMS = {"post": "after the addition (original)", "pre": "before the branch (rearranged)"}
EVERY = 10  # Steps in one row of the table, which has their mean loss.
APART = 0.05  # The smallest difference between losses that counts, in nats for each byte.


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        losses: in nats for each byte; each is the mean of EVERY steps.
    """

    norm: str
    layers: int
    seed: int
    losses: list[float]

    @property
    def final(self) -> float:
        """Returns the mean of the last tenth of the losses."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)


def arguments() -> Namespace:
    """Returns the flags of the command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", nargs="*", default=[], help="files or folders of text; default: Python's source code")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure and the table")
    parser.add_argument("--device", help='such as "cuda:0"; default: a GPU if there is one, else the CPU')
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 12, 24], help="layers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="seeds of the weights and the batches")
    parser.add_argument("--heads", type=int, default=4, help="number of attention heads")
    parser.add_argument("--width", type=int, default=64, help="width of the residual stream")
    parser.add_argument("--block", type=int, default=32, help="bytes in a window")
    parser.add_argument("--batch", type=int, default=32, help="windows in a step")
    parser.add_argument("--steps", type=int, default=600, help="steps of each run; a shorter run asserts nothing")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate of AdamW; it falls linearly to 0")
    parser.add_argument("--warmup", type=int, default=0, help="steps in which the learning rate rises linearly")
    args = parser.parse_args()
    if args.steps < EVERY or args.warmup >= args.steps:
        parser.error(f"--steps {args.steps} must be {EVERY} at least, and more than --warmup, which is {args.warmup}")
    args.short = args.steps < parser.get_default("steps")
    return args


def build(norm: str, layers: int, seed: int, args: Namespace) -> BERT:
    """Returns an ordinary BERT over bytes; for one depth and seed, the weights of both orders differ only in scale."""
    torch.manual_seed(seed)
    config = BERTConfig(
        block_size=args.block, vocab_size=MASK + 1, n_layer=layers, n_head=args.heads, n_embd=args.width, dropout=0.0,
        norm="pre" if norm == "pre" else "post",
    )  # fmt: skip
    return BERT(config)


def fit(model: nn.Module, text: corpus.Corpus, name: str, seed: int, args: Namespace) -> list[float]:
    """Trains the model; returns the mean loss of every EVERY steps."""
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, args.warmup), (args.steps - step) / (args.steps - args.warmup))
    )
    losses: list[float] = []
    with training.progress(name, args.steps * args.batch * args.block) as bar:
        for step in range(args.steps):
            windows = corpus.windows(text.train, args.block, args.batch, step, seed)
            tokens, labels = training.to_device(masked(windows, step), model)
            loss = model(tokens, labels=labels)
            optimizer.zero_grad()
            loss.backward()
            autotp.clip_grad_norm_(model, training.MAX_NORM)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            bar.update(tokens.numel())
    groups = (losses[start : start + EVERY] for start in range(0, args.steps - EVERY + 1, EVERY))
    return [sum(group) / EVERY for group in groups]


def write(file: Path, runs: Sequence[Run]) -> None:
    """Writes a table with a row for every EVERY steps of each run; `step` is the last of these steps."""
    with file.open("w", newline="") as opened:
        rows = csv.writer(opened, lineterminator="\n")
        rows.writerow(["norm", "layers", "seed", "step", "loss"])
        for run in runs:
            for i, loss in enumerate(run.losses, 1):
                rows.writerow([run.norm, run.layers, run.seed, i * EVERY, f"{loss:.4f}"])


def plot(file: Path, runs: Sequence[Run], without_context: float) -> None:
    """Draws the losses of both orders: one plot for each depth, one line for each seed."""
    import matplotlib

    matplotlib.use("Agg")  # No display is needed.
    from matplotlib import pyplot

    depths = sorted({run.layers for run in runs})
    figure, places = pyplot.subplots(
        1, len(depths), figsize=(4 * len(depths), 3.8), layout="constrained", sharey=True, squeeze=False
    )
    for place, layers in zip(places[0], depths, strict=True):
        for color, norm in enumerate(NORMS):
            mine = [run for run in runs if (run.layers, run.norm) == (layers, norm)]
            for i, run in enumerate(mine):
                steps = [(j + 1) * EVERY for j in range(len(run.losses))]
                place.plot(steps, run.losses, color=f"C{1 - color}", alpha=0.8, label=NORMS[norm] if not i else None)
        place.axhline(without_context, color="black", linestyle=":", linewidth=1, label="knows no context")
        place.set(title=f"{layers} layers", xlabel="step")
    places[0][0].set(ylabel="masked bytes' loss, nats a byte", ylim=(None, without_context + 0.6))
    places[0][-1].legend(title="layer norm", fontsize="small")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def check(runs: Sequence[Run], without_context: float) -> None:
    """Asserts the result of the paper: at the largest depth only the rearranged order learns well from context."""
    deepest = max(run.layers for run in runs)
    worst = max(run.final for run in runs if (run.layers, run.norm) == (deepest, "pre"))
    best = min(run.final for run in runs if (run.layers, run.norm) == (deepest, "post"))
    assert worst < without_context - APART, f"{deepest} layers, pre: nothing learnt from context, {worst:.3f}"
    assert worst < best - APART, f"{deepest} layers: {worst:.3f} is not below {best:.3f} of the original order"


def main() -> None:
    """Trains each depth, order and seed, and writes the table and the figure."""
    args = arguments()
    text = corpus.load(args.data)
    without_context, where = frequencies_loss(text), training.device(args)
    say(f"{text}\nwithout context  {without_context:.3f} nats a byte")
    runs: list[Run] = []
    for layers in args.depths:
        for seed in args.seeds:
            for norm in NORMS:
                model = autotp.parallelize(build(norm, layers, seed, args), device=where)
                name = f"{layers} layers, {norm}, seed {seed}"
                runs.append(Run(norm, layers, seed, fit(model, text, name, seed, args)))
                say(f"{name:<26} {runs[-1].final:.3f}")
    if rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        write(args.out / "bert_layernorm.csv", runs)
        plot(args.out / "bert_layernorm.png", runs, without_context)
    if not args.short:
        check(runs, without_context)


if __name__ == "__main__":
    main()
