"""A step of `distribute`, and a call of a parallel model, on cards: batches are moved, and the host never waits."""

from __future__ import annotations

import copy
import math
import warnings
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cards.pretend import has_priority
from cards.spies import host_waits, pinned_requests
from errors import message
from ranks import Checks, run_ranks, shared
from small_models import gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from trainers import SMALL, batch, mine, started

import autotp
from autotp.distributed import device_arguments
from autotp.distributed.mesh import group_of, make_mesh, sum_ints, timeout_of
from autotp.training import process_groups
from autotp.training.pipeline.gradient_buckets import GradientSums

checks = Checks(cards=True)
MOVED = "tensors of the batch are on the CPU, and are copied to cuda"
LAYOUTS: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((2, 1, 1), {}),
    ((1, 2, 1), {}),
    ((1, 1, 2), {}),
    ((1, 1, 2), {"zero": 1}),
    ((1, 1, 2), {"zero": 3}),
    ((2, 2, 1), {}),
    ((2, 1, 2), {"zero": 1}),
    ((1, 2, 2), {}),
]


# ---- batches


def ended(trainer: Any, optimizer: Any, steps: range, of: Any = batch) -> list[Tensor]:
    """The losses of these steps, on the device."""
    dp, rank, losses = trainer.mesh["dp"].size(), trainer.mesh["dp"].get_local_rank(), []
    for step in steps:
        losses.append(trainer.step(**mine(of(step), rank, dp)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def steps_of(rank: int, n: int, layout: Any, more: Any, on_cards: bool) -> tuple[list[float], dict[Any, int], int]:
    """Losses, waits of steps 6 to 9, and how often it was said that batches are moved."""
    device_arguments._tell_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, optimizer = started(layout, **more)
        of = (lambda step: {name: x.cuda() for name, x in batch(step).items()}) if on_cards else batch
        losses = ended(trainer, optimizer, range(6), of)
        rows = {step: of(step) for step in range(6, 10)}
        with host_waits() as traffic:
            losses += ended(trainer, optimizer, range(6, 10), rows.get)
    said = sum(str(warning.message).startswith(MOVED) for warning in caught)
    return [float(loss) for loss in losses], traffic.waits, said


def alone(layers: int = 2) -> list[float]:
    model = gpt(seed=0, n_layer=layers, **SMALL)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), []
    for step in range(10):
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("on_cards", [False, True], ids=["cpu-batch", "card-batch"])
@pytest.mark.parametrize(("layout", "more"), LAYOUTS, ids=str)
def test_no_step_waits_for_its_card(layout: Any, more: dict[str, Any], on_cards: bool) -> None:
    """In every layout, with batches of the CPU, which are moved, as with batches of the card."""
    tp, pp, dp = layout
    for losses, waits, said in run_ranks(steps_of, tp * pp * dp, layout, more, on_cards, cards=True, timeout=100):
        assert not waits
        assert said == (not on_cards), "once, where they are moved"
        assert losses == pytest.approx(alone(), rel=1e-4)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, batch: dict[str, Any], scale: Tensor) -> dict[str, Any]:
        x, (mask,) = batch["x"], batch["masks"]
        return {"y": self.down(self.up(x).relu()) * mask * scale, "mask": mask}


@checks.on(2)
def a_call_takes_a_batch_of_the_cpu(rank: int, n: int) -> None:
    """Tensors in structures are moved; one without dimensions need not be. Gradients go back to the caller's tensor."""
    device_arguments._tell_once.cache_clear()
    torch.manual_seed(0)
    whole = Nested()
    given = {"x": torch.randn(3, 8), "masks": (torch.ones(3, 1).tril(),)}, torch.tensor(2.0)
    model: Any = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=given)
    leaf = given[0]["x"].clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            found = model(*given)
        with host_waits() as traffic:
            model(*given)
        model({"x": leaf, "masks": given[0]["masks"]}, given[1])["y"].sum().backward()
    assert sum(str(warning.message).startswith(MOVED) for warning in caught) == 1
    assert not traffic.waits and traffic.count("pageable copy") == 0
    assert found["y"].is_cuda and found["mask"].is_cuda
    torch.testing.assert_close(found["y"].cpu(), whole(*given)["y"])
    other = given[0]["x"].clone().requires_grad_()
    whole({"x": other, "masks": given[0]["masks"]}, given[1])["y"].sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


# ---- kept values on the host


@checks.on(2)
def values_on_the_host_are_copied_without_a_wait(rank: int, n: int) -> None:
    """Gradients are those without copies; pinned memory is asked for, and free again after backward and without one."""
    whole, x = gpt(seed=0, n_layer=2, **SMALL).double().cuda(), batch(0)
    x = {name: value.cuda() for name, value in x.items()}
    gradients = []
    for fate in ("keep", "host"):
        with patch(
            "autotp.passes.emit.kept_values.recompute.scores", lambda graph, fate=fate: _everywhere(graph, fate)
        ):
            cut: Any = autotp.parallelize(copy.deepcopy(whole), n, recompute="selective")
            for _ in range(3):
                cut.zero_grad()
                cut(**x).backward()
            with host_waits() as traffic, pinned_requests() as sizes:
                cut.zero_grad()
                loss = cut(**x)
                del loss  # A graph that is dropped without a backward.
                cut(**x).backward()
            assert not traffic.waits and bool(sizes) == (fate == "host")
            assert (traffic.count("async copy to the host") > 10) == (fate == "host")
            gradients.append([p.grad for p in cut.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def _everywhere(graph: Any, fate: str) -> dict[str, str]:
    return {node.name: fate for node in graph.nodes if node.op == "call_function"}


# ---- gradients of replicas


def events_of(rank: int, n: int, layout: Any, more: Any) -> tuple[list[list[str]], list[float]]:
    """Of four steps: where a gradient is there that is summed under backward, and where a sum begins; the losses."""
    real_add, real_sum, found = GradientSums._add, dist.all_reduce, list[list[str]]()
    losses = list[Tensor]()

    def add(sums: GradientSums, parameter: nn.Parameter) -> None:
        found[-1].append("gradient")
        real_add(sums, parameter)

    def begin(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        found[-1] += ["sum under backward" if async_op else "sum"] * (group is replicas)
        return real_sum(tensor, op, group, async_op)

    found.append([])
    trainer, optimizer = started(layout, **more)
    replicas = trainer.mesh.get_group("dp")
    defaults = patch.object(GradientSums.__init__, "__defaults__", (2**11, None))
    with patch.object(GradientSums, "_add", add), patch.object(dist, "all_reduce", begin), defaults:
        for step in range(4):
            found.append([])
            losses += ended(trainer, optimizer, range(step, step + 1))
    return found[1:], [float(loss) for loss in losses]


@pytest.mark.parametrize(
    ("layout", "more", "halves"),
    [
        ((1, 1, 2), {}, False),
        ((2, 1, 2), {"overlap": "batch"}, False),
        ((1, 2, 2), {}, False),
        ((1, 2, 2), {"schedule": "interleaved", "layers": 4}, False),
        ((1, 2, 2), {"schedule": "zero-bubble", "layers": 4}, True),
    ],
    ids=str,
)
def test_sums_over_replicas_run_under_backward(layout: Any, more: dict[str, Any], halves: bool) -> None:
    """From the second step on, when it is known which parameters learn; the first step sums behind backward.

    In halves of backward the sums of a stage begin when its last half is over, before those of the other stage.
    """
    every = run_ranks(events_of, math.prod(layout), layout, more, cards=True, timeout=100)
    expected = alone(more.get("layers", 2))[:4]
    for (first, second, *_), losses in every:
        assert losses == pytest.approx(expected, rel=1e-4)
        assert "sum under backward" not in first and "sum" in first
        sums = [i for i, event in enumerate(second) if event == "sum under backward"]
        gradients = [i for i, event in enumerate(second) if event == "gradient"]
        assert len(sums) > 2 and sums[0] < gradients[-1]
        assert halves or sum(i < gradients[-1] for i in sums) >= len(sums) - 2
        assert second.count("sum") < len(sums)


@checks.on(4)
def sums_come_before_products(rank: int, n: int) -> None:
    """The groups that autotp makes run on streams of high priority, and also send from the CPU; a user's are kept."""
    trainer, _ = started((2, 1, 2))
    tp, dp = trainer.mesh.get_group("tp"), trainer.mesh.get_group("dp")
    for group in (tp, dp, group_of(make_mesh(2)), group_of(make_mesh(4))):
        assert has_priority(group) and dist.get_backend_config(group) == "cpu:gloo,cuda:nccl"
    assert timeout_of(tp) == timeout_of(trainer.files) == timedelta(minutes=10)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    own = make_mesh(mesh=mesh)
    assert own.group == mesh.get_group("tp").group_name and not has_priority(mesh.get_group("tp"))
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    chosen = init_device_mesh(
        "cuda", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"tp": ("cpu:gloo,cuda:nccl", options)}
    )  # fmt: skip
    assert has_priority(chosen.get_group("tp")) and not has_priority(chosen.get_group("dp"))


# ---- what ranks learn late


@checks.on(2)
def a_loss_that_is_not_finite_is_an_error_that_names_its_step(rank: int, n: int) -> None:
    """Steps 4 and 5 begin before it is known; then the parameter is named that was not finite in step 4."""
    trainer, optimizer = started((2, 1, 1))
    steps = iter(range(20))
    ended(trainer, optimizer, range(3))
    with torch.no_grad():
        next(p for name, p in trainer.named_parameters() if name.endswith("0.ln_2.weight"))[0] = torch.nan
    told = message(lambda: [ended(trainer, optimizer, range(step, step + 1)) for step in steps])
    assert next(steps) <= 4
    first, fix = told.splitlines()
    assert first.startswith("Trainer.step: the loss of step 4 is nan: `") and first.endswith("is infinite or undefined")
    assert "ln_2.weight" in first
    assert fix == "  try      autotp.load_checkpoint(...), and a smaller learning rate from there"


@checks.on(2)
def a_checkpoint_waits_for_the_losses(rank: int, n: int) -> None:
    trainer, optimizer = started((1, 2, 1))
    folder = shared(rank)
    ended(trainer, optimizer, range(2))
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.fill_(torch.inf)
    ended(trainer, optimizer, range(2, 3))
    told = message(lambda: autotp.save_checkpoint(folder, trainer, optimizer, step=3))
    assert not list(folder.glob("*step-*")) and told.startswith("save_checkpoint: the loss of step 3 is nan: `")


@checks.on(2)
def another_batch_of_a_card_is_an_error_that_names_its_step(rank: int, n: int) -> None:
    trainer, optimizer = started((2, 1, 1))

    def of(step: int) -> dict[str, Tensor]:
        return {name: x.cuda() for name, x in batch(step + (step == 5 and rank)).items()}

    ended(trainer, optimizer, range(4), of)
    meta = {name: x.to("meta") for name, x in batch(4).items()}
    told = message(lambda: trainer.step(**(meta if rank else of(4))))
    assert told.startswith("Trainer.step: a tensor of the batch has no values: it is on meta")
    ended(trainer, optimizer, range(4, 6), of)  # The refused step is none.
    told = message(lambda: [ended(trainer, optimizer, range(step, step + 1), of) for step in range(6, 12)])
    assert told.splitlines()[0] == "Trainer.step: tp rank 1 got another batch than tp rank 0, in step 6"
    ended(trainer, optimizer, range(12, 16), of)


@checks.on(2)
def compiled_code_drops_elements(rank: int, n: int) -> None:
    """Dynamo traces no question to the card: whether it records a CUDA graph."""
    tokens = torch.arange(16, device="cuda").view(2, 8)
    cut = autotp.parallelize(gpt(seed=0, **SMALL, n_layer=1, dropout=0.5), n, device="cuda")
    cut(tokens, tokens).backward()
    compiled = torch.compile(cut, fullgraph=True, backend="eager")
    losses = [compiled(tokens, tokens) for _ in range(2)]
    losses[1].backward()
    assert losses[0].isfinite() and losses[0] != losses[1]


@checks.on(4)
def many_ranks_sum_along_one_axis_after_the_other(rank: int, n: int) -> None:
    """Through the groups of the axes, which also send tensors of the CPU; what differs is found as without."""
    with patch.object(process_groups, "MANY", 2):
        trainer, optimizer = started((2, 2, 1))
    assert len(trainer.everyone.axes) == 2 and not trainer.place.axes
    assert sum_ints([rank, 1, -(2**63) + 1], trainer.everyone) == [6, 4, 4]
    ended(trainer, optimizer, range(3))
    told = message(lambda: trainer.step(**batch(3 + (rank == 2))))
    assert "got another batch than pp rank 0, tp rank 0, now or in the last step" in told
    told = message(lambda: trainer.evaluate(**batch(3)) if rank == 1 else trainer.step(**batch(3)))
    assert "is in Trainer.step" in told and "in Trainer.evaluate" in told


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_cards(n: int, name: str) -> None:
    checks.expect(n, name)
