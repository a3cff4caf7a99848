"""linear_mixed_terms: entropy, divergence and the greatest class of a head in chunks are those of all logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.ops.collectives import joined_terms
from autotp.ops.losses import chunks as chunks_of_rows
from autotp.ops.losses.argmax import argmax_key, linear_argmax_key, place_of_key
from autotp.ops.losses.linear_cross_entropy import linear_class_terms
from autotp.passes.lower.prove_rules import prove_rule
from autotp.sharding.partition import chunk_bounds

ROWS, WIDTH, OTHER_WIDTH, CLASSES = (2, 7), 5, 3, 13
NUMBERS = [(1.0, 0.0, 1.0, 0.0), (0.5, 3.0, 2.0, 4.0)]


@pytest.fixture(params=[1, 40, 10**6], ids=["row-by-row", "chunks", "one-chunk"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_of_rows, "CHUNK", request.param)


def heads() -> tuple[list[Tensor], Tensor]:
    """Weight, input and bias of two heads; and classes."""
    torch.manual_seed(0)
    shapes = [(CLASSES, WIDTH), (*ROWS, WIDTH), (CLASSES,), (CLASSES, OTHER_WIDTH), (*ROWS, OTHER_WIDTH), (CLASSES,)]
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes], torch.randint(
        0, CLASSES, ROWS
    )


def logits(weight: Tensor, x: Tensor, bias: Tensor, scale: float, cap: float, low: Sequence[Tensor] = ()) -> Tensor:
    z = F.linear(x, weight, bias)
    z = (z + F.linear(low[1], low[0]) if low else z) * scale
    return torch.tanh(z / cap) * cap if cap else z


def terms(tensors: list[Tensor], classes: Tensor, numbers: Any, parts: tuple[float, float], tp: int) -> Tensor:
    """Terms of all classes, of those of `tp` ranks."""
    scale, cap, other_scale, other_cap = numbers
    weight, x, bias, *other = tensors
    results = []
    for a, b in (chunk_bounds(CLASSES, tp, rank) for rank in range(tp)):
        more: tuple[Any, ...] = ()
        if parts[1]:
            more = other[0][a:b], other[1], other_scale, other_cap, other[2][a:b]
        results.append(linear_class_terms(weight[a:b], x, classes, a, CLASSES, scale, cap, bias[a:b], *parts, *more))
    return joined_terms(torch.stack(results), "logsumexp_mean")


def mean(t: Tensor) -> Tensor:
    return t[2]


def expect_same(ours: Callable[[], Tensor], theirs: Callable[[], Tensor], trained: list[Tensor]) -> None:
    (a, b), weights = (ours(), theirs()), torch.linspace(-1, 1, 14, dtype=torch.float64).view(ROWS)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    expected = torch.autograd.grad((b * weights).sum(), trained)
    for retain in (True, False):
        grads = torch.autograd.grad((a * weights).sum(), trained, retain_graph=retain)
        torch.testing.assert_close(grads, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("tp", [1, 2, 16])  # On 16 ranks some have no class.
@pytest.mark.parametrize("numbers", NUMBERS)
def test_entropy_beside_the_logarithm_of_a_class(numbers: Any, tp: int) -> None:
    tensors, classes = heads()

    def ours() -> Tensor:
        t = terms(tensors, classes, numbers, (1.0, 0.0), tp)
        return (t[0] - mean(t)) + 2 * (t[1] - t[0])

    def theirs() -> Tensor:
        every = logits(*tensors[:3], *numbers[:2]).log_softmax(-1)
        return -(every.exp() * every).sum(-1) + 2 * every.gather(-1, classes[..., None])[..., 0]

    expect_same(ours, theirs, tensors[:3])


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("tp", [1, 2, 16])
@pytest.mark.parametrize("trained", [slice(0, 3), slice(3, 6), slice(0, 6), slice(1, 2), slice(4, 5)])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_divergence_of_two_heads(numbers: Any, trained: slice, tp: int) -> None:
    tensors, classes = heads()
    for tensor in tensors:
        tensor.requires_grad_(any(tensor is wanted for wanted in tensors[trained]))

    def ours() -> Tensor:
        t = terms(tensors, classes, numbers, (1.0, -0.5), tp)
        return mean(t) + 0.3 * t[3]

    def theirs() -> Tensor:
        z, other = logits(*tensors[:3], *numbers[:2]), logits(*tensors[3:], *numbers[2:])
        return (z.softmax(-1) * (z - 0.5 * other)).sum(-1) + 0.3 * other.logsumexp(-1)

    expect_same(ours, theirs, tensors[trained])


@pytest.mark.usefixtures("chunks")
def test_divergence_of_equal_heads_has_the_slope_of_a_difference_of_zero() -> None:
    """A student that begins as its teacher: every difference of logits is 0, where |d| has no slope and d has."""
    tensors, classes = heads()
    equal = [*tensors[:3], *(tensor.detach().clone() for tensor in tensors[:3])]

    def ours() -> Tensor:
        return mean(terms(equal, classes, NUMBERS[0], (1.0, -1.0), 2))

    def theirs() -> Tensor:
        z, other = logits(*equal[:3], 1, 0), logits(*equal[3:], 1, 0)
        return (z.softmax(-1) * (z - other)).sum(-1)

    expect_same(ours, theirs, equal[:3])


# ---- products that are added, such as those of adapters, and shares of classes

SHARES = {"probabilities": None, "of-classes": (CLASSES,), "of-rows": (*ROWS, CLASSES)}


def low_products() -> list[Tensor]:
    """Weight and input of the product that is added to each of two heads."""
    torch.manual_seed(1)
    shapes = [(CLASSES, 2), (*ROWS, 2), (CLASSES, 4), (*ROWS, 4)]
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def shares_of(shape: tuple[int, ...] | None) -> Tensor | None:
    return None if shape is None else torch.rand(shape, dtype=torch.float64, requires_grad=True)


def terms_with_all(
    tensors: list[Tensor], low: list[Tensor], shares: Tensor | None, classes: Tensor, numbers: Any, heads: int, tp: int
) -> Tensor:
    """Terms of all classes, where every argument is used: of one head, or of two."""
    (weight, x, bias, other, other_x, other_bias), results = tensors, []
    for a, b in (chunk_bounds(CLASSES, tp, rank) for rank in range(tp)):
        more = [*numbers[:2], bias[a:b], 1.0, -0.5, other[a:b], other_x, *numbers[2:], other_bias[a:b]]
        more = more if heads == 2 else [*numbers[:2], bias[a:b], 0.7, 0.0, None, None, 1.0, 0.0, None]
        own = None if shares is None else shares[..., a:b]
        others = [low[2][a:b], low[3]] if heads == 2 else []
        results.append(
            linear_class_terms(weight[a:b], x, classes, a, CLASSES, *more, own, low[0][a:b], low[1], *others)
        )
    return joined_terms(torch.stack(results), "logsumexp_mean" if shares is None else "logsumexp_sum")


def sum_of_terms(t: Tensor) -> Tensor:
    return t[0] - 2 * t[1] + 0.3 * t[2] + (0.4 * t[3] if len(t) > 3 else 0)


def expected_sum(
    tensors: list[Tensor], low: list[Tensor], shares: Tensor | None, classes: Tensor, numbers: Any, heads: int
) -> Tensor:
    """`sum_of_terms` of plain torch."""
    z = logits(*tensors[:3], *numbers[:2], low[:2])
    y = logits(*tensors[3:], *numbers[2:], low[2:])
    d = z - 0.5 * y if heads == 2 else 0.7 * z
    total = ((z.softmax(-1) if shares is None else shares) * d).sum(-1)
    result = z.logsumexp(-1) - 2 * z.gather(-1, classes[..., None])[..., 0] + 0.3 * total
    return result + 0.4 * y.logsumexp(-1) if heads == 2 else result


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("tp", [1, 2, 16])
@pytest.mark.parametrize("number", [1, 2], ids=["one-head", "two-heads"])
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("shape", SHARES.values(), ids=list(SHARES))
def test_shares_and_added_products(shape: tuple[int, ...] | None, numbers: Any, number: int, tp: int) -> None:
    (tensors, classes), low, shares = heads(), low_products(), shares_of(shape)
    trained = [*tensors[: 3 * number], *low[: 2 * number], *([] if shares is None else [shares])]
    expect_same(
        lambda: sum_of_terms(terms_with_all(tensors, low, shares, classes, numbers, number, tp)),
        lambda: expected_sum(tensors, low, shares, classes, numbers, number),
        trained,
    )


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("trained", ["weight", "x", "low_weight", "low_x", "shares", "other_low_x"])
def test_only_one_tensor_is_trained(trained: str, numbers: Any) -> None:
    (tensors, classes), low, shares = heads(), low_products(), shares_of((*ROWS, CLASSES))
    assert shares is not None
    names = {"weight": tensors[0], "x": tensors[1], "low_weight": low[0], "low_x": low[1], "shares": shares,
             "other_low_x": low[3]}  # fmt: skip
    for tensor in (*tensors, *low, shares):
        tensor.requires_grad_(tensor is names[trained])
    expect_same(
        lambda: sum_of_terms(terms_with_all(tensors, low, shares, classes, numbers, 2, 2)),
        lambda: expected_sum(tensors, low, shares, classes, numbers, 2),
        [names[trained]],
    )


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("trained", range(4), ids=["weight", "x", "low_weight", "low_x"])
def test_a_loss_with_an_added_product_of_which_one_tensor_is_trained(trained: int) -> None:
    (tensors, classes), low = heads(), low_products()
    weight, x, low_weight, low_x = operands = [*tensors[:2], *low[:2]]
    for i, tensor in enumerate(operands):
        tensor.requires_grad_(i == trained)

    def ours() -> Tensor:
        more = [0.5, 0.0, None, 0.0, 0.0, None, None, 1.0, 0.0, None, None]
        parts = [linear_class_terms(weight[a:b], x, classes, a, CLASSES, *more, low_weight[a:b], low_x)
                 for a, b in (chunk_bounds(CLASSES, 2, rank) for rank in range(2))]  # fmt: skip
        t = joined_terms(torch.stack(parts), "logsumexp")
        return t[0] - t[1]

    def theirs() -> Tensor:
        z = (F.linear(x, weight) + F.linear(low_x, low_weight)) * 0.5
        return F.cross_entropy(z.movedim(-1, 1), classes, reduction="none")

    expect_same(ours, theirs, [operands[trained]])


@pytest.mark.parametrize("shape", SHARES.values(), ids=list(SHARES))
def test_second_derivatives_of_shares_and_added_products(shape: tuple[int, ...] | None) -> None:
    (tensors, classes), low, shares = heads(), low_products(), shares_of(shape)
    tensors, classes = [y[:, :2] if y.shape[:2] == ROWS else y for y in tensors], classes[:, :2]
    low = [y[:, :2] if y.shape[:2] == ROWS else y for y in low]
    shares = shares[:, :2] if shares is not None and shares.dim() > 1 else shares

    def function(weight: Tensor, x: Tensor, low_weight: Tensor, low_x: Tensor, *own: Tensor) -> Tensor:
        more = 0.5, 3.0, None, 1.0, 0.0, None, None, 1.0, 0.0, None, own[0] if own else None
        return linear_class_terms(weight, x, classes, 0, CLASSES, *more, low_weight, low_x)

    operands = *tensors[:2], *low[:2], *([] if shares is None else [shares])
    assert torch.autograd.gradgradcheck(function, tuple(y.detach().requires_grad_() for y in operands))


@pytest.mark.parametrize("parts", [(1.0, 0.0), (1.0, -1.0)])
def test_second_derivatives(parts: tuple[float, float]) -> None:
    tensors, classes = heads()
    assert torch.autograd.gradgradcheck(
        lambda *ts: terms(list(ts), classes, NUMBERS[1], parts, 1),
        tensors[:6] if parts[1] else tensors[:3] + tensors[3:],
    )


@pytest.mark.parametrize("grads_again", [False, True], ids=["gradient", "create-graph"])
def test_a_mean_of_the_same_head_with_another_scale_has_its_gradient_once(grads_again: bool) -> None:
    """As an entropy with a temperature: both heads are one tensor."""
    (weight, x, bias, *_), classes = heads()
    own, other = (0.5, 0.0), (1.0, 0.0)
    t = terms([weight, x, bias, weight, x, bias], classes, (*own, *other), (0.0, 1.0), 1)
    expected = (logits(weight, x, bias, *own).softmax(-1) * logits(weight, x, bias, *other)).sum(-1)
    gradients = [torch.autograd.grad(y.square().sum(), (weight, x, bias), create_graph=grads_again)
                 for y in (mean(t), expected)]  # fmt: skip
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_rules_hold(tp: int) -> None:
    (weight, x, bias, other, other_x, other_bias), classes = heads()
    more = 1.0, -1.0, other, other_x, 1.0, 0.0, other_bias
    assert prove_rule(linear_class_terms, (weight, x, classes, 0, CLASSES, 1.0, 0.0, bias, *more), {}, tp) == []
    assert prove_rule(linear_class_terms, (weight, x, classes, 0, CLASSES, 1.0, 0.0, None, 1.0), {}, tp) == []
    low = low_products()
    for shape in SHARES.values():
        added = shares_of(shape), *low
        assert (
            prove_rule(linear_class_terms, (weight, x, classes, 0, CLASSES, 1.0, 0.0, bias, *more, *added), {}, tp)
            == []
        )
    exact = [
        y.detach().round().float() for y in (weight, x, bias, *low[:2])
    ]  # Products of parts have no other last digit.
    assert prove_rule(argmax_key, (exact[0], 0, 0), {}, tp) == []
    assert prove_rule(linear_argmax_key, (*exact[:2], 0, 1.0, 0.0, *exact[2:]), {}, tp) == []


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("tp", [1, 2, 4, 16])
def test_greatest_class_is_the_first_of_equal_ones(tp: int) -> None:
    (weight, x, bias, *_), _ = heads()
    weight, x, bias, low_weight, low_x = (
        (y.detach() * 2).round().float() for y in (weight, x, bias, *low_products()[:2])
    )
    x[0, :3] = low_x[0, :3] = bias[:2] = 0  # All logits but those of the bias are 0 or -0.
    keys = [linear_argmax_key(weight[a:b], x, a, -1.0, 0.0, bias[a:b], low_weight[a:b], low_x)
            for a, b in (chunk_bounds(CLASSES, tp, rank) for rank in range(tp))]  # fmt: skip
    expected = (-logits(weight, x, bias, 1.0, 0.0, (low_weight, low_x))).argmax(-1)
    assert torch.equal(place_of_key(torch.stack(keys).amax(0)), expected)
