"""The pretended device: what it does as a card does."""

from __future__ import annotations

import functools
import io
import threading

import pytest
import torch
from cards.pretend import REAL, pretended
from cards.spies import host_waits
from ranks import Checks
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

checks = Checks(cards=True)


@checks.on(1)
def tensors_are_plain_tensors_on_cuda(rank: int, n: int) -> None:
    x = torch.arange(6.0, device="cuda").view(2, 3)
    assert type(x) is Tensor and x.is_cuda and x.device == torch.device("cuda", 0)
    assert torch.equal((x @ x.T + 1).cpu(), torch.tensor([[6.0, 15.0], [15.0, 51.0]]))


@checks.on(1)
def two_devices_are_an_error(rank: int, n: int) -> None:
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu!"):
        torch.ones(2, device="cuda") + torch.ones(2)
    if not REAL or torch.cuda.device_count() > 1:
        with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1!"):
            torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")


@checks.on(1)
def numbers_of_the_host_mix(rank: int, n: int) -> None:
    assert (torch.ones(2, device="cuda") + torch.tensor(1.0)).sum().item() == 4


@checks.on(1)
def backward_runs_in_another_thread(rank: int, n: int) -> None:
    threads = []
    x = torch.ones(2, device="cuda", requires_grad=True)
    (x * 2).register_hook(lambda gradient: threads.append(threading.get_ident()))
    y = x * 2
    y.register_hook(lambda gradient: threads.append(threading.get_ident()))
    y.sum().backward()
    assert threads and threads[0] != threading.get_ident()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]


@checks.on(1)
def in_place_operators_write_the_memory(rank: int, n: int) -> None:
    x = torch.zeros(2, 3, device="cuda")
    row = x[1]
    row.add_(1)
    torch.add(x[0], 5, out=x[0])
    assert x.tolist() == [[5.0] * 3, [1.0] * 3] and row.data_ptr() == x.data_ptr() + 12


@checks.on(1)
def random_numbers_have_a_stream_of_the_device(rank: int, n: int) -> None:
    torch.manual_seed(0)
    first = torch.rand(3, device="cuda")
    before = torch.get_rng_state()
    second = torch.rand(3, device="cuda")
    assert torch.equal(before, torch.get_rng_state()) and not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(3, device="cuda"))
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.rand(3, device="cuda", generator=torch.Generator())


@checks.on(1)
def waits_of_the_host_are_counted_with_their_lines(rank: int, n: int) -> None:
    x, pinned = torch.ones(3, device="cuda"), torch.ones(3).pin_memory()
    with host_waits() as quiet:
        (x * 2).sum()
        x.copy_(pinned, non_blocking=True)
    assert not quiet.waits
    constant = functools.partial(torch.tensor, [1], device="cuda")
    for wait in (lambda: x.sum().item(), lambda: x.cpu(), lambda: x.nonzero(), lambda: x[x > 0], constant):
        with host_waits() as traffic:
            wait()
        assert sum(traffic.waits.values()) == 1, traffic


@checks.on(1)
def a_tensor_is_set_to_a_storage(rank: int, n: int) -> None:
    x = torch.arange(6.0, device="cuda").view(2, 3)
    whole = torch.empty(0, device="cuda").set_(x[1].untyped_storage())
    assert whole.device == x.device and whole.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.empty(0, dtype=torch.uint8, device="cuda").set_(x.untyped_storage()).shape == (24,)


@checks.on(1)
def memory_is_counted(rank: int, n: int) -> None:
    before = torch.cuda.memory_allocated()
    x = torch.ones(1024, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096
    y = x.view(2, 512)[1]
    del x
    assert torch.cuda.memory_allocated() - before == 4096
    del y
    assert torch.cuda.memory_allocated() == before


@checks.on(1)
def copies_into_pinned_memory_arrive_late(rank: int, n: int) -> None:
    host, x = torch.zeros(2).pin_memory(), torch.tensor([1.0, 2.0], device="cuda")
    assert host.is_pinned() and not torch.zeros(2).is_pinned()
    host.copy_(x, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    assert REAL or host.isnan().all()
    arrived.synchronize()
    assert host.tolist() == [1.0, 2.0]


@checks.on(1)
def derivatives_of_zero_have_no_memory(rank: int, n: int) -> None:
    """Forward mode makes them of what has no derivative, such as the mask of causal attention."""
    x = torch.arange(16.0, device="cuda").view(1, 1, 4, 4)
    read = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    value, derivative = torch.func.jvp(lambda x: read(x, x, x), (x,), (torch.ones_like(x),))
    with sdpa_kernel(SDPBackend.MATH):  # On the CPU the fused kernel has no forward mode.
        on_host = torch.func.jvp(lambda x: read(x, x, x), (x.cpu(),), (torch.ones(1, 1, 4, 4),))
    torch.testing.assert_close((value.cpu(), derivative.cpu()), on_host)


@checks.on(1)
def a_model_trains_as_on_the_host(rank: int, n: int) -> None:
    def trained(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).double().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(3):
            model(torch.arange(10, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    for p, q in zip(trained("cuda"), trained("cpu"), strict=True):
        assert (p - q).abs().max() < 1e-12


@checks.on(1)
def a_storage_can_be_emptied_and_filled(rank: int, n: int) -> None:
    x = torch.ones(4, device="cuda")
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(16)
    assert x.fill_(2).tolist() == [2.0] * 4


@checks.on(1)
def tensors_are_saved_and_loaded(rank: int, n: int) -> None:
    file = io.BytesIO()
    torch.save(torch.arange(3.0, device="cuda"), file)
    file.seek(0)
    assert torch.load(file).device.type == "cuda"
    file.seek(0)
    assert torch.load(file, map_location="cpu").tolist() == [0.0, 1.0, 2.0]


@checks.on(1)
def checkpointed_blocks_draw_the_same_numbers_again(rank: int, n: int) -> None:
    x = torch.ones(100, device="cuda", requires_grad=True)
    y = checkpoint(lambda x: nn.functional.dropout(x * x, 0.5), x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * y.detach())


@pytest.mark.parametrize("n, name", checks.cases())
def test_device(n: int, name: str) -> None:
    checks.expect(n, name)


def test_cards_are_pretended_in_ranks_only() -> None:
    """The process of pytest itself has the device of the machine, but with `--cards`."""
    from cards.pretend import Cards, asked_for

    assert (Cards.module is not None) == (asked_for() and not REAL)
    if Cards.module is not None:
        assert pretended().device_count() == torch.cuda.device_count()
