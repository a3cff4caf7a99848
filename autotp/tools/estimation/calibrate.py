"""`calibrate`: measures a device's numbers in about a minute, and compares them with those of a known kind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from autotp.arguments import expect_arguments
from autotp.costs.hardware import (
    CPU_GLOO,
    GIB,
    GIGA,
    H100_80GB,
    KINDS,
    MICRO,
    TERA,
    Hardware,
    hardware_of,
    to_file,
)
from autotp.display.sheet import Sheet, Shown, Table
from autotp.distributed.launch import launch
from autotp.distributed.mesh import start_distributed
from autotp.errors import Error, within
from autotp.tools.estimation.seconds.measure_device import Measured, measure_device
from autotp.tools.estimation.seconds.measure_links import MeasuredLink, measured_alone, timed

DIFFERS = 0.1
"""The part by which a number differs that is pointed out."""


@dataclass(frozen=True, kw_only=True)
class MeasuredNumber:
    """A number that was measured, and what the known kind has for it; both in `unit`."""

    DATA = ("name", "measured", "known", "unit", "differs")

    name: str
    measured: float
    known: float
    unit: str

    @property
    def more(self) -> float:
        """How much more was measured: 0.1 is a tenth more."""
        return self.measured / self.known - 1

    @property
    def differs(self) -> bool:
        """Whether the two differ by more than a tenth."""
        return abs(self.more) > DIFFERS


@dataclass(frozen=True, kw_only=True, repr=False)
class Calibration(Shown):
    """What `calibrate` measured.

    Attributes:
        device: the measured device, for `gpu=` of `estimate` and `search`.
        known: the kind that it is compared with.
        numbers: what was measured.
        ranks: the ranks that communicated; 1 if none did, so that the links are those of the known kind.

    Example:
        >>> found = autotp.calibrate(seconds=1)
        >>> found.line().endswith("like=cpu-gloo"), found.device.memory_bandwidth > 1e9
        (True, True)
    """

    DATA = ("known", "ranks", "line", "device", "numbers")

    device: Hardware
    known: Hardware
    numbers: tuple[MeasuredNumber, ...]
    ranks: int

    @property
    def differing(self) -> tuple[MeasuredNumber, ...]:
        """The numbers that differ from the known kind's by more than a tenth."""
        return tuple(number for number in self.numbers if number.differs)

    def line(self) -> str:
        """Returns the line that describes the device, for `--gpu`.

        It names the known kind, which has what a line cannot say.
        """
        device = self.device
        words = [
            f"{_short(device.matrix_flops / TERA)}TF", f"{_short(device.memory_bandwidth / GIGA)}GB/s",
            f"{_short(device.memory / GIB)}GiB", f"node={device.node}x{_short(device.node_bandwidth / GIGA)}GB/s",
            f"net={_short(device.net_bandwidth / GIGA)}GB/s",
        ]  # fmt: skip
        return " ".join([*words, f"like={self.known.name}"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all numbers of the device into a file, which `gpu=` and `--gpu` take.

        Args:
            path: the file; its name ends in `.json`.

        Raises:
            Error: the file cannot be written, or has another name.
        """
        to_file(self.device, expect_json(path))

    def summary(self) -> str:
        """Returns the peaks and the bandwidths in a line."""
        return f"{self.line()}: {len(self.differing)} of {len(self.numbers)} numbers differ from {self.known.name}"

    def sheet(self) -> Sheet:
        """Returns the table of the numbers, and the lines for `--gpu`."""
        rows = tuple(
            (number.name, f"{number.measured:.4g} {number.unit}", f"{number.known:.4g} {number.unit}",
             f"{number.more:+.0%}", "differs" if number.differs else "")
            for number in self.numbers
        )  # fmt: skip
        differ = f"{len(self.differing)} of {len(self.numbers)} numbers differ by more than {DIFFERS:.0%}"
        alone = f"links        not measured, those of {self.known.name}: start one process for each GPU with torchrun"
        lines = (differ, *((alone,) if self.ranks == 1 else ()), f'device       --gpu "{self.line()}"')
        head = ("number", "measured", self.known.name, "", "")
        return Sheet(
            f"this device beside {self.known.name}", (Table(head, rows, ("", "cut", "note", "note", "bad")), lines)
        )


def calibrate(*, gpu: str | Hardware | None = None, seconds: float = 40.0) -> Calibration:
    """Returns what is measured of the device of this process: products, a copy, an operator's call, and collectives.

    A GPU if there is one, else the CPU with as many threads as torch has here. Ranks of one launch (torchrun) call it
    together, and measure their links; a process that is alone starts others for a few seconds.

    Args:
        gpu: the kind to compare with, and from which comes what is not measured; by default the kind that the GPU's
            name says, or "cpu-gloo".
        seconds: that the measurements take, about.

    Raises:
        Error: the kind is not known; or the ranks cannot communicate.

    Example:
        >>> found = autotp.calibrate(seconds=1)
        >>> [number.name for number in found.numbers if number.measured <= 0]
        []
    """

    def run() -> Calibration:
        expect_arguments(calibrate, gpu=gpu, seconds=seconds)
        if not seconds > 0:
            raise Error(f"seconds={seconds} is no time", fix="seconds=40")
        started = launch()
        together = started is not None and started.size > 1
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        base = hardware_of(gpu) if gpu is not None else _kind_of(device_type)
        # What is not measured (units, cache, sustained parts) comes from this kind, and a CPU has others.
        if base.is_gpu != (device_type == "cuda"):
            actual = "a GPU" if device_type == "cuda" else "a CPU"
            raise Error(f"gpu={base.name!r}, and this process has {actual}", fix="gpu=None")
        device = start_distributed() if together else torch.device(device_type)
        measured = measure_device(device, seconds / 2)
        if together and started is not None:
            near, far = _links(device, started.size, started.local_size, seconds / 2)
        else:
            near, far = measured_alone(device_type, seconds / 2), None
        return compared(base, measured, near, far)

    return within("calibrate", run)


def _kind_of(device_type: str) -> Hardware:
    """Returns the kind whose name the GPU's name has; an H100 for others."""
    if device_type == "cpu":
        return CPU_GLOO
    name = torch.cuda.get_device_name().lower().replace(" ", "")
    memory = torch.cuda.get_device_properties(0).total_memory
    # Several kinds may share a name: an A100 has 40 GB or 80, which its memory tells.
    named = [device for device in KINDS.values() if device.is_gpu and device.name.partition("-")[0] in name]
    return min(named, key=lambda device: abs(device.memory - memory), default=H100_80GB)


def _links(
    device: torch.device, size: int, node_size: int, seconds: float
) -> tuple[MeasuredLink | None, MeasuredLink | None]:
    """Returns the links of the ranks of a node, and those of the nodes; None where there is one only."""
    if size == node_size:
        return timed(dist.group.WORLD, device, seconds), None
    near = far = None
    if node_size > 1:
        # Launchers give the processes of a node neighbouring ranks, as `new_subgroups` takes them.
        near = timed(dist.new_subgroups(node_size)[0], device, seconds / 2)
    # All ranks create the group, also those that are not in it: torch asks for that.
    firsts = dist.new_group(list(range(0, size, node_size)))
    if dist.get_rank() % node_size == 0:
        far = timed(firsts, device, seconds / 2)
    # The other ranks wait here: what they would do next would disturb the measurement.
    dist.barrier()
    return near, far


def compared(base: Hardware, measured: Measured, near: MeasuredLink | None, far: MeasuredLink | None) -> Calibration:
    """Returns the device with these measurements, beside a known kind.

    What is sustained of a peak is measured, and the kind knows its part: so the peak is the measured one divided by it.
    """
    cpu = not base.is_gpu
    # A collective of all ranks waits for the longer way.
    link = far or near
    device = replace(
        base, name=f"calibrated {base.name}", matrix_flops=measured.half / base.matrix_sustained,
        vector_flops=measured.single / base.matrix_sustained, memory=measured.memory,
        memory_bandwidth=measured.copy / base.memory_sustained, launch=measured.call,
        fill=measured.fill if cpu else base.fill,
    )  # fmt: skip
    if near is not None:
        device = replace(device, node=near.ranks, node_bandwidth=near.bandwidth / base.link_sustained)
        # gloo communicates in a node as it does between nodes. Of a GPU's network, NVLink says nothing.
        device = replace(device, net_bandwidth=device.node_bandwidth) if cpu and far is None else device
    if far is not None:
        per_node = near.ranks if near is not None else 1
        device = replace(device, node=per_node, net_bandwidth=far.bandwidth / base.net_sustained)
    if link is not None:
        device = replace(device, latency=link.latency)
    ranks = (near.ranks if near else 1) * (far.ranks if far else 1)
    return Calibration(device=device, known=base, numbers=tuple(_numbers(base, measured, near, far)), ranks=ranks)


def _numbers(
    base: Hardware, measured: Measured, near: MeasuredLink | None, far: MeasuredLink | None
) -> Sequence[MeasuredNumber]:
    # What is measured is what a device sustains, so it is compared with that part of the known peaks.
    flops, bandwidth = base.matrix_sustained, base.memory_bandwidth * base.memory_sustained / GIGA
    rows = [
        ("products, bfloat16", measured.half / TERA, base.matrix_flops * flops / TERA, "TFLOP/s"),
        ("products, float32", measured.single / TERA, base.vector_flops * flops / TERA, "TFLOP/s"),
        ("products, float64", measured.double / TERA, base.vector_flops * flops / 2 / TERA, "TFLOP/s"),
        ("a copy", measured.copy / GIGA, bandwidth, "GB/s"),
        ("a sum of two tensors", measured.add / GIGA, bandwidth, "GB/s"),
        ("an operator's call", measured.call / MICRO, base.launch / MICRO, "us"),
        ("memory", measured.memory / GIB, base.memory / GIB, "GiB"),
    ]
    inside, across = base.node_bandwidth * base.link_sustained, base.net_bandwidth * base.net_sustained
    for name, link, sustained in (("in a node", near, inside), ("between nodes", far, across)):
        if link is not None:
            rows.append((f"links {name}", link.bandwidth / GIGA, sustained / GIGA, "GB/s"))
            rows.append((f"latency {name}", link.latency / MICRO, base.latency / MICRO, "us"))
    return [MeasuredNumber(name=name, measured=value, known=known, unit=unit) for name, value, known, unit in rows]


def expect_json(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a device's file.

    Raises:
        Error: its name does not end in `.json`, by which `gpu=` knows it; or its folder does not exist.
    """
    file = Path(path)
    if file.suffix.lower() != ".json":
        raise Error(f"{str(path)!r} does not end in .json, by which gpu= knows a file", fix="device.json")
    if not file.parent.is_dir():
        raise Error(f"the folder of {str(path)!r} does not exist", fix="device.json")
    return file


def _short(x: float) -> str:
    """Returns a number with three digits, without an exponent."""
    # A line for `gpu=` has no exponents, and `.3g` writes 1234 as 1.23e+03.
    return f"{float(f'{x:.3g}'):.12f}".rstrip("0").rstrip(".")
