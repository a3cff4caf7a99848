"""digest: a planned graph as text, and a rank's collectives in order, which ranks compare."""

from __future__ import annotations

import re
from typing import Any
from zlib import crc32

import torch
from torch import fx
from torch._ops import OpOverload

from autotp.compiler import Program, communication, expect_one_order
from autotp.distributed.consistency import SOURCE, checksum, expect_as_first
from autotp.distributed.mesh import Mesh, gather_ints
from autotp.ops.dropout import fast_attention, fast_dropout
from autotp.passes.capture.captured import Captured
from autotp.passes.capture.guards.values import shown
from autotp.passes.capture.python_state.freeze import freeze_argument
from autotp.rules.call import outputs_of
from autotp.rules.traits import draws
from autotp.source_location import line_of


def digest(analysis: Program) -> str:
    """Returns graph, constants and layouts as text, without names of nodes; ranks that agree have the same text.

    Symbols of sizes are numbered as they come: their names depend on what else was planned in a process.

    The graph is that before sequences are cut: each rank of the axis `cp` makes its own of it.
    """
    graph = analysis.whole or analysis.graph
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    symbols: dict[str, str] = {}
    nodes = [_line(node, number, analysis.captured, symbols) for node in graph.nodes]
    text = re.sub(r"cuda:\d+", "cuda", "\n".join(nodes))  # Each rank names its own device.
    outcomes = (read.outcome for read in analysis.captured.asked)
    reads = (f"{freeze_argument(outcome.value)}{SOURCE}{shown(outcome.place)}" for outcome in outcomes)
    return "\n".join([text, *reads, *(f"{name} {layout}" for name, layout in analysis.layouts.items())])


def agree_on_order(mesh: Mesh, order: int) -> None:
    """Raises Error on every rank if the cp ranks of a model would communicate in another order.

    Args:
        order: `order_of` this rank's graph.
    """
    if mesh.cp > 1:
        expect_one_order(gather_ints([order], mesh))


def draws_alike(lowered: fx.Graph) -> bool:
    """Returns whether a rank's graph draws random numbers that must be the same on all ranks."""
    # These two draw another mask on each rank by design.
    return any(draws(node) and node.target not in (fast_attention, fast_dropout) for node in lowered.nodes)


def agree_on_cards(mesh: Mesh, shares_draws: bool) -> None:
    """Raises Error on every rank if ranks have GPUs of several kinds, and must draw the same random numbers.

    The kernels of CUDA divide a stream of random numbers by the number of a GPU's processors.

    Args:
        shares_draws: `draws_alike` of this rank's graph.
    """
    if not shares_draws or mesh.device.type != "cuda" or mesh.everyone.size == 1:
        return
    card = torch.cuda.get_device_properties(mesh.device)
    expect_as_first(
        gather_ints([crc32(f"{card.name} {card.multi_processor_count}".encode())], mesh),
        0,
        mesh,
        "has a GPU of another kind than rank 0, and would draw other numbers for dropout of what all ranks hold",
        "GPUs of one kind for the ranks of one model, or no dropout",
    )


def order_of(lowered: fx.Graph) -> int:
    """Returns a checksum of a rank's collectives in order: ranks that meet must have the same."""
    return crc32(communication(lowered).encode())


def _line(node: fx.Node, number: dict[fx.Node, str], captured: Captured, symbols: dict[str, str]) -> str:
    """Returns a node as `%2 = aten.add.Tensor(%0, %1)  float32[2, 3]`, with its source line."""
    if node.op == "placeholder":
        return f"{number[node]} = {_placed(node, captured)}  {_shaped(node, symbols)}"
    arguments = fx.map_arg((node.args, node.kwargs), number.__getitem__)
    parts = [*map(str, arguments[0]), *(f"{name}={value}" for name, value in arguments[1].items())]
    # `str` of a nested list puts quotes around the names of nodes.
    called = re.sub(r"'(%\d+)'", r"\1", f"{_called(node)}({', '.join(parts)})")
    line = f"{number[node]} = {called}  {_shaped(node, symbols)}".rstrip()
    return line if (place := line_of(node)) == "?" else f"{line}{SOURCE}{place}"


def _placed(node: fx.Node, captured: Captured) -> str:
    """Returns the meaning of a placeholder as text."""
    for role, names in (("parameter", captured.parameters), ("buffer", captured.buffers)):
        if node.name in names:
            return f"{role} `{names[node.name]}`"
    if node.name in captured.constants:
        return f"a tensor made in forward, with checksum {checksum(captured.constants[node.name]):08x}"
    return f"input {captured.inputs.index(node.name)}" if node.name in captured.inputs else node.name


def _shaped(node: fx.Node, symbols: dict[str, str]) -> str:
    """Returns dtypes and shapes as text. symbols: name of a symbol -> its name in the text."""

    def named(match: re.Match[str]) -> str:
        return symbols.setdefault(match[0], f"{match[0][0]}{len(symbols)}")

    # Symbols of torch.export: s0 is the size of an input, u0 a size that values decide.
    shapes = (re.sub(r"\b[su]\d+\b", named, str(list(t.shape))) for t in outputs_of(node))
    kinds = (str(t.dtype).removeprefix("torch.") for t in outputs_of(node))
    return ", ".join(map("".join, zip(kinds, shapes, strict=True)))


def _called(node: fx.Node) -> str:
    target: Any = node.target
    return str(target) if isinstance(target, OpOverload | str) else target.__name__
