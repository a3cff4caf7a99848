"""Tries an optimizer with small tensors: whether it steps each element, or each parameter, by itself.

An optimizer that divides by the norm of all gradients is found in this way, whatever its name is, and so is one that
draws random numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autotp.errors import Error

SIZES = (1e3, 1e-3)
"""The sizes of the gradients in the steps that are compared: some optimizers change only large ones, or small ones."""
GROUPS = 4
"""The number of parameter groups that are tried; others have other options at most."""

Drawn = tuple[Tensor, tuple[Tensor, ...]]
"""A parameter, and its gradients."""
Group = tuple[Mapping[str, Any], Sequence[Drawn]]
"""The options of a group, and its parameters."""


def unhooked_step(cls: type[Optimizer]) -> Any:
    """Returns the `step` of a class without torch's hooks around it."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def expect_elementwise(optimizer: Optimizer, why: str) -> None:
    """Raises Error unless an optimizer steps each element of a parameter by itself.

    Args:
        why: what a rank has of a parameter.
    """
    options = optimizer.param_groups[0]
    start, gradients = _drawn((4, 6), torch.Generator().manual_seed(0), torch.device("cpu"))
    expected = _stepped(optimizer, [(options, [(start, gradients)])])[0]
    for dim in (0, 1):
        halves = [
            _stepped(optimizer, [(options, [(half, tuple(g.chunk(2, dim)[i] for g in gradients))])])[0]
            for i, half in enumerate(start.chunk(2, dim))
        ]
        if not _is_close(torch.cat(halves, dim), expected):
            name = type(optimizer).__name__
            raise Error(
                f"{why}, and {name} does not step each element by itself",
                fix=f"autotp.whole_matrices({name})(parameters, ...), which steps each whole matrix on one rank",
                alternative="AdamW, SGD, Lion or the like; zero=0",
            )


def expect_alone(optimizer: Optimizer, why: str) -> None:
    """Raises Error unless an optimizer steps each parameter by itself.

    Args:
        why: what a rank has of the parameters.
    """
    if not steps_alone(optimizer):
        raise Error(
            f"{why}, and {type(optimizer).__name__} uses the gradients of several parameters at once",
            fix="AdamW, SGD, Lion or the like; or pp=1",
        )


def steps_alone(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer steps a parameter in the same way beside others and alone.

    Raises:
        Error: it does not step small tensors.
    """
    generator = torch.Generator().manual_seed(0)
    devices = [p.device for group in optimizer.param_groups for p in group["params"] if not p.is_meta]
    groups = list[Group]()
    for group in optimizer.param_groups[:GROUPS]:
        dims = group["params"][0].dim() if group["params"] else 2
        shape = (4, *[3] * dims)[:dims]  # Both parameters have it: an optimizer may stack the gradients of a group.
        device = devices[0] if devices else torch.device("cpu")
        groups.append((group, [_drawn(shape, generator, device) for _ in range(2)]))
    together = _stepped(optimizer, groups)
    alone = [_stepped(optimizer, [(options, [drawn])])[0] for options, pair in groups for drawn in pair]
    return all(_is_close(a, b) for a, b in zip(together, alone, strict=True))


def states_of(optimizer: Optimizer, options: Mapping[str, Any], device: torch.device) -> dict[str, bool]:
    """Returns the key of each state that is shaped as its parameter, and whether it may be negative.

    Args:
        options: those of a group.
        device: that of its parameters.

    Raises:
        Error: the optimizer does not step small tensors, or has a state of another shape.
    """
    drawn = _drawn((4, 6), torch.Generator().manual_seed(0), device)
    trial = _trial(optimizer, [(options, [drawn])])
    (parameter,) = trial.param_groups[0]["params"]
    states = {key: x for key, x in trial.state[parameter].items() if isinstance(x, Tensor) and x.dim()}
    for key in [key for key, x in states.items() if x.shape != parameter.shape]:
        raise Error(
            f"`{key}` of {type(optimizer).__name__} is {list(states[key].shape)} where the parameter is "
            f"{list(parameter.shape)}",
            fix="an optimizer whose state is shaped as the parameters are, such as AdamW",
        )
    return {key: bool((x < 0).any()) for key, x in states.items()}


def plain_stepper(optimizer: Optimizer, cls: type[Optimizer]) -> Optimizer:
    """Returns an optimizer of a class with the groups of one of a derived class, and all its other attributes.

    It has no state.
    """
    stepper: Any = object.__new__(cls)
    # As when torch unpickles an optimizer: it gets hooks of its own.
    content = {"defaults": dict(optimizer.defaults), "param_groups": optimizer.param_groups, "state": defaultdict(dict)}
    Optimizer.__setstate__(stepper, content)
    vars(stepper).update({key: value for key, value in vars(optimizer).items() if key not in vars(stepper)})
    return stepper


def expect_nothing_kept(optimizer: Optimizer, alternative: str) -> None:
    """Raises Error if an optimizer has parameters in other attributes than its groups: it would step parts of them."""
    for key, value in vars(optimizer).items():
        beside = key not in ("param_groups", "state")
        if beside and any(isinstance(x, nn.Parameter | Optimizer) for x in pytree.tree_leaves(value)):
            raise Error(
                f"{type(optimizer).__name__} keeps parameters in `{key}`, and would step this rank's parts of them",
                fix="an optimizer that reads its param_groups in each step",
                alternative=alternative,
            )


def _is_close(value: Tensor, expected: Tensor) -> bool:
    return torch.allclose(value, expected, rtol=1e-9, atol=0, equal_nan=True)


def _drawn(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Drawn:
    dtype = torch.float32 if device.type == "mps" else torch.float64
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for _ in range(3)]
    return drawn[0], tuple(size * gradient for size, gradient in zip(SIZES, drawn[1:], strict=True))


def _stepped(optimizer: Optimizer, groups: Sequence[Group]) -> list[Tensor]:
    """Returns small parameters after some steps; raises Error as `_trial`."""
    return [p.detach() for group in _trial(optimizer, groups).param_groups for p in group["params"]]


def _trial(optimizer: Optimizer, groups: Sequence[Group]) -> Any:
    """Returns an optimizer that has all but its groups and state from another one, after some steps.

    Raises:
        Error: it does not step small parameters.
    """
    parameters = [[nn.Parameter(start.clone()) for start, _ in drawn] for _, drawn in groups]
    trial: Any = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer), state=defaultdict(dict))
    trial.param_groups = [{**options, "params": some} for (options, _), some in zip(groups, parameters, strict=True)]
    every = [p for some in parameters for p in some]
    cards = [every[0].device] if every[0].is_cuda else []
    try:
        with torch.random.fork_rng(devices=cards):
            torch.manual_seed(0)
            for i in range(len(SIZES)):
                for parameter, (_, gradients) in zip(every, (x for _, drawn in groups for x in drawn), strict=True):
                    parameter.grad = gradients[i].clone()
                unhooked_step(type(optimizer))(trial)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise Error(
            f"{type(optimizer).__name__} does not step a small tensor without a closure: {type(error).__name__}: "
            f"{first_line}",
            fix="an optimizer that steps each element by itself, such as torch.optim.AdamW",
        ) from error
    return trial
