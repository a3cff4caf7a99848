"""relocate: all values on one device, and random numbers from the stream from which the model draws them."""

from __future__ import annotations

from typing import Any

import torch
from graphs import draft, lines, some

from autotp.passes.canonicalize.relocate import relocate
from autotp.rules.call import outputs_of

aten = torch.ops.aten
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def mixed(call: Any, x: Any) -> Any:
    """Positions that the model makes on the CPU and moves, and numbers that it draws there."""
    positions = call(aten.to.device, call(aten.arange.default, 4, device=CPU), GPU, torch.float32)
    drawn = call(aten.rand.default, [4], device=CPU)
    return positions, call(aten.lt.Scalar, drawn, 0.5), call(aten.relu.default, x)


def test_relocate_does_the_docstring_s_example() -> None:
    graph = draft(mixed, x=some(4))
    found = relocate(graph, "cuda")
    assert lines(found) == [
        "arange(4, device=device(type='cuda', index=0))",
        "to(arange, device(type='cuda', index=0), float32)",
        "rand([4], device=device(type='cpu'))",
        "to_1 = to(rand, device(type='cuda', index=0), float32)",
        "lt(to_1, 0.5)",
        "relu(x)",
        "return to, lt, relu",
    ]
    drawn = next(node for node in found.nodes if node.target is aten.rand.default)
    others = [node for node in found.nodes if node is not drawn and node.op != "output"]
    assert {value.device.type for node in others for value in outputs_of(node)} == {"cuda"}
    assert lines(graph)[0] == "arange(4, device=device(type='cpu'))", "the old graph stays as it is"


def test_relocate_to_the_cpu_returns_the_same_graph() -> None:
    graph = draft(lambda call: call(aten.rand.default, [4], device=CPU))
    assert relocate(graph, "cpu") is graph
