"""What forward writes into buffers, arguments and attributes."""

import pytest
import torch
from ranks import Checks
from small_models import Plain, both, read_values
from torch import Tensor, nn

import autotp

checks = Checks()


class Counting(nn.Module):
    """A counter, a running mean of what is cut, a buffer set anew, and one that nobody saves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("share", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("last", torch.zeros(16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        inside = nn.functional.gelu(self.up(x))
        self.calls += 1
        self.share = self.share * 0.5 + 0.5
        if self.training:
            self.mean.mul_(0.9).add_(inside.detach().mean(0), alpha=0.1)
        self.last = x.detach().sum(0)
        return self.down(inside * (self.share + self.mean)) * self.calls


@checks.on(2)
def buffers_are_updated_as_on_one_device(rank: int, n: int) -> None:
    torch.manual_seed(0)
    example = torch.randn(4, 16, dtype=torch.float64)
    whole, parallel = both(n, Counting().double(), example_inputs=example, outputs="local")
    for step in range(3):
        x = torch.randn(4, 16, dtype=torch.float64)
        whole.train(step < 2)
        parallel.train(step < 2)
        torch.testing.assert_close(parallel(x), whole(x))
        for (name, a), (other, b) in zip(whole.named_buffers(), parallel.named_buffers(), strict=True):
            assert name == other
            torch.testing.assert_close(b, a, msg=lambda m, name=name: f"{name}: {m}")
    assert parallel.calls == 3
    assert "last" not in parallel.state_dict()


class Cached(nn.Module):
    """Writes into its argument, and asserts something of the result: a second run must find the first values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Plain()

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        seen.add_(x)
        y: Tensor = self.body(seen)
        return y * 2 if y.sum() > 0 else -y


@checks.on(2)
def a_call_that_runs_again_writes_arguments_once(rank: int, n: int) -> None:
    given = {"x": torch.ones(3, 8).double(), "seen": torch.zeros(3, 8).double()}
    whole, parallel = both(n, Cached().double(), example_inputs=given)
    seen = [torch.zeros(3, 8).double() for _ in range(2)]
    for sign in (1, -1, 3, -5):
        x = torch.full((3, 8), float(sign)).double()
        torch.testing.assert_close(parallel(x, seen[1]), whole(x, seen[0]))
        torch.testing.assert_close(seen[1], seen[0])
    assert set(read_values(parallel)) == {
        True, False,
    }  # fmt: skip


class Recalling(nn.Module):
    """Reads tensors in attributes, which it sets, or which the caller sets; and of a view by torch.vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last, self.rounds = Plain(), torch.tensor(0.0).double(), torch.tensor(0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        y = y * 2 if self.last > 1 else y
        for _ in range(self.rounds.item()):
            y = y + 1
        self.last = x.max()
        return y * 3 if (torch.vmap(torch.max)(x) > 2).any() else y


@checks.on(2)
def branches_on_tensor_attributes_equal_one_device(rank: int, n: int) -> None:
    whole, parallel = both(n, Recalling().double(), example_inputs=torch.zeros(3, 8).double())
    for step in range(8):
        x = torch.full((3, 8), [0.5, 1.5, 3.0][step % 3]).double()
        for model in (whole, parallel):
            model.rounds = torch.tensor(step % 2)
        torch.testing.assert_close(parallel(x), whole(x), msg=f"step {step}")


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Plain()
        self.seen = nn.Buffer(torch.zeros(3, 8))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x.add_(1)
        y: Tensor = self.body(other + self.seen)
        return y


@checks.on(2)
def writes_into_arguments_that_share_memory_are_refused(rank: int, n: int) -> None:
    """What is written into one would have to be seen in the other."""
    given = {"x": torch.ones(3, 8).double(), "other": torch.ones(3, 8).double()}
    whole, parallel = both(n, Adding().double(), example_inputs=given)
    rows = torch.ones(4, 8).double()
    for x, other in ((rows[:3], rows[1:]), (rows[:3], rows[:3]), (parallel.seen, given["other"])):
        before = x.clone()
        with pytest.raises(autotp.Error, match="writes into an argument that shares memory with another tensor"):
            parallel(x, other)
        assert torch.equal(x, before)
    x = torch.zeros(3, 8).double()
    torch.testing.assert_close(parallel(x, rows[1:]), whole(torch.zeros(3, 8).double(), rows[1:]))
    assert torch.equal(x, torch.ones(3, 8).double())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
