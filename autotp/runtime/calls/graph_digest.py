"""digest: a planned graph as text; and what ranks must have alike before they run a graph."""

from __future__ import annotations

import re
from typing import Any
from zlib import crc32

import torch
from torch import fx
from torch._ops import OpOverload

from autotp.distributed.agreement import SOURCE, Among, Fact, text_fact
from autotp.distributed.fingerprint import checksum, random_state
from autotp.distributed.mesh import Mesh
from autotp.ops.dropout import OWN_MASKS
from autotp.passes.capture.captured import Captured
from autotp.passes.capture.guards.values import place_text
from autotp.passes.capture.python_state.freeze import freeze_argument
from autotp.passes.emit.bind import COMMUNICATING
from autotp.passes.program.program import Program
from autotp.rules.call import outputs_of
from autotp.rules.traits import draws
from autotp.source_location import line_of


def digest(analysis: Program) -> str:
    """Returns graph, constants and layouts as text, without names of nodes; ranks that agree have the same text.

    Symbols of sizes are numbered as they come: their names depend on what else was planned in a process.

    The graph is that before sequences are cut: each rank of the axis `cp` makes its own of it.
    """
    graph = analysis.sequences.uncut_graph or analysis.graph
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    symbols: dict[str, str] = {}
    nodes = [_line(node, number, analysis.captured, symbols) for node in graph.nodes]
    text = re.sub(r"cuda:\d+", "cuda", "\n".join(nodes))  # Each rank names its own device.
    outcomes = (read.outcome for read in analysis.captured.asked)
    reads = (f"{freeze_argument(outcome.value)}{SOURCE}{place_text(outcome.place)}" for outcome in outcomes)
    return "\n".join([text, *reads, *(f"{name} {layout}" for name, layout in analysis.layouts.items())])


def same_graph(text: str, mesh: Mesh) -> Fact:
    """Returns a `digest`, perhaps with settings behind it, as what ranks must have alike before they run the graph."""
    fix = "build the same model and call it alike on all ranks"
    return text_fact("graph", text, mesh, "would run another graph", fix)


def same_order(order: int, among: Among | None = None) -> Fact:
    """Returns `order_of` a rank's graph as what ranks must have alike: those of a model with cut sequences."""
    problem = "the parts of a sequence are so unequal that cp ranks would communicate in another order"
    return Fact("order", order, problem, "a sequence whose length cp divides, or another cp", among, wording="alone")


def draws_alike(lowered: fx.Graph) -> bool:
    """Returns whether a rank's graph draws random numbers that must be the same on all ranks."""
    return any(draws(node) and node.target not in OWN_MASKS for node in lowered.nodes)


def same_draws(mesh: Mesh) -> Fact:
    """Returns this rank's random state as what ranks must have alike."""
    fix = "torch.manual_seed(seed) with one seed on all ranks"
    return Fact("random", random_state(mesh), "would draw other random numbers", fix)


def same_cards(mesh: Mesh, shares_draws: bool, among: Among | None = None) -> list[Fact]:
    """Returns the kind of this rank's GPU as what ranks must have alike, if they must draw the same random numbers.

    The kernels of CUDA divide a stream of random numbers by the number of a GPU's processors.

    Args:
        shares_draws: `draws_alike` of this rank's graph.
    """
    if not shares_draws or mesh.device.type != "cuda":
        return []
    card = torch.cuda.get_device_properties(mesh.device)
    fix = "GPUs of one kind for the ranks of one model, or no dropout"
    result = {"result": "other random numbers for dropout of what all ranks hold"}
    card_text = f"{card.name} {card.multi_processor_count}"
    return [Fact("card", card_text, "has a GPU of another kind", fix, among, details=lambda *ranks: result)]


def order_of(lowered: fx.Graph) -> int:
    """Returns a checksum of a rank's collectives in order: ranks that meet must have the same."""
    collectives = (node for node in lowered.nodes if node.target in COMMUNICATING)
    lines = (f"{getattr(node.target, '__name__', '')} {node.args[1]}" for node in collectives)
    return crc32("\n".join(lines).encode())


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
