"""sequence_parallel: residuals, norms and dropouts are cut by tokens: one device's numbers, nothing is sent twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from architectures import Architecture, arguments, model
from ranks import Checks
from small_models import gpt
from torch import Tensor, nn
from torch.nn import functional as F

import autotp

checks = Checks()


class Block(nn.Module):
    """`x + attention(norm(x))`, `x + mlp(norm(x))`, or with `parallel` both of one norm at once; [b, s, 12]."""

    def __init__(self, parallel: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.parallel, self.dropout = parallel, dropout
        self.first, self.second = nn.LayerNorm(12), nn.LayerNorm(12)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        n = self.first(x)
        if self.parallel:
            return x + F.dropout(self.attention(n) + self.down(F.gelu(self.up(n))), self.dropout)
        x = x + F.dropout(self.attention(n), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), self.dropout)


class Blocks(nn.Module):
    """Blocks and a last norm."""

    def __init__(self, count: int, parallel: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(parallel, dropout) for _ in range(count))
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        for block in self.h:
            x = block(x)
        return self.norm(x)


def verified(whole: nn.Module, tp: int, given: Any) -> autotp.Plan:
    torch.manual_seed(0)
    report = autotp.verify(whole, tp, example_inputs=given, sequence_parallel=True)
    assert report.ok, report
    return report.plan


@pytest.mark.parametrize(("parallel", "each"), [(False, 2), pytest.param(True, 1, marks=pytest.mark.rare)])
def test_sequence_parallel_splits_each_all_reduce_in_two(parallel: bool, each: int) -> None:
    """Per block as many pairs as there were all-reduces; the parameters of a block are summed in one exchange.

    What groups of products read is gathered once more in backward, where they are groups.
    """
    choices: list[dict[str, Any]] = [
        {}, {"sequence_parallel": True}, {"sequence_parallel": True, "without": ("overlap",)}
    ]  # fmt: skip
    plans = {
        count: [
            autotp.explain(Blocks(count, parallel), 2, example_inputs=torch.ones(2, 6, 12), **asked)
            for asked in choices
        ]
        for count in (2, 3)
    }
    for way in ("forward", "backward"):
        usual, cut, kept = (
            {kind: n - getattr(plans[2][i].traffic, way).get(kind, 0) for kind, n in getattr(p.traffic, way).items()}
            for i, p in enumerate(plans[3])
        )
        assert usual == {"all-reduce": each}
        own = {"all-reduce": 1} if way == "backward" else {}
        assert kept == {"reduce-scatter": each, "all-gather": each} | own
        again = each if way == "backward" else 0
        assert cut == kept | {"all-gather": each + again}


def test_sequence_parallel_plan_says_what_each_weight_causes() -> None:
    """What the first block reads is whole: there nothing is gathered."""
    plan = autotp.explain(Blocks(2, False), 2, example_inputs=torch.ones(2, 6, 12), sequence_parallel=True)
    weights = [cut for cut in plan.cuts if cut.name.endswith("weight")]
    assert {(cut.forward, cut.backward) for cut in weights} == {
        ("", "all-reduce"), ("all-gather", "reduce-scatter"), ("reduce-scatter", "")
    }  # fmt: skip


@pytest.mark.parametrize(("tp", "length", "dropout"), [(2, 5, 0.3), (2, 6, 0.0), (3, 2, 0.3), (3, 5, 0.0)])
def test_sequence_parallel_of_any_length_is_verified(tp: int, length: int, dropout: float) -> None:
    """5 on 2 and 3 ranks are 3 + 2 and 2 + 2 + 1; of 2 the third has none."""
    plan = verified(Blocks(2, dropout=dropout), tp, torch.randn(2, length, 12))
    assert plan.along_sequence


def test_sequence_parallel_drops_transposed_values_as_one_device() -> None:
    """What nn.MultiheadAttention gives is transposed, and dropout draws in the order of memory."""
    arch = Architecture(qkv="module", dropout=(0.0, 0.0, 0.3))
    assert verified(model(arch), 2, arguments(arch)).along_sequence


class Tapped(Blocks):
    """Gives its hidden states, too, and what it makes of the first place."""

    def forward(self, x: Tensor) -> Any:
        states = [x := block(x) for block in self.h]
        return self.norm(x), states, torch.tanh(x[:, 0])


@pytest.mark.parametrize("outputs", ["auto", "full", "local"])
def test_sequence_parallel_returns_whole_outputs(outputs: Any) -> None:
    torch.manual_seed(0)
    report = autotp.verify(Tapped(2), 2, example_inputs=torch.randn(2, 5, 12), outputs=outputs, sequence_parallel=True)
    assert report.ok, report


class Width(nn.Module):
    """No attention: nothing is a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def test_sequence_parallel_plan_says_what_is_cut() -> None:
    x = torch.ones(2, 6, 12)
    asked = [str(autotp.explain(m, 2, example_inputs=x, sequence_parallel=True)) for m in (Blocks(2), Width())]
    assert "sequence    " in asked[0] and "operators are cut along it" in asked[0]
    assert "sequence    nothing: no sum over ranks has an axis along which an attention sums" in asked[1]
    assert "sequence  " not in str(autotp.explain(Blocks(2), 2, example_inputs=x))


# ---- real ranks


@checks.on(2)
def sequence_parallel_trains_as_one_device_at_changing_lengths(rank: int, n: int) -> None:
    """Lengths change from step to step, an odd one too; gradients accumulate; the parameters stay one device's."""
    whole = gpt(seed=0, vocab_size=31, n_head=2, n_embd=8).double()
    cut = autotp.parallelize(copy.deepcopy(whole), n, sequence_parallel=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, cut)]
    for step, length in enumerate((8, 5, 11)):
        torch.manual_seed(step)
        batches = torch.randint(31, (2, 2, 3, length))  # two batches of tokens and labels
        for m, optimizer in zip((whole, cut), optimizers, strict=True):
            optimizer.zero_grad()
            for tokens, labels in batches:
                m(tokens, labels).backward()
            optimizer.step()
    state = autotp.full_state_dict(cut)
    for name, tensor in whole.state_dict().items() if rank == 0 else ():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
