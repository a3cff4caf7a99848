"""Checkpoints on cards: nothing is copied to pageable memory, and the host waits once, in the thread that writes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cards.pretend import REAL, pretended
from cards.spies import collective_order, host_waits, pinned_requests
from errors import message
from hugging_face import built
from ranks import Checks, run_ranks, shared
from safetensors.torch import load_file
from torch import Tensor
from trainers import batch, mine, started

import autotp
from autotp.checkpoint.files.staging import SMALLEST
from autotp.distributed.mesh import make_mesh
from autotp.integrations.transformers.files import tensor_sources
from autotp.integrations.transformers.files.whole_tensors import GatheredTensor
from autotp.sharding.layout import Layout

checks = Checks(cards=True)


class Average:
    """Tensors of the card that are saved by name."""

    def __init__(self, value: float = 1.0) -> None:
        self.values = {f"{i}": torch.full((3, 3), value + i, device="cuda") for i in range(5)}

    def state_dict(self) -> dict[str, Tensor]:
        return self.values

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.values = state


def stepped(trainer: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        trainer.step(**mine(batch(step), trainer.mesh["dp"].get_local_rank(), trainer.mesh["dp"].size()))
        optimizer.step()
        optimizer.zero_grad()


def state_of(trainer: Any, optimizer: Any) -> list[Tensor]:
    kept = [value for p in trainer.parameters() for value in (p, *optimizer.state[p].values())]
    return [value.detach().cpu().clone() for value in kept]


def saved_and_loaded(rank: int, n: int, folder: str, layout: Any, fused: bool) -> tuple[Any, ...]:
    trainer, _ = started(layout, zero=1 if layout[2] > 1 else 0)
    optimizer, average = torch.optim.AdamW(trainer.parameters(), lr=0.01, fused=fused), Average()
    stepped(trainer, optimizer, range(6))
    expected = state_of(trainer, optimizer)
    with host_waits() as call, host_waits() as whole:
        saving = autotp.save_checkpoint(folder, trainer, optimizer, 6, wait=False, average=average)
        in_call = dict(call.waits)
        stepped(trainer, optimizer, range(6, 7))  # What was copied is of step 6.
        saving.result()
    average.values["0"].zero_()
    with host_waits() as load:
        assert autotp.load_checkpoint(folder, trainer, optimizer, average=average) == 6
    found = state_of(trainer, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert average.values["0"].tolist() == [[1.0] * 3] * 3
    return in_call, whole.waits, whole.count("pageable copy"), load.waits, load.count("pageable copy")


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 1, 2)], ids=str)
def test_a_save_waits_once_for_the_card(layout: Any, fused: bool, tmp_path: Any) -> None:
    """Not in the call: training goes on. Loading does not wait at all. Before: 115 waits to save, and 108 to load."""
    for in_call, save, pageable, load, unpinned in run_ranks(
        saved_and_loaded, 2, str(tmp_path), layout, fused, cards=True, timeout=100
    ):
        assert not in_call
        assert [(event, count) for (event, _), count in save.items()] == [("Event.synchronize", 1)]
        assert not load and not pageable and not unpinned


def pinned_by_saves(rank: int, n: int, folder: str) -> tuple[list[list[int]], int, list[int]]:
    """Returns the requests of each of two saves, the bytes of the saved tensors, and what is kept after each."""
    trainer, _ = started((n, 1, 1))
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.01, fused=True)
    stepped(trainer, optimizer, range(1))
    requests, kept = list[list[int]](), list[int]()
    for step in (1, 2):
        before = pretended().live_pinned_bytes()
        with pinned_requests() as sizes:
            saving = autotp.save_checkpoint(folder, trainer, optimizer, step, wait=False)
            saving.result()
        requests.append(sizes)
        kept.append(pretended().live_pinned_bytes() - before)
    return requests, sum(x.numel() * x.itemsize for x in state_of(trainer, optimizer)), kept


@pytest.mark.skipif(REAL, reason="torch's allocator tells no single requests")
def test_a_save_asks_for_few_chunks_and_frees_them(tmp_path: Any) -> None:
    """Before: a request for each tensor, each rounded up to a power of two."""
    for (first, second), size, kept in run_ranks(pinned_by_saves, 2, str(tmp_path), cards=True, timeout=100):
        assert first == second == [SMALLEST] * len(first) and sum(first) < size + SMALLEST
        assert kept == [0, 0]


def pinned_by_whole_tensors(rank: int, n: int, folder: str) -> list[int]:
    """Returns the requests while a tensor of 5 MB is written, and read whole, in blocks of 2**16 bytes."""
    layout = Layout((2**15, 40), 0, ((((0, 2**14)),), ((2**14, 2**15),)))
    mesh = make_mesh(n)
    full = torch.arange(2**15 * 40.0).view(2**15, 40)
    whole = GatheredTensor(layout.take(full, rank).cuda(), layout, mesh)
    with patch.object(tensor_sources, "BLOCK", 2**16), pinned_requests() as sizes:
        found = whole.read(((0, 2**15), (0, 40)))
    assert rank or torch.equal(found, full)
    return sizes


@pytest.mark.skipif(REAL, reason="torch's allocator tells no single requests")
def test_a_whole_tensor_goes_through_one_block_of_pinned_memory(tmp_path: Any) -> None:
    first, second = run_ranks(pinned_by_whole_tensors, 2, str(tmp_path), cards=True, timeout=100)
    assert not second and len(first) == 81 and set(first) == {SMALLEST}


@checks.on(2)
def what_differs_by_name_is_an_error_of_the_save(rank: int, n: int) -> None:
    """Its values are known when they have come from the card."""
    trainer, optimizer = started((2, 1, 1))
    folder = shared(rank)
    saving = autotp.save_checkpoint(folder, trainer, optimizer, 1, wait=False, average=Average(float(rank)))
    told = message(saving.result)
    assert told.splitlines()[0] == "global rank 1 saves another state by name than global rank 0"
    assert not list(folder.glob("step-*"))


@checks.on(2)
def a_loss_that_is_not_finite_is_an_error_of_the_save(rank: int, n: int) -> None:
    """The step's loss is known when the state has come from the card; loading forgets it."""
    trainer, optimizer = started((2, 1, 1))
    folder = shared(rank)
    stepped(trainer, optimizer, range(5))
    autotp.save_checkpoint(folder, trainer, optimizer, 5)
    with torch.no_grad():
        next(p for name, p in trainer.named_parameters() if name.endswith("0.ln_2.weight"))[0] = torch.nan
    stepped(trainer, optimizer, range(5, 6))
    saving = autotp.save_checkpoint(folder, trainer, optimizer, 6, wait=False)
    assert message(saving.result).startswith("the loss of step 6 is nan: `")
    assert autotp.load_checkpoint(folder, trainer, optimizer) == 5
    stepped(trainer, optimizer, range(5, 12))


@checks.on(2)
def whole_tensors_need_no_further_communicator(rank: int, n: int) -> None:
    """Read and written in blocks of a few rows; the files are those that were read."""
    make_mesh(n)
    folder, reads, read = shared(rank), [], GatheredTensor.read
    if rank == 0:
        built("llama").float().save_pretrained(folder)
    dist.barrier()

    def counted(tensor: Any, box: Any) -> Tensor:
        reads.append(box)
        return read(tensor, box)

    with patch.object(tensor_sources, "BLOCK", 2048), patch.object(GatheredTensor, "read", counted):
        with host_waits() as reading:
            model = autotp.from_pretrained(folder, n)
        with collective_order() as order, host_waits() as writing:
            autotp.save_pretrained(model, folder / "again")
    assert any(": reduce " in row for row in order) and not any(": send" in row or ": recv" in row for row in order)
    assert not writing.count("pageable copy") and not writing.count("copy to the host")
    assert writing.count("Event.synchronize") == (0 if rank else len(reads)) and len(reads) > 20
    copies = [event for event, lines in reading.events if "files/staging.py" in lines]
    assert set(copies) == {"async copy to the device"}, reading
    if rank == 0:
        expected, found = (load_file(where / "model.safetensors") for where in (folder, folder / "again"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_cards(n: int, name: str) -> None:
    checks.expect(n, name)
