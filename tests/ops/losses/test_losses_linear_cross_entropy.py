"""linear_cross_entropy: a head and its loss in chunks of rows are the loss of all logits, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.ops.losses import chunks as chunks_of_rows
from autotp.ops.losses.linear_cross_entropy import linear_class_terms, linear_loss_sum
from autotp.passes.lower.prove_rules import prove_rule
from autotp.sharding.partition import chunk_bounds

ROWS, WIDTH, CLASSES = (2, 7), 5, 13
FORMS = [pytest.param(scale, cap, bias, id=f"{scale}-{cap}-{bias}") for scale, cap, bias in
         [(1.0, 0.0, False), (0.5, 0.0, True), (1.0, 3.0, True), (0.25, 2.0, False)]]  # fmt: skip
SIZES = {"row-by-row": 1, "chunks": 40, "one-chunk": 10**6}


@pytest.fixture(params=SIZES.values(), ids=list(SIZES))
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths of chunks, and whether backward computes logits again."""
    monkeypatch.setattr(chunks_of_rows, "CHUNK", request.param)


def operands(bias: bool, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Weight, input and perhaps bias, which have gradients; and classes."""
    torch.manual_seed(0)
    shapes = [(CLASSES, WIDTH), (*ROWS, WIDTH), *[(CLASSES,)] * bias]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes], torch.randint(0, CLASSES, ROWS)


def logits(tensors: list[Tensor], scale: float, cap: float) -> Tensor:
    z = F.linear(tensors[1], tensors[0], *tensors[2:]) * scale
    return torch.tanh(z / cap) * cap if cap else z


def expect_same(ours: Callable[[], Tensor], theirs: Callable[[], Tensor], tensors: list[Tensor]) -> None:
    """Values and gradients are equal, also in a second backward, which finds nothing overwritten."""
    (a, b), wanted = (ours(), theirs()), [x for x in tensors if x.requires_grad]
    torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    weights = torch.linspace(-1, 1, a.numel(), dtype=a.dtype).view(a.shape) if a.dim() else torch.tensor(3.0)
    expected = torch.autograd.grad((b * weights).sum(), wanted)
    for retain in (True, False):
        grads = torch.autograd.grad((a * weights).sum(), wanted, retain_graph=retain)
        torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-13)


def loss(tensors: list[Tensor], classes: Tensor, scale: float, cap: float, tp: int) -> Tensor:
    """The loss of each row, of the terms of `tp` ranks."""
    weight, x, *bias = tensors
    parts = []
    for a, b in (chunk_bounds(CLASSES, tp, rank) for rank in range(tp)):
        own_bias = bias[0][a:b] if bias else None
        parts.append(linear_class_terms(weight[a:b], x, classes, a, CLASSES, scale, cap, own_bias))
    terms = torch.stack(parts).logsumexp(0)
    return terms[0] - terms[1]


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("tp", [1, 2, 4, 16])  # On 16 ranks some have no class.
@pytest.mark.parametrize(("scale", "cap", "bias"), FORMS)
def test_terms_give_cross_entropy_and_its_gradients(scale: float, cap: float, bias: bool, tp: int) -> None:
    tensors, classes = operands(bias)
    expect_same(
        lambda: loss(tensors, classes, scale, cap, tp),
        lambda: F.cross_entropy(logits(tensors, scale, cap).movedim(-1, 1), classes, reduction="none"),
        tensors,
    )


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(("scale", "cap", "bias"), FORMS)
@pytest.mark.parametrize("trained", ["weight", "x"])
def test_terms_with_a_frozen_operand(trained: str, scale: float, cap: float, bias: bool) -> None:
    tensors, classes = operands(bias)
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i == ("weight", "x").index(trained))
    expect_same(
        lambda: loss(tensors, classes, scale, cap, 2),
        lambda: F.cross_entropy(logits(tensors, scale, cap).movedim(-1, 1), classes, reduction="none"),
        tensors,
    )


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(("scale", "cap", "bias"), FORMS)
def test_sum_gives_weighted_rows_and_their_gradients(scale: float, cap: float, bias: bool) -> None:
    tensors, classes = operands(bias)
    of_sum, of_class = torch.rand(2, *ROWS, dtype=torch.float64)
    of_sum[0, :3] = of_class[0, :3] = 0

    def expected() -> Tensor:
        z = logits(tensors, scale, cap)
        picked = z.gather(-1, classes[..., None])[..., 0]
        return (of_sum * z.logsumexp(-1) - of_class * picked).sum()

    ours = [*tensors[:2], classes, of_sum, -of_class, None, None, scale, cap, *tensors[2:]]
    expect_same(lambda: linear_loss_sum(*ours), expected, tensors)  # type: ignore[arg-type]


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("trained", ["head", "all"])
@pytest.mark.parametrize("shape", [(CLASSES,), (*ROWS, CLASSES)], ids=["of-classes", "of-rows"])
@pytest.mark.parametrize(("scale", "cap", "bias"), FORMS)
def test_sum_with_shares_of_classes_and_an_added_product(
    scale: float, cap: float, bias: bool, shape: tuple[int, ...], trained: str
) -> None:
    """As a loss with smoothed labels or with probabilities as its target; of a target that learns, too."""
    (weight, x, *own_bias), classes = operands(bias)
    low_weight, low_x = (torch.randn(*n, 3, dtype=torch.float64, requires_grad=True) for n in ((CLASSES,), ROWS))
    (of_class, of_shares), of_sum, shares = (
        torch.rand(2, *ROWS).double(),
        torch.rand(ROWS).double(),
        torch.rand(shape).double(),
    )
    learning = [weight, x, *own_bias, low_weight, low_x]
    if trained == "all":
        learning += [of_sum.requires_grad_(), shares.requires_grad_()]

    def ours() -> Tensor:
        more = {"bias": own_bias[0] if bias else None, "shares": shares, "low_weight": low_weight, "low_x": low_x}
        numbers = of_sum, -of_class, of_shares, None, scale, cap
        return linear_loss_sum(weight, x, classes, *numbers, first_part=-1.0, **more)  # type: ignore[arg-type]

    def expected() -> Tensor:
        z = (F.linear(x, weight, *own_bias) + F.linear(low_x, low_weight)) * scale
        z = torch.tanh(z / cap) * cap if cap else z
        own = z.gather(-1, classes[..., None])[..., 0]
        return (of_sum * z.logsumexp(-1) - of_class * own - of_shares * (shares * z).sum(-1)).sum()

    expect_same(ours, expected, learning)


@pytest.mark.parametrize("shape", [(CLASSES,), (*ROWS, CLASSES)], ids=["of-classes", "of-rows"])
def test_sum_with_shares_has_second_derivatives(shape: tuple[int, ...]) -> None:
    (weight, x), classes = operands(bias=False)
    counted, shares = torch.rand(ROWS).double(), torch.rand(shape).double()
    low = [torch.randn(*n, 2, dtype=torch.float64, requires_grad=True) for n in ((CLASSES,), ROWS)]

    def total(*tensors: Tensor) -> Tensor:
        more = {"shares": shares, "low_weight": tensors[2], "low_x": tensors[3]}
        return linear_loss_sum(
            *tensors[:2], classes, counted, -counted, counted, None, 0.5, 2.0, first_part=-1.0, **more
        )

    assert torch.autograd.gradgradcheck(total, (weight, x, *low))
    once, again = (
        torch.autograd.grad(total(weight, x, *low), (weight, x, *low), create_graph=again) for again in (False, True)
    )
    torch.testing.assert_close(again, once)


@pytest.mark.usefixtures("chunks")
def test_rows_that_do_not_count_may_have_any_number() -> None:
    tensors, classes = operands(bias=False)
    counted = torch.ones(ROWS, dtype=torch.float64)
    counted[1, 2:] = 0
    with torch.no_grad():
        tensors[1][1, 2:] = torch.inf
    total = linear_loss_sum(*tensors, classes, counted, -counted)
    rows = logits(tensors, 1, 0).movedim(-1, 1)
    torch.testing.assert_close(total, F.cross_entropy(rows, classes.masked_fill(counted == 0, -100), reduction="sum"))


@pytest.mark.usefixtures("chunks")
def test_both_have_second_derivatives_and_per_sample_gradients() -> None:
    (weight, x), classes = operands(bias=False)
    rows, of_rows = x[0], classes[0]
    counted = torch.rand(ROWS[1], dtype=torch.float64)

    def terms(w: Tensor, y: Tensor) -> Tensor:
        return linear_class_terms(w, y, of_rows, 0, CLASSES)

    def total(w: Tensor, y: Tensor) -> Tensor:
        return linear_loss_sum(w, y, of_rows, counted, -counted)

    for function in (terms, total):
        assert torch.autograd.gradgradcheck(function, (weight, rows))
        whole = torch.autograd.grad(function(weight, rows).sum(), weight)[0]
        mapped = torch.func.grad(lambda w: function(w, rows).sum())(weight)  # noqa: B023
        torch.testing.assert_close(mapped, whole)


@pytest.mark.usefixtures("chunks")
def test_half_precision_has_sums_in_float32() -> None:
    tensors, classes = operands(bias=False, dtype=torch.bfloat16)
    z = F.linear(tensors[1], tensors[0]).float()
    expected = F.cross_entropy(z.movedim(-1, 1), classes)
    ours = linear_loss_sum(*tensors, classes, torch.ones(ROWS), -torch.ones(ROWS)) / classes.numel()
    terms = linear_class_terms(*tensors, classes, 0, CLASSES)
    mean = (terms[0] - terms[1]).mean()
    for value in (ours, mean):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
        for a, b in zip(*(torch.autograd.grad(v, tensors, retain_graph=True) for v in (value, expected)), strict=True):
            assert a.dtype == torch.bfloat16
            torch.testing.assert_close(a, b, rtol=3e-2, atol=1e-3)


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_rules_hold(tp: int, bias: bool) -> None:
    (weight, x, *more), classes = operands(bias)
    counted = torch.rand(ROWS, dtype=torch.float64)
    given = more[0] if bias else None
    assert prove_rule(linear_class_terms, (weight, x, classes, 0, CLASSES, 1.0, 0.0, given), {}, tp) == []
    assert (
        prove_rule(linear_loss_sum, (weight, x, classes, counted, counted, None, None, 1.0, 0.0, given), {}, tp) == []
    )
    low = torch.rand(CLASSES, 2).double(), torch.rand(*ROWS, 2).double()
    for shares in (torch.rand(CLASSES).double(), torch.rand(*ROWS, CLASSES).double()):
        more = {"first_part": -1.0, "shares": shares, "low_weight": low[0], "low_x": low[1]}
        of_rows = counted, counted, counted, None, 1.0, 0.0, given
        assert prove_rule(linear_loss_sum, (weight, x, classes, *of_rows), more, tp) == []


def test_a_class_out_of_range_is_refused() -> None:
    (weight, x), classes = operands(bias=False)
    with pytest.raises(RuntimeError, match="an index is out of range"):
        linear_class_terms(weight, x, classes + CLASSES, 0, CLASSES)


def errors_in_bfloat16(form: str, rows: int, factor: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The errors of gradients of the weight and the input beside float64, each relative to that of plain torch."""
    monkeypatch.setattr(chunks_of_rows, "CHUNK", 8 * 64)
    torch.manual_seed(0)
    # Equal signs add up, and the logits of the classes are large: their probabilities are near 1.
    weight, x = (torch.randn(64, 32) * 0.02).bfloat16(), torch.randn(rows, 32).abs().bfloat16()
    classes = torch.randint(0, 4, (rows,))
    x[:, :4] = 0
    x[torch.arange(rows), classes] = 1
    weight[:, :4] = 8 * torch.eye(64)[:, :4]
    counted = torch.ones(rows)

    def total(form: str, w: Tensor, y: Tensor) -> Tensor:
        match form:
            case "logits":
                z = F.linear(y, w)
                return F.cross_entropy(z if z.dtype == torch.float64 else z.float(), classes, reduction="sum")
            case "sum":
                return linear_loss_sum(w, y, classes, counted, -counted)
            case _:
                w = w.detach() if form == "frozen" else w
                parts = [linear_class_terms(w[a : a + 32], y, classes, a, 64) for a in (0, 32)]
                lse, own = torch.stack(parts).logsumexp(0)
                return (lse - own).sum()

    def grads(form: str, dtype: torch.dtype) -> list[Tensor]:
        operands = [y.to(dtype).requires_grad_() for y in (weight, x)]
        wanted = operands[1:] if is_frozen else operands
        return list(torch.autograd.grad(total(form, *operands) * factor, wanted))

    is_frozen = form == "frozen"
    all_grads = zip(
        grads(form, torch.bfloat16), grads("logits", torch.bfloat16), grads("logits", torch.float64), strict=True
    )
    return [float((ours - exact).norm() / (theirs - exact).norm()) for ours, theirs, exact in all_grads]


@pytest.mark.parametrize("form", ["sum", "terms", "frozen"])
@pytest.mark.parametrize("rows", [64, 4096])  # 8 and 512 chunks.
@pytest.mark.parametrize("factor", [1.0, 1 / 513])  # The second is 0.2 % more in bfloat16.
def test_bfloat16_is_as_exact_as_all_logits(
    form: str, rows: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(errors_in_bfloat16(form, rows, factor, monkeypatch)) < 1.3
