"""What the machine is: its cards and how they are joined, versions, clocks, and what NCCL says of its links."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version

import torch

from first_day.checks import Place
from first_day.processes import environment, free_port

ASKED = (
    "name", "memory.total", "driver_version", "vbios_version", "clocks.max.sm", "clocks.sm", "clocks.mem",
    "power.limit", "temperature.gpu", "ecc.mode.current", "pcie.link.gen.current", "pcie.link.width.current",
    "compute_mode", "mig.mode.current",
)  # fmt: skip
LIBRARIES = ("torch", "transformers", "accelerate", "triton", "numpy")


def machine(place: Place) -> str:
    """Prints the record of the machine; returns its cards in a line."""
    print(f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} CPUs")
    print("  ".join(f"{name} {_version(name)}" for name in LIBRARIES))
    if not torch.cuda.is_available():
        return "no card: everything runs on the CPU, over gloo"
    print(f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = {f"{card.name}, {card.total_memory / 2**30:.0f} GiB, {card.multi_processor_count} SMs" for card in cards}
    print(_said(["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv"]))
    print(_said(["nvidia-smi", "topo", "-m"]))
    return f"{len(cards)} x {'; '.join(sorted(names))}"


def first_communicator(place: Place) -> str:
    """Makes a communicator of all cards, with NCCL_DEBUG=INFO; prints and returns what it says of links."""
    ranks = torch.cuda.device_count()
    place.need_real_cards("NCCL")
    port, program = free_port(), "import torch, torch.distributed as d, os\n"
    program += "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\nd.init_process_group('nccl')\n"
    program += "d.all_reduce(torch.ones(1, device='cuda'))\nd.destroy_process_group()\n"
    with tempfile.TemporaryFile("w+") as said:  # A pipe that nobody reads blocks its rank.
        started = [
            subprocess.Popen(
                [sys.executable, "-c", program],
                env=os.environ | environment(rank, ranks, port) | {"NCCL_DEBUG": "INFO"},
                stdout=said if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            statuses = [process.wait(timeout=150) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        said.seek(0)
        text = said.read()
    kept = [
        line for line in text.splitlines() if any(word in line for word in ("version", "NVLS", "via", "Channel 00"))
    ]
    print("\n".join(kept[:40]))
    if any(statuses):
        raise RuntimeError(text[-2000:])
    return f"{ranks} ranks, {sum('via' in line for line in kept)} links"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def _said(command: list[str]) -> str:
    """Returns what a program prints; a line that says so if it is not there."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not there"
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
