"""What a trainer is asked besides a step: norms, state, half precision, data, and what it refuses."""

from __future__ import annotations

import copy
import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from cards.pretend import asked_for
from errors import message
from ranks import run_ranks
from small_models import assert_values_close, gpt
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import SMALL, batch, started, trained

import autotp

LAYOUTS = [((2, 2, 1), {})]
RARE = [
    ((2, 1, 2), {"zero": 2}),
    ((1, 1, 2), {"zero": 1}),
    ((1, 2, 2), {"zero": 3}),
    ((2, 2, 2), {"sequence_parallel": True}),
]
cases = pytest.mark.parametrize(
    ("layout", "more"), [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.rare) for case in RARE)], ids=str
)


def part(trainer: autotp.Trainer, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    mesh = trainer.mesh["dp"]
    return {name: x.chunk(mesh.size())[mesh.get_local_rank()] for name, x in rows.items()}


def whole_of(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


# ---- norms and states


def clipped_and_stated(rank: int, n: int, layout: Any, more: Any) -> None:
    clipped(layout, more)
    stated(rank, layout, more)


def clipped(layout: Any, more: Any) -> None:
    """Equal to one device's norm, of every order; gradients are scaled alike."""
    for order in (2.0, 1.0, float("inf")):
        whole = gpt(seed=0, **SMALL)
        whole.wpe.requires_grad_(False)
        trainer, _ = started(layout, **more, model=copy.deepcopy(whole))
        whole(**batch(0)).backward()
        trainer.step(**part(trainer, batch(0)))
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 1e-3, order)
        found = nn.utils.clip_grad_norm_(trainer.parameters(), float("inf"), order)
        assert_values_close(found, expected, rtol=1e-5, atol=0)
        assert_values_close(autotp.clip_grad_norm_(trainer, 1e-3, order), expected, rtol=1e-5, atol=0)
        grads = {name: p.grad for name, p in whole.named_parameters()}
        for name, p in trainer.named_parameters():
            assert (grads[name] is None) == (p.grad is None)
            if p.grad is not None:
                assert_values_close(whole_of(p.grad), grads[name], rtol=1e-3, atol=1e-8)


def stated(rank: int, layout: Any, more: Any) -> None:
    """The state dict of the original, out and in again, bit for bit."""
    trainer, _ = started(layout, **more)
    for source in (gpt(seed=0, **SMALL), gpt(seed=0, **SMALL).requires_grad_(False)):
        if any(not p.requires_grad for p in source.parameters()):
            torch.nn.init.ones_(source.wte.weight)
            autotp.load_full_state_dict(trainer, source.state_dict() if rank == 0 else {})
        found = autotp.full_state_dict(trainer)
        assert list(found) == (list(source.state_dict()) if rank == 0 else [])
        for name, value in found.items():
            assert torch.equal(value, source.state_dict()[name]), name


@cases
def test_trainer_clips_and_loads_states_as_one_device(layout: Any, more: dict[str, Any]) -> None:
    run_ranks(clipped_and_stated, layout[0] * layout[1] * layout[2], layout, more, timeout=100)


# ---- half precision


OTHER_ROUNDING = pytest.mark.skipif(
    asked_for(), reason="AdamW makes other steps of small gradients that a card's attention rounds in another way"
)


def in_half(rank: int, n: int, layout: Any, dtype: torch.dtype, more: Any) -> tuple[float, ...]:
    """Losses of a few steps; parameters and gradients are in float32, what is computed is not."""
    with warnings.catch_warnings():
        # torch's scaler multiplies sharded gradients by a tensor of one element, and warns of it.
        warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1")
        return losses_in_half(layout, dtype, more)


def losses_in_half(layout: Any, dtype: torch.dtype, more: Any) -> tuple[float, ...]:
    kind = torch.amp.GradScaler if layout[0] > 1 else ShardedGradScaler
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scaler = kind(device, init_scale=2.0**12) if dtype == torch.float16 else None
    trainer, optimizer = started(layout, compute_dtype=dtype, loss_scaler=scaler, **more)
    losses = []
    for step in range(4):
        losses.append(trainer.step(**part(trainer, batch(step))).item())
        assert {p.grad.dtype for p in trainer.parameters() if p.grad is not None} == {torch.float32}
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = autotp.clip_grad_norm_(trainer, 1.0).item()
        (scaler or optimizer).step(*([optimizer] if scaler else []))
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()
    return (*losses, norm)


@pytest.mark.parametrize(
    ("layout", "more", "dtype"),
    [
        ((1, 1, 2), {"zero": 3}, torch.bfloat16),
        pytest.param((2, 1, 1), {}, torch.float16, marks=OTHER_ROUNDING),
        pytest.param((1, 1, 2), {"zero": 3}, torch.float16, marks=[pytest.mark.rare, OTHER_ROUNDING]),
        pytest.param((2, 1, 1), {}, torch.bfloat16, marks=pytest.mark.rare),
        pytest.param((1, 2, 1), {}, torch.bfloat16, marks=pytest.mark.rare),
        pytest.param((1, 2, 1), {}, torch.float16, marks=[pytest.mark.rare, OTHER_ROUNDING]),
    ],
    ids=str,
)
def test_half_precision_trains_near_one_device(layout: Any, more: dict[str, Any], dtype: torch.dtype) -> None:
    expected = trained_alone()
    for found in run_ranks(in_half, layout[0] * layout[1] * layout[2], layout, dtype, more, timeout=100):
        assert found == pytest.approx(expected, rel=0.03)
        assert found != pytest.approx(expected, rel=1e-6)


def trained_alone() -> tuple[float, ...]:
    model = gpt(seed=0, **SMALL)
    optimizer, losses = AdamW(model.parameters(), lr=0.01, weight_decay=0.1), []
    for step in range(4):
        loss = model(**batch(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return (*losses, norm.item())


def overflowing(rank: int, n: int, kind: type[torch.amp.GradScaler]) -> list[float]:
    """A scale that overflows in the first steps: they are skipped on every rank, and the scale falls."""
    scaler = kind("cpu", init_scale=2.0**40)
    trainer, optimizer = started((1, 2, 1), compute_dtype=torch.float16, loss_scaler=scaler)
    before = [p.detach().clone() for p in trainer.parameters()]
    trainer.step(**batch(0))
    if rank == 0:  # One rank alone has seen it.
        for p in trainer.parameters():
            p.grad = torch.zeros_like(p)
    else:
        next(trainer.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, old) for p, old in zip(trainer.parameters(), before, strict=True))
    return [scaler.get_scale()]


def casting(rank: int, n: int, layout: Any, more: Any) -> dict[torch.Size, float]:
    """How often a step of two microbatches casts each matrix among the parameters, by shape."""
    trainer, _ = started(layout, compute_dtype=torch.bfloat16, **more)
    shapes = {p.shape: 0 for name, p in trainer.named_parameters() if p.dim() == 2}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float32 and args[0].shape in shapes:
                shapes[args[0].shape] += 1
            return func(*args, **(kwargs or {}))

    trainer.step(**part(trainer, batch(0)))
    trainer.zero_grad()
    with Counting():
        trainer.step(**part(trainer, batch(0)))
    held = [p.shape for name, p in trainer.named_parameters() if p.dim() == 2]
    return {shape: count / held.count(shape) for shape, count in shapes.items()}


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ((1, 1, 1), {}),
        ((1, 2, 1), {}),
        pytest.param((1, 2, 1), {"schedule": "zero-bubble", "layers": 4}, marks=pytest.mark.rare),
        pytest.param((2, 1, 1), {"recompute": "full"}, marks=pytest.mark.rare),
    ],
    ids=str,
)
def test_trainer_step_casts_each_parameter_once(layout: Any, more: dict[str, Any]) -> None:
    """Its microbatches share the copy."""
    for counts in run_ranks(casting, layout[0] * layout[1] * layout[2], layout, more, timeout=100):
        assert counts and set(counts.values()) == {1}


@pytest.mark.parametrize("kind", [ShardedGradScaler, torch.amp.GradScaler])
def test_an_overflow_on_one_rank_skips_the_step_on_all(kind: type[torch.amp.GradScaler]) -> None:
    assert run_ranks(overflowing, 2, kind, timeout=100) == [[2.0**39]] * 2


# ---- refused


def undefined(rank: int, n: int) -> str:
    trainer, optimizer = started((1, 2, 1))
    trained(trainer, optimizer, range(2))
    if rank == 1:
        with torch.no_grad():
            trainer.get_parameter("h.1.mlp.c_fc.weight")[0, 0] = torch.nan
    with pytest.raises(autotp.Error) as raised:
        for step in range(2, 8):  # A card's loss comes later.
            trainer.step(**batch(step))
    return str(raised.value)


class Scaled(nn.Module):
    """A product of a parameter and a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch 8]"""
        return self.linear(x * self.scale).square().mean()


def test_compute_dtype_refuses_a_product_of_two_dtypes() -> None:
    """On meta torch does not see that there are two."""
    with pytest.raises(autotp.Error) as raised:
        run_ranks(half_scaled, 1)
    assert "compute_dtype: a product of bfloat16 and float32" in str(raised.value)
    assert raised.value.facts["at"].endswith("return self.linear(x * self.scale).square().mean()")


def half_scaled(rank: int, n: int) -> None:
    autotp.distribute(Scaled(), compute_dtype=torch.bfloat16, example_inputs={"x": torch.randn(4, 8)})


def test_nan_loss_names_the_parameter() -> None:
    first = "Trainer.step: the loss of step 3 is nan: `h.1.mlp.c_fc.weight` is infinite or undefined"
    for found in run_ranks(undefined, 2, timeout=100):
        assert found.splitlines()[0] == first


def otherwise(rank: int, n: int) -> str:
    trainer, _ = started((2, 1, 1))
    return message(lambda: trainer.step(**batch(rank))).splitlines()[0]


def test_tensor_ranks_with_other_batches_are_an_error() -> None:
    expected = "Trainer.step: tp rank 1 got other inputs than tp rank 0"
    assert run_ranks(otherwise, 2, timeout=100) == [expected] * 2


def later_otherwise(rank: int, n: int, layout: tuple[int, int, int]) -> str:
    """From step 3 on, the last rank is one batch ahead."""
    trainer, _ = started(layout)
    with pytest.raises(autotp.Error) as raised:
        for step in range(5):
            trainer.step(**batch(step + (step > 2 and rank == n - 1)))
    assert trainer.steps == 3
    return str(raised.value).splitlines()[0]


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_a_rank_that_skips_a_later_batch_is_named(axis: str) -> None:
    expected = f"Trainer.step: {axis} rank 1 got another batch than {axis} rank 0, now or in the last step"
    layout = (2, 1, 1) if axis == "tp" else (1, 2, 1)
    assert run_ranks(later_otherwise, 2, layout, timeout=100) == [expected] * 2


def taken_over(rank: int, n: int) -> list[str]:
    model = gpt(seed=0, **SMALL)
    started((1, 1, 1), model=model)
    found = []
    for again in (lambda: started((1, 1, 1), model=model), lambda: autotp.parallelize(model, 1)):
        found.append(message(again).partition(": ")[2])
    return found


def test_distribute_refuses_a_model_taken_over_before() -> None:
    (found,) = run_ranks(taken_over, 1)
    remedy = "  try      use the model that autotp.parallelize or autotp.distribute returned then"
    assert found == [f"the model was made parallel before, and its parameters are in that parallel model\n{remedy}"] * 2


def evaluated_between(rank: int, n: int) -> None:
    trainer, _ = started((1, 2, 2), layers=4, zero=1)
    rows = part(trainer, batch(0))
    trainer.step(**rows)
    expected = autotp.clip_grad_norm_(trainer, 1e9)
    assert expected > 0
    trainer.evaluate(**rows)
    assert torch.equal(autotp.clip_grad_norm_(trainer, 1e9), expected)


def test_evaluate_keeps_gradients_of_sharded_pipeline_stages() -> None:
    """Of sharded parameters in a pipeline: torch's schedules would drop them in the first evaluation."""
    run_ranks(evaluated_between, 4, timeout=100)


def in_two_modes(rank: int, n: int) -> str:
    trainer, optimizer = started((1, 1, 2))
    trained(trainer, optimizer, range(3))
    with pytest.raises(autotp.Error) as raised:
        (trainer.evaluate if rank else trainer.step)(**part(trainer, batch(3)))
    return str(raised.value).splitlines()[0].partition(": ")[2]


def test_replicas_in_step_and_in_evaluate_are_an_error() -> None:
    assert run_ranks(in_two_modes, 2) == ["dp rank 0 is in Trainer.step, and dp rank 1 in Trainer.evaluate"] * 2


def frozen_on_one(rank: int, n: int) -> list[str]:
    """One rank freezes what it holds with the others of its stage, or of another one; then all do."""
    pp, found = n // 2, list[str]()
    trainer, optimizer = started((2, pp, 1), timeout=timedelta(seconds=20))
    trained(trainer, optimizer, range(1))
    table = trainer.wte.weight if pp > 1 else next(trainer.parameters())
    for chosen in [rank == n - 1, rank >= n // 2][:pp]:
        table.requires_grad_(not chosen)
        found.append(message(lambda: trainer.step(**part(trainer, batch(1)))))
    table.requires_grad_(False)
    before = table.detach().clone()
    trained(trainer, optimizer, range(1, 2))
    assert torch.equal(table, before)
    return found


@pytest.mark.parametrize(
    ("n", "told"),
    [
        pytest.param(2, ["tp rank 1 has other parameters frozen than tp rank 0"], marks=pytest.mark.rare),
        (
            4,
            [
                "pp rank 1, tp rank 1 has other parameters frozen than pp rank 1, tp rank 0",
                "pp rank 1, tp rank 0; pp rank 1, tp rank 1 has other tied parameters frozen than pp rank 0, tp rank 0",
            ],
        ),
    ],
)
def test_parameters_frozen_on_one_rank_are_an_error_on_all(n: int, told: list[str]) -> None:
    """An error on every rank, at once: also where a table is tied over stages of the pipeline."""
    for found in run_ranks(frozen_on_one, n, timeout=90):
        assert [text.splitlines()[0] for text in found] == [f"Trainer.step: {text}" for text in told]


def frozen_between_halves(rank: int, n: int) -> None:
    """After the first step parts are frozen, in the middle and before; the rest gets one device's gradients."""
    whole = gpt(seed=0, **SMALL, n_layer=4)
    trainer, _ = started((1, n, 1), layers=4, schedule="zero-bubble", model=copy.deepcopy(whole))
    for frozen in ((), ("ln_f", "h.1.mlp"), ("wte", "wpe", "h.0", "h.1")):
        for model in (whole, trainer):
            model.zero_grad()
            for name, p in model.named_parameters():
                p.requires_grad_(not name.startswith(frozen))
        whole(**batch(0)).backward()
        trainer.step(**batch(0))
        grads = {name: p.grad for name, p in whole.named_parameters()}
        for name, p in trainer.named_parameters():
            assert (p.grad is None) == name.startswith(frozen)
            if p.grad is not None:
                assert_values_close(p.grad, grads[name], rtol=1e-4, atol=1e-7, msg=lambda m, x=name: f"{x}: {m}")


def test_zero_bubble_follows_parameters_frozen_later() -> None:
    run_ranks(frozen_between_halves, 2, timeout=90)


def alone(rank: int, n: int, change: str) -> str:
    """What each rank raises where one rank's batch has other values, long after these were compared."""
    trainer, optimizer = started((2, 1, 1), timeout=timedelta(seconds=3))
    trained(trainer, optimizer, range(3))
    rows = part(trainer, batch(3))
    if rank and change == "ignored":
        rows["labels"] = torch.full_like(rows["labels"], -100)
    if rank and change == "range":
        rows["tokens"] = rows["tokens"] + 1000
    if rank and change == "meta":
        rows["tokens"] = rows["tokens"].to("meta")
    if rank and change == "sparse":
        rows["tokens"] = rows["tokens"].to_sparse()
    with pytest.raises(Exception) as raised:
        trainer.step(**rows)
    return str(raised.value)


@pytest.mark.parametrize("change", ["ignored", "range"])
def test_a_rank_whose_batch_would_fail_is_named(change: str) -> None:
    for found in run_ranks(alone, 2, change):
        assert found.startswith("Trainer.step: tp rank 1 got another batch than tp rank 0, now or in the last step"), (
            found
        )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("meta", "has no values: it is on meta"),
        pytest.param("sparse", "is not dense: torch.sparse_coo", marks=pytest.mark.rare),
    ],
)
def test_a_meta_or_sparse_batch_on_one_rank_is_refused(change: str, what: str) -> None:
    for found in run_ranks(alone, 2, change):
        assert found.startswith(f"Trainer.step: a tensor of the batch {what}\n"), found


BAD = {
    "another length": (lambda rows: {name: x[:, :-1] for name, x in rows.items()}, "got other inputs than"),
    "another dtype": (lambda rows: {name: x.int() for name, x in rows.items()}, "got other inputs than"),
    "rows that do not divide": (
        lambda rows: {name: x[:1] for name, x in rows.items()}, "a batch of 1 does not divide into 2 microbatches",
    ),
    "of unequal rows": (lambda rows: {**rows, "labels": rows["labels"][:1]}, "need the same number of rows"),
    "no tensor": (lambda rows: {}, "the first tensor of a batch has no rows"),
    "an argument too many": (lambda rows: {**rows, "unknown": 1}, "got other inputs than"),
}  # fmt: skip
"""What one rank alone makes of its batch, and what all are told."""


def bad_on_one(rank: int, n: int, layout: tuple[int, int, int], bad: int) -> list[Any]:
    """Long after values were compared: an error on every rank, and the next step is right."""
    trainer, optimizer = started(layout)
    trained(trainer, optimizer, range(3))
    trainer.evaluate(**part(trainer, batch(3)))
    found: list[Any] = []
    for change, _ in BAD.values():
        for call in (trainer.step, trainer.evaluate):
            given = part(trainer, batch(3))
            with pytest.raises(Exception) as raised:
                call(**(change(given) if rank == bad else given))
            found.append(str(raised.value))
    trainer.zero_grad()
    found.append(trainer.step(**part(trainer, batch(3))).item())
    return found


@pytest.mark.parametrize(
    ("layout", "bad", "named"),
    [
        ((2, 1, 1), 1, "tp rank 1 got other inputs than tp rank 0"),
        ((1, 2, 1), 1, "pp rank 1 got other inputs than pp rank 0"),
        pytest.param((2, 2, 1), 2, "pp rank 1, tp rank 0 got", marks=pytest.mark.rare),
        pytest.param(
            (2, 1, 2), 3, "dp rank 1, tp rank 1 got other inputs than dp rank 1, tp rank 0", marks=pytest.mark.rare
        ),
    ],
    ids=lambda it: "tp{}-pp{}-dp{}".format(*it) if isinstance(it, tuple) else str(it)[:9],
)
def test_a_bad_batch_on_one_rank_is_an_error_on_all(layout: tuple[int, int, int], bad: int, named: str) -> None:
    expected = [text for _, text in BAD.values() for _ in range(2)]
    ranks = run_ranks(bad_on_one, layout[0] * layout[1] * layout[2], layout, bad, timeout=100)
    for rank, found in enumerate(ranks):
        assert found[-1] == ranks[0][-1]
        for text, error in zip(expected, found, strict=False):
            assert text in error and (text != "got other inputs than" or named in error), (rank, error)
            alone = text != "got other inputs than" and rank != bad
            assert not alone or error.splitlines()[-1] == f"  on       {named.partition(' got')[0]}"


def failed_between(rank: int, n: int, layout: tuple[int, int, int]) -> None:
    """A step that fails in its last microbatch, between two whose gradients are added."""
    found = []
    for fails in (False, True):
        trainer, optimizer = started(layout, model=gpt(seed=0, **SMALL).double())
        for step in range(2):
            trainer.step(**part(trainer, batch(0)))
            bad = part(trainer, batch(1))
            bad["tokens"][-1] += 99
            if fails:
                with pytest.raises((IndexError, RuntimeError), match="out of range"):
                    trainer.step(**bad)
            trainer.step(**part(trainer, batch(2 + step)))
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: whole_of(p.detach()) for name, p in trainer.named_parameters()})
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 1, 2)], ids=str)
def test_a_failed_step_adds_no_gradients(layout: tuple[int, int, int]) -> None:
    run_ranks(failed_between, 2, layout, timeout=100)


def failed_for_good(rank: int, n: int, layout: tuple[int, int, int], zero: int) -> None:
    """A batch fails on every rank, in its last microbatch."""
    trainer, _ = started(layout, zero=zero)
    bad = part(trainer, batch(1))
    bad["tokens"][-1] += 99
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        trainer.step(**bad)
    for call in (trainer.step, trainer.evaluate):
        with pytest.raises(autotp.Error, match="an earlier call failed in the middle, and stages or sh"):
            call(**part(trainer, batch(0)))


@pytest.mark.parametrize(
    ("layout", "zero"),
    [((1, 1, 2), 1), *(pytest.param((1, 1, 2), zero, marks=pytest.mark.rare) for zero in (2, 3))],
    ids=str,
)
def test_trainer_refuses_steps_after_one_broke_its_shards(layout: tuple[int, int, int], zero: int) -> None:
    run_ranks(failed_for_good, 2, layout, zero, timeout=100)


class Outcome(NamedTuple):
    """The loss is not the first number."""

    aux: Tensor
    loss: Tensor


class Half(nn.Module):
    """Blocks whose first half gets no gradient, and whose names are not in the order of the parts."""

    def __init__(self, out: Any = lambda loss, aux: loss) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 8)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))
        self.out = out

    def forward(self, x: Tensor, y: Tensor, blocks: int = 4) -> Any:
        """x, y: [batch 8]"""
        with torch.no_grad():
            for block in self.h[:2]:  # type: ignore[union-attr]
                x = x + block(x)
        for block in self.h[2:blocks]:  # type: ignore[union-attr]
            x = x + block(x)
        loss = ((self.head(x) * self.scale - y) ** 2).mean()
        return self.out(loss, x.square().mean())


WIDE = torch.arange(64.0).view(8, 8).sin(), torch.arange(64.0).view(8, 8).cos()


def half_learns(rank: int, n: int, layout: tuple[int, int, int]) -> None:
    """AdamW decays what has zeros for a gradient, and leaves alone what has none."""
    torch.manual_seed(0)
    whole = Half().double()
    rows = [x.double() for x in WIDE]
    tp, pp, dp = layout
    trainer = autotp.distribute(
        copy.deepcopy(whole), tp=tp, pp=pp, dp=dp, microbatches=2, example_inputs=(rows[0][:2], rows[1][:2])
    )
    ours, theirs = ([*it.parameters()] for it in (trainer, whole))
    mine, one = (AdamW(parameters, lr=0.1, weight_decay=0.5) for parameters in (ours, theirs))
    for _ in range(2):
        replicas = trainer.mesh["dp"]
        trainer.step(*(x.chunk(replicas.size())[replicas.get_local_rank()] for x in rows))
        whole(*rows).backward()
        mine.step()
        one.step()
    names = [name for name, _ in trainer.named_parameters()]
    expected = dict(whole.named_parameters())
    assert names == [name for name in expected if name in names]  # In the model's order.
    for name, p in trainer.named_parameters():
        assert (p.grad is None) == (expected[name].grad is None), name
        assert_values_close(p, expected[name], msg=name)
    assert rank or any(expected[name].grad is None for name in names)


@pytest.mark.parametrize("layout", [(1, 2, 1), pytest.param((1, 1, 2), marks=pytest.mark.rare)], ids=str)
def test_trainer_parameters_without_gradient_stay_without(layout: tuple[int, int, int]) -> None:
    run_ranks(half_learns, 2, layout, timeout=100)


def fewer_blocks(rank: int, n: int) -> None:
    trainer = autotp.distribute(Half(), pp=2, microbatches=2, schedule="interleaved", example_inputs=WIDE)
    trainer.step(*WIDE)
    with pytest.raises(autotp.Error, match="a batch of another kind needs `scale` in a stage whose rank does not have"):
        trainer.step(*WIDE, blocks=3)


def test_a_batch_for_which_stages_lack_parameters_is_refused() -> None:
    run_ranks(fewer_blocks, 2, timeout=100)


def several_numbers(rank: int, n: int) -> None:
    def step(out: Any) -> float:
        torch.manual_seed(0)
        trainer = autotp.distribute(Half(out), example_inputs=WIDE)
        return trainer.step(*WIDE).item()

    expected = step(lambda loss, aux: loss)
    assert step(lambda loss, aux: {"aux": aux, "loss": loss}) == expected
    assert step(lambda loss, aux: (loss, aux)) == expected
    assert step(lambda loss, aux: Outcome(aux, loss)) == expected
    with pytest.raises(autotp.Error, match="the model returns several numbers, and none is named `loss`"):
        step(lambda loss, aux: {"aux": aux, "total": loss})


def test_trainer_takes_the_output_named_loss() -> None:
    run_ranks(several_numbers, 1)
    assert autotp.verify(Half(lambda loss, aux: {"aux": aux, "loss": loss}), 1, dp=2, example_inputs=WIDE).ok


# ---- data


def test_an_exception_with_another_cause_than_a_lost_rank_is_not_its_own_cause() -> None:
    """Whoever follows `__cause__` would not come to an end."""
    trainer: Any = SimpleNamespace(_ranks=SimpleNamespace(group="0"))

    def fail() -> None:
        raise RuntimeError("expected a contiguous tensor")

    with pytest.raises(RuntimeError, match="expected a contiguous tensor") as raised:
        autotp.Trainer._named_if_lost(trainer, "Trainer.step", fail)
    assert raised.value.__cause__ is None
