"""bind: process groups for mesh axes, the device for `meta`, and memory that may be written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import call_named, draft, lines, some
from torch import fx

from autotp.diagnostics.lockstep import COLLECTIVES
from autotp.ops import collectives
from autotp.ops.attention.products import attention
from autotp.ops.custom_vjp import Places, Vjp
from autotp.passes.emit.bind import COMMUNICATING, bind
from autotp.rules.call import placeholders

aten = torch.ops.aten
GROUPS = {"tp": "5", "tp/4": "9"}
GPU = torch.device("cuda:1")


def test_bind_puts_in_groups_and_device() -> None:
    def make(call: Any, x: Any) -> Any:
        made = call(aten.arange.default, 4, device=torch.device("cpu"))
        x = call(collectives.reduce, call(collectives.copy, x, "tp"), "tp")
        return call(collectives.reduce, x, "tp/4"), made

    graph = draft(make, x=some(4))
    assert lines(bind(graph, GPU, GROUPS, reuse=False)) == [
        "arange(4, device=device(type='cuda', index=1))",
        "copy(x, '5')",
        "reduce(copy, '5')",
        "reduce_1 = reduce(reduce, '9')",
        "return reduce_1, arange",
    ]
    assert lines(graph)[2] == "reduce(copy, 'tp')", "the lowered graph stays as it is"


def test_bind_leaves_draws_on_the_cpu() -> None:
    """Numbers that the model draws on the CPU come from its random stream, also on a GPU."""

    def make(call: Any) -> Any:
        return call(aten.rand.default, [4], device=torch.device("cpu"))

    assert lines(bind(draft(make), GPU, GROUPS))[0] == "rand([4], device=device(type='cpu'))"


@pytest.mark.parametrize("target", sorted(COMMUNICATING, key=str), ids=lambda target: target.__name__)
def test_bind_gives_every_collective_its_group(target: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(target, (x, "tp", None)),))
    found = call_named(bind(graph, GPU, GROUPS, reuse=False), target.__name__)
    assert found.args[1:] == ("5", None)


def test_bind_knows_every_simulated_collective() -> None:
    """Those of autotp that the simulation of all ranks knows: a new one must be bound, too.

    Extensions write theirs into bound graphs.
    """
    assert {target for target in COLLECTIVES if "experimental" not in target.__module__} == COMMUNICATING


def test_bind_of_one_process_has_no_group() -> None:
    """Without a group the axis becomes None."""
    graph = draft(lambda call, x: call(collectives.reduce, x, "tp"), x=some(4))
    assert lines(bind(graph, torch.device("cpu"), {"tp": None}, reuse=False))[0] == "reduce(x, None)"


def test_bind_reaches_the_backward_of_a_function() -> None:
    backward = fx.Graph()
    grad = backward.placeholder("grad")
    backward.output((backward.call_function(collectives.copy, (grad, "tp")),))
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(Vjp(backward, Places((0,), (0,), ()), "Own"), (x,)),))
    bound: Any = call_named(bind(graph, GPU, GROUPS), "vjp").target
    assert lines(bound.graph)[0] == "copy(grad, '5')"
    assert lines(backward)[0] == "copy(grad, 'tp')"


def test_bind_replaces_masked_attention_without_heads() -> None:
    """Its mask must get a gradient, of which torch knows nothing; with heads, or without a mask, it stays."""

    def names(heads: int, masked: bool) -> list[str]:
        def make(call: Any, q: Any, m: Any) -> Any:
            return call(aten.scaled_dot_product_attention.default, q, q, q, *([m] if masked else []))

        graph = draft(make, q=some(2, heads, 5, 3), m=some(5, 5))
        return [str(node.args) for node in bind(graph, GPU, GROUPS).nodes if node.target is attention]

    assert [names(0, True), names(0, False), names(2, True)] == [["(q, q, q, m)"], [], []]


def test_bind_writes_owned_caches_in_place() -> None:
    """A cache belongs to the graph: its next value takes its memory."""

    def make(call: Any, cache: Any, x: Any) -> Any:
        return call(aten.index_copy.default, cache, 0, call(aten.arange.default, 2), x)

    graph = draft(make, cache=some(4, 3), x=some(2, 3))
    assert placeholders(graph) == ["cache", "x"]
    for owned, kind in (((), "index_copy"), (("cache",), "index_copy_")):
        assert any(line.startswith(f"{kind}(") for line in lines(bind(graph, GPU, GROUPS, owned)))
