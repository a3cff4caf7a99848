"""low_memory: steps are those of one device in every layout, and near those of torch's optimizer; what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import message
from ranks import run_ranks
from small_models import gpt
from torch import Tensor, nn
from trainers import mine

import autotp
from autotp import low_memory
from autotp.checkpoint.whole_optimizer import whole_state_dict
from autotp.distributed.cut_tensors.cut_parameter import CutTensor
from autotp.training.low_memory.parts import as_torch
from autotp.training.low_memory.stored_state import StateMemory, StoredState

SIZES: dict[str, Any] = {"block_size": 8, "vocab_size": 97, "n_layer": 2, "n_head": 4, "n_embd": 64}
"""Matrices have 4,096 elements and more, and cuts of the last dimension go through blocks."""
STEPS, ROWS = 5, 12
Layout = tuple[int, int, int]
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def batch(step: int) -> dict[str, Tensor]:
    tokens, labels = torch.randint(97, (2, ROWS, 8), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens, "labels": labels}


def built(dtype: torch.dtype = torch.float64) -> nn.Module:
    return gpt(seed=0, **SIZES).to(dtype)


def trainer_of(layout: Layout, zero: int = 0, microbatches: int = 2, **more: Any) -> autotp.Trainer:
    tp, pp, dp = layout
    example = {name: x[: ROWS // (dp * microbatches)] for name, x in batch(0).items()}
    return autotp.distribute(
        more.pop("model", None) or built(), tp=tp, pp=pp, dp=dp, zero=zero, microbatches=microbatches,
        example_inputs=example, **more,
    )  # fmt: skip


def rows_of(trainer: autotp.Trainer, step: int) -> dict[str, Tensor]:
    return mine(batch(step), trainer.mesh["dp"].get_local_rank(), trainer.mesh["dp"].size())


def stepped(trainer: autotp.Trainer, optimizer: Any, steps: range, max_norm: float | None = None) -> list[float]:
    """Norms of the gradient, before clipping."""
    norms = []
    for step in steps:
        trainer.step(**rows_of(trainer, step))
        if max_norm is not None:
            norms.append(float(autotp.clip_grad_norm_(trainer, max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def on_one_device(kind: Any, steps: range = range(STEPS), **options: Any) -> dict[str, Tensor]:
    """Parameters after steps of an optimizer on one device, and then their states."""
    model = built()
    optimizer = kind(model.parameters(), **options)
    for step in steps:
        loss = model(**batch(step))
        (loss if isinstance(loss, Tensor) else loss[-1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**dict(model.named_parameters()), **states(model, optimizer)}


def states(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    saved = optimizer.state_dict()["state"]
    return {
        f"{name} {key}": x
        for i, (name, _) in enumerate(model.named_parameters())
        for key, x in saved.get(i, {}).items()
    }


def in_layout(rank: int, n: int, layout: Layout, zero: int, name: str, states_in: str) -> dict[str, Tensor]:
    kind, options = KINDS[name]
    trainer = trainer_of(layout, zero)
    stepped(trainer, low_memory(kind, states_in)(trainer.parameters(), **options), range(STEPS))  # type: ignore[arg-type]
    return autotp.full_state_dict(trainer)


class Lion(torch.optim.Optimizer):
    """A class that is not torch's: the sign of a mean of gradients (Chen et al. 2023)."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(group["lr"] * torch.tanh(1e3 * (0.9 * mean + 0.1 * p.grad)))
                mean.lerp_(p.grad, 0.01)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, ADAMW),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "lion": (Lion, {"lr": 1e-3}),
}
RARE = pytest.mark.rare
LAYOUTS = [
    ((2, 1, 1), 0, "adamw", "8bit"), ((3, 1, 1), 0, "amsgrad", "8bit"), ((1, 1, 2), 3, "adamw", "8bit"),
    ((2, 1, 2), 3, "adamw", "bfloat16"), ((1, 2, 1), 0, "lion", "8bit"),
    *(pytest.param(*row, marks=RARE) for row in (
        ((4, 1, 1), 0, "adamw", "8bit"), ((1, 1, 2), 1, "adamw", "8bit"), ((1, 1, 3), 2, "adamw", "8bit"),
        ((2, 2, 1), 0, "adamw", "bfloat16"), ((2, 1, 2), 1, "sgd", "8bit"), ((1, 1, 2), 0, "sgd", "unchanged"),
    )),
]  # fmt: skip


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("layout", "zero", "name", "states_in"), LAYOUTS, ids=str)
def test_steps_in_any_layout_are_those_of_one_device(layout: Layout, zero: int, name: str, states_in: str) -> None:
    kind, options = KINDS[name]
    expected = on_one_device(low_memory(kind, states_in), **options)  # type: ignore[arg-type]
    n = layout[0] * layout[1] * layout[2]
    parameters = run_ranks(in_layout, n, layout, zero, name, states_in, timeout=150)[0]
    for key, _ in built().named_parameters():
        torch.testing.assert_close(parameters[key], expected[key].detach(), rtol=0, atol=1e-10)


def from_gradients(
    rank: int, n: int, layout: Layout, zero: int, momentum: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and states in float32 after steps with gradients that every layout gets alike, bit for bit.

    momentum: SGD, which gets its momentum after the first step
    """
    trainer = trainer_of(layout, zero, model=built(torch.float32))
    kind, options = (torch.optim.SGD, {"lr": 0.1}) if momentum else (torch.optim.AdamW, ADAMW)
    optimizer = low_memory(kind)(trainer.parameters(), **options)
    shapes = {name: x.shape for name, x in built().named_parameters()}
    for step in range(STEPS):
        optimizer.param_groups[0] |= {"momentum": 0.9} if momentum and step else {}
        for name, p in trainer.named_parameters():
            draw = torch.Generator().manual_seed(hash((step, shapes[name])))
            p.grad = torch.randn(shapes[name], generator=draw)
        optimizer.step()
    names = {p: name for name, p in trainer.named_parameters()}
    opened = [(names[p], key, as_torch(p, x)) for p in names for key, x in optimizer.state[p].items()]
    return autotp.full_state_dict(trainer), {f"{name} {key}": whole(x) for name, key, x in opened}


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, CutTensor) else x


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("layout", "zero"), [((2, 1, 1), 0), ((1, 1, 2), 3), *(pytest.param(*row, marks=RARE) for row in (
        ((4, 1, 1), 0), ((3, 1, 1), 0), ((1, 2, 1), 0), ((1, 1, 2), 1), ((1, 1, 2), 2), ((2, 1, 2), 3)))], ids=str,
)  # fmt: skip
def test_the_same_gradients_give_the_same_states_in_any_layout(layout: Layout, zero: int) -> None:
    ((expected, expected_states),) = run_ranks(from_gradients, 1, (1, 1, 1), 0)
    every = run_ranks(from_gradients, layout[0] * layout[1] * layout[2], layout, zero, timeout=150)
    assert all(torch.equal(every[0][0][name], x) for name, x in expected.items())
    found = {name: x for _, states_of_rank in every for name, x in states_of_rank.items()}
    assert found.keys() == expected_states.keys()
    assert all(torch.equal(found[name], x) for name, x in expected_states.items())


def test_a_state_that_begins_later_is_the_same_in_any_layout() -> None:
    """Ranks exchange the largest elements of its blocks, too."""
    ((expected, expected_states),) = run_ranks(from_gradients, 1, (1, 1, 1), 0, True)
    every = run_ranks(from_gradients, 3, (3, 1, 1), 0, True, timeout=100)
    assert all(torch.equal(every[0][0][name], x) for name, x in expected.items())
    assert expected_states and every[0][1].keys() == expected_states.keys()
    assert all(torch.equal(every[0][1][name], x) for name, x in expected_states.items())


# ---- checkpoints


def written(rank: int, n: int, folder: str, layout: Layout, zero: int) -> dict[str, Tensor]:
    trainer = trainer_of(layout, zero, model=built(torch.float32))
    optimizer = low_memory(torch.optim.AdamW)(trainer.parameters(), **ADAMW)
    stepped(trainer, optimizer, range(3))
    autotp.save_checkpoint(folder, trainer, optimizer, trainer.steps, wait=False)
    stepped(trainer, optimizer, range(3, 6))
    return autotp.full_state_dict(trainer)


def gone_on(rank: int, n: int, folder: str, layout: Layout, zero: int) -> dict[str, Tensor]:
    trainer = trainer_of(layout, zero, model=built(torch.float32))
    optimizer = low_memory(torch.optim.AdamW)(trainer.parameters(), **ADAMW)
    assert autotp.load_checkpoint(folder, trainer, optimizer) == 3
    stepped(trainer, optimizer, range(3, 6))
    return autotp.full_state_dict(trainer)


def moved(rank: int, n: int, source: str, target: str, layout: Layout, zero: int) -> None:
    """Reads in one layout what another one wrote, and writes it again: before a step, so that some states are open."""
    trainer = trainer_of(layout, zero, model=built(torch.float32))
    optimizer = low_memory(torch.optim.AdamW)(trainer.parameters(), **ADAMW)
    autotp.load_checkpoint(source, trainer, optimizer)
    autotp.save_checkpoint(target, trainer, optimizer, 3)


def read(rank: int, n: int, states_in: str, *folders: str) -> list[dict[str, Tensor]]:
    every = []
    for folder in folders:
        trainer = trainer_of((1, 1, 1), model=built(torch.float32))
        kind: Any = torch.optim.AdamW if states_in == "torch" else low_memory(torch.optim.AdamW, states_in)  # type: ignore[arg-type]
        optimizer = kind(trainer.parameters(), **ADAMW)
        autotp.load_checkpoint(folder, trainer, optimizer)
        assert (states_in == "8bit") == any(state.is_packed for state in stored(optimizer)), states_in
        every.append({**dict(trainer.named_parameters()), **states(trainer, optimizer)})
    return every


def stored(optimizer: Any) -> list[StoredState]:
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, StoredState)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("layout", "zero", "other", "other_zero"), [
        ((2, 1, 1), 0, (1, 1, 2), 1), pytest.param((1, 2, 1), 0, (2, 1, 2), 3, marks=RARE),
        pytest.param((2, 1, 1), 0, (1, 2, 2), 1, marks=RARE), pytest.param((1, 1, 2), 3, (3, 1, 1), 0, marks=RARE),
    ],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_moves_between_layouts_and_is_torchs_too(
    layout: Layout, zero: int, other: Layout, other_zero: int, tmp_path: Path
) -> None:
    """Resumed training in the same layout is bit for bit that of one that went on."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    n, other_n = (a * b * c for a, b, c in (layout, other))
    expected = run_ranks(written, n, first, layout, zero, timeout=150)[0]
    resumed = run_ranks(gone_on, n, first, layout, zero, timeout=150)[0]
    assert all(torch.equal(resumed[name], x) for name, x in expected.items())
    run_ranks(moved, other_n, first, second, other, other_zero, timeout=150)
    for states_in in ("8bit", "unchanged", "torch"):
        ((before, after),) = run_ranks(read, 1, states_in, first, second)
        assert before.keys() == after.keys() and len(before) == 4 * len(list(built().parameters()))
        assert all(torch.equal(after[name], x) for name, x in before.items())


# ---- norms, accumulation, overflows


def clipped(rank: int, n: int, layout: Layout, zero: int, microbatches: int, calls: int) -> Any:
    """The norms of some steps; each has the gradients of several calls of `trainer.step`."""
    trainer = trainer_of(layout, zero, microbatches)
    optimizer = low_memory(torch.optim.AdamW, offload=True)(trainer.parameters(), **ADAMW)
    norms = []
    for step in range(0, STEPS * calls, calls):
        for i in range(calls):
            trainer.step(**rows_of(trainer, step + i))
        by_torch = torch.nn.utils.get_total_norm([p.grad for p in trainer.parameters()])  # type: ignore[misc]
        norms.append(float(autotp.clip_grad_norm_(trainer, 0.5)))
        assert float(by_torch) == pytest.approx(norms[-1], rel=1e-12)
        optimizer.step()
        optimizer.zero_grad()
    return norms, autotp.full_state_dict(trainer)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("layout", "zero", "microbatches", "calls"), [
        ((2, 1, 1), 0, 3, 2), ((1, 1, 2), 2, 2, 1), pytest.param((1, 2, 1), 0, 4, 2, marks=RARE),
        pytest.param((2, 1, 2), 3, 3, 2, marks=RARE),
    ],
    ids=str,
)  # fmt: skip
def test_norms_and_accumulated_gradients_are_those_of_one_device(
    layout: Layout, zero: int, microbatches: int, calls: int
) -> None:
    """Offloaded gradients gave norms that are too small (DeepSpeed#7967), and all chunks of a batch but the last one
    were dropped (DeepSpeed#7981)."""
    model = built()
    optimizer, expected = low_memory(torch.optim.AdamW)(model.parameters(), **ADAMW), []
    for step in range(0, STEPS * calls, calls):
        for i in range(calls):
            model(**batch(step + i)).backward()
        expected.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    n = layout[0] * layout[1] * layout[2]
    norms, parameters = run_ranks(clipped, n, layout, zero, microbatches, calls, timeout=150)[0]
    assert norms == pytest.approx(expected, rel=1e-10) and min(expected) > 0.5
    for name, x in model.named_parameters():
        torch.testing.assert_close(parameters[name], x.detach(), rtol=0, atol=1e-10)


def overflowing(rank: int, n: int) -> None:
    """A gradient overflows on one rank: no rank steps, and states keep their bits."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    trainer = trainer_of((n, 1, 1), model=built(torch.float32), loss_scaler=scaler)
    optimizer = low_memory(torch.optim.AdamW)(trainer.parameters(), **ADAMW)
    for step in range(3):
        trainer.step(**rows_of(trainer, step))
        before = [x.clone() for state in stored(optimizer) for x in state.tensors()]
        if step == 2 and rank == n - 1:
            trainer.get_parameter("h.0.attn.c_attn.weight").grad.to_local()[0] = torch.inf  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    after = [x for state in stored(optimizer) for x in state.tensors()]
    assert before and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert scaler.get_scale() == 2.0**7 and {int(state["step"]) for state in optimizer.state.values()} == {2}


def test_an_overflow_on_one_rank_leaves_all_states_as_they_are() -> None:
    run_ranks(overflowing, 2)


# ---- masters, state dicts, bytes


def test_masters_in_float32_are_stepped_and_written_parameters_count() -> None:
    """As a parameter in float32, of which the one in bfloat16 is a rounded copy."""
    torch.manual_seed(0)
    wide = nn.Linear(64, 80)
    narrow = nn.Linear(64, 80, dtype=torch.bfloat16)
    narrow.load_state_dict(wide.state_dict())
    wide.load_state_dict(narrow.state_dict())
    optimizers = [
        torch.optim.AdamW(wide.parameters(), lr=1e-4),
        low_memory(torch.optim.AdamW, "unchanged", masters=True)(narrow.parameters(), lr=1e-4),
    ]
    for step in range(20):
        for p, q in zip(narrow.parameters(), wide.parameters(), strict=True):
            p.grad = torch.randn(p.shape, dtype=torch.bfloat16)
            q.grad = p.grad.float()
        if step == 10:
            with torch.no_grad():
                narrow.weight[3] = wide.weight[3] = 1.5
        if step == 15:  # torch casts what is loaded to bfloat16.
            optimizers[1].load_state_dict(optimizers[1].state_dict())
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(narrow.parameters(), wide.parameters(), strict=True):
        state = optimizers[1].state_dict()["state"][0 if p.dim() == 2 else 1]
        assert torch.equal(p, q.bfloat16()) and torch.equal(state["master"], q)


@pytest.mark.parametrize(("states_in", "nbytes"), [("8bit", 2.04), ("bfloat16", 4.04), ("unchanged", 8.0)])
def test_bytes_of_a_parameter(states_in: Any, nbytes: float) -> None:
    """Of both moments of Adam: 2 scales of 4 bytes for 256 elements. A block of a short row has fewer elements."""
    p = nn.Parameter(torch.randn(128, 1024))
    p.grad = torch.randn_like(p)
    optimizer = low_memory(torch.optim.Adam, states_in)([p])
    optimizer.step()
    total = sum(state.nbytes for state in stored(optimizer))
    assert total / p.numel() == pytest.approx(nbytes, abs=0.01)


def trained_losses(kind: Any, **options: Any) -> list[float]:
    model = gpt(seed=0, **SIZES)
    optimizer, losses = kind(model.parameters(), lr=3e-3), []
    for step in range(120):
        draw = torch.Generator().manual_seed(step)
        start, stride = torch.randint(97, (2, 16, 1), generator=draw)
        tokens = (start + torch.arange(9) * (1 + stride % 5)) % 97
        loss = model(tokens[:, :-1], labels=tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("states_in", ["8bit", "bfloat16"])
def test_losses_stay_near_those_of_torchs_optimizer(states_in: Any) -> None:
    expected, losses = trained_losses(torch.optim.AdamW), trained_losses(low_memory(torch.optim.AdamW, states_in))
    last, of_torch = (sum(some[-20:]) / 20 for some in (losses, expected))
    assert of_torch < expected[0] / 2
    assert last == pytest.approx(of_torch, rel=0.005)


# ---- what is refused


def without_memory(rank: int, n: int) -> str:
    trainer = trainer_of((n, 1, 1))
    optimizer = low_memory(torch.optim.AdamW, offload=True)(trainer.parameters())
    trainer.step(**rows_of(trainer, 0))
    if rank == 1:

        def empty(self: Any, shape: Any, dtype: Any) -> Any:
            raise MemoryError("34359738368 bytes")

        StateMemory.empty = empty  # type: ignore[method-assign]
    return message(optimizer.step)


def test_a_host_without_memory_is_one_error_on_every_rank() -> None:
    problem = "AdamW.step: there is not enough memory: 34359738368 bytes\n  try      free memory, and call it again"
    every = run_ranks(without_memory, 2, alone=True)
    assert [text.split("\n  on ")[0] for text in every] == [problem] * 2


class ByNorm(torch.optim.SGD):
    """Divides by the norm of a gradient, as LARS does."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad.div_(p.grad.norm())
        return super().step(closure)


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(64, 80)), nn.Parameter(torch.randn(64, 3))]


def test_a_group_that_is_added_later_has_states_before_its_first_step() -> None:
    first, second = parameters()
    optimizer = low_memory(torch.optim.Adam)([first])
    optimizer.add_param_group({"params": [second]})
    moment = optimizer.taken(second, "exp_avg", torch.ones(64, 3))  # As a checkpoint gives it.
    assert isinstance(moment, StoredState)


def test_optimizers_of_whole_matrices_are_refused() -> None:
    text = "low_memory({0}): autotp.low_memory steps some rows at a time, and {0} does not step each element by itself"
    for kind in (torch.optim.Muon, ByNorm):
        make: Any = low_memory(kind)
        assert message(lambda make=make: make(parameters())).startswith(text.format(kind.__name__))
    assert "where a class of optimizers belongs" in message(lambda: low_memory(torch.optim.Adam(parameters())))  # type: ignore[arg-type]
    make = low_memory(torch.optim.Adam)
    assert "is not differentiable" in message(lambda: make(parameters(), differentiable=True))
    with pytest.raises(autotp.Error, match="cannot be copied or pickled"):
        copy.deepcopy(make(parameters()))


# ---- a loop of one's own


def parallel_steps(rank: int, n: int) -> None:
    """With a step before the model was cut, and after that with the whole state in a new optimizer."""
    models = [built(), built()]
    optimizers = [low_memory(torch.optim.AdamW)(model.parameters(), **ADAMW) for model in models]

    def step_both(step: int) -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            model(**batch(step)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    step_both(0)
    models[1] = autotp.parallelize(models[1], n, example_inputs=batch(0))
    for step in range(1, 4):
        step_both(step)
    whole_state = [whole_state_dict(optimizers[1])]
    for i, state in optimizers[0].state_dict()["state"].items() if rank == 0 else ():
        for key, x in state.items():
            torch.testing.assert_close(whole_state[0]["state"][i][key], x, rtol=0, atol=1e-10)  # type: ignore[index]
    dist.broadcast_object_list(whole_state, 0)
    optimizers[1] = low_memory(torch.optim.AdamW)(models[1].parameters(), **ADAMW)
    optimizers[1].load_state_dict(whole_state[0])  # type: ignore[arg-type]
    for step in range(4, 6):
        step_both(step)
    parameters = autotp.full_state_dict(models[1])
    for name, x in models[0].named_parameters() if rank == 0 else ():
        torch.testing.assert_close(parameters[name], x.detach(), rtol=0, atol=1e-10)


def test_a_parallel_model_steps_as_one_device() -> None:
    run_ranks(parallel_steps, 2)
