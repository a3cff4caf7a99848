"""Models that broke autotp once: each is right, or refused for a reason."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import message
from small_models import Negated, Plain
from torch import Tensor, nn

import autotp
from autotp.diagnostics.verify import make_trial, run_and_compare

X = torch.linspace(-1, 1, 120).view(3, 5, 8)


class Recurrent(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.rnn(x)[0])


class Shift(Plain):
    """Moves what it reads by slice assignment, as sequence-to-sequence models do with their labels."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.new_zeros(x.shape)
        y[:, 1:] = x[:, :-1].clone()
        y[:, 0] = 2
        y[:, 1:] += 1
        return super().forward(y)


class Doubled(Plain):
    """Writes into a part whose end is a size of the input."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x, x], 1).clone()
        y[:, : x.size(1)] *= 2
        return super().forward(y)


class Swap(Plain):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).clone()
        a, b = h[..., :16], h[..., 16:]
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
        return self.down(h)


class Interleave(Plain):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y = h.new_zeros(h.shape)
        y[..., ::2] = h[..., ::2]
        y[..., 1::2] = -h[..., 1::2]
        return self.down(y)


class Counted(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.ones(x[..., 0].numel(), 1).view(x.shape[0], -1, 1)


class Attribute(Plain):
    """A tensor that is neither parameter nor buffer is a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.linspace(0, 1, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.scale)


class Classified(nn.Module):
    """A class token before the sequence: lengths are sums, of which sizes are products."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 24))
        self.attention, self.head = nn.MultiheadAttention(24, 6, batch_first=True), nn.Linear(24, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return F.cross_entropy(self.head(self.attention(x, x, x, need_weights=False)[0][:, 0]), labels)


CLASSIFIED = {"x": torch.linspace(-1, 1, 288).view(3, 4, 24), "labels": torch.tensor([1, 2, 3])}


@pytest.mark.parametrize("kind", [Recurrent, Shift, Doubled, Swap, Interleave, Counted, Attribute, Classified])
@pytest.mark.parametrize("tp", [2, 3], ids=lambda tp: f"tp{tp}")
def test_models_that_broke_autotp_are_verified(kind: type[nn.Module], tp: int) -> None:
    report = autotp.verify(kind(), tp, example_inputs=CLASSIFIED if kind is Classified else X)
    assert report.ok, report


class Averaging(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(32))

    mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        self.mean.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        return self.down(h)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 400, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@pytest.mark.parametrize(
    ("model", "inputs", "at", "spoil"),
    [
        pytest.param(Averaging(), {"x": X}, -1, torch.neg, id="buffer"),
        pytest.param(
            Language(), {"x": X, "labels": torch.arange(15).view(3, 5)}, 1, lambda x: Negated.apply(x), id="cut-logits"
        ),
    ],
)
def test_verify_sees_spoilt_buffers_and_cut_gradients(
    model: nn.Module, inputs: dict[str, Tensor], at: int, spoil: Any
) -> None:
    """The new value of a buffer, and the gradient of logits that stay cut beside a loss."""

    def change(graph: Any, rank: int) -> Any:
        out = graph.output_node()
        row = list(out.args[0])
        with graph.inserting_before(out):
            row[at] = graph.call_function(spoil, (row[at],))
        out.args = (tuple(row),)
        return graph

    trial = make_trial(model, (), inputs, 2)
    assert run_and_compare(trial).ok
    assert not run_and_compare(trial, change).ok


noise = torch.library.custom_op(
    "autotp_tests::noise", lambda x: x + torch.rand_like(x), mutates_args=(), schema="(Tensor x) -> Tensor"
)
noise.register_fake(lambda x: torch.empty_like(x))


class Noisy(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(noise(self.up(x)))


def test_rule_for_an_operator_that_draws_is_refused(registry: None) -> None:
    autotp.rule(torch.ops.autotp_tests.noise, "* -> *")
    with pytest.raises(autotp.Error, match="two runs on the same numbers differ, and no rule can say how"):
        autotp.explain(Noisy(), 2, example_inputs=X)


class Into(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        with torch.no_grad():
            torch.mul(x, 0.1, out=y)
        return super().forward(x) + y


def test_verify_of_an_out_argument_is_right() -> None:
    report = autotp.verify(Into(), 2, example_inputs=X)
    assert report.ok, report


@pytest.mark.parametrize("tp", [0, -1, 2.0, "2", True], ids=repr)
@pytest.mark.parametrize("call", [autotp.explain, autotp.verify], ids=["explain", "verify"])
def test_explain_and_verify_refuse_bad_numbers_of_ranks(call: Any, tp: Any) -> None:
    assert message(lambda: call(Plain(), tp, example_inputs=X)) == (
        f"{call.__name__}(Plain, tp={tp}): tp={tp!r} is not a whole number of 1 or more\n  try      tp=2"
    )
