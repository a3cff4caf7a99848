"""Trains with optimizers of PyPI packages on real ranks, compares with one device, and writes a table of them.

    torchrun --nproc-per-node 2 examples/support/optimizer_walk.py               # docs/coverage_optimizers.md
    torchrun --nproc-per-node 4 examples/support/optimizer_walk.py timm optimi   # some packages, on the screen

A package that is not installed is skipped, with a message. `pip install --no-deps timm torch-optimi` brings no other
torch.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autotp

PACKAGES = {
    "torch": "torch.optim", "pytorch-optimizer": "pytorch_optimizer", "torch-optimizer": "torch_optimizer",
    "timm": "timm.optim", "heavyball": "heavyball", "torch-optimi": "optimi", "schedulefree": "schedulefree",
    "dadaptation": "dadaptation", "prodigyopt": "prodigyopt", "pytorch-ranger": "pytorch_ranger",
    "transformers": "transformers.optimization", "lion-pytorch": "lion_pytorch", "adan-pytorch": "adan_pytorch",
    "came-pytorch": "came_pytorch", "adam-mini": "adam_mini",
}  # fmt: skip
"""Name of a package -> its module of optimizers."""
RIGHT, REFUSED, ALONE, WRONG = "right", "refused", "not on one device", "wrong"
OUTCOMES = (RIGHT, REFUSED, ALONE, WRONG)
STEPS, TOLERANCE = 10, 1e-6
SECOND_ORDER = ("adahessian", "sophiah")
"""Optimizers that take a derivative of the gradient, by the small letters of their names."""
DEFAULTS: dict[str, Any] = {"lr": 0.01, "storage_dtype": "float64", "num_data": 10, "num_iterations": 10}
DEFAULTS["base_optimizer"] = torch.optim.SGD
"""Arguments of optimizers that have one of this name."""
FIRST: dict[str, Callable[[Any], Any]] = {
    "named_parameters": lambda model: list(model.named_parameters()),
    "model": lambda model: model,
    "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}
"""What an optimizer gets as its first argument, by the name of this argument; most take parameters."""
SETTINGS: dict[str, dict[str, Any]] = {
    "LBFGS": {"max_iter": 5},  # A hundred evaluations multiply round-off by a million.
    "Adam_mini": {"dim": 8, "n_heads": 2, "verbose": False},
}
PAGE = Path(__file__).parents[2] / "docs" / "coverage_optimizers.md"
TEXT = """# Optimizers of other packages

`torchrun --nproc-per-node {ranks} examples/support/optimizer_walk.py` wrote this page, with torch {torch}. It trains a
small model on {ranks} ranks with each optimizer of these packages, with its defaults and a learning rate of 0.01, for
ten steps in float64. After the fifth step it saves the state, loads it into a new optimizer, and goes on. It compares
each loss, the saved state, and the parameters at the end with those of one device. The ranks hold parts of different
sizes (3 heads, 31 units), and one matrix has queries, keys and values. heavyball runs without its own `torch.compile`.

**{right} of {count} optimizers that train so on one device are right.**

{summary}

| package | optimizer | | why |
|---|---|---|---|
{reasons}
"""
HEADER = f"""| package | version | {" | ".join(OUTCOMES)} | right are |
|---|---|---|---|---|---|---|"""
ALIKE = "differs by less than ten times what one device differs by if its parameters are moved by round-off"


class Small(nn.Module):
    """Two attentions and an MLP. tokens: [rows length] -> [rows length 8]"""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(13, 8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 36, bias=False), nn.Linear(12, 8)
        self.query, self.values, self.second = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(24, 8)
        self.keys = nn.Linear(8, 8, bias=False)  # The gradient of its bias would be 0, and its sign one of round-off.
        self.up, self.down = nn.Linear(8, 31), nn.Linear(31, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.out(attention(*self.qkv(x).chunk(3, -1)))
        x = x + self.second(attention(self.query(x), self.keys(x), self.values(x)))
        y: Tensor = self.norm(x + self.down(self.up(x).tanh()))
        return y


def attention(*tensors: Tensor) -> Tensor:
    """Returns attention of heads of 4 numbers. q, k, v: [rows length (heads 4)]"""
    q, k, v = (x.unflatten(-1, (-1, 4)).transpose(1, 2) for x in tensors)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Trained:
    """What a training gives: the loss of each step, numbers of a saved state, and the parameters, all whole."""

    losses: list[float]
    saved: list[Any]
    parameters: list[Tensor]


def train(model: nn.Module, optimizer_class: Any, in_step: bool) -> Trained:
    """Trains for ten steps. After five, the state of the optimizer goes through a file into a new one.

    Args:
        in_step: whether the optimizer gets a closure for its step, as LBFGS needs it.
    """
    torch.manual_seed(1)
    optimizer, losses, saved = made(optimizer_class, model), list[float](), dict[str, Any]()
    tokens, target = torch.arange(14).view(2, 7) % 13, torch.randn(2, 7, 8)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(tokens) - target).square().mean()
        loss.backward(create_graph=optimizer_class.__name__.lower() in SECOND_ORDER)
        return loss

    for step in range(STEPS):
        if step == STEPS // 2:
            torch.save(optimizer.state_dict(), file := io.BytesIO())
            file.seek(0)
            saved = torch.load(file, weights_only=False)
            optimizer = made(optimizer_class, model)
            optimizer.load_state_dict(copy.deepcopy(saved))
        losses.append(float(closure().detach()))
        optimizer.step(*[closure] * in_step)
    numbers = [x for x in pytree.tree_leaves(saved) if isinstance(x, Tensor | int | float)]
    return Trained(losses, numbers, [autotp.gather(p.detach()) for p in model.parameters()])


def made(optimizer_class: Any, model: nn.Module) -> Any:
    """Returns an optimizer of the model; of its parameters, matrices or groups, if it takes only these."""
    asked = list(inspect.signature(optimizer_class).parameters)
    given = {name: value for name, value in DEFAULTS.items() if name in asked}
    given |= SETTINGS.get(optimizer_class.__name__, {})
    parameters, matrices = list(model.parameters()), [p for p in model.parameters() if p.dim() == 2]
    groups = [{"params": [p for p in parameters if (p.dim() == 2) == muon], "use_muon": muon} for muon in (True, False)]
    choices: list[Any] = [FIRST[asked[0]](model)] if asked[0] in FIRST else [parameters, matrices, groups]
    while True:
        try:
            optimizer = optimizer_class(choices.pop(0), **given)
            break
        except (ValueError, RuntimeError):
            if not choices:
                raise
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


def attempt(model: nn.Module, optimizer_class: Any, in_step: bool) -> Trained | Exception:
    try:
        return train(copy.deepcopy(model), optimizer_class, in_step)
    except Exception as error:
        return error


def compared(optimizer_class: Any, whole: nn.Module, parallel: nn.Module) -> tuple[str, str]:
    """Returns what this rank finds of an optimizer, and the reason."""
    alone = {in_step: attempt(whole, optimizer_class, in_step) for in_step in (False, True)}
    in_step = isinstance(alone[False], Exception)
    expected = alone[in_step]
    if isinstance(expected, Exception):
        return ALONE, f"{type(alone[False]).__name__}: {alone[False]}"
    result = attempt(parallel, optimizer_class, in_step)
    if isinstance(result, Exception):
        return REFUSED if isinstance(result, autotp.Error) else WRONG, f"{type(result).__name__}: {result}"
    distance = difference(result, expected)
    if distance < TOLERANCE:
        return RIGHT, ""
    moved = attempt(with_round_off(whole), optimizer_class, in_step)
    alike = difference(moved, expected) if isinstance(moved, Trained) else 0.0
    text = f"differs by {distance:.0e}; one device differs by {alike:.0e} if its parameters are moved by round-off"
    return RIGHT if distance < 10 * alike else WRONG, text


def difference(result: Trained, expected: Trained) -> float:
    """Returns the largest difference of a number; infinite if other numbers are there, or not-a-numbers."""
    rows = [[torch.as_tensor(x) for x in itertools.chain(*vars(one).values())] for one in (result, expected)]
    pairs = list(zip(*rows, strict=False))
    alike = len(rows[0]) == len(rows[1]) and all(x.shape == y.shape for x, y in pairs)
    if not alike or not all(torch.equal(x.isfinite(), y.isfinite()) for x, y in pairs):
        return math.inf
    return max(float((x.double() - y.double()).nan_to_num().abs().max()) for x, y in pairs if x.numel())


def with_round_off(model: nn.Module) -> nn.Module:
    """Returns a copy whose parameters differ in the last bit or two."""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for p in moved.parameters():
            p.mul_(1 + torch.randn_like(p) * 2**-53)
    return moved


def optimizers_of(package: str) -> dict[str, Any]:
    """Returns the optimizers of a package; none with a message if it is not installed."""
    name = PACKAGES[package]
    folder = name.partition(".")[0]
    try:
        module: Any = importlib.import_module(name)
    except ImportError as error:
        print(f"{package} is skipped: {error}")
        return {}
    if package == "heavyball":
        module.utils.compile_mode = module.utils.compile_mode_recommended_to_none = None
    members = inspect.getmembers(module, inspect.isclass)
    own = {kind: key for key, kind in members if kind.__module__.partition(".")[0] == folder}  # Each class once.
    kinds = {key: kind for kind, key in own.items() if issubclass(kind, torch.optim.Optimizer)}
    return {key: kind for key, kind in kinds.items() if kind is not torch.optim.Optimizer}


def page(found: Mapping[str, Mapping[str, tuple[str, str]]], ranks: int) -> str:
    """Returns the page of the docs that shows what was found of each optimizer of each package."""
    rows, reasons = [], dict[tuple[str, str], list[str]]()
    for package, outcomes in found.items():
        names = {kind: [name for name, (of, _) in outcomes.items() if of == kind] for kind in OUTCOMES}
        numbers = " | ".join(str(len(names[kind])) for kind in OUTCOMES)
        rows.append(f"| {package} | {version(package).partition('+')[0]} | {numbers} | {', '.join(names[RIGHT])} |")
        for name, (of, why) in ((name, found) for name, found in outcomes.items() if found[1]):
            text = ALIKE if of == RIGHT else cell(why.replace(name, "..."))
            reasons.setdefault((package, f"{of} | {text}"), []).append(name)
    every = [of for outcomes in found.values() for of, _ in outcomes.values() if of != ALONE]
    return TEXT.format(
        torch=version("torch").partition("+")[0],
        ranks=ranks,
        right=every.count(RIGHT),
        count=len(every),
        summary="\n".join([HEADER, *rows]),
        reasons="\n".join(f"| {package} | {', '.join(names)} | {why} |" for (package, why), names in reasons.items()),
    )


def cell(text: str) -> str:
    """Returns the first line of a text, for a table."""
    return text.strip().splitlines()[0][:120].replace("|", "/").replace("<", "&lt;")


def main(packages: Sequence[str]) -> None:
    """Compares, and writes the page if all packages are walked on two ranks. The status is 1 if one is wrong."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = Small()
    parallel = autotp.parallelize(copy.deepcopy(whole), example_inputs=torch.arange(14).view(2, 7) % 13)
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for package in packages or PACKAGES:
        for name, optimizer_class in optimizers_of(package).items():
            of_ranks: list[Any] = [None] * ranks
            dist.all_gather_object(of_ranks, compared(optimizer_class, whole, parallel))
            outcome = max(of_ranks, key=lambda one: OUTCOMES.index(one[0]))
            found.setdefault(package, {})[name] = outcome
            if rank == 0:
                print(package, name, *outcome, flush=True)
    if rank == 0 and not packages and ranks == 2:
        PAGE.write_text(page(found, ranks))
    dist.destroy_process_group()
    wrong = [name for outcomes in found.values() for name, (of, _) in outcomes.items() if of == WRONG]
    assert not wrong, wrong


if __name__ == "__main__":
    main(sys.argv[1:])
