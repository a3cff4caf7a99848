"""gather: parts become the whole; what is whole stays; what is neither is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from errors import message
from ranks import Checks
from small_models import ROWS, Plain
from torch import nn

import autotp
from autotp.distributed.gather import OutputLayout, gather_all, mark, marked
from autotp.distributed.mesh import Mesh
from autotp.distributed.sharded_tensor import Sharded
from autotp.sharding.layout import Layout

checks = Checks()
HALVES = Layout((4, 3), 0, (((0, 2),), ((2, 4),)))


class Hidden(Plain):
    def forward(self, x: Any) -> Any:
        hidden = self.up(x)
        return {"hidden": hidden, "out": self.down(hidden.relu())}


def test_sizes_stay_sizes() -> None:
    assert [type(x) for x in gather_all((torch.Size([2]), 3, torch.ones(2)))] == [torch.Size, int, torch.Tensor]


def test_marks() -> None:
    part, whole, plain = torch.ones(2, 3), torch.ones(4, 3), torch.ones(1)
    mark(part, OutputLayout(HALVES, Mesh(size=2, rank=1)))
    mark(whole, OutputLayout(None, Mesh(size=2)))
    mark("text", OutputLayout(None, Mesh()))
    found = marked(part)
    assert isinstance(found, Sharded) and found.shape == (4, 3)
    assert marked(whole) is whole and marked(plain) is plain and marked(3) == 3
    assert gather_all({"a": whole, "b": [plain, 3]}) == {"a": whole, "b": [plain, 3]}


def test_what_is_no_output() -> None:
    assert message(lambda: autotp.gather(torch.ones(2, 3))) == (
        "gather: a tensor [2, 3] that is not an output of a parallel model\n"
        "  try      autotp.gather(output) on what the model returned, before anything is computed from it"
    )


@checks.on(2)
@checks.on(3, rare=True)
def outputs_and_parameters(rank: int, n: int) -> None:
    """In any structure; the gradient of a whole value reaches each rank's part."""
    torch.manual_seed(0)
    one = Hidden().double()
    torch.manual_seed(0)
    mine = autotp.parallelize(Hidden().double(), n, example_inputs=ROWS, outputs="local")
    expected, found = one(ROWS), mine(ROWS)
    assert found["hidden"].shape[-1] < 32
    whole = autotp.gather([found, "text"])[0]
    torch.testing.assert_close(whole["hidden"], expected["hidden"])
    assert whole["out"] is found["out"]
    whole["hidden"].square().sum().backward()
    expected["hidden"].square().sum().backward()
    weight = mine.get_parameter("up.weight")
    torch.testing.assert_close(autotp.gather(weight), one.up.weight)
    torch.testing.assert_close(autotp.gather(weight.grad), one.up.weight.grad)
    assert autotp.gather(mine.get_parameter("down.bias")) is mine.get_parameter("down.bias")


@checks.on(2)
def a_loss_of_the_whole_parameter(rank: int, n: int) -> None:
    """A penalty that no rank can compute of its part."""
    torch.manual_seed(0)
    one = nn.Sequential(Plain()).double()
    torch.manual_seed(0)
    mine = autotp.parallelize(nn.Sequential(Plain()).double(), n, example_inputs=ROWS)
    torch.linalg.matrix_norm(autotp.gather(mine.get_parameter("0.up.weight")), 2).backward()
    torch.linalg.matrix_norm(one.get_parameter("0.up.weight"), 2).backward()
    torch.testing.assert_close(
        autotp.gather(mine.get_parameter("0.up.weight").grad), one.get_parameter("0.up.weight").grad
    )


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
