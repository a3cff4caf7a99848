"""Which graph a call gets, and which calls need another one."""

import warnings
from unittest.mock import patch

import pytest
import torch
from ranks import Checks
from small_models import Plain, both, expect_gradients, gpt, signatures_met, tokens
from torch import Tensor, nn

import autotp
from autotp.runtime.calls import graph_cache
from autotp.runtime.module import executable_of

checks = Checks()


@checks.on(2)
def other_signatures_get_one_graph_each(rank: int, n: int) -> None:
    """Without labels, in eval mode, of length 1 and batch 1: another graph each time one is needed, and only then."""
    whole, parallel = both(n, gpt().double().train())
    x, y = tokens()
    for a, b in ((x, y), (x[:2, :5], y[:2, :5])):
        torch.testing.assert_close(parallel(a, b), whole(a, b))
        torch.testing.assert_close(parallel(labels=b, tokens=a), whole(a, b))
    assert signatures_met(parallel) == 1
    for a in (x, x[:2], x[:1], x[:, :1], x[:1, :1], x[1:3, :4]):
        torch.testing.assert_close(parallel(a), whole(a))
        torch.testing.assert_close(parallel(a, labels=None), whole(a))
    assert signatures_met(parallel) <= 5
    before = signatures_met(parallel)
    for mode in (False, True, False):
        torch.testing.assert_close(parallel.train(mode)(x), whole.train(mode)(x))
    assert signatures_met(parallel) == before + 1


@checks.on(1)
def as_many_graphs_as_are_kept(rank: int, n: int) -> None:
    """The first graph stays, and those that were used last."""
    parallel = autotp.parallelize(Plain(), n, example_inputs=torch.ones(2, 8))
    graphs = executable_of(parallel).graphs
    first = graphs.entries[0]
    with patch.object(graph_cache, "MOST", 3):
        for dims in (2, 3, 4, 5, 3, 4, 5, 4, 6):
            parallel(torch.ones(*[1] * (dims - 1), 8))
    assert len(graphs.entries) == 3 and graphs.entries[0] is first
    assert [len(entry.analysis.captured.leaves[0].shape) for _, entry in graphs.entries] == [2, 4, 6]


class Modes(nn.Module):
    """A GPT that is called for all or a part of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt(seed=0)
        self.double()

    def forward(self, tokens: Tensor, which: str = "all") -> Tensor:
        embedded = self.gpt.wte(tokens)
        if which == "embedded":
            return embedded
        out: Tensor = self.gpt(tokens) if which == "all" else self.gpt.h[0].mlp(embedded)
        return out


@checks.on(2)
def calls_that_read_some_parameters_equal_one_device(rank: int, n: int) -> None:
    """How the others are cut (a fused weight by heads) does not follow from such a call, and need not."""
    whole, parallel = both(n, Modes(), example_inputs={"tokens": tokens()[0]})
    for which in ("all", "embedded", "mlp", "all"):
        found = []
        for model in (whole, parallel):
            model.zero_grad()
            found.append(model(tokens()[0], which))
            found[-1].square().mean().backward()
        torch.testing.assert_close(found[1], found[0])
        expect_gradients(whole, parallel)


class Rounds(nn.Module):
    """Runs as often as its argument says."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Plain()

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        for _ in range(int(n)):
            x = x + 1
        y: Tensor = self.body(x)
        return y


@checks.on(2)
def the_ninth_graph_of_read_values_is_warned_of(rank: int, n: int) -> None:
    """The ninth graph is warned of; one that is known is found again."""
    x = torch.ones(2, 12, 8).double()
    _, parallel = both(n, Rounds().double(), example_inputs={"x": x, "n": torch.tensor(1)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (*range(1, 11), 4):
            parallel(x, torch.tensor(length))
    told = [str(w.message) for w in caught if "is captured for the" in str(w.message)]
    assert len(told) == 1 and "for the 9th time" in told[0] and "range(int(n))" in told[0], told
    assert signatures_met(parallel) <= 11


class Coin(nn.Module):
    """Any combination of eight draws."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            if torch.rand(()) < 0.5:
                x = x + 1
        y: Tensor = self.body(x)
        return y


@checks.on(2)
def too_many_graphs_of_read_values_are_an_error(rank: int, n: int) -> None:
    _, parallel = both(n, Coin().double())
    x = torch.ones(2, 4).double()
    with pytest.raises(autotp.Error, match="Python reads other values of activations") as raised:
        for step in range(50):
            torch.manual_seed(step)
            parallel(x)
    assert "if torch.rand(()) < 0.5" in str(raised.value) and signatures_met(parallel) <= 9


class Routed(nn.Module):
    """Experts, each behind a branch: it computes only where rows have chosen it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if mask.any():
                rows = mask.nonzero().flatten()
                y.index_add_(0, rows, expert(x[rows]))
        return y


@checks.on(2)
def branches_on_chosen_experts_need_one_further_graph(rank: int, n: int) -> None:
    """One run says what all branches do: other rows need one further graph, not one for each branch."""
    torch.manual_seed(0)
    model = Routed().double()
    with torch.no_grad():
        model.router.weight.copy_(torch.eye(4))
        model.router.bias.zero_()
    rows = torch.eye(4).double()
    whole, parallel = both(n, model, example_inputs=rows[:2])
    for count, x in enumerate((rows[1:], rows[:3], rows[1:3]), 2):
        torch.testing.assert_close(parallel(x), whole(x))
        parallel(x).sum().backward()
        whole(x).sum().backward()
        expect_gradients(whole, parallel)
        assert signatures_met(parallel) <= count, count
    whole_experts = [entry.name for entry in parallel.plan.whole if entry.name.startswith("experts.")]
    assert all(name.endswith("2.bias") for name in whole_experts), whole_experts  # The example assumes that all run.


@checks.on(2)
def branches_that_differ_between_ranks_are_an_error_on_all(rank: int, n: int) -> None:
    """One error on all ranks, also where inputs are not compared any more."""
    given = {"x": torch.ones(2, 5, 8).double(), "n": torch.tensor(3)}
    _, parallel = both(n, Rounds().double(), check_inputs="never", example_inputs=given)
    x = torch.ones(2, 5, 8).double()
    for length in (3, 2, 3):
        parallel(x, torch.tensor(length))
    with pytest.raises(autotp.Error, match="rank 1 reads other values of tensors than rank 0"):
        parallel(x, torch.tensor(3 - rank))
    assert parallel(x, torch.tensor(2)).shape == x.shape


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
