"""save: checkpoints of a training: written in one layout and read in another, bit for bit; and what is refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_models import gpt
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from trainers import SMALL, Layout, fingerprint, started, trained

import autotp
from autotp.checkpoint import manifest
from autotp.checkpoint.save import saved_steps


def written(rank: int, n: int, folder: str, layout: Layout, dropout: float, more: dict[str, Any]) -> list[float]:
    trainer, optimizer = started(layout, dropout, **more)
    schedule = StepLR(optimizer, 1)
    trained(trainer, optimizer, range(3))
    autotp.save_checkpoint(folder, trainer, optimizer, 3, schedule=schedule)
    return trained(trainer, optimizer, range(3, 6))


def gone_on(rank: int, n: int, folder: str, layout: Layout, dropout: float, more: dict[str, Any]) -> list[float]:
    torch.manual_seed(7)
    trainer, optimizer = started(layout, dropout, **more)
    assert autotp.load_checkpoint(folder, trainer, optimizer, schedule=StepLR(optimizer, 1)) == 3
    assert trainer.steps == 3
    return trained(trainer, optimizer, range(3, 6))


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        pytest.param((2, 1, 1), {}, marks=pytest.mark.rare),
        ((1, 1, 2), {"zero": 3}),
        pytest.param((2, 2, 2), {"zero": 1}, marks=pytest.mark.rare),
        pytest.param((1, 2, 1), {"sequence_parallel": True}, marks=pytest.mark.rare),
    ],
    ids=str,
)
def test_resumed_training_equals_uninterrupted_training(layout: Layout, more: dict[str, Any], tmp_path: Path) -> None:
    n = layout[0] * layout[1] * layout[2]
    expected = run_ranks(written, n, str(tmp_path), layout, 0.3, more, timeout=100)
    assert run_ranks(gone_on, n, str(tmp_path), layout, 0.3, more, timeout=100) == expected


def moved(rank: int, n: int, source: str, target: str, layout: Layout, more: dict[str, Any]) -> None:
    """Reads in one layout what another wrote, and writes it again."""
    trainer, optimizer = started(layout, **more)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.fill_(-1)
    schedule = StepLR(optimizer, 1)
    step = autotp.load_checkpoint(source, trainer, optimizer, schedule=schedule)
    autotp.save_checkpoint(target, trainer, optimizer, step, wait=False, schedule=schedule).result()


def everything(rank: int, n: int, *folders: str) -> list[dict[str, Tensor]]:
    """Parameters and the optimizer's state, read by one process."""
    found = []
    for folder in folders:
        trainer, optimizer = started((1, 1, 1))
        autotp.load_checkpoint(folder, trainer, optimizer, schedule=StepLR(optimizer, 1))
        tensors = {name: p.detach() for name, p in trainer.named_parameters()}
        for name, p in trainer.named_parameters():
            tensors |= {f"{name} {key}": value for key, value in optimizer.state[p].items()}
        found.append(tensors)
    with pytest.raises(autotp.Error, match="NoneType is no optimizer"):
        autotp.save_checkpoint(folders[0], trainer, None, 9)  # type: ignore[arg-type]
    trainer, _ = started((1, 1, 1))
    assert autotp.load_checkpoint(folders[0], trainer) == trainer.steps == 3  # To evaluate.
    assert all(torch.equal(p, found[0][name]) for name, p in trainer.named_parameters())
    return found


@pytest.mark.parametrize(
    ("layouts", "more"),
    [
        (((2, 1, 1), (1, 2, 1)), {}),
        pytest.param(((2, 1, 1), (1, 1, 2)), {}, marks=pytest.mark.rare),
        pytest.param(((2, 2, 1), (4, 1, 1), (2, 1, 2)), {}, marks=pytest.mark.rare),
        pytest.param(((2, 1, 2), (1, 2, 2)), {"zero": 3}, marks=pytest.mark.rare),
        pytest.param(((3, 1, 1), (1, 1, 3)), {"zero": 1}, marks=pytest.mark.rare),
    ],
    ids=str,
)
@pytest.mark.timeout(240)
def test_load_checkpoint_in_any_layout_is_bit_identical(
    layouts: tuple[Layout, ...], more: dict[str, Any], tmp_path: Path
) -> None:
    folders = [str(tmp_path / str(i)) for i in range(len(layouts))]
    for i, layout in enumerate(layouts):
        n = layout[0] * layout[1] * layout[2]
        if i == 0:
            run_ranks(written, n, folders[0], layout, 0.0, more, timeout=100)
        else:
            run_ranks(moved, n, folders[i - 1], folders[i], layout, more, timeout=100)
    (found,) = run_ranks(everything, 1, *folders, timeout=100)
    assert len(found[0]) == 4 * len(list(gpt(seed=0, **SMALL).parameters()))
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        for name, value in found[0].items():
            assert torch.equal(value, other[name]), name


# ---- what is refused


def refusals(rank: int, n: int, folder: str) -> list[str]:
    """Every kind of bad checkpoint, one after another; after each the trainer is what it was."""
    other, others = started((2, 1, 1), layers=3)
    trainer, optimizer = started((2, 1, 1))
    trained(trainer, optimizer, range(1))
    good, path = Path(folder) / "good", Path(folder) / "good" / "step-00000003"
    before = fingerprint(trainer, optimizer)
    found = []

    def tried(where: str, trainer: nn.Module = trainer, optimizer: Any = optimizer, **more: Any) -> None:
        with pytest.raises(autotp.Error) as raised:
            autotp.load_checkpoint(Path(folder) / where, trainer, optimizer, **more)
        found.append(str(raised.value).splitlines()[0].replace(folder, ""))

    for where in ("truncated", "missing", "bare", "garbled", "newer", "older", "renamed"):
        tried(where)
    tried("good", optimizer=torch.optim.SGD(trainer.parameters(), lr=0.1))
    tried("good", optimizer=AdamW([nn.Parameter(torch.zeros(2))]))
    tried("good", sampler=optimizer)
    tried("good", other, others)
    tried("some", optimizer=optimizer)
    assert fingerprint(trainer, optimizer) == before
    assert autotp.load_checkpoint(Path(folder) / "nothing", trainer, optimizer) == 0
    for step in (3, -1, True, 2.0):
        with pytest.raises(autotp.Error) as raised:
            autotp.save_checkpoint(good, trainer, optimizer, step)  # type: ignore[arg-type]
        found.append(str(raised.value).splitlines()[0].replace(folder, ""))
    assert path.exists()
    assert autotp.load_checkpoint(good, trainer, optimizer, schedule=StepLR(optimizer, 1)) == 3
    return found


def newer(rank: int, n: int, folder: str) -> None:
    before, manifest.FORMAT = manifest.FORMAT, 9
    try:
        written(rank, n, folder, (2, 1, 1), 0.0, {})
    finally:
        manifest.FORMAT = before  # The process runs the next function of this file, too.


def of_some_parameters(rank: int, n: int, folder: str) -> None:
    """A checkpoint whose optimizer has one parameter less than the trainer."""
    trainer, _ = started((2, 1, 1))
    optimizer = AdamW([p for name, p in trainer.named_parameters() if name != "h.1.ln_2.weight"], lr=0.01)
    trained(trainer, optimizer, range(1))
    autotp.save_checkpoint(folder, trainer, optimizer, 1)


def test_broken_checkpoints_are_refused_on_every_rank(tmp_path: Path) -> None:
    good = tmp_path / "good"
    run_ranks(written, 2, str(good), (2, 1, 1), 0.0, {}, timeout=100)
    run_ranks(newer, 2, str(tmp_path / "newer"), timeout=100)
    run_ranks(of_some_parameters, 2, str(tmp_path / "some"), timeout=100)
    for name in ("truncated", "missing", "bare", "garbled", "renamed"):
        shutil.copytree(good, tmp_path / name)
    file = tmp_path / "truncated" / "step-00000003" / "rank-00001.tensors"
    file.write_bytes(file.read_bytes()[:-100])
    (tmp_path / "missing" / "step-00000003" / "rank-00001.tensors").unlink()
    (tmp_path / "bare" / "step-00000003" / "manifest.json").unlink()
    (tmp_path / "garbled" / "step-00000003" / "manifest.json").write_bytes(b"no")
    (tmp_path / "renamed" / "step-00000003").rename(tmp_path / "renamed" / "step-00000005")
    (tmp_path / "older" / "step-00000003").mkdir(parents=True)
    (tmp_path / "older" / "step-00000003" / ".metadata").touch()
    for found in run_ranks(refusals, 2, str(tmp_path), timeout=100):
        assert re.sub(r"[\d,]+ bytes|had [\d,]+", "few bytes", found[0]) == (
            "load_checkpoint: /truncated/step-00000003/rank-00001.tensors has few bytes, and few bytes "
            "when it was written"
        )
        assert found[1:] == [
            "load_checkpoint: /missing/step-00000003/rank-00001.tensors is missing",
            "load_checkpoint: /bare/step-00000003/manifest.json is missing",
            "load_checkpoint: /garbled/step-00000003/manifest.json is damaged: its checksum does not match",
            "load_checkpoint: /newer/step-00000003 is of format 9, and this autotp reads 2",
            "load_checkpoint: /older/step-00000003 is of format 1, and this autotp reads 2",
            "load_checkpoint: /renamed/step-00000005 is of step 3",
            "load_checkpoint: /good/step-00000003 has the state of AdamW, and this is SGD",
            "load_checkpoint: the optimizer has parameters that the trainer does not have",
            "load_checkpoint: /good/step-00000003 has no sampler",
            "load_checkpoint: /good/step-00000003 is another model's; missing: h.2.attn.c_attn.bias, "
            "h.2.attn.c_attn.weight, h.2.attn.c_proj.bias and 9 more",
            "load_checkpoint: /some/step-00000001 has no state of the optimizer for h.1.ln_2.weight",
            "save_checkpoint: /good/step-00000003 is there already",
            "save_checkpoint: step=-1 is not a number of steps",
            "save_checkpoint: step=True is not a number of steps",
            "save_checkpoint: step=2.0 is not a number of steps",
        ]


# ---- what is the same in shape and not in kind


def with_other_heads(rank: int, n: int, folder: str) -> str:
    """The same tensors are another model's where the heads are fewer; where it is meant, they are loaded."""
    trainer, optimizer = started((1, 1, 1), model=gpt(**SMALL | {"n_head": 2}))
    with pytest.raises(autotp.Error) as raised:
        autotp.load_checkpoint(folder, trainer, optimizer)
    assert autotp.load_checkpoint(folder, trainer, optimizer, changed=("n_head",), schedule=StepLR(optimizer, 1)) == 3
    return str(raised.value).replace(folder, "")


def test_load_checkpoint_refuses_another_number_of_heads(tmp_path: Path) -> None:
    run_ranks(written, 1, str(tmp_path), (1, 1, 1), 0.3, {}, timeout=100)
    (found,) = run_ranks(with_other_heads, 1, str(tmp_path), timeout=100)
    assert found == (
        "load_checkpoint: /step-00000003 is another model's: `config.n_head` is 4 there, and 2 here, "
        "`h.*.attn.n_head` is 4 there, and 2 here\n"
        "  try      the model that was saved; if it is meant, load_checkpoint(..., changed=['n_head'])"
    )


def test_saved_steps_lists_only_complete_checkpoints(tmp_path: Path) -> None:
    names = ("step-00000002", "step-00000010", "step-00000011", "other", "step-3", ".step-00000012.0f.new")
    for name in names:
        (tmp_path / name).mkdir()
        if name != "step-00000011":
            (tmp_path / name / "manifest.json").touch()
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / ".metadata").touch()  # Of format 1: not passed over, but refused.
    assert saved_steps(tmp_path) == [2, 4, 10]
    assert saved_steps(tmp_path / "nothing") == []


@pytest.mark.parametrize("name", ["save_checkpoint", "load_checkpoint"])
def test_checkpoints_refuse_a_model_in_place_of_a_trainer(name: str, tmp_path: Path) -> None:
    model: Any = autotp.parallelize(nn.Sequential(nn.Linear(2, 2)), 1, example_inputs=(torch.zeros(2, 2),))
    with pytest.raises(autotp.Error) as raised:
        getattr(autotp, name)(
            tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), *[1][: name == "save_checkpoint"]
        )
    assert str(raised.value) == (
        f"{name}: a Sequential in place of a trainer of autotp.distribute\n"
        "  try      trainer = autotp.distribute(model, tp=...), whose state is all that training needs\n"
        "  or       accelerate's Accelerator().prepare(model, optimizer), with its save_state and load_state\n"
        "  or else  autotp.full_state_dict(model), autotp.save_pretrained(model, folder): the parameters alone"
    )
    assert not list(tmp_path.iterdir())
