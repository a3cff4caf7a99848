"""Training on real ranks equals one device: losses, clipped norms, parameters after every step, dropout on."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Checks, Collectives
from small_models import VOCAB, assert_values_close, gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.models.bert import BERT, BERTConfig

checks = Checks()
STEPS = 20
SIX = {"n_head": 6, "dropout": 0.1}


def bert(dropout: float = 0.1) -> BERT:
    return BERT(BERTConfig(block_size=16, vocab_size=VOCAB, n_layer=2, n_head=6, n_embd=48, dropout=dropout))


def batch(model: nn.Module, step: int, rows: int = 3) -> dict[str, Tensor]:
    """Another one for each step, its length too."""
    generator = torch.Generator().manual_seed(step)
    seq = 8 + step % 3
    given = {name: torch.randint(VOCAB, (rows, seq), generator=generator) for name in ("tokens", "labels")}
    if isinstance(model, BERT):
        given["types"] = given["tokens"] % 2
        given["mask"] = torch.ones(rows, seq, dtype=torch.int64)
        given["mask"][-1, -2:] = 0
        given["next_sentence"] = given["labels"][:, 0] % 2
    return given


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """For float32: AdamW would blow the round-off of a true gradient of zero up to a step."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def expect_equal_training(whole: nn.Module, n: int, optimizer: Any, tolerance: float) -> None:
    """Steps with clipping, on both, from the same random state; dropout draws the masks of one device."""
    parallel = autotp.parallelize(copy.deepcopy(whole), n, randomness="exact")
    models = whole, parallel
    optimizers = [optimizer(m) for m in models]
    norms: dict[nn.Module, Any] = {whole: lambda: nn.utils.clip_grad_norm_(whole.parameters(), 0.5)}
    norms[parallel] = lambda: autotp.clip_grad_norm_(parallel, 0.5)
    for step in range(STEPS):
        found = []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = model(**batch(whole, step))
            loss.backward()
            found.append([loss.detach(), norms[model](), torch.rand((), device=loss.device)])  # and the next draw
            optimizer.step()
        for a, b in zip(*found, strict=True):
            assert abs(float(a - b)) <= tolerance * float(a), (step, found)
    expect_equal_state(whole, parallel, tolerance * 100)


def expect_equal_state(whole: nn.Module, parallel: nn.Module, tolerance: float) -> None:
    state = autotp.full_state_dict(parallel)
    if dist.get_rank() == 0:
        assert list(state) == list(whole.state_dict())
        for name, tensor in whole.state_dict().items():
            assert_values_close(state[name], tensor, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


@checks.on(2)
@checks.on(4, rare=True)
def gpt_in_float64_trains_as_one_device(rank: int, n: int) -> None:
    expect_equal_training(gpt(**SIX).double().train(), n, adamw, 1e-12)


@checks.on(2, 4, rare=True)
def bert_in_float64_trains_as_one_device(rank: int, n: int) -> None:
    expect_equal_training(bert().double().train(), n, adamw, 1e-12)


@checks.on(2, rare=True)
def gpt_in_float32_trains_as_one_device(rank: int, n: int) -> None:
    expect_equal_training(gpt(**SIX).train(), n, sgd, 1e-5)


@checks.on(2)
def bert_in_float32_trains_as_one_device(rank: int, n: int) -> None:
    expect_equal_training(bert().train(), n, sgd, 1e-5)


@checks.on(4)
def ranks_without_heads_train_as_one_device(rank: int, n: int) -> None:
    """Three heads on four ranks: the last holds nothing of them, and AdamW's foreach form is given empty tensors."""
    whole = gpt(n_embd=24, dropout=0.1).double().train()
    expect_equal_training(whole, n, adamw, 1e-12)
    parallel = autotp.parallelize(copy.deepcopy(whole), n)
    assert (parallel.h[0].attn.c_proj.weight.to_local().numel() == 0) == (rank == 3)


# ---- collectives at run time


@checks.on(2)
def a_layer_adds_two_all_reduces_each_way(rank: int, n: int) -> None:
    """Two layers more are four all-reduces forward and four backward more: 2 + 2 a layer, as the plan says."""
    counts = [_counted(gpt(n_head=6, dropout=dropout), n) for dropout in (0.1, 0.0)]
    assert counts[0] == counts[1]
    shallow, deep = _counted(gpt(**SIX, n_layer=1), n), _counted(gpt(**SIX, n_layer=3), n)
    assert [b - a for a, b in zip(shallow, deep, strict=True)] == [4, 4]


@checks.on(2, rare=True)
def dropout_adds_no_collectives_to_bert(rank: int, n: int) -> None:
    assert _counted(bert(0.1), n) == _counted(bert(0.0), n)


def _counted(model: nn.Module, n: int) -> tuple[int, int]:
    """All-reduces forward and backward of one step, which are all there is, and what the plan promised."""
    parallel = autotp.parallelize(model.train(), n, check_inputs="never")
    parallel(**batch(model, 0))
    with Collectives() as forward:
        loss = parallel(**batch(model, 0))
    with Collectives() as backward:
        loss.backward()
    planned = parallel.plan.traffic
    assert [forward.counts, backward.counts] == [planned.forward, planned.backward]
    assert {*forward.counts, *backward.counts} == {"all-reduce"}
    return forward.counts["all-reduce"], backward.counts["all-reduce"]


class Copies(TorchDispatchMode):
    """Counts the tensors that are written once more, elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._opname in ("clone", "copy_", "cat", "stack")
        return func(*args, **(kwargs or {}))


@checks.on(2)
def nothing_is_copied_for_a_collective(rank: int, n: int) -> None:
    """A step copies as many tensors as one device's does."""
    parallel = autotp.parallelize(gpt(n_head=6).train(), n, check_inputs="never")
    whole = gpt(n_head=6).train().to(parallel.mesh.device)
    given = {name: x.to(parallel.mesh.device) for name, x in batch(whole, 0).items()}
    counts = []
    for model in (whole, parallel):
        model(**given).backward()
        with Copies() as copies:
            model(**given).backward()
        counts.append(copies.count)
    # The two sums over classes that the loss needs are in one tensor, and so in one exchange.
    assert counts[1] == counts[0] + 1, counts


# ---- fast randomness


class Masks(nn.Module):
    """A dropout on a replicated value and one on a cut value, both returned."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inside = nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.5, self.training)
        return inside, nn.functional.dropout(self.down(inside), 0.5, self.training)


@checks.on(2)
def fast_dropout_masks_agree_where_replicated_only(rank: int, n: int) -> None:
    """Replicated values are dropped alike on all ranks, cut ones each for itself; the seed repeats both."""
    model, x = Masks().train(), torch.randn(8, 16)
    parallel = autotp.parallelize(model, n, example_inputs=x, outputs="local")

    def masks(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        inside, outside = parallel(x)
        return [inside.to_local() == 0, outside == 0]

    cut, whole = masks(1)
    assert cut.shape == (8, 32) and 0.35 < cut.float().mean() < 0.65
    theirs = [[torch.empty_like(mask) for _ in range(n)] for mask in (cut, whole)]
    for mask, all_of_it in zip((cut, whole), theirs, strict=True):
        dist.all_gather(all_of_it, mask)
    assert not torch.equal(*theirs[0])
    assert torch.equal(*theirs[1])
    assert all(torch.equal(a, b) for a, b in zip((cut, whole), masks(1), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip((cut, whole), masks(2), strict=True))


# ---- data parallelism around it


@checks.on(4, rare=True)
def ddp_over_tp_equals_one_device(rank: int, n: int) -> None:
    """Two replicas of two ranks, each on half of the batch, are one device on the whole of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = gpt(n_head=6).double().train()
    parallel = autotp.parallelize(copy.deepcopy(whole), mesh=mesh)
    replica = DistributedDataParallel(parallel, process_group=mesh["dp"].get_group())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (whole, replica)]
    half = mesh["dp"].get_local_rank()
    for step in range(5):
        given = batch(whole, step, rows=4)
        for model, optimizer in zip((whole, replica), optimizers, strict=True):
            optimizer.zero_grad()
            rows = given if model is whole else {name: t[2 * half : 2 * half + 2] for name, t in given.items()}
            model(**rows).backward()
            optimizer.step()
    assert_values_close(
        autotp.clip_grad_norm_(replica, 1.0), nn.utils.clip_grad_norm_(whole.parameters(), 1.0), rtol=1e-9, atol=0
    )
    state = autotp.full_state_dict(replica)
    for name, tensor in whole.state_dict().items() if mesh["tp"].get_local_rank() == 0 else ():
        assert_values_close(state[name], tensor, rtol=0, atol=1e-10)


@checks.on(2)
def parallelize_takes_an_unnamed_mesh(rank: int, n: int) -> None:
    mesh = init_device_mesh("cpu", (n,))
    whole = gpt(n_head=6).double()
    parallel = autotp.parallelize(copy.deepcopy(whole), mesh=mesh)
    assert (parallel.mesh.size, parallel.mesh.rank) == (n, rank)
    given = batch(whole, 0)
    assert_values_close(parallel(**given), whole(**given))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
