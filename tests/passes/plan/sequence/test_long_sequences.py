"""Sequences that are cut over ranks: ten steps of training as on one device, at lengths of any kind, in any layout."""

from __future__ import annotations

import copy
import warnings
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_models import gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.optim import SGD, AdamW

import autotp

pytestmark = pytest.mark.system

SIZES = {"block_size": 64, "vocab_size": 61, "n_layer": 4, "n_head": 4, "n_embd": 16}
LENGTHS = (8, 8, 7, 13, 1, 2, 5, 64, 3, 8)
"""Odd ones, and shorter ones than there are ranks."""
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def batches(lengths: tuple[int, ...], rows: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels, some of which are ignored; [rows length]"""
    source = torch.Generator().manual_seed(1)
    found = []
    for length in lengths:
        tokens, labels = (torch.randint(61, (rows, length), generator=source) for _ in range(2))
        labels[0, : length // 3] = -100
        found.append((tokens, labels))
    return found


def trains(rank: int, n: int, layout: tuple[int, int], how: dict[str, Any], dtype: torch.dtype) -> None:
    tp, cp = layout
    whole, parallel = gpt(seed=0, **SIZES).to(dtype), gpt(seed=0, **SIZES).to(dtype)
    if how.get("mesh"):
        how = {"mesh": init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))}
        parallel = autotp.parallelize(parallel, **how)
    else:
        parallel = autotp.parallelize(parallel, tp=tp, cp=cp, **how)
    assert (parallel.mesh.size, parallel.mesh.cp) == (tp, cp)
    double = dtype == torch.float64
    near = EXACT if double else {"rtol": 2e-4, "atol": 2e-5}
    kind: Any = AdamW if double else SGD  # AdamW divides round-off in a gradient that is zero by itself.
    optimizers = [kind(model.parameters(), lr=1e-2) for model in (whole, parallel)]
    warnings.filterwarnings("ignore", ".*no sequence of this call can be cut over cp")  # One position.
    for step, (tokens, labels) in enumerate(batches(LENGTHS)):
        if step in (3, 6):  # Without labels: logits come back whole.
            losses = [model(tokens).logsumexp(-1).mean() for model in (whole, parallel)]
        else:
            losses = [model(tokens, labels) for model in (whole, parallel)]
        torch.testing.assert_close(losses[1].detach(), losses[0].detach(), **near)
        for loss in losses:
            loss.backward()
        for (name, p), one in zip(parallel.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, one.grad, **near, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = autotp.full_state_dict(parallel)
    for name, tensor in whole.state_dict().items() if rank == 0 else ():
        torch.testing.assert_close(state[name], tensor, **near)


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ((1, 2), {}),
        ((1, 3), {"recompute": "full"}),
        ((2, 2), {"sequence_parallel": True}),
        ((2, 2), {"mesh": True}),
        ((1, 4), {}),
        ((2, 3), {}),
        pytest.param((4, 2), {}, marks=pytest.mark.rare),
        pytest.param((4, 2), {"sequence_parallel": True, "recompute": "selective"}, marks=pytest.mark.rare),
    ],
    ids=str,
)
def test_ten_steps_over_cp_equal_one_device(layout: tuple[int, int], how: dict[str, Any]) -> None:
    run_ranks(trains, prod(layout), layout, how, torch.float64, timeout=110)


def test_ten_float32_steps_over_cp_equal_one_device() -> None:
    run_ranks(trains, 4, (2, 2), {}, torch.float32, timeout=110)


def distributed(rank: int, n: int, layout: dict[str, Any], folder: str) -> None:
    (first, _), *_ = batches((8,))
    whole = gpt(seed=0, **SIZES).double()
    trainer = autotp.distribute(gpt(seed=0, **SIZES).double(), **layout, example_inputs=(first, first))
    optimizers = [AdamW(model.parameters(), lr=1e-2) for model in (whole, trainer)]
    replicas = trainer.mesh["dp"]
    warnings.filterwarnings("ignore", ".*no sequence of this call can be cut over cp")  # One position.

    def mine(x: Tensor) -> Tensor:
        return x.chunk(replicas.size())[replicas.get_local_rank()]

    for step, (tokens, labels) in enumerate(batches(LENGTHS if layout.get("pp", 1) == 1 else (8,) * 10, rows=8)):
        loss = whole(tokens, labels)
        loss.backward()
        torch.testing.assert_close(trainer.step(mine(tokens), mine(labels)), loss.detach(), **EXACT)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 8:
            autotp.save_checkpoint(folder, trainer, optimizers[1], step=9)
    torch.testing.assert_close(trainer.evaluate(mine(tokens), mine(labels)), whole(tokens, labels).detach(), **EXACT)
    state = autotp.full_state_dict(trainer)
    for name, tensor in whole.state_dict().items() if rank == 0 else ():
        torch.testing.assert_close(state[name], tensor, **EXACT)
    assert autotp.load_checkpoint(folder, trainer, optimizers[1]) == 9
    trainer.step(mine(tokens), mine(labels))
    optimizers[1].step()
    again = autotp.full_state_dict(trainer)
    for name in state:
        torch.testing.assert_close(again[name], state[name], **EXACT)


@pytest.mark.parametrize(
    "layout",
    [
        {"cp": 2, "tp": 2, "microbatches": 2},
        {"cp": 2, "pp": 2, "microbatches": 4},
        {"cp": 2, "dp": 2, "zero": 3, "microbatches": 2},
        pytest.param({"cp": 2, "dp": 2, "zero": 1}, marks=pytest.mark.rare),
        pytest.param({"cp": 3, "pp": 2, "microbatches": 2, "schedule": "interleaved"}, marks=pytest.mark.rare),
        pytest.param({"cp": 2, "tp": 2, "pp": 2, "microbatches": 4, "sequence_parallel": True}, marks=pytest.mark.rare),
        pytest.param({"cp": 2, "tp": 2, "pp": 2, "dp": 2, "microbatches": 2}, marks=pytest.mark.rare),
    ],
    ids=str,
)
def test_ten_trainer_steps_over_cp_equal_one_device(layout: dict[str, Any], tmp_path: Path) -> None:
    sizes = (layout.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
    run_ranks(distributed, prod(sizes), layout, str(tmp_path / "saved"), timeout=110)


def whole_calls(rank: int, n: int) -> None:
    """A step with one position: right, computed by both ranks, with one warning for its graph; evaluation has none."""
    one, parallel = (gpt(seed=0, **SIZES).double() for _ in range(2))
    parallel = autotp.parallelize(parallel, tp=1, cp=2)
    (tokens, labels), *_ = batches((8,))
    assert "no sequence can be cut" not in str(parallel.plan)
    short = tokens[:, :1], labels[:, :1] % 61
    with torch.no_grad():
        torch.testing.assert_close(parallel(*short), one(*short), **EXACT)
    with pytest.warns(UserWarning, match=r"GPT.forward: no sequence of this call can be cut over cp"):
        parallel(*short).backward()
    assert "over cp     no sequence can be cut: every cp rank computes the whole call\n" in str(parallel.plan)
    parallel(*short).backward()
    one(*short).backward()
    torch.testing.assert_close(parallel.wte.weight.grad, 2 * one.wte.weight.grad, **EXACT)

    trainer = autotp.distribute(gpt(seed=0, **SIZES).double(), cp=2, example_inputs=(tokens, labels))
    torch.testing.assert_close(trainer.evaluate(*short), one(*short).detach(), **EXACT)
    with pytest.warns(UserWarning, match=r"Trainer.step: no sequence of this call can be cut over cp"):
        trainer.step(*short)
    trainer.step(*short)
    torch.testing.assert_close(trainer.get_parameter("wte.weight").grad, 2 * one.wte.weight.grad, **EXACT)


def test_a_call_without_a_sequence_is_computed_whole_with_warning() -> None:
    run_ranks(whole_calls, 2, timeout=100)


def other_orders(rank: int, n: int) -> None:
    """In a later capture one rank has another order of collectives: an error on all ranks, and then it is right."""
    (tokens, labels), *_ = batches((8,), rows=4)
    whole = gpt(seed=0, **SIZES).double()
    trainer = autotp.distribute(gpt(seed=0, **SIZES).double(), cp=2, dp=2, example_inputs=(tokens[:2], labels[:2]))
    mine = [x.chunk(2)[rank // 2] for x in (tokens, labels)]
    trainer.step(*mine)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 3:
            patch.setattr("autotp.training.pipeline.microbatch_graphs.order_of", lambda graph: 1)
        with pytest.raises(autotp.Error, match=r"Trainer.evaluate: (.|\n)*cp ranks would communicate in another order"):
            trainer.evaluate(*mine)
    torch.testing.assert_close(trainer.evaluate(*mine), whole(tokens, labels).detach(), **EXACT)


def test_a_later_call_with_another_collective_order_is_refused() -> None:
    run_ranks(other_orders, 4, timeout=100)


def drops(rank: int, n: int, randomness: str) -> Any:
    """Steps with dropout: the ranks of one model have one loss; returned with the gradient of a whole parameter."""
    torch.manual_seed(3)
    model = gpt(seed=0, **SIZES, dropout=0.3).double()
    one = gpt(seed=0, **SIZES, dropout=0.3).double()
    parallel = autotp.parallelize(model, tp=2, cp=2, randomness=randomness)  # type: ignore[arg-type]
    found = []
    for tokens, labels in batches((8, 7, 5)):
        torch.manual_seed(5)
        loss = parallel(tokens, labels)
        loss.backward()
        torch.manual_seed(5)
        expected = one(tokens, labels)
        found.append((loss.item(), expected.item(), parallel.get_parameter("ln_f.weight").grad.sum().item()))
    return found


@pytest.mark.parametrize("randomness", ["exact", "fast"])
def test_dropout_over_cp_has_one_loss_on_all_ranks(randomness: str) -> None:
    ranks = run_ranks(drops, 4, randomness, timeout=110)
    assert all(found == ranks[0] for found in ranks)
    for loss, expected, _ in ranks[0]:
        assert loss == pytest.approx(expected, rel=1e-12 if randomness == "exact" else 0.2)


def replicas(rank: int, n: int) -> None:
    """Two replicas of two ranks that hold one model: with other rows, nobody averages, which is an error."""
    parallel = autotp.parallelize(gpt(seed=0, **SIZES).double(), tp=1, cp=2)
    assert parallel.mesh.replicas is not None and parallel.mesh.replicas.size == 2
    optimizer = AdamW(parallel.parameters())
    tokens, labels = batches((8,), rows=4)[0]
    half = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
    parallel(tokens[half], labels[half]).backward()
    with pytest.raises(autotp.Error, match="nobody averaged the gradients of the replicas"):
        optimizer.step()


def test_unaveraged_replicas_over_cp_are_an_error() -> None:
    run_ranks(replicas, 4, timeout=100)


def other_inputs(rank: int, n: int) -> None:
    parallel = autotp.parallelize(gpt(seed=0, **SIZES), tp=2, cp=2)
    tokens, labels = batches((8,))[0]
    if rank == 2:
        tokens = tokens + 1
    with pytest.raises(autotp.Error, match="tp rank 0, cp rank 1 got other inputs than rank 0"):
        parallel(tokens % 61, labels)


def test_cp_ranks_with_other_inputs_are_named() -> None:
    run_ranks(other_inputs, 4, timeout=100)


def asks_too_much(rank: int, n: int) -> None:
    with pytest.raises(autotp.Error, match=r"tp=2, cp=2 needs 4 processes, and the world has 2"):
        autotp.parallelize(gpt(seed=0, **SIZES), tp=2, cp=2)
    with pytest.raises(autotp.Error, match="cp=0 is not a whole number of 1 or more"):
        autotp.parallelize(gpt(seed=0, **SIZES), tp=2, cp=0)
    with pytest.raises(autotp.Error, match=r"tp \* cp \* pp \* dp is 4, and the world has 2"):
        autotp.distribute(gpt(seed=0, **SIZES), tp=2, cp=2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(autotp.Error, match="no sequence that can be cut over cp"):
        autotp.parallelize(model, tp=1, cp=2, example_inputs=torch.ones(2, 4))
    assert not model[0].weight.is_meta
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    with pytest.raises(autotp.Error, match="cp=1, but the mesh has cp=2"):
        autotp.parallelize(gpt(seed=0, **SIZES), mesh=mesh, cp=1)
    alone = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    with pytest.raises(autotp.Error, match=r"no dimension of the mesh is named tp: \('cp',\)(.|\n)*\(2, 1\)"):
        autotp.parallelize(gpt(seed=0, **SIZES), mesh=alone)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autotp.parallelize(gpt(seed=0, **SIZES), cp=2)


def test_impossible_tp_and_cp_sizes_are_refused() -> None:
    run_ranks(asks_too_much, 2, timeout=100)


class Scored(nn.Module):
    """Returns the logits beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt(0, n_head=4, n_embd=32, vocab_size=64)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(tokens)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def scores(rank: int, n: int) -> tuple[list[int], float]:
    """The shape of this rank's part of the logits, and how far the gathered ones are from those of one device."""
    torch.manual_seed(0)
    whole = Scored().double()
    model = autotp.parallelize(copy.deepcopy(whole), 2, cp=2)
    tokens = torch.arange(21).view(3, 7)
    found = model(tokens, labels=tokens)
    expected = whole(tokens, labels=tokens)["logits"]
    return list(found["logits"].part.shape), (autotp.gather(found["logits"]) - expected).abs().max().item()


def test_logits_are_cut_over_tp_and_gathered_over_cp() -> None:
    for shape, difference in run_ranks(scores, 4):
        assert shape == [3, 7, 32] and difference < 1e-12
