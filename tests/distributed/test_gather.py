"""gather: parts become the whole; what is whole stays; what is neither is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Checks
from small_models import ROWS, Grouped, Plain
from torch import nn

import autotp
from autotp.distributed.cut_tensors.cut_parameter import CutTensor
from autotp.distributed.gather import gather_all

checks = Checks()


class Hidden(Plain):
    def forward(self, x: Any) -> Any:
        hidden = self.up(x)
        return {"hidden": hidden, "out": self.down(hidden.relu())}


def test_gather_all_leaves_sizes_as_they_are() -> None:
    assert [type(x) for x in gather_all((torch.Size([2]), 3, torch.ones(2)))] == [torch.Size, int, torch.Tensor]


def test_gather_returns_what_is_whole() -> None:
    plain = torch.ones(2, 3)
    assert autotp.gather({"a": plain, "b": [3, "text"]}) == {"a": plain, "b": [3, "text"]}


@checks.on(2)
def states_of_optimizers(rank: int, n: int) -> None:
    """Those of cut parameters are gathered; what is whole comes back."""
    mine = autotp.parallelize(Plain().double(), n, example_inputs=ROWS)
    optimizer = torch.optim.Adam(mine.parameters())
    mine(ROWS).sum().backward()
    optimizer.step()
    weight, bias = mine.get_parameter("up.weight"), mine.get_parameter("down.bias")
    gathered = autotp.gather(optimizer.state[weight]["exp_avg"])
    assert type(gathered) is torch.Tensor and gathered.shape == mine.layouts["up.weight"].shape
    for what in (bias, optimizer.state[bias]["exp_avg"], torch.ones(4, 3)):
        assert autotp.gather(what) is what


@checks.on(4)
def heads_that_do_not_divide_evenly(rank: int, n: int) -> None:
    """Six heads and two of keys on four ranks: 2, 1, 2, 1 heads. Gradients of whole values reach the parts, too."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1, "vocab_size": 99}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2)
    one = transformers.LlamaForCausalLM(config).double()
    mine = autotp.parallelize(copy.deepcopy(one), n)
    tokens = torch.arange(8).view(2, 4)
    one(tokens, labels=tokens).loss.backward()
    mine(tokens, labels=tokens).loss.backward()
    assert {mine.layouts[name].lengths()[0] for name in mine.layouts if "q_proj" in name} == {16}
    for name, parameter in mine.named_parameters():
        whole = one.get_parameter(name)
        torch.testing.assert_close(autotp.gather(parameter), whole)
        torch.testing.assert_close(autotp.gather(parameter.grad), whole.grad)


@checks.on(2)
@checks.on(3, rare=True)
def outputs_and_parameters(rank: int, n: int) -> None:
    """In any structure; the gradient of a whole value reaches each rank's part."""
    torch.manual_seed(0)
    one = Hidden().double()
    torch.manual_seed(0)
    mine = autotp.parallelize(Hidden().double(), n, example_inputs=ROWS, outputs="local")
    expected, found = one(ROWS), mine(ROWS)
    assert found["hidden"].to_local().shape[-1] < found["hidden"].shape[-1] == 32
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


@checks.on(4)
def every_copy_gets_the_gradient(rank: int, n: int) -> None:
    """Two ranks hold a key head: both get the gradient of a whole that was gathered, or their copies would differ."""
    one = Grouped(2, 2, "separate").double()
    mine = autotp.parallelize(copy.deepcopy(one), n, example_inputs=torch.ones(1, 3, 12).double())
    assert mine.layouts["k.weight"].repeated
    losses: list[Callable[[Any], Any]] = [
        lambda p: autotp.gather(p),
        lambda p: autotp.gather(p * 2),
        lambda p: p.full_tensor() if isinstance(p, CutTensor) else p,
        lambda p: p[2],
    ]
    for loss in losses:
        for model in (one, mine):
            model.zero_grad()
            loss(model.k.weight).square().sum().backward()
        part = mine.layouts["k.weight"].take(one.k.weight.grad, rank)
        torch.testing.assert_close(mine.k.weight.grad.to_local(), part)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
