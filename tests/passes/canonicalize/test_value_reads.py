"""value_reads: what follows from the inputs alone is a graph of its own; draws and updated buffers stay."""

from __future__ import annotations

import torch
from graphs import ops
from torch import Tensor, nn

from autotp.compiler import analyse
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.program.program import CallState
from autotp.rules.call import returned
from autotp.sharding.layout import Layout

X, N = torch.linspace(-1, 1, 24).view(3, 8), torch.tensor([2, 3])


class Model(nn.Module):
    """Reads an input, an activation and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(3)
        x = x[:, : int(n.max()) + 5]
        x = nn.functional.dropout(x) if self.calls > 1 else x
        y = self.down(self.up(x).relu())
        return -y if (y > 3).any() else y


def program(**state: object):  # type: ignore[no-untyped-def]
    return analyse(skeleton_of(Model()), (X, N), {}, 2, call=CallState(**state))  # type: ignore[arg-type]


def test_value_reads_split_those_of_inputs_from_later_ones() -> None:
    found = program()
    captured = found.captured
    assert [read.of_inputs for read in captured.asked] == [True, False, False]
    assert [read.given[0].at for read in captured.asked] == [0, 1, 2]
    assert ops(captured.input_values)[:1] == ["max"]
    assert len(returned(captured.input_values)) == 1
    assert len(returned(found.graph)) == 4  # The result, two reads, and the buffer's new value.
    assert found.updated == ["b_model_calls"]


def test_value_reads_leave_draws_in_the_graph() -> None:
    assert "rand" in ops(program().graph)


def test_value_reads_let_no_argument_be_written() -> None:
    assert program().captured.owned == frozenset()


def test_value_reads_of_cut_inputs_are_later_ones() -> None:
    """Each rank has other values of a cut input."""
    found = program(cut_inputs={1: Layout((2,), 0)}).captured
    assert [read.of_inputs for read in found.asked] == [False, False, False]
    assert not returned(found.input_values)
