"""What autotp relies on in NCCL and CUDA, and can only be seen on real cards."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

import autotp
from first_day.checks import Check, Differs, Place

SIZES = 1, 1000, 2**20
DTYPES = torch.float32, torch.bfloat16
KERNELS = 4096
"""More than the launch queue of a card takes: then the host waits in the next launch."""


def sign_of_zero(place: Place) -> str:
    """Sums of -0.0 over all ranks are -0.0: so autotp knows that no rank has a gradient (autotp/ops/coalesced.py)."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    autotp.parallelize(model, device=place.device, example_inputs=torch.ones(1, 8))  # It starts the process group.
    for dtype in DTYPES:
        for size in SIZES:
            zeros = torch.full((size,), -0.0, dtype=dtype, device=place.device)
            dist.all_reduce(zeros)
            if not bool(zeros.signbit().all()):
                raise Differs(f"the sum of {size} -0.0 in {dtype} is +0.0")
    return f"-0.0 in {len(DTYPES)} dtypes, up to {max(SIZES)} elements"


def events_while_the_card_is_behind(place: Place) -> str:
    """The host's time for an event once more kernels wait than the launch queue takes: autotp records some a step."""
    place.need_real_cards("launch queues")
    x, event = torch.ones(1, device=place.device), torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # About half a second.
    launches, began = list[float](), time.perf_counter()
    for _ in range(KERNELS):
        before = time.perf_counter()
        x.add_(1)
        launches.append(time.perf_counter() - before)
    queued, before = time.perf_counter() - began, time.perf_counter()
    event.record()
    recorded = time.perf_counter() - before
    torch.cuda.synchronize()
    return f"event {1e6 * recorded:.0f} us, slowest launch {1e3 * max(launches):.1f} ms, all {1e3 * queued:.0f} ms"


CHECKS = [
    Check("premise: the sign of zero", sign_of_zero),
    Check("premise: events while the card is behind", events_while_the_card_is_behind, (1, 2)),
]
