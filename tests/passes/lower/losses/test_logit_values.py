"""logit_values: readers of logits that need few numbers of a row are computed with the head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import CLASSES, LABELS, WIDTH, WORD_ROWS, beside_one_device, first_graph, fused, small
from ranks import Checks
from torch import Tensor, nn

import autotp
from autotp.ops import collectives

checks = Checks()


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small():
        yield


def log_probabilities(z: Tensor, labels: Tensor) -> Tensor:
    return z.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)


def selected(z: Tensor, labels: Tensor) -> Tensor:
    return z.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(z, -1)


def preference(z: Tensor, labels: Tensor, t: Tensor) -> Tensor:
    """As in DPO: of a row's sum of log-probabilities, beside that of a reference."""
    ours, theirs = (log_probabilities(y[:, :-1], labels[:, 1:].clamp(0)) for y in (z, t))
    kept = labels[:, 1:] != -100
    return -F.logsigmoid(0.1 * ((ours - theirs) * kept).sum(-1)).mean()


def policy(z: Tensor, labels: Tensor, t: Tensor) -> Tensor:
    """As in GRPO: with a temperature, a ratio, and the entropy beside it."""
    z = z / 1.7
    every = z.log_softmax(-1)
    ours = every.gather(-1, labels.clamp(0)[..., None]).squeeze(-1)
    entropy = -(every.exp() * every).sum(-1)
    return ((ours - ours.detach()).exp() * labels - 0.01 * entropy).mean()


def entropy_of_probabilities(z: Tensor, labels: Tensor, t: Tensor) -> Tensor:
    p = F.softmax(z, dim=-1)
    return (torch.logsumexp(z, dim=-1) - torch.sum(p * z, dim=-1)).mean() + selected(z, labels.clamp(0)).mean()


def normed(z: Tensor, labels: Tensor, t: Tensor) -> Tensor:
    """As torch.distributions.Categorical."""
    z = z - z.logsumexp(-1, keepdim=True)
    return (F.softmax(z.detach(), -1) * z).sum(-1).square().mean() + log_probabilities(z, labels.clamp(0)).sum()


def z_loss(z: Tensor, labels: Tensor, t: Tensor) -> Tensor:
    flat = z.flatten(0, 1)
    return 1e-2 * flat.logsumexp(-1).square().mean() + F.cross_entropy(flat, labels.flatten())


def measured(z: Tensor, labels: Tensor, t: Tensor) -> Tensor:
    """Beside a loss: the mean of logits, and a sum of squares of probabilities, without gradients."""
    fixed = z.detach()
    squares = torch.logsumexp(2 * fixed.log_softmax(-1), -1)
    return F.cross_entropy(z.transpose(1, 2), labels) * (1 + fixed.mean(-1).mean() + squares.exp().mean())


def divergence(**more: Any) -> Callable[..., Tensor]:
    """The divergence of the model from a teacher."""

    def of(z: Tensor, labels: Tensor, t: Tensor) -> Tensor:
        target = (t / 2).log_softmax(-1) if more.get("log_target") else (t / 2).softmax(-1)
        return F.kl_div((z / 2).log_softmax(-1), target, **more)

    return of


def rows_of_divergence(z: Tensor, labels: Tensor, t: Tensor) -> Tensor:
    rows = F.kl_div(z.log_softmax(-1), t.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return (rows * (labels != -100)).sum() / (labels != -100).sum()


def reverse(z: Tensor, labels: Tensor, t: Tensor) -> Tensor:
    ours, theirs = z.log_softmax(-1), t.log_softmax(-1)
    return (ours.exp() * (ours - theirs)).sum(-1).mean() + F.cross_entropy(z.flatten(0, 1), labels.flatten())


def soft_targets(z: Tensor, labels: Tensor, t: Tensor) -> Tensor:
    """As written by hand, with a number for each class."""
    weights = torch.linspace(0, 1, CLASSES, dtype=z.dtype)
    return -(weights * z.log_softmax(-1)).sum(-1).mean() + (z * weights).sum(-1).square().mean()


def cross_entropy_of_heads(z: Tensor, labels: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), t.softmax(-1).flatten(0, 1))


def distillation(z: Tensor, labels: Tensor, t: Tensor) -> Tensor:
    return -(t.softmax(-1) * z.log_softmax(-1)).sum(-1).mean()


def mixed(p: Tensor, q: Tensor, beta: float, **more: Any) -> Tensor:
    """The generalized Jensen-Shannon divergence, as in GKD (Agarwal et al. 2024)."""
    m = torch.logaddexp(p + math.log(1 - beta), q + math.log(beta))
    theirs, ours = (F.kl_div(m, each, log_target=True, **more) for each in (q, p))
    if more["reduction"] == "none":
        theirs, ours = theirs.sum(-1), ours.sum(-1)
    return beta * theirs + (1 - beta) * ours


def jensen_shannon(z: Tensor, labels: Tensor, t: Tensor) -> Tensor:
    rows = mixed((z / 2).log_softmax(-1), (t / 2).log_softmax(-1), 0.3, reduction="none")
    return (rows * (labels != -100)).sum() / (labels != -100).sum()


READERS: dict[str, Callable[..., Tensor]] = {
    "log_probabilities": lambda z, labels, t: log_probabilities(z, labels.clamp(0)).square().sum(),
    "selected": lambda z, labels, t: (selected(z / 0.7, labels.clamp(0)) * labels).mean(),
    "preference": preference, "policy": policy, "entropy": entropy_of_probabilities, "normed": normed,
    "z_loss": z_loss, "measured": measured, "divergence": divergence(reduction="batchmean"),
    "divergence_of_logarithms": divergence(reduction="sum", log_target=True),
    "rows_of_divergence": rows_of_divergence, "reverse": reverse, "distillation": distillation,
    "cross_entropy_of_heads": cross_entropy_of_heads, "jensen_shannon": jensen_shannon,
    "mean_of_mixed": lambda z, labels, t: mixed(
        z.log_softmax(-1), t.log_softmax(-1), 0.5, reduction="batchmean"
    ),
}  # fmt: skip
MIXED = {"jensen_shannon", "mean_of_mixed"}
MORE = {
    "soft_targets": soft_targets,
    "squares": lambda z, labels, t: z.log_softmax(-1).square().mean(),
    "two classes": lambda z, labels, t: (
        z.log_softmax(-1).gather(-1, labels.clamp(0)[..., None].expand(-1, -1, 2)).sum()
    ),
    "mixed otherwise": lambda z, labels, t: torch.logaddexp(z.log_softmax(-1), z * 2).sum(-1).mean(),
    "masked": lambda z, labels, t: z.masked_fill(z < 0, -1).logsumexp(-1).sum(),
}
OF_TEACHER = {name for name in READERS if "diver" in name} | {
    "preference", "reverse", "distillation", "cross_entropy_of_heads", *MIXED,
}  # fmt: skip


class Student(nn.Module):
    """A model with a head, and a frozen teacher with one of another width."""

    def __init__(self, name: str, cap: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.down = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.head, self.name, self.cap = nn.Linear(WIDTH, CLASSES), name, cap
        self.teacher, self.teacher_head = nn.Embedding(CLASSES, 12), nn.Linear(12, CLASSES, bias=False)
        for parameter in (*self.teacher.parameters(), *self.teacher_head.parameters()):
            parameter.requires_grad_(False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.table(tokens)
        z = self.head(hidden + self.down(F.gelu(self.up(hidden))))
        z = torch.tanh(z / self.cap) * self.cap if self.cap else z
        with torch.no_grad():
            t = self.teacher_head(self.teacher(tokens)) if self.name in OF_TEACHER else z
        return (READERS | MORE)[self.name](z, labels, t)


def student(name: str) -> Student:
    # The sum of logits with a bound by tanh is no product.
    return Student(name, cap=0.0 if name == "measured" else 3.0).double()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", READERS)
def test_logits_are_never_whole_and_all_is_equal_to_one_device(name: str, tp: int) -> None:
    model = student(name)
    values = [node.meta.get("val") for node in first_graph(model, tp).nodes if node.op != "placeholder"]
    logits = [x for x in values if isinstance(x, Tensor) and x.dim() > 1 and x.shape[-1] == -(-CLASSES // tp)]
    assert logits == []
    # Two heads without a divergence, another scale, and other views of rows want operators of their own.
    several = (name in {"preference", "normed", "measured", "reverse"}) + 2 * (name in MIXED)
    assert len(fused(model, tp)) == 1 + several
    report = autotp.verify(model, tp=tp, example_inputs=(WORD_ROWS, LABELS))
    assert report.ok and report.computed and report.worst.error < 1e-10, str(report)


@pytest.mark.parametrize("tp", [1, 2])
def test_shares_of_classes_that_the_model_computes(tp: int) -> None:
    model = student("soft_targets")
    assert fused(model, tp) == ["linear_class_terms"]
    report = autotp.verify(model, tp=tp, example_inputs=(WORD_ROWS, LABELS))
    assert report.ok and report.computed and report.worst.error < 1e-10, str(report)


class TwoVocabularies(nn.Module):
    """The sum over classes of the logits of two heads, which have other numbers of classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES + more) for more in (0, 4))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        means = [head(self.table(tokens)).log_softmax(-1).mean(-1) for head in self.heads]
        return (means[0] * means[1]).mean()


@pytest.mark.parametrize("tp", [1, 2])
def test_sums_over_the_classes_of_two_heads(tp: int) -> None:
    model = TwoVocabularies().double()
    assert fused(model, tp) == ["linear_class_terms"] * 2
    report = autotp.verify(model, tp=tp, example_inputs=(WORD_ROWS, LABELS))
    assert report.ok and report.computed and report.worst.error < 1e-10, str(report)


def test_ranks_exchange_the_terms_of_all_rows_once() -> None:
    graph = first_graph(student("policy"), 2)
    reductions = [node for node in graph.nodes if node.target is collectives.reduce]
    assert [node.args[2:] for node in reductions] == [(), (), ("logsumexp_mean",)]


@pytest.mark.parametrize("name", ["squares", "two classes", "masked", "mixed otherwise"])
def test_what_needs_all_logits_has_them(name: str) -> None:
    assert fused(student(name), 2) == []


# ---- on ranks


@checks.on(2, 4)
def steps_are_those_of_one_device(rank: int, n: int) -> None:
    for name in ("policy", "preference", "z_loss", "rows_of_divergence", "reverse", "normed", "jensen_shannon"):
        beside_one_device(n, student(name))


@checks.on(2)
def blocks_are_computed_again(rank: int, n: int) -> None:
    beside_one_device(n, student("policy"), recompute="full")


@checks.on(2, 4)
def gradients_of_log_probabilities_are_counted_once(rank: int, n: int) -> None:
    """torchtitan#3827: over a gathered vocabulary they were as many times too large as there were ranks."""
    for without in ((), ("linear_cross_entropy",)):
        mine, whole = student("log_probabilities"), student("log_probabilities")
        mine = autotp.parallelize(mine, n, example_inputs=(WORD_ROWS, LABELS), without=without)
        for model in (mine, whole):
            model(WORD_ROWS, LABELS).backward()
            with torch.no_grad():  # The gradients themselves; Adam would hide a factor.
                for parameter in (p for p in model.parameters() if p.grad is not None):
                    parameter -= parameter.grad
        expected = whole.state_dict()
        for name, tensor in autotp.full_state_dict(mine).items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10)


class Accurate(nn.Module):
    """A loss, and the class with the greatest logit, of whole numbers that two parts of the head have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        with torch.no_grad():
            self.table.weight.round_()
            self.head.weight.mul_(8).round_()
            self.head.weight[CLASSES // 2 :] = self.head.weight[: CLASSES - CLASSES // 2].clone()

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        z = self.head(self.table(tokens))
        return F.cross_entropy(z.flatten(0, 1), labels.flatten()), z.detach().argmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_verify_of_a_model_with_the_greatest_class(dtype: torch.dtype) -> None:
    """`verify` computes in float64, where the greatest of cut logits has no key that ranks could compare."""
    assert autotp.verify(Accurate().to(dtype), tp=2, example_inputs=(WORD_ROWS, LABELS)).ok


@checks.on(2, 4)
def the_first_of_the_greatest_logits_is_that_of_one_device(rank: int, n: int) -> None:
    expected = Accurate()(WORD_ROWS, LABELS)
    for without in ((), ("linear_cross_entropy",)):
        mine = autotp.parallelize(Accurate(), n, example_inputs=(WORD_ROWS, LABELS), without=without)
        loss, places = mine(WORD_ROWS, LABELS)
        torch.testing.assert_close(loss, expected[0])
        assert torch.equal(places, expected[1])


class PseudoLabelled(Accurate):
    """The first reader of the logits stands before the greatest class, and the last one picks it."""

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        z = self.head(self.table(tokens))
        lse, greatest = z.logsumexp(-1), z.argmax(-1)
        return lse - z.gather(-1, greatest.unsqueeze(-1)).squeeze(-1), greatest


@checks.on(1, 2)
def classes_that_are_read_from_the_logits_are_no_labels_in_time(rank: int, n: int) -> None:
    expected = PseudoLabelled()(WORD_ROWS, LABELS)
    with small():
        mine = autotp.parallelize(PseudoLabelled(), n, example_inputs=(WORD_ROWS, LABELS))
        torch.testing.assert_close(mine(WORD_ROWS, LABELS), expected)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
