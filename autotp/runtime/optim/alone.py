"""Raises Error for an optimizer whose step of a parameter depends on other parameters, or on more than its gradient.

Each rank steps the matrices that it owns. This is the step of one device only if an optimizer steps each parameter by
itself. So, before an optimizer is used, its class steps some small tensors together, and each of them alone; the
results must be equal. An optimizer that divides by the norm of all gradients is found in this way, whatever its name
is, and so is one that draws random numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotp.errors import Error

SIZES = (1e3, 1e-3)
"""The sizes of the gradients in the steps that are compared: some optimizers change only large ones, or small ones."""
GROUPS = 4
"""The number of parameter groups that are compared; others have other options at most."""
ALTERNATIVE = "autotp.distribute with tp=1, pp=1 and zero=0, where each rank steps all parameters, whole"


def unhooked_step(cls: type[Optimizer]) -> Any:
    """Returns the `step` of a class without torch's hooks around it."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def step_groups(cls: type[Optimizer], optimizer: Any, empty: bool) -> None:
    """Steps the groups of an optimizer, without torch's hooks around it.

    Args:
        empty: whether the step is also shown groups without parameters.
    """
    groups = optimizer.param_groups
    try:
        optimizer.param_groups = [group for group in groups if empty or group["params"]]
        if optimizer.param_groups:
            unhooked_step(cls)(optimizer)
    finally:
        optimizer.param_groups = groups


def expect_alone(
    cls: type[Optimizer], groups: Sequence[tuple[int, Mapping[str, Any]]], args: Any, kwargs: Any, device: torch.device
) -> bool:
    """Returns whether a step takes groups without parameters; some stack the gradients of a group.

    Raises Error unless a class of optimizers steps each parameter by itself.

    Args:
        groups: for each group of parameters a number of dimensions, and its options.
        args, kwargs: the other arguments of the constructor.
        device: where the tensors are.
    """
    of_empty = [options_of_group for _, options_of_group in groups]
    groups = groups[:GROUPS]
    shapes = [[(4, 3) if dims == 2 else (2,) * (dims - 1) + (3,)] * 2 for dims, _ in groups]  # A step may stack them.
    generator = torch.Generator().manual_seed(0)
    drawn_groups = [
        [_drawn(shape if dims else (), generator, device) for shape in some]
        for (dims, _), some in zip(groups, shapes, strict=True)
    ]
    options = [group_options for _, group_options in groups]
    try:
        stepped = partial(_stepped, cls, args, kwargs)
        together = stepped(options, drawn_groups, empty=False)
        try:
            alone, takes_empty = _each_alone(stepped, options, drawn_groups, of_empty), True
        except Exception:  # As torch.stack of no gradients.
            alone, takes_empty = _each_alone(stepped, options, drawn_groups, ()), False
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise Error(
            f"{cls.__name__} does not step a small tensor without a closure: {type(error).__name__}: {first_line}",
            fix="an optimizer that uses each gradient once, such as torch.optim.Muon",
            alternative=ALTERNATIVE,
        ) from error
    pairs = [pair for some in zip(together, alone, strict=True) for pair in zip(*some, strict=True)]
    if not all(torch.allclose(a, b, rtol=1e-9, atol=0, equal_nan=True) for a, b in pairs):
        raise Error(
            f"{cls.__name__} steps a parameter in another way beside other parameters than alone: it uses the "
            "gradients of several parameters at once, or random numbers",
            fix="an optimizer of each parameter by itself, such as torch.optim.Muon; for the norm of all gradients "
            "autotp.clip_grad_norm_",
            alternative=ALTERNATIVE,
        )
    return takes_empty


def expect_elementwise(optimizer: Optimizer, why: str) -> None:
    """Raises Error unless an optimizer steps each element of a parameter by itself.

    Args:
        why: what a rank has of a parameter.
    """
    start, gradients = _drawn((4, 6), torch.Generator().manual_seed(0), torch.device("cpu"))
    whole = _trial(optimizer, [(start, gradients)])[0]
    for dim in (0, 1):
        halves = [
            _trial(optimizer, [(half, tuple(g.chunk(2, dim)[i] for g in gradients))])[0]
            for i, half in enumerate(start.chunk(2, dim))
        ]
        if not torch.allclose(torch.cat(halves, dim), whole, rtol=1e-9, atol=0, equal_nan=True):
            name = type(optimizer).__name__
            raise Error(
                f"{why}, and {name} does not step each element by itself",
                fix=f"autotp.whole_matrices({name})(parameters, ...), which steps each whole matrix on one rank",
                alternative="AdamW, SGD, Lion or the like; zero=0",
            )


def expect_alone_in_groups(optimizer: Optimizer, why: str) -> None:
    """Raises Error unless an optimizer steps each parameter by itself.

    Args:
        why: what a rank has of the parameters.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = [_drawn(shape, generator, torch.device("cpu")) for shape in ((4, 3), (3, 5))]
    together, alone = _trial(optimizer, drawn), [_trial(optimizer, [drawn_parameter])[0] for drawn_parameter in drawn]
    pairs = zip(together, alone, strict=True)
    if not all(torch.allclose(a, b, rtol=1e-9, atol=0, equal_nan=True) for a, b in pairs):
        raise Error(
            f"{why}, and {type(optimizer).__name__} uses the gradients of several parameters at once",
            fix="AdamW, SGD, Lion or the like; or pp=1",
        )


def _trial(optimizer: Optimizer, drawn: Sequence[Drawn]) -> list[Tensor]:
    """Returns small parameters after some steps of an optimizer with the settings of another one's first group.

    Raises:
        Error: it does not step them.
    """
    parameters = [nn.Parameter(start.clone()) for start, _ in drawn]
    trial: Any = object.__new__(type(optimizer))
    trial.__dict__.update(vars(optimizer))
    trial.__dict__.update(state=defaultdict(dict), param_groups=[{**optimizer.param_groups[0], "params": parameters}])
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for i in range(len(SIZES)):
                for parameter, (_, gradients) in zip(parameters, drawn, strict=True):
                    parameter.grad = gradients[i].clone()
                unhooked_step(type(optimizer))(trial)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise Error(
            f"{type(optimizer).__name__} does not step a small tensor: {type(error).__name__}: {first_line}",
            fix="an optimizer that steps each element by itself, such as torch.optim.AdamW",
        ) from error
    return [parameter.detach() for parameter in parameters]


Drawn = tuple[Tensor, tuple[Tensor, ...]]
"""A parameter, and its gradients."""
Options = Sequence[Mapping[str, Any]]
"""The options of each group of parameters."""


def _drawn(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Drawn:
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, _wide(device)) for _ in range(3)]
    return drawn[0], tuple(size * gradient for size, gradient in zip(SIZES, drawn[1:], strict=True))


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _each_alone(
    stepped: Any, options: Options, drawn_groups: Sequence[Sequence[Drawn]], of_empty: Options
) -> list[list[Tensor]]:
    """Returns the same as `_stepped` where each parameter is the only one, beside groups without parameters.

    Args:
        of_empty: the options of these groups; the step is not shown them if there are none.
    """

    def alone(group: int, number: int) -> Tensor:
        only = [[some[number]] if i == group else [] for i, some in enumerate(drawn_groups)]
        every = [*only, *([] for _ in of_empty)]
        value: Tensor = stepped([*options, *of_empty], every, empty=bool(of_empty))[group][0]
        return value

    return [[alone(i, j) for j in range(len(some))] for i, some in enumerate(drawn_groups)]


def _stepped(
    cls: type[Optimizer],
    args: Any,
    kwargs: Any,
    options: Options,
    drawn_groups: Sequence[Sequence[Drawn]],
    empty: bool,
) -> list[list[Tensor]]:
    """Returns the parameters of each group after some steps of a new optimizer."""
    parameters = [[nn.Parameter(start.clone()) for start, _ in some] for some in drawn_groups]
    groups = [{**group_options, "params": some} for group_options, some in zip(options, parameters, strict=True)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        optimizer: Any = cls(groups, *args, **kwargs)
        for i in range(len(SIZES)):
            for some, drawn in zip(parameters, drawn_groups, strict=True):
                for parameter, (_, gradients) in zip(some, drawn, strict=True):
                    parameter.grad = gradients[i].clone()
            step_groups(cls, optimizer, empty)
    return [[parameter.detach() for parameter in some] for some in parameters]
