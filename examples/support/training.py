"""The common parts of the training scripts: flags, the loop with its progress bar, the held-out loss, the loss curve.

Only `rank` depends on tensor parallelism: the loop is the same as on a single device.
"""

from __future__ import annotations

import math
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from autotp.distributed.launch import launch

Batch = tuple[Tensor, Tensor]  # tokens, labels: [batch block] each
Model = TypeVar("Model", bound=nn.Module)

MAX_NORM = 1.0


def parser(description: str) -> ArgumentParser:
    """Returns the flags that the scripts share; each script adds its own flags and sets defaults."""
    new = ArgumentParser(description=description, formatter_class=ArgumentDefaultsHelpFormatter)
    new.add_argument("--data", nargs="*", default=[], help="files or folders of text; default: Python's source code")
    new.add_argument("--out", type=Path, default=Path("out"), help="folder for the loss curve")
    new.add_argument("--device", help='such as "cuda:0"; default: a GPU if there is one, else the CPU')
    new.add_argument("--seed", type=int, default=0, help="seed of the weights, the batches and the dropout")
    new.add_argument("--layers", type=int, default=4, help="number of blocks")
    new.add_argument("--heads", type=int, default=4, help="number of attention heads")
    new.add_argument("--width", type=int, default=128, help="width of the residual stream")
    new.add_argument("--block", type=int, default=64, help="bytes in a window")
    new.add_argument("--batch", type=int, default=16, help="windows in a step")
    new.add_argument("--dropout", type=float, default=0.0, help="probability of all dropouts")
    new.add_argument(
        "--steps",
        type=int,
        default=1000,
        help="steps of the optimizer; a shorter run does not check what it has learnt",
    )
    new.add_argument("--compare", type=int, default=50, help="steps that a single process trains as well")
    new.add_argument(
        "--tolerance", type=float, default=1e-4, help="largest allowed difference between the losses of these steps"
    )
    new.add_argument("--lr", type=float, default=4e-3, help="highest learning rate, after 1/10 of the steps")
    return new


def parse(parser: ArgumentParser) -> Namespace:
    """Returns the flags of the command line; ends the program with a message if they contradict each other."""
    args = parser.parse_args()
    if not 1 <= args.compare <= args.steps:
        parser.error(f"--compare {args.compare} must be from 1 to --steps, which is {args.steps}")
    args.short = args.steps < parser.get_default("steps")  # too few steps to assert that it has learnt
    return args


def rank() -> int:
    """Returns the rank of this process among those that torchrun, srun or mpirun started; 0 if it is alone."""
    started = launch()
    return started.rank if started else 0


def world() -> int:
    """Returns the number of processes that were started together; 1 for a process that is alone."""
    started = launch()
    return started.size if started else 1


def say(*what: object, sep: str = " ") -> None:
    """Prints, on the first rank only."""
    if rank() == 0:
        print(*what, sep=sep, flush=True)


def device(args: Namespace) -> torch.device:
    """Returns the device of this process: `--device`, else a GPU (shared if there are too few), else the CPU."""
    if args.device is not None or not torch.cuda.is_available():
        return torch.device(args.device or "cpu")
    started = launch()
    return torch.device("cuda", (started.local_rank if started else 0) % torch.cuda.device_count())


def clip_one_device(model: nn.Module, max_norm: float) -> Tensor:
    """Clips with torch's own function; called like `autotp.clip_grad_norm_`."""
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def fit(
    model: Model,
    batches: Callable[[int], Batch],
    args: Namespace,
    *,
    name: str,
    steps: int,
    clip: Callable[[Model, float], object],
) -> list[float]:
    """Trains with AdamW; returns the loss of each step. `model` is any module that takes tokens and labels.

    Args:
        batches: step -> tokens and labels.
        steps: the number of steps to take; the schedule is that of `args.steps` steps.
        clip: clips the gradients in place to a norm.
    """
    torch.manual_seed(args.seed)  # The dropout of both runs starts here.
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.steps, pct_start=0.1, cycle_momentum=False
    )
    losses: list[float] = []
    with progress(name, steps * args.batch * args.block) as bar:
        for step in range(steps):
            tokens, labels = to_device(batches(step), model)
            loss = model(tokens, labels=labels)
            optimizer.zero_grad()
            loss.backward()
            clip(model, MAX_NORM)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update(tokens.numel())
    return losses


def progress(name: str, tokens: int) -> tqdm:
    """Returns a progress bar that counts tokens, and shows tokens per second; on the first rank only."""
    return tqdm(total=tokens, desc=name, unit="tok", unit_scale=True, disable=rank() != 0, mininterval=0.5)


def to_device(batch: Batch, model: nn.Module) -> Batch:
    """Returns the batch on the device of the model's parameters."""
    where = next(model.parameters()).device
    return batch[0].to(where), batch[1].to(where)


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Returns the mean loss over the batches without dropout, in nats for each label."""
    model.eval()
    total, count = 0.0, 0
    for tokens, labels in batches:
        found = int((labels >= 0).sum())
        tokens, labels = to_device((tokens, labels), model)
        total += float(model(tokens, labels=labels)) * found
        count += found
    return total / count


def largest_difference(alone: list[float], together: list[float]) -> float:
    """Returns the largest difference between the losses of the two runs, over the steps that both took.

    It is infinite if a loss is NaN.

    NOTE [Why the comparison lies in the warm-up] Training at the full learning rate amplifies round-off: within 50 such
    steps, the losses of one process in float32 are 1e-3 to 1e-2 away from those in float64; in the warm-up of 1,000
    steps they are 5e-6 away at most (six seeds). So a run with far fewer --steps needs a smaller --lr, or a larger
    --tolerance.
    """
    differences = [abs(a - b) for a, b in zip(alone, together, strict=False)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def report(args: Namespace, script: str, alone: list[float], together: list[float], held_out: float) -> float:
    """Draws the loss curve and prints the figures; returns the largest difference between the two runs' losses."""
    difference = largest_difference(alone, together)
    if rank() == 0:
        file = args.out / f"{script}.png"
        plot(file, f"tp={world()}", alone, together, held_out)
        print(f"loss curve                {file}")
        print(f"largest difference        {difference:.1e} to a single process, first {len(alone)} steps")
        print(f"held-out loss             {held_out:.3f} nats a byte", flush=True)
    return difference


def smooth(losses: list[float], window: int = 25) -> list[float]:
    """Returns for each loss the mean of this loss and the `window - 1` losses before it (fewer at the start)."""
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    starts = (max(0, end - window) for end in range(1, len(sums)))
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, 1)]


def plot(file: Path, name: str, alone: list[float], together: list[float], held_out: float) -> None:
    """Draws the loss curve into `file`, and the first steps with the single-process run beside it."""
    import matplotlib

    matplotlib.use("Agg")  # No display is needed.
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    left.plot(together, color="C0", alpha=0.25)
    left.plot(smooth(together), color="C0", label=f"{name}, mean of 25 steps")
    left.axhline(held_out, color="C2", linestyle=":", label=f"held out, at the end: {held_out:.3f}")
    left.set(title="training loss", xlabel="step", ylabel="nats a byte")
    left.legend()
    right.plot(together[: len(alone)], color="C0", linewidth=5, alpha=0.4, label=name)
    right.plot(alone, color="black", linestyle="--", linewidth=1.2, label="single process")
    difference = largest_difference(alone, together)
    right.set(title=f"the first {len(alone)} steps: at most {difference:.1e} apart", xlabel="step")
    right.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
