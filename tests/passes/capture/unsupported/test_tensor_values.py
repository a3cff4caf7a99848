"""What a model does with a tensor's values is refused by what it is, with the ways out; messages compared whole."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from errors import LOOPS, OPERATOR, ROUNDS, line_of, message
from small_models import Plain
from torch import Tensor, nn

import autotp
from autotp.runtime.module import executable_of

X = torch.linspace(-1, 1, 24).view(3, 8)
line = partial(line_of, __file__)
NUMBERS = "the model makes a Python number of a tensor's values, which are not known in a graph"
MASKS = f"a mask, `torch.arange(n) < lengths[:, None]`; the number as an argument; or {OPERATOR}"
BRANCHES = "the model branches on the values of a tensor, which one graph cannot do"
AVERAGES = (
    "`norm` has momentum=None: its average makes a Python number of a tensor's values, which are not known in a graph"
)
ASSERTS = "the model asserts something about the values of a tensor, which are not known in a graph"
CHOICES = f"choose with torch.where, or branch on shapes and configuration only; or {OPERATOR}"
NO_ROWS = "no branch at all, if it only leaves out work on no rows: operators compute on no rows, too"


class Experts(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Plain() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        hit = nn.functional.one_hot(self.mlp(x).argmax(-1) % 4, 4).sum(0)
        y = torch.zeros_like(x)
        for e in hit.nonzero():
            y = y + self.experts[e](x)
        return y


class While(Plain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(x)
        while x.sum() > 0:
            x = x - 1
        return x


class Longest(Plain):
    def forward(self, x: Tensor) -> Tensor:
        longest = int(self.mlp(x).abs().max().item())
        return self.mlp(x)[:, :longest]


class Branch(Plain):
    def forward(self, x: Tensor) -> Tensor:
        hit = self.mlp(x).argmax(-1).unique()
        return self.mlp(x) if hit.numel() > 1 else x


class NoRows(Plain):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.mlp(x).argmax(-1).nonzero()[:, 0]
        if len(rows) == 0:
            return x
        return x.index_add(0, rows, self.mlp(x[rows]))


class NoBranch(Plain):
    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 100).nonzero()[:, 0]
        return x.index_add(0, rows, self.mlp(x[rows]))


class Asserts(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        assert y.argmax().item() < x.numel(), "beyond the end"
        return y


class Averaged(Plain):
    """A batch norm whose running statistics are averages of all batches: torch reads their count as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.mlp(x))  # type: ignore[no-any-return]


class Logged(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        self.log = f"{y.sum():.2f}"
        return y


class LoggedInteger(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        self.log = "{:d}".format(y.argmax())  # noqa: UP032
        return y


class Wave(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y * abs(complex(torch.fft.fft(y).sum()))


class Largest(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y / max(y[0])


class Smallest(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y / min(y[0])


class Made(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y * torch.tensor([row % 3 for row in y[0]]).sum()


TEXTS = "the model makes text of a tensor's values, which are not known in a graph"
OUTSIDE = "return the tensor from forward, and make the text of what the call returns"
TAKEN = "a function of torch takes numbers here, and gets values of tensors, which are not known in a graph"
GIVEN = f"numbers that shapes or arguments give (`x.shape[1]`, not `mask.sum()`); a mask; or {OPERATOR}"
ITSELF = "Python's `{}` of one tensor compares the values of its rows, which are not known in a graph"


@pytest.mark.parametrize(
    ("kind", "what", "at", "way"),
    [
        (Experts, LOOPS, "for e in hit.nonzero():", ROUNDS),
        (While, LOOPS, "while x.sum() > 0:", ROUNDS),
        (Longest, NUMBERS, "longest = int(self", f"x.item(), if it only decides or is computed with; {MASKS}"),
        (Branch, BRANCHES, "return self.mlp(x) if hit", CHOICES),
        (NoRows, BRANCHES, "if len(rows) == 0:", f"{CHOICES}\n  or       {NO_ROWS}"),
        (Asserts, ASSERTS, "assert y.argmax()", "the assert before the call of the model"),
        (Logged, TEXTS, "self.log = f", OUTSIDE),
        (LoggedInteger, TEXTS, 'self.log = "{:d}', OUTSIDE),
        (Wave, NUMBERS, "return y * abs(complex", MASKS),
        (Largest, ITSELF.format("max"), "return y / max(y", "x.amax(0), which has one operator"),
        (Smallest, ITSELF.format("min"), "return y / min(y", "x.amin(0), which has one operator"),
        (Made, TAKEN, "return y * torch.tensor(", GIVEN),
        (Averaged, AVERAGES, "return self.norm(", "momentum=0.1"),
    ],
)
def test_explain_refuses_uses_of_tensor_values(kind: type[nn.Module], what: str, at: str, way: str) -> None:
    found = message(lambda: autotp.explain(kind(), 2, example_inputs=X))
    assert found == f"explain({kind.__name__}, tp=2): {what}\n  at       {line(at)}\n  try      {way}"


def test_branches_on_empty_rows_are_left_out() -> None:
    assert autotp.verify(NoBranch(), 2, example_inputs=X).ok


class Named(Plain):
    """Chooses a scale by the text of an argument."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.mlp(x) * {"0.5": 2.0, "1.5": 3.0}[f"{scale:.1f}"]


def test_the_text_of_an_argument_is_read_in_each_call() -> None:
    assert all(autotp.verify(Named(), 2, example_inputs=(X, torch.tensor(scale))).ok for scale in (0.51, 1.5))
    whole = Named()
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=(X, torch.tensor(0.51)))
    for scale in (0.51, 1.5, 0.49):
        torch.testing.assert_close(parallel(X, torch.tensor(scale)), whole(X, torch.tensor(scale)), msg=str(scale))


class Numpy(Plain):
    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(x)
        return h * float(h.detach().numpy().mean())


def test_explain_refuses_numpy_in_forward() -> None:
    found = message(lambda: autotp.explain(Numpy(), 2, example_inputs=X))
    assert found == (
        "explain(Numpy, tp=2): the model computes with numpy, which a graph does not see\n"
        f"  at       {line('return h * float')}\n  try      torch's operators, or {OPERATOR}"
    )


class Lengths(Plain):
    """Takes its rows apart by the values of a tensor, as vision towers do: nothing is decided by them."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        lengths = (ends[1:] - ends[:-1]).tolist()
        parts = self.mlp(x).split(lengths)
        return torch.cat([nn.functional.scaled_dot_product_attention(p[None], p[None], p[None])[0] for p in parts])


def test_lengths_that_decide_nothing_share_one_graph() -> None:
    ends = torch.tensor([0, 1, 3])
    assert autotp.verify(Lengths(), 2, example_inputs=(X, ends)).ok
    whole = Lengths()
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=(X, ends))
    for other_ends in (ends, torch.tensor([0, 2, 3]), torch.tensor([0, 3, 3])):
        torch.testing.assert_close(parallel(X, other_ends), whole(X, other_ends), msg=str(other_ends))
    assert len(executable_of(parallel).graphs.entries) == 1


@pytest.mark.system
def test_explain_refuses_eager_expert_loops_of_transformers() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.models.mixtral import modeling_mixtral

    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, experts_implementation="eager"))
    at = line_of(str(modeling_mixtral.__file__), "for expert_idx in expert_hit")
    assert message(lambda: autotp.explain(model, 2)) == (
        "explain(MixtralForCausalLM, tp=2): the model loops over the experts that are hit: torch.export has no loop "
        f"whose length depends on values\n  at       {at}\n"
        '  try      model.set_experts_implementation("grouped_mm"), which has no loop'
    )
    model.set_experts_implementation("grouped_mm")
    assert autotp.explain(model, 2).cuts
