"""A cut parameter that is taken for the whole: a warning the first time; an optimizer's work is none."""

import warnings
from typing import Any

import pytest
import torch
from helpers import Checks
from test_attributes import Mlp, x
from torch import Tensor, nn

import autotp

checks = Checks()


class Net(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


WRONG: dict[str, Any] = {
    "norm": lambda w: w.norm(),
    "sum": lambda w: w.sum(),
    "__getitem__": lambda w: w[3],
    "__setitem__": lambda w: w.__setitem__(3, 0),
    "linear": lambda w: nn.functional.linear(torch.ones(1, 8, dtype=w.dtype), w),
    "matmul": lambda w: torch.matmul(w, w.new_zeros(8)),
    "T": lambda w: w.T,
    "normal_": nn.init.normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "view": lambda w: w.view(-1),
}


@checks.on(2)
def what_is_wrong_on_parts(rank: int, n: int) -> None:
    for name, do in WRONG.items():
        parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
        with torch.no_grad():
            with pytest.warns(
                UserWarning, match=r"`up.weight` is this rank's part \[15, 8\] of \[30, 8\], and "
            ) as told:
                do(parallel.up.weight)
            assert len(told) == 1 and (name in str(told[0].message) or name == "T"), str(told[0].message)
            do(parallel.up.weight)  # Once.
            do(parallel.down.bias if "2" in name else nn.Parameter(torch.zeros(30, 8)))


@checks.on(2)
def what_is_right_on_parts(rank: int, n: int) -> None:
    """Training, averages, freezing, initialisation with constants, printing: not a word."""
    parallel = autotp.parallelize(Net(), n, example_inputs=(x(),))
    average = {name: p.detach().clone() for name, p in parallel.named_parameters()}
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        for foreach in (True, False):
            optimizer = kind(parallel.parameters(), lr=0.01, foreach=foreach)
            parallel(x()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        for name, p in parallel.named_parameters():
            average[name].mul_(0.9).add_(p, alpha=0.1)
            p.copy_(average[name])
            p.data = p.data * 2
            assert p.shape == p.data.shape and str(p.device) == "cpu" and len(repr(p)) > 0
            p.requires_grad_(False).requires_grad_()
        nn.init.zeros_(parallel.up.weight)
        nn.init.constant_(parallel.up.weight, 0.5)
        (parallel.up.weight * 2 + 1).abs()
    assert isinstance(parallel.up.weight, nn.Parameter) and parallel.up.weight in set(parallel.parameters())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


def test_nothing_is_said_on_one_rank() -> None:
    parallel = autotp.parallelize(Net(), 1, example_inputs=(x(),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel.up.weight.norm()
