"""composition: stages compute the graph, and each way in which they might not is an error that says where."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from small_models import gpt
from torch import Tensor, fx, nn

from autotp.errors import Error
from autotp.passes.capture.capture import capture
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.check.stage_composition import compose
from autotp.passes.pipeline.stages import staged

aten = torch.ops.aten
Parts = list[tuple[fx.Graph, list[str]]]


class Noisy(nn.Module):
    """A mask that every stage computes, noise that one stage draws, and a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch seq]"""
        x, mask = self.table(tokens), (tokens > 3).unsqueeze(-1).to(torch.float32)
        for block in self.h:
            x = x + block(x) * mask
        return (x @ self.table.weight.T).logsumexp(-1).mean()


@cache
def captured() -> tuple[fx.Graph, tuple[str, ...]]:
    found = capture(skeleton_of(Noisy()), (torch.arange(6).view(2, 3),), {})
    return found.graph, tuple(found.parameters)


def parts() -> Parts:
    graph, names = captured()
    stages = staged(graph, [["h.0"], ["h.1"], ["h.2"]], names)
    return [(stage.graph, list(stage.received)) for stage in stages]


def one(graph: fx.Graph, target: Any, at: int = 0) -> fx.Node:
    return [node for node in graph.nodes if node.target is target][at]


def test_compose_accepts_stages_that_compute_the_graph() -> None:
    graph, _ = captured()
    found = compose(graph, parts())
    assert [len(values) for values in found.sent] == [1, 1]
    tied = {name for name, readers in found.readers.items() if len(readers) > 1}
    assert {tuple(sorted(found.readers[name])) for name in tied} == {(0, 1, 2), (0, 2)}  # The tokens, and the table.


def test_compose_accepts_the_stages_of_a_gpt() -> None:
    model = gpt(n_layer=4, block_size=8, vocab_size=61, n_head=4, n_embd=16, dropout=0.1)
    found = capture(skeleton_of(model), (), model.dummy_inputs)
    stages = staged(found.graph, [["h.0"], ["h.1", "h.2"], ["h.3"]], tuple(found.parameters))
    composed = compose(found.graph, [(stage.graph, stage.received) for stage in stages])
    assert [[node.name for node in values] for values in composed.sent] == [list(s.received) for s in stages[1:]]


def other_operand(made: Parts) -> None:
    add = one(made[1][0], aten.add.Tensor)
    add.args = (add.args[1], add.args[0])


def other_operator(made: Parts) -> None:
    one(made[1][0], aten.mul.Tensor).target = aten.div.Tensor


def other_number(made: Parts) -> None:
    drop = one(made[2][0], aten.dropout.default)
    drop.args = (drop.args[0], 0.25, *drop.args[2:])


def not_sent(made: Parts) -> None:
    made[0][0].output_node().args = ((),)


def not_received(made: Parts) -> None:
    made[1] = (made[1][0], [])


def sent_to_another_stage(made: Parts) -> None:
    made[1], made[2] = made[2], made[1]


def sent_too_early(made: Parts) -> None:
    add = one(made[1][0], aten.add.Tensor)
    made[1][0].output_node().args = ((add.args[0],),)


def drawn_twice(made: Parts) -> None:
    """The second stage repeats the first one's dropout, which draws other numbers there."""
    graph = made[1][0]
    first = one(made[0][0], aten.dropout.default)
    given = next(node for node in graph.nodes if node.op == "placeholder" and node.name in made[1][1])
    with graph.inserting_after(given):
        again = graph.call_function(first.target, (given, *first.args[1:]))
    again.name, again.meta = "again", dict(first.meta)


def other_result(made: Parts) -> None:
    graph = made[2][0]
    graph.output_node().args = ((one(graph, aten.logsumexp.default),),)


def too_late(made: Parts) -> None:
    one(made[0][0], aten.linear.default).prepend(one(made[0][0], aten.embedding.default))


def before_what_it_reads(made: Parts) -> None:
    made[0][0].output_node().prepend(one(made[0][0], aten.embedding.default))


def other_input(made: Parts) -> None:
    place = next(node for node in made[0][0].nodes if node.op == "placeholder")
    place.name = "nobody"


def smaller(made: Parts) -> None:
    node = one(made[1][0], aten.add.Tensor)
    node.meta["val"] = node.meta["val"][:1]


FAULTS: dict[Callable[[Parts], None], str] = {
    other_operand: "stage 1 computes `add.*`, which is not in the graph",
    other_operator: "stage 1 computes `mul.*`, which is not in the graph",
    other_number: "stage 2 computes `dropout.*`, which is not in the graph",
    not_sent: "stage 1 does not receive what stage 0 sends",
    not_received: "stage 1 does not receive what stage 0 sends",
    sent_to_another_stage: "stage 1 computes `linear_2`, which is not in the graph",
    sent_too_early: "stage 2 computes `.*`, which is not in the graph",
    drawn_twice: "stage 1 computes `again`, which is not in the graph",
    other_result: "the last stage does not return what the graph returns",
    too_late: "stage 0 computes `.*` later than the graph does",
    before_what_it_reads: "stage 0 computes `linear.*` before `embedding`, which it reads",
    other_input: "stage 0 reads `nobody`, which is no input of the graph",
    smaller: "stage 1: `add.*` is not as large as in the graph",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_compose_refuses_a_fault_in_stages(fault: Callable[[Parts], None]) -> None:
    made = parts()
    fault(made)
    with pytest.raises(Error, match=FAULTS[fault]):
        compose(captured()[0], made)


def test_compose_refuses_a_draw_in_two_stages() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(2)
    noise = graph.call_function(aten.rand_like.default, (x,))
    noise.meta["val"] = torch.zeros(2)
    graph.output((noise,))
    first, second = fx.Graph(), fx.Graph()
    for part in (first, second):
        part.output(part.graph_copy(graph, {}))
    first.output_node().args = ((),)
    with pytest.raises(Error, match="stages 0 and 1 draw the random numbers of `rand_like_default`"):
        compose(graph, [(first, []), (second, [])])


def test_compose_refuses_a_draw_in_no_stage() -> None:
    """What is not returned is drawn, too: later numbers would be others."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(2)
    graph.call_function(aten.rand_like.default, (x,)).meta["val"] = torch.zeros(2)
    graph.output((x,))
    part = fx.Graph()
    place = part.placeholder("x")
    place.meta["val"] = torch.zeros(2)
    part.output((place,))
    with pytest.raises(Error, match="no stage computes `rand_like_default`, which draws random numbers"):
        compose(graph, [(part, [])])
