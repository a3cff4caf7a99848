"""microbatches: batches with plain or optional arguments, one row a microbatch, other sizes; what nobody reads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks, silence
from small_models import assert_values_close
from torch import Tensor, nn
from torch.nn import functional as F

import autotp
from autotp.training.microbatches import map_rows

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


class Model(nn.Module):
    """Two blocks, a part and a buffer that nobody reads, and a loss of one of several kinds."""

    def __init__(self, loss: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.plan, self.kind = nn.Linear(4, 4), loss  # A name that the trainer has, too.
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5, 1.0]))
        self.register_buffer("unread", torch.zeros(3))

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0, a: Any = None, b: Any = None) -> Tensor:
        for block in self.h:
            x = torch.tanh(block(x))
        x = x if a is None else x + a
        x = x if b is None else x * b
        rows = F.cross_entropy(x, y, reduction="none")
        if self.kind == "weighted":
            return F.cross_entropy(x, y, self.weights, label_smoothing=0.1)
        losses = {
            "mean": lambda: rows.mean() * scale,
            "mean of a mean": lambda: F.cross_entropy(x, y).mean(),
            "by rows": lambda: rows.sum() / x.shape[0],
            "centred": lambda: (x - x.mean(0)).square().mean(),
        }
        return losses[self.kind]()


def trained(loss: str = "mean", **given: Any) -> tuple[nn.Module, autotp.Trainer]:
    whole = Model(loss).double()
    example = (X[: given.pop("rows", 2)].double(), Y[: given.pop("labels", 2)])
    return whole, autotp.distribute(copy.deepcopy(whole), example_inputs=example, **given)


def same(whole: nn.Module, trainer: autotp.Trainer, *args: Any, **kwargs: Any) -> None:
    """The loss and every gradient, of a step that all replicas are given alike."""
    whole.zero_grad()
    trainer.zero_grad()
    expected = whole(*args, **kwargs)
    expected.backward()
    assert_values_close(trainer.step(*args, **kwargs), expected.detach())
    for name, parameter in trainer.named_parameters():
        grad = dict(whole.named_parameters())[name].grad
        assert (parameter.grad is None) == (grad is None), name
        if grad is not None:
            assert_values_close(parameter.grad, grad, msg=name)


def by_chance(pp: int) -> None:
    """Arguments that are no rows, and as long as the rows of a microbatch, of the batch, and of a single row."""
    torch.manual_seed(0)
    x, wide = X.double(), torch.linspace(1, 2, 4, dtype=torch.float64)
    whole, more = Model().double(), {"a": x[:1], "b": wide}
    trainer = autotp.distribute(
        copy.deepcopy(whole), pp=pp, microbatches=2, example_inputs={"x": x[:2], "y": Y[:2], **more}
    )
    for size in (8, 4, 2):
        same(whole, trainer, x[:size], Y[:size], **more)
        assert_values_close(trainer.evaluate(x[:size], Y[:size], **more), whole(x[:size], Y[:size], **more))
        same(whole, trainer, x[:size], Y[:size], a=x[:size], b=wide)  # Now `a` has rows.
    with pytest.raises(autotp.Error, match="inputs of 8 and 6 rows"):
        trainer.step(x, Y[:6], **more)


def called(rank: int, n: int) -> None:
    """Other plain arguments, and other optional ones, are other graphs."""
    whole, trainer = trained(microbatches=2)
    x = X.double()
    same(whole, trainer, x, Y)
    same(whole, trainer, x, Y, scale=3.0)
    same(whole, trainer, x, Y, a=x)
    same(whole, trainer, x, Y, b=x)
    for kind in ("mean of a mean", "weighted"):
        same(*trained(kind, microbatches=4), x, Y)
    one = trained(microbatches=8, rows=1, labels=1)
    same(*one, x, Y)
    by_chance(pp=1)
    same(*trained("by rows", microbatches=8, rows=1, labels=1), x, Y)
    with pytest.raises(autotp.Error, match="gives each row a sum over the batch"):
        trained("centred", microbatches=8, rows=1, labels=1)


def test_map_rows_leaves_torch_size_alone() -> None:
    found = map_rows((X, {"size": X.shape}), {0}, lambda x: x[:2])
    assert len(found[0]) == 2 and type(found[1]["size"]) is torch.Size


def test_microbatches_take_plain_and_optional_arguments() -> None:
    run_ranks(called, 1, timeout=100)


def sized(rank: int, n: int, folder: str) -> None:
    """Through a pipeline, batches of other sizes; state and checkpoints of what nobody reads; groups of each stage."""
    whole, trainer = trained(microbatches=2, pp=2)
    x = X.double()
    for size in (8, 4, 8):
        same(whole, trainer, x[:size], Y[:size])
    by_chance(pp=2)
    found = trainer.evaluate(x[:6], Y[:6])
    assert_values_close(found, whole(x[:6], Y[:6]).detach())
    state = autotp.full_state_dict(trainer)
    assert list(state) == (list(whole.state_dict()) if rank == 0 else [])
    rates = {name: 0.1 * (1 + int(name.split(".")[1])) for name, _ in trainer.named_parameters() if name[0] == "h"}
    groups = [{"params": [p], "lr": rates.get(name, 0.5)} for name, p in trainer.named_parameters()]
    optimizer = torch.optim.AdamW(groups)
    optimizer.step()
    averaged = nn.Linear(1, 1, bias=False)  # Ranks draw numbers of their own.
    before = nn.init.constant_(averaged.weight, 2.0).item()
    saving = autotp.save_checkpoint(folder, trainer, optimizer, 3, wait=False, averaged=averaged)
    nn.init.zeros_(averaged.weight)
    saving.result()
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    assert autotp.load_checkpoint(folder, trainer, optimizer, averaged=averaged) == 3
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in groups]
    assert averaged.weight.item() == before


def test_pipeline_takes_other_batch_sizes_and_restores_checkpoints(tmp_path: Path) -> None:
    run_ranks(sized, 2, str(tmp_path), timeout=100)


# ---- replicas whose rows are of other lengths


class Places(nn.Module):
    """A mean over all elements, or one over those that a mask counts."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked, self.layer = masked, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch seq 4]"""
        y = self.layer(x).square().sum(-1)
        return y.sum() / torch.ones_like(x[..., 0]).sum() if self.masked else sum([y.mean()])  # type: ignore[return-value]


def of_lengths(rank: int, n: int) -> None:
    """Python's `sum` begins with 0, which changes nothing."""
    draw = torch.Generator().manual_seed(0)
    x = [torch.randn(rows, length, 4, generator=draw) for rows, length in ((2, 5), (2, 7), (4, 7))]
    for masked in (False, True):
        torch.manual_seed(0)  # `distribute` seeds the replicas differently.
        whole = Places(masked)
        trainer = autotp.distribute(copy.deepcopy(whole), dp=2, example_inputs=(x[0],))
        with silence():
            trainer.step(x[1 + rank])  # As long, and another number of rows.
        with (
            silence() if masked else pytest.warns(UserWarning, match=r"a mean over all elements \(test_microbatches.py")
        ):
            found = trainer.step(x[rank])
        parts = [whole.layer(part).square().sum(-1) for part in x[:2]]
        rows = sum(part.mean(1).sum() for part in parts) / 4
        places = sum(part.sum() for part in parts) / sum(part.numel() for part in parts)
        assert_values_close(found, (places if masked else rows).detach())


def test_replicas_with_other_lengths_average_rows_and_warn() -> None:
    run_ranks(of_lengths, 2, timeout=60)
