"""fully_shard on the blocks of a parallel model: they gather where they run, and gradients are one device's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import message
from ranks import run_ranks
from small_models import Plain, gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import autotp
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.models.gpt import GPT

X = torch.arange(64).view(4, 16) * 7 % 101
LABELS = X.roll(1, 1)
SIZES = {"vocab_size": 101, "n_layer": 3, "n_head": 4, "n_embd": 24}


def sharded(whole: GPT, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None, **given: Any) -> Any:
    """The model, cut over "tp", its blocks and the rest sharded over "dp"."""
    model = autotp.parallelize(copy.deepcopy(whole), mesh=mesh["tp"], example_inputs=(X[:2], LABELS[:2]), **given)
    for block in model.h:
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy or MixedPrecisionPolicy())
    return fully_shard(model, mesh=mesh["dp"], mp_policy=policy or MixedPrecisionPolicy())


class Rectified(Plain):
    """A block that returns no view: torch warns of views of a sharded block."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x).relu()


class ClampingFirst(nn.Module):
    """Its graph assumes that no index is too large, and fails where one is; its block is behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.table = nn.Buffer(torch.tensor(0)), nn.Embedding(4, 8)
        self.h = nn.ModuleList([Rectified()])

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids + self.shift
        ids = ids.clamp(max=3) if (ids > 3).any() else ids
        rows: Tensor = self.h[0](self.table(ids))
        return rows


def a_graph_that_fails(rank: int, n: int) -> None:
    """What Python reads is made without the parameters of the block, of which this rank has a shard."""
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole, ids = ClampingFirst().double(), torch.arange(4).view(2, 2)
    model = autotp.parallelize(copy.deepcopy(whole), mesh=mesh["tp"], example_inputs=ids)
    fully_shard(model.h[0], mesh=mesh["dp"])
    for shift in (0, 1, 0, 2):
        for each in (whole, model):
            each.shift.fill_(shift)
        torch.testing.assert_close(model(ids), whole(ids))


def test_a_graph_that_fails_reads_no_sharded_block() -> None:
    run_ranks(a_graph_that_fails, 2)


def mine(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    rank, n = mesh["dp"].get_local_rank(), mesh["dp"].size()
    return X.chunk(n)[rank], LABELS.chunk(n)[rank]


def equal(rank: int, n: int, given: dict[str, Any]) -> None:
    """Three steps; the norm, the state, and evaluation."""
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))
    whole = gpt(seed=0, **SIZES).double()
    model = sharded(whole, mesh, **given)
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert units == ["", "h.0", "h.1", "h.2"]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, model)]
    for _ in range(3):
        expected, found = whole(X, labels=LABELS), model(*mine(mesh))
        expected.backward()
        found.backward()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(p.grad, DTensor) and isinstance(p, DTensor)
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0, atol=1e-12)
        norms = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1), autotp.clip_grad_norm_(model, 0.1)
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole.eval(), model.eval()
    with torch.no_grad():
        torch.testing.assert_close(autotp.gather(model(X)), whole(X))
    for name, value in autotp.full_state_dict(model).items():
        torch.testing.assert_close(value, whole.state_dict()[name])


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, marks=pytest.mark.rare),
        {"recompute": "full", "sequence_parallel": True},
        pytest.param({"recompute": "selective"}, marks=pytest.mark.rare),
    ],
    ids=str,
)
def test_fully_shard_has_the_gradients_of_one_device(given: dict[str, Any]) -> None:
    run_ranks(equal, 4, given, timeout=100)


class WithLoss(nn.Module):
    """A GPT that returns its logits beside its loss: they stay cut."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt(seed=0, **SIZES).double()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """[batch seq], [batch seq] -> [], [batch seq vocab]"""
        logits = self.gpt(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}


def cut_logits(rank: int, n: int) -> None:
    """They are cut tensors behind FSDP's hooks and casts, too: they behave as wholes."""
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))
    whole, (x, y) = WithLoss(), mine(mesh)
    model: Any = autotp.parallelize(copy.deepcopy(whole), mesh=mesh["tp"], example_inputs=(x, y))
    for block in model.gpt.h:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32))
    found, expected = model(x, y), whole(x, y)
    assert isinstance(found["logits"], Sharded) and found["logits"].dtype == torch.float32
    torch.testing.assert_close(found["logits"].softmax(-1), expected["logits"].float().softmax(-1))
    logits = autotp.gather(found["logits"])
    torch.testing.assert_close(logits, expected["logits"].float())
    (found["loss"] + logits.square().mean()).backward()
    (expected["loss"] + expected["logits"].float().square().mean()).backward()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert q.grad is not None
        dist.all_reduce(q.grad, dist.ReduceOp.SUM, group=mesh.get_group("dp"))
        torch.testing.assert_close(p.grad.full_tensor(), q.grad / 2, rtol=1e-6, atol=1e-7)


def test_fully_shard_leaves_logits_cut() -> None:
    run_ranks(cut_logits, 4, timeout=100)


def in_half(rank: int, n: int) -> None:
    """The graph is the one of a model in bfloat16; parameters and gradients are in float32."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    whole = gpt(seed=0, **SIZES)
    model = sharded(whole, mesh, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    found, expected = model(*mine(mesh)), whole.bfloat16()(*mine(mesh))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
    found.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_fully_shard_in_half_precision_trains() -> None:
    run_ranks(in_half, 2, timeout=100)


def refused(rank: int, n: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = autotp.parallelize(gpt(seed=0, **SIZES), mesh=mesh["tp"], example_inputs=(X[:2], LABELS[:2]))
    found = []
    for module in (model.h[0].attn, model.ln_f):
        found.append(message(fully_shard, module, mesh=mesh["dp"]))
    return [*found, message(lambda: model.h[0].register_forward_hook(lambda *given: None)).splitlines()[0]]


def test_fully_shard_refuses_parts_that_are_never_called() -> None:
    remedy = (
        "this part of a parallel model is not a block: it is never called\n  try      fully_shard each numbered block"
    )
    for attention, norm, hook in run_ranks(refused, 2, timeout=100):
        assert attention == f"fully_shard(CausalSelfAttention): {remedy}, such as model.h[0], and the model"
        assert norm == f"fully_shard(LayerNorm): {remedy}, such as model.h[0], and the model"
        assert (
            hook == "a hook on a submodule of a parallel model would never run: its work is part of the model's graph"
        )
