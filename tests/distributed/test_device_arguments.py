"""device_arguments: batches of the CPU are moved to the rank's device; what an operator wants on the CPU stays."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence

from autotp.distributed import device_arguments
from autotp.distributed.device_arguments import inputs_on_host, to_device

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    device_arguments._tell_once.cache_clear()


def test_a_batch_is_moved_and_one_line_says_so_once() -> None:
    batch = [torch.ones(2, 3), torch.ones(2, dtype=torch.int64)]
    with pytest.warns(UserWarning, match="on the CPU, and are copied to meta in each call"):
        moved = to_device(batch, ELSEWHERE, [False, False])
    assert [x.device for x in moved] == [ELSEWHERE, ELSEWHERE]
    assert [(x.shape, x.dtype) for x in moved] == [(x.shape, x.dtype) for x in batch]
    with warnings.catch_warnings(action="error"):
        assert to_device(batch, ELSEWHERE, [False, False])[0].device == ELSEWHERE


def test_to_device_leaves_what_is_wanted_or_there() -> None:
    """A tensor that an operator wants there, one without dimensions, one that is on the device already."""
    given = [torch.ones(2), torch.tensor(3), torch.ones(2, device="meta")]
    with warnings.catch_warnings(action="error"):
        found = to_device(given, ELSEWHERE, [True, False, False])
    assert all(x is y for x, y in zip(found, given, strict=True))


def test_to_device_does_nothing_on_the_cpu() -> None:
    given = [torch.ones(2)]
    with warnings.catch_warnings(action="error"):
        assert to_device(given, CPU, [False])[0] is given[0]


def test_a_gradient_goes_back_to_the_callers_tensor(recwarn: pytest.WarningsRecorder) -> None:
    x = torch.ones(2, requires_grad=True)
    (moved,) = to_device([x], ELSEWHERE, [False])
    assert moved.requires_grad and moved.grad_fn is not None and moved.grad_fn.next_functions[0][0].variable is x


def test_lengths_of_packed_sequences_are_wanted_on_the_cpu() -> None:
    class Packed(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return pack_padded_sequence(x, lengths, batch_first=True).data * 2

    graph = make_fx(Packed())(torch.ones(2, 3, 4), torch.tensor([3, 2])).graph
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    assert inputs_on_host(graph, names) == {names[1]}
