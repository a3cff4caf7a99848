"""linear_cross_entropy: a head and its loss become one operator, and loss and gradients stay those of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from faults import Case, refusal
from graphs import CLASSES, FUSED, LABELS, ONLY_MEMORY, ONLY_PRODUCTS, WIDTH, WORD_ROWS, beside_one_device, fused, small
from ranks import Checks
from small_models import gpt
from torch import Tensor, fx, nn

import autotp
from autotp.compiler import analyse, rank_graph
from autotp.costs.hardware import Hardware, estimated_on
from autotp.ops import collectives
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.lower.losses import linear_cross_entropy
from autotp.training.distribute import distribute

checks = Checks()


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small():
        yield


def shared(labels: Tensor) -> Tensor:
    """Probabilities of every class."""
    return ((labels[..., None] + 101) * torch.arange(1, CLASSES + 1) % 7).double().softmax(-1)


class Words(nn.Module):
    """A table, a layer, a head and a loss. kind: what is between head and loss; more: arguments of the loss"""

    def __init__(self, kind: str = "", bias: bool = False, tied: bool = False, weighted: bool = False, **more: Any):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.down = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.head, self.kind, self.more = nn.Linear(WIDTH, CLASSES, bias), kind, more
        self.weights = nn.Buffer(torch.linspace(0.5, 2, CLASSES)) if weighted else None
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        hidden = self.table(tokens)
        z = self.head(hidden + self.down(F.gelu(self.up(hidden))))
        more = self.more if self.weights is None else {**self.more, "weight": self.weights}
        labels = labels.clamp(0) if "ignore_index" in more else labels
        match self.kind:
            case "capped":
                z = torch.tanh(z / 3) * 3
            case "scaled":
                z = (z * 0.25).float().double() if z.dtype == torch.float32 else z * 0.25
            case "shifted":
                z, labels = z[:, :-1].contiguous(), labels[:, 1:]
            case "transposed":
                return F.cross_entropy(z.transpose(1, 2), labels, **more)
            case "logarithms":
                return F.nll_loss(z.flatten(0, 1).log_softmax(-1), labels.flatten(), **more)
            case "returned":
                return F.cross_entropy(z.flatten(0, 1), labels.flatten()), z
            case "read":
                return F.cross_entropy(z.flatten(0, 1), labels.flatten()) + z.square().mean()
            case "soft":
                return F.cross_entropy(z.flatten(0, 1), shared(labels).flatten(0, 1).to(z.dtype), **more)
            case "soft-capped":
                return F.cross_entropy((torch.tanh(z / 3) * 3).transpose(1, 2), shared(labels).transpose(1, 2), **more)
            case "soft-trained":
                target = self.head(self.down(self.up(hidden))).detach() + self.table.weight.sum(-1)
                return F.cross_entropy(z.flatten(0, 1), target.sigmoid().flatten(0, 1), **more)
        return F.cross_entropy(z.reshape(-1, CLASSES), labels.reshape(-1), **more)


CASES = {
    "plain": Words, "bias": lambda: Words(bias=True), "tied": lambda: Words(tied=True, bias=True),
    "capped": lambda: Words("capped", bias=True), "scaled": lambda: Words("scaled"),
    "shifted": lambda: Words("shifted"), "transposed": lambda: Words("transposed", tied=True),
    "logarithms": lambda: Words("logarithms", reduction="sum"), "none": lambda: Words(reduction="none"),
    "sum": lambda: Words(reduction="sum", ignore_index=5), "weighted": lambda: Words(weighted=True, tied=True),
    "smooth": lambda: Words(label_smoothing=0.1, bias=True),
    "smooth-capped": lambda: Words("capped", label_smoothing=0.1, weighted=True, bias=True, ignore_index=5),
    "smooth-capped-none": lambda: Words("capped", label_smoothing=0.1, reduction="none"),
    "soft": lambda: Words("soft"), "soft-sum": lambda: Words("soft", label_smoothing=0.2, reduction="sum"),
    "soft-none": lambda: Words("soft", weighted=True, bias=True, reduction="none"),
    "soft-capped": lambda: Words("soft-capped", label_smoothing=0.3, weighted=True, tied=True),
    "soft-trained": lambda: Words("soft-trained", label_smoothing=0.3, weighted=True),
    "smooth-weighted": lambda: Words("scaled", label_smoothing=0.1, weighted=True, bias=True),
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_it_is_one_operator_and_equal_to_one_device(name: str, tp: int) -> None:
    model = CASES[name]().double()
    expected = "linear_class_terms" if tp > 1 or model.more.get("reduction") == "none" else "linear_loss_sum"
    assert fused(model, tp) == [expected]
    report = autotp.verify(model, tp=tp, example_inputs=(WORD_ROWS, LABELS))
    assert report.ok and report.computed and report.worst.error < 1e-10, str(report)


@pytest.mark.parametrize("name", [name for name in CASES if "soft" in name])
def test_probabilities_as_target_without_chunks(name: str) -> None:
    """A cut vocabulary that is too small for chunks: the loss is written in parts."""
    model, without = CASES[name]().double(), ("linear_cross_entropy",)
    report = autotp.verify(model, tp=2, example_inputs=(WORD_ROWS, LABELS), without=without)
    assert report.ok and report.computed and report.worst.error < 1e-10, str(report)


def test_ranks_exchange_the_terms_of_all_rows_once() -> None:
    analysis = analyse(skeleton_of(Words().double()), (WORD_ROWS, LABELS), {}, 2)
    graph = rank_graph(analysis, 0, "fast")
    (terms,) = (node for node in graph.nodes if node.target in FUSED)
    reductions = [node for node in graph.nodes if node.target is collectives.reduce]
    assert [node.args[2:] for node in reductions] == [(), (), ("logsumexp",)]
    assert reductions[-1].args[0] is terms
    assert not [node for node in graph.nodes if CLASSES in tuple(getattr(node.meta.get("val"), "shape", ()))]


MISTAKES: dict[str, Callable[[fx.Node, int], Any]] = {
    "a plain sum over ranks": lambda terms, rank: setattr(reduction_of(terms), "args", reduction_of(terms).args[:2]),
    "no exchange": lambda terms, rank: reduction_of(terms).replace_all_uses_with(terms),
    "the first classes on each rank": lambda terms, rank: terms.update_arg(3, 0),
    "rows whose gradient is not summed": lambda terms, rank: terms.update_arg(1, terms.args[1].args[0]),  # type: ignore[union-attr, arg-type]
    "another scale on one rank": lambda terms, rank: setattr(terms, "args", (*terms.args[:5], 1.0 + rank)),
}


def reduction_of(terms: fx.Node) -> fx.Node:
    return next(user for user in terms.users if user.target is collectives.reduce)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_exchange_of_terms_is_refused(mistake: str) -> None:
    case = Case(Words().double(), {"tokens": WORD_ROWS, "labels": LABELS})
    program = case.analysed()
    graphs = [rank_graph(program, rank, "exact") for rank in range(2)]
    assert refusal(case, program, graphs) is None
    for rank, graph in enumerate(graphs):
        (terms,) = (node for node in graph.nodes if node.target in FUSED)
        MISTAKES[mistake](terms, rank)
    assert refusal(case, program, graphs) is not None


@pytest.mark.parametrize("kind", ["returned", "read"])
def test_logits_that_others_read_stay(kind: str) -> None:
    assert fused(Words(kind), 2) == []


def test_a_head_that_is_cut_otherwise_stays() -> None:
    assert fused(Words(), 2, cut={"head": "whole"}) == ["linear_loss_sum"]
    assert fused(Words(), 2, cut={"head": "rowwise"}) == []
    assert fused(Words(), 2, without=("linear_cross_entropy",)) == []


@pytest.mark.parametrize("name", ["plain", "smooth", "weighted"])
def test_without_any_label_gradients_are_zero_as_on_one_device(name: str) -> None:
    model = autotp.parallelize(CASES[name]().double(), 1, example_inputs=(WORD_ROWS, LABELS))
    loss = model(WORD_ROWS, torch.full_like(LABELS, -100))
    loss.backward()
    assert loss.isnan()  # The mean of no row.
    assert all(parameter.grad.count_nonzero() == 0 for parameter in model.parameters())


def test_few_classes_stay() -> None:
    with patch.object(linear_cross_entropy, "LEAST", CLASSES + 1):
        assert fused(Words(), 2) == []


def twice(model: Callable[..., Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
    loss = model(WORD_ROWS, LABELS)
    return [*torch.autograd.grad(loss, parameters, retain_graph=True), *torch.autograd.grad(loss, parameters)]


def derived_again(model: Callable[..., Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
    grads = torch.autograd.grad(model(WORD_ROWS, LABELS), parameters, create_graph=True)
    return list(torch.autograd.grad(sum((g * g).sum() for g in grads), parameters))  # type: ignore[arg-type]


def mapped(model: Any, parameters: list[nn.Parameter]) -> list[Tensor]:
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    call = partial(torch.func.functional_call, model, args=(WORD_ROWS, LABELS))
    return list(torch.func.grad(call)(tensors).values())


def compiled(model: Any, parameters: list[nn.Parameter]) -> list[Tensor]:
    is_plain = isinstance(model, Words)
    call = model if is_plain else torch.compile(model, fullgraph=True, backend="aot_eager")
    return list(torch.autograd.grad(call(WORD_ROWS, LABELS), parameters))


@pytest.mark.parametrize("device", [ONLY_PRODUCTS, ONLY_MEMORY], ids=["in-forward", "again"])
@pytest.mark.parametrize("way", [twice, derived_again, mapped, compiled])
def test_other_ways_to_differentiate_are_one_devices(way: Callable[..., list[Tensor]], device: Hardware) -> None:
    whole = Words(bias=True, label_smoothing=0.1).double()
    with estimated_on(device):
        model = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=(WORD_ROWS, LABELS))
    ours, theirs = (way(each, list(each.parameters())) for each in (model, whole))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


# ---- on ranks


@checks.on(2, 4)
def steps_are_those_of_one_device(rank: int, n: int) -> None:
    for name in ("tied", "weighted", "shifted", "soft-capped", "soft-trained", "smooth-capped"):
        beside_one_device(n, CASES[name]().double())


@checks.on(2)
def blocks_are_computed_again(rank: int, n: int) -> None:
    beside_one_device(n, CASES["smooth"]().double(), recompute="full")


@checks.on(2)
def logits_beside_a_loss_are_left_out(rank: int, n: int) -> None:
    beside_one_device(n, Words("returned").double(), outputs="loss")


@checks.on(2)
def a_frozen_head_has_no_gradient(rank: int, n: int) -> None:
    model = Words(bias=True).double()
    model.head.requires_grad_(False)
    beside_one_device(n, model)


def expect_gradients(n: int, make: Callable[[], nn.Module], x: Tensor, atol: float = 1e-10) -> None:
    """Gradients of all parameters, and of an input that has one, are one device's: Adam would hide a factor."""
    whole, inputs = make(), [x.detach().clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
    with small():
        mine = autotp.parallelize(make(), n, example_inputs=(x, LABELS))
        for model, own in zip((mine, whole), inputs, strict=True):
            model(own, LABELS).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= parameter.grad
        torch.testing.assert_close(*(own.grad for own in inputs), rtol=0, atol=atol)
        for name, tensor in autotp.full_state_dict(mine).items():
            torch.testing.assert_close(tensor, whole.state_dict()[name], rtol=0, atol=atol)


class Transposed(nn.Module):
    """A head of rows that are no contiguous memory, such as [sequence batch hidden] of [batch sequence hidden]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x.transpose(0, 1)).flatten(0, 1), labels.t().flatten())


@checks.on(2)
def gradients_of_a_head_of_transposed_rows_are_summed(rank: int, n: int) -> None:
    """Megatron-LM#5337: a sum over ranks went to a copy, and what was under the head had a part of its gradient."""
    expect_gradients(n, Transposed, torch.randn(*LABELS.shape, WIDTH, generator=torch.manual_seed(1)).double())


@checks.on(2)
def a_tied_weight_has_its_gradient_once(rank: int, n: int) -> None:
    """torchtitan#3174: the gradient of a weight of two names was written back twice."""
    for more in ({}, {"label_smoothing": 0.1}):
        expect_gradients(n, lambda: Words(tied=True, **more).double(), WORD_ROWS)  # noqa: B023


class Cast(nn.Module):
    """A head whose logits the model casts to another precision. kind: by what"""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.kind = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES), kind
        self.to(dtype)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        z = self.head(self.table(tokens))
        to = torch.float32 if z.dtype == torch.float64 else torch.float64
        match self.kind:
            case "softmax":
                return -z.log_softmax(-1, dtype=to).gather(-1, labels.clamp(0)[..., None]).mean()
            case "bounded":
                z = torch.tanh(z / 3) * 3
        z = z.to(to) * 0.3
        smoothing = 0.1 * (self.kind == "smooth")
        return F.cross_entropy(z.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)


CAST = [(kind, dtype) for kind in ("logits", "smooth", "softmax") for dtype in (torch.float64, torch.float32)]


def test_logits_that_are_cast_stay_only_where_they_are_computed_with_before() -> None:
    assert {name for cast in CAST for name in fused(Cast(*cast), 2)} == {"linear_class_terms"}
    assert fused(Cast("bounded", torch.float64), 2) == []


@checks.on(1, 2)
def logits_in_another_precision_are_those_of_one_device(rank: int, n: int) -> None:
    """A cast of float64 to float32 rounds as it does on one device: sums of its results differ by their order alone."""
    for cast in CAST:
        expect_gradients(n, partial(Cast, *cast), WORD_ROWS, atol=1e-6)


@checks.on(4)
def distributed_steps_are_those_of_one_device(rank: int, n: int) -> None:
    """The last stage has the head, with a table that the first one has, too; blocks are cut along the sequence.

    DeepSpeed#7981: of the chunks of a microbatch, and of the microbatches, only the last one counted.
    """
    torch.manual_seed(0)
    whole = gpt(block_size=8, vocab_size=96, n_layer=2, n_head=2, n_embd=16).double()
    tokens = torch.randint(96, (4, 8))
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(8) < torch.arange(4)[:, None] * 3, -100)
    with small():
        trainer = distribute(
            copy.deepcopy(whole), tp=2, pp=2, microbatches=2, sequence_parallel=True,
            example_inputs={"tokens": tokens[:2], "labels": labels[:2]},
        )  # fmt: skip
        loss = trainer.step(tokens=tokens, labels=labels)
    expected = whole(tokens, labels=labels)
    expected = expected if isinstance(expected, Tensor) else expected[-1]
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    grads = dict(whole.named_parameters())
    names = {id(parameter): name for name, parameter in trainer.named_parameters()}
    assert names
    for parameter in trainer.parameters():
        torch.testing.assert_close(parameter.grad, grads[names[id(parameter)]].grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
