"""Answers questions of passes about an operator, from its row in the table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autotp.model_library import library
from autotp.rules.call import arguments_of, call_of, operator_of
from autotp.rules.row import Reach, Row, Trait
from autotp.rules.table import ROWS

UNKNOWN = Row()


def has(op: Any, traits: Trait) -> bool:
    """True for an operator that has this trait, or at least one of several (`Trait.SAME | Trait.RESHAPE`)."""
    return op in having(traits)


@cache
def having(traits: Trait) -> frozenset[Any]:
    """Returns the operators that have at least one of these traits."""
    return frozenset(op for op, row in ROWS.items() if row.traits & traits)


def reach_of(node: fx.Node) -> Reach | None:
    """Returns which keys around its own position a query of an attention reads; None if they have no bound."""
    reach = ROWS.get(node.target, UNKNOWN).reach  # type: ignore[arg-type]
    return reach(call_of(node)) if reach is not None else None


def is_masked(node: fx.Node) -> bool:
    """True for an attention in which the values of a tensor say which keys a query reads."""
    masked = ROWS.get(node.target, UNKNOWN).masked  # type: ignore[arg-type]
    return masked is not None and masked(call_of(node))


def zigzag_of(node: fx.Node) -> Any:
    """Returns the operator that computes a causal attention for queries in the order of `zigzag`; None for others."""
    zigzag = ROWS.get(node.target, UNKNOWN).zigzag  # type: ignore[arg-type]
    return zigzag(call_of(node)) if zigzag is not None else None


def draws(node: fx.Node) -> bool:
    """True for a call that takes numbers from the random stream; dropout with p=0 or in evaluation does not."""
    operator = operator_of(node)
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return has(operator, Trait.RANDOM) and arguments_of(node).get("dropout_p") != 0
    arguments = arguments_of(node)
    idle = arguments.get("train", True) is False, arguments.get("training", True) is False
    # `dropout` with p=0 returns its input, and `native_dropout` draws its mask all the same.
    nothing = operator is not torch.ops.aten.native_dropout.default and "train" in arguments and arguments.get("p") == 0
    return not (any(idle) or nothing or arguments.get("dropout_p") == 0)


def draws_from_numpy(node: fx.Node) -> bool:
    """True for a call that takes numbers from `numpy.random`."""
    name: str = getattr(operator_of(node), "_name", "")
    return library().draws_from_numpy(name.removesuffix(".default"))


def sparse_argument(node: fx.Node) -> str:
    """Returns the name of the argument that makes the gradient of the first operand sparse; "" if it is dense."""
    arguments = arguments_of(node) if isinstance(node.target, OpOverload) else {}
    return next((name for name in ("sparse", "sparse_grad") if arguments.get(name) is True), "")


def size_argument(op: Any) -> str:
    """Returns the name of the argument with the sizes of an operator's result; "" if there is none."""
    return ROWS.get(op, UNKNOWN).sizes


def each_channel() -> Iterator[tuple[Any, int]]:
    """Returns the operators that work on each channel by itself, with the number of dimensions behind the channels."""
    return ((op, row.places) for op, row in ROWS.items() if row.places)


@cache
def in_place_of(op: Any) -> OpOverload | None:
    """Returns the in-place form of `op`, which overwrites its first operand; None if torch has none."""
    if not isinstance(op, OpOverload):
        return None
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    return getattr(packet, op._overloadname, None)


@cache
def functional_of(op: OpOverload) -> OpOverload | None:
    """Returns the functional form of an in-place operator, or None: same name, arguments of the same types.

    The overload's name does not tell: `pow_.Scalar` raises a tensor to a number, `pow.Scalar` a number to a tensor.
    """
    namespace, _, written = op._schema.name.partition("::")
    name = f"__{written[3:]}" if written.startswith("__i") else written.removesuffix("_")  # `__ior__` of `x |= y`.
    library, types = getattr(torch.ops, namespace), _types(op)
    packets = [getattr(library, n) for n in (name, f"{name}_functional") if hasattr(library, n)]
    candidates = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    fitting = [candidate for candidate in candidates if not candidate._schema.is_mutable and _types(candidate) == types]
    return min(fitting, key=lambda candidate: candidate._overloadname != op._overloadname, default=None)


def _types(op: OpOverload) -> list[tuple[str, bool]]:
    return [(str(arg.type), arg.kwarg_only) for arg in op._schema.arguments if not arg.is_out]
