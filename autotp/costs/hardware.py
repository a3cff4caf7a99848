"""hardware: the numbers of each kind of device, with their sources, and the line that describes a device of one's own.

At most 15 numbers a kind, each with a physical meaning. Bandwidths are of one direction.

NOTE [Where the sustained parts come from]
`matrix_sustained` and `memory_sustained` are not in data sheets. Those of the A100 are fitted to one table, the times
of one layer of a model of 22B parameters (Korthikanti et al. 2022, table 4), by `benchmarks/estimates.py --fit`.
Nothing else is fitted, and other GPUs have the same parts until somebody measures them. `fill` is for cuBLAS's kernels
of tiles of 256 x 128, whose loads run three stages of 32 ahead (`256x128_32x3`), and as much for the time in which they
write a tile. `link_sustained` is what NCCL's tests reach in a DGX A100 (about 235 of 300 GB/s).
Between nodes the rings of all replicas share the network. Narayanan et al. 2021 (section 5.9) have 12.9 TB/s across the
middle of 3,072 A100s in the sums over six replicas. Each of the 512 rings crosses it twice, so these are 12.6 of the
25 GB/s of each GPU: that is `net_sustained` of an A100. Of newer networks nothing is published. They are taken to
sustain what a node does: so the step of 384 H100s that Megatron-Core published for 32B is predicted at 99 % of its
TFLOP/s, and with an A100's half at 87 %.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from autotp.errors import Error

TERA, GIGA, MICRO, GIB = 1e12, 1e9, 1e-6, 2**30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A kind of device, and how devices are connected.

    Attributes:
        name: the name of the kind.
        matrix_flops: peak of products in 16 bits, without sparsity: FLOP/s.
        vector_flops: peak of products in float32: FLOP/s. In float64 it is half of this: registers hold half as many.
        memory_bandwidth: bytes/s.
        memory: bytes.
        units: the parts that compute a tile of a product each (streaming multiprocessors); 1 for a core of a CPU.
        cache_bandwidth: bytes/s between the last cache and all units, which read the operands of tiles. (Not used for
            a CPU: a core reads them as fast as it computes.)
        matrix_sustained: the part of the peak that a large product sustains: clocks fall under load.
        memory_sustained: the part of the memory's bandwidth that a long copy sustains.
        fill: the summed length that a tile's time is longer by, while its pipeline of loads fills and empties.
        launch: seconds from the end of a kernel to the work of the next; on a CPU, of the call of an operator.
        node: the number of devices in a node.
        node_bandwidth: bytes/s of a device to the others of its node.
        net_bandwidth: bytes/s of a device to other nodes: of the node's adapters, divided by its devices.
        link_sustained: the part of these that collectives in a node and sends sustain.
        latency: seconds for a message of no length. (That of GPUs, and their `launch`, are round numbers of the usual
            size, without a source. `autotp calibrate` measures both.)
    """

    name: str
    matrix_flops: float
    vector_flops: float
    memory_bandwidth: float
    memory: float
    units: int
    cache_bandwidth: float
    matrix_sustained: float = 0.758
    memory_sustained: float = 0.811
    fill: float = 192.0
    launch: float = 2 * MICRO
    node: int = 8
    node_bandwidth: float
    net_bandwidth: float
    link_sustained: float = 0.78
    latency: float = 5 * MICRO

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU, on which NCCL communicates; else one core of a CPU, with gloo."""
        return self.units > 1

    @property
    def net_sustained(self) -> float:
        """The part of `net_bandwidth` that collectives sustain beside those of all replicas.

        The name has the kind also where a line or a calibration describes the device.
        """
        return 0.50 if any(generation in self.name for generation in ("v100", "a100")) else self.link_sustained

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s of a copy between the device and its host's pinned memory, in one direction.

        PCIe 3, 4 and 5 with 16 lanes; large copies sustain four fifths. On a CPU it is a copy in the same memory.
        """
        if not self.is_gpu:
            return self.memory_bandwidth / 2
        fourth = any(kind in self.name for kind in ("a100", "rtx4090"))
        return 0.8 * (16 * GIGA if "v100" in self.name else 32 * GIGA if fourth else 64 * GIGA)


# Sources: NVIDIA A100 white paper (2020), table 4 and page 39 (level-2 cache: 5,120 bytes a clock, 1,410 MHz); DGX A100
# data sheet: NVSwitch 600 GB/s both ways, 8 adapters of 200 Gbit/s for 8 GPUs (Narayanan et al. 2021, section 5).
A100_80GB = Hardware(
    name="a100-80gb", matrix_flops=312 * TERA, vector_flops=19.5 * TERA, memory_bandwidth=2039 * GIGA, memory=80 * GIB,
    units=108, cache_bandwidth=5120 * 1.41e9, node_bandwidth=300 * GIGA, net_bandwidth=25 * GIGA,
)  # fmt: skip
# The same white paper: 1,555 GB/s.
A100_40GB = replace(A100_80GB, name="a100-40gb", memory_bandwidth=1555 * GIGA, memory=40 * GIB)
# NVIDIA V100 white paper (2017): 80 multiprocessors, 900 GB/s. DGX-2H: 2.1 PFLOP/s on 16 GPUs of 450 W. Cache: Jia et
# al. 2018 (1804.06826), table 3.4. Shoeybi et al. 2019, section 5: 300 GB/s both ways in a server, 100 GB/s between.
V100_32GB = Hardware(
    name="v100-32gb", matrix_flops=130 * TERA, vector_flops=16.4 * TERA, memory_bandwidth=900 * GIGA, memory=32 * GIB,
    units=80, cache_bandwidth=2155 * GIGA, node=16, node_bandwidth=150 * GIGA, net_bandwidth=100 * GIGA / 16,
)  # fmt: skip
# NVIDIA H100 data sheet (SXM): 989.4 TFLOP/s, 66.9 TFLOP/s, 3.35 TB/s. Cache: as the A100's, at 1.755 GHz. DGX H100
# data sheet: NVLink 900 GB/s both ways, 8 adapters of 400 Gbit/s.
H100_80GB = Hardware(
    name="h100-80gb", matrix_flops=989.4 * TERA, vector_flops=66.9 * TERA, memory_bandwidth=3352 * GIGA,
    memory=80 * GIB, units=132, cache_bandwidth=5120 * 1.755e9, node_bandwidth=450 * GIGA, net_bandwidth=50 * GIGA,
)  # fmt: skip
# NVIDIA H200 data sheet: an H100 with 141 GB at 4.8 TB/s.
H200_141GB = replace(H100_80GB, name="h200-141gb", memory_bandwidth=4800 * GIGA, memory=141 * GIGA)
# DGX B200 data sheet: 8 GPUs, 72 PFLOP/s in 8 bits with sparsity, 1,440 GB, 64 TB/s, NVLink 14.4 TB/s both ways,
# adapters of 400 Gbit/s. 148 multiprocessors at 1.965 GHz; the cache's bytes a clock are taken to be the H100's.
B200_180GB = Hardware(
    name="b200-180gb", matrix_flops=2250 * TERA, vector_flops=75 * TERA, memory_bandwidth=8000 * GIGA,
    memory=180 * GIGA, units=148, cache_bandwidth=5120 * 1.965e9, node_bandwidth=900 * GIGA, net_bandwidth=50 * GIGA,
)  # fmt: skip
# NVIDIA Ada white paper (2023), appendix A, GeForce RTX 4090: 165.2 TFLOP/s in 16 bits with sums in float32, 82.6
# TFLOP/s, 1,008 GB/s, 128 multiprocessors at 2.52 GHz. PCIe 4 with 16 lanes between cards, four in a node with an
# adapter of 100 Gbit/s. The cache's bytes a clock are taken to be the A100's.
RTX4090_24GB = Hardware(
    name="rtx4090-24gb", matrix_flops=165.2 * TERA, vector_flops=82.6 * TERA, memory_bandwidth=1008 * GIGA,
    memory=24 * GIB, units=128, cache_bandwidth=5120 * 2.52e9, node=4, node_bandwidth=32 * GIGA,
    net_bandwidth=12.5 * GIGA / 4,
)  # fmt: skip
# One core of an AMD EPYC (family 26, Zen 5; a virtual machine of two cores and 24 GB), torch 2.13.0, a thread a rank,
# two ranks with gloo on loopback. Each number is measured: `autotp calibrate`, 2026-11-25, beside other programs; but
# `launch` stands between a call whose code is in the caches (4 us) and one that a copy of 16 MB precedes (20 us).
CPU_GLOO = Hardware(
    name="cpu-gloo", matrix_flops=500 * GIGA, vector_flops=115 * GIGA, memory_bandwidth=55 * GIGA, memory=12 * GIB,
    units=1, cache_bandwidth=105 * GIGA, matrix_sustained=1.0, memory_sustained=1.0, fill=0.0, launch=8 * MICRO,
    node=2, node_bandwidth=3 * GIGA, net_bandwidth=3 * GIGA, link_sustained=1.0, latency=70 * MICRO,
)  # fmt: skip
KINDS = {
    device.name: device
    for device in (V100_32GB, A100_40GB, A100_80GB, H100_80GB, H200_141GB, B200_180GB, RTX4090_24GB, CPU_GLOO)
}

LINE = "989TF 3.35TB/s 80GB node=8x450GB/s net=50GB/s"
"""An example of a line that describes a device."""
_UNITS = {
    "TF": TERA,
    "GF": GIGA,
    "PF": 1e15,
    "TB/s": TERA,
    "GB/s": GIGA,
    "MB/s": 1e6,
    "GB": GIGA,
    "GiB": GIB,
    "TB": TERA,
}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z/]+)")


def hardware_of(gpu: str | Hardware) -> Hardware:
    """Returns a kind of device by its name, from a line such as LINE, or from a file that `autotp calibrate` saved.

    A line has, in any order: peak of products in 16 bits (TF), memory bandwidth (TB/s or GB/s), memory (GB or GiB),
    `node=` number of devices x bandwidth of each inside a node, and `net=` bandwidth of each between nodes. All else
    is as for an H100, or for the kind behind `like=`.

    Raises:
        Error: there is no such kind, the line lacks a part, or the file cannot be read.
    """
    if isinstance(gpu, Hardware):
        return gpu
    if not isinstance(gpu, str):
        raise Error(f"gpu is of type {type(gpu).__name__}", expected="a name, or a line", fix=f"gpu={LINE!r}")
    name = gpu.strip().lower().replace("_", "-")
    if name in KINDS:
        return KINDS[name]
    if name.endswith(".json"):
        return loaded(Path(gpu.strip()))
    if " " not in gpu.strip():
        raise Error(f"gpu={gpu!r} is not known", expected=", ".join(KINDS), fix=f"a line, such as gpu={LINE!r}")
    return _parsed(gpu)


_estimated: ContextVar[Hardware | None] = ContextVar("estimated", default=None)


@contextmanager
def estimated_on(device: Hardware) -> Iterator[None]:
    """A region in which `hardware_at` returns this kind: plans are made for it, whatever device is there."""
    token = _estimated.set(device)
    try:
        yield
    finally:
        _estimated.reset(token)


def hardware_at(device: torch.device) -> Hardware:
    """Returns the kind of a device that is there, by its name; of a GPU of another name, an H100 with its memory.

    Of tensors that pretend to be on a GPU, where there is none, an H100.
    """
    if (estimated := _estimated.get()) is not None:
        return estimated
    if device.type != "cuda":
        return CPU_GLOO
    if not torch.cuda.is_available():
        return H100_80GB
    facts = torch.cuda.get_device_properties(device)
    name = facts.name.lower().replace(" ", "")
    of_this_name = [gpu for gpu in KINDS.values() if gpu.is_gpu and gpu.name.partition("-")[0] in name]
    nearest = min(of_this_name or [H100_80GB], key=lambda gpu: abs(gpu.memory - facts.total_memory))
    return replace(nearest, memory=float(facts.total_memory))


def _parsed(line: str) -> Hardware:
    numbers: dict[str, float] = {}
    base = H100_80GB
    for word in line.split():
        key, text = word.split("=", 1) if "=" in word else ("", word)
        # A second kind would contradict the first: as an unknown word it is refused below.
        if key == "like" and text in KINDS and base is H100_80GB:
            base = KINDS[text]
            continue
        if key == "node":
            count, _, text = text.partition("x")
            if not count.isdigit() or not int(count):
                raise _unreadable(line, word)
            numbers["node"] = int(count)
        match = _NUMBER.fullmatch(text)
        field = _FIELDS.get((key, match[2][-1] if match else ""))
        if match is None or match[2] not in _UNITS or field is None or field in numbers or not float(match[1]):
            raise _unreadable(line, word)
        numbers[field] = float(match[1]) * _UNITS[match[2]]
    lacking = ", ".join(name for name in (*_FIELDS.values(), "node") if name not in numbers)
    if lacking:
        raise Error(f"gpu={line!r} does not say {lacking}", fix=f"gpu={LINE!r}")
    # A line does not say these peaks: they are taken to grow as that of products does.
    node, faster = int(numbers.pop("node")), numbers["matrix_flops"] / base.matrix_flops
    more = {"vector_flops": base.vector_flops * faster, "cache_bandwidth": base.cache_bandwidth * faster}
    sizes: dict[str, Any] = {**numbers, **more, "node": node}
    return replace(base, name=line, **sizes)


VERSION = 1
NUMBERS = tuple(field.name for field in fields(Hardware) if field.name != "name")


def to_file(device: Hardware, path: Path) -> None:
    """Writes a device's numbers into a file, which `--gpu` takes; by a temporary name, so that it is never half there.

    Raises:
        Error: the file cannot be written.
    """
    text = json.dumps({"version": VERSION, "name": device.name, **{n: getattr(device, n) for n in NUMBERS}}, indent=2)
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(text + "\n")
        beside.replace(path)
    except OSError as error:
        raise Error(f"{path} cannot be written: {error.strerror}", fix="another folder") from error


def loaded(path: Path) -> Hardware:
    """Returns the device of a file that `to_file` wrote.

    Raises:
        Error: it cannot be read, or it is no such file.
    """
    fix = f"autotp calibrate --save {path.name}"
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise Error(f"gpu={str(path)!r}: {error.strerror}", fix=fix) from error
    except ValueError as error:
        raise Error(f"gpu={str(path)!r} is no JSON", fix=fix) from error
    if not isinstance(content, dict) or content.get("version") != VERSION or not isinstance(content.get("name"), str):
        raise Error(f"gpu={str(path)!r} is no file of a device, version {VERSION}", fix=fix)
    # An unknown name may be a misspelled one, whose number would silently be the usual one.
    wrong = sorted({*NUMBERS, "version", "name"} ^ content.keys())
    wrong += [n for n in NUMBERS if n in content and not _is_positive(content[n], n)]
    if wrong:
        raise Error(f"gpu={str(path)!r}: `{wrong[0]}` is missing, unknown or no positive number", fix=fix)
    numbers: dict[str, Any] = {n: float(content[n]) for n in NUMBERS}
    integers = {n: int(content[n]) for n in ("units", "node")}
    return Hardware(name=content["name"], **numbers | integers)


def _is_positive(value: Any, name: str) -> bool:
    """Whether a number of a device can be right; only `fill` may be 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        return False
    return (value > 0 or name == "fill") and (name not in ("units", "node") or value == int(value))


_FIELDS = {
    ("", "F"): "matrix_flops", ("", "s"): "memory_bandwidth", ("", "B"): "memory", ("node", "s"): "node_bandwidth",
    ("net", "s"): "net_bandwidth",
}  # fmt: skip
"""(key of a word, last letter of its unit) -> what the word says."""


def _unreadable(line: str, word: str) -> Error:
    return Error(f"gpu={line!r}: `{word}` cannot be read", fix=f"gpu={LINE!r}")
