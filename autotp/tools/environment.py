"""environment: what autotp finds where it runs: versions, libraries, launcher, ranks, GPUs, an all-reduce's time."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

import autotp
from autotp.display.sheet import Code, Kind, Sheet, Shown, Table
from autotp.distributed.launch import TORCHRUN, Launch, launch
from autotp.distributed.mesh import start_distributed

TESTED = {
    "torch": "2.13.0", "numpy": "2.4.6", "transformers": "5.17.0", "peft": "0.21.2", "accelerate": "1.15.0",
    "lightning": "2.6.6", "trl": "1.16.0", "safetensors": "0.8.0", "tqdm": "4.70.1", "typer": "0.29.2",
    "rich": "15.0.0",
}  # fmt: skip
"""Package -> the version that the tests run with; those of constraints.txt."""
OLDEST_TORCH = (2, 13)

LIBRARIES = {
    "transformers": "models, Trainer, generate, gradient checkpointing; autotp.from_pretrained, save_pretrained",
    "peft": "LoRA: autotp.parallelize(get_peft_model(model, config)); save_pretrained saves the adapters",
    "accelerate": "Accelerator sees the ranks of one model as one process, and replicas as several",
    "lightning": "Trainer and Fabric, by strategies of autotp.integrations.lightning; checkpoints are one device's",
    "trl": "SFTTrainer, DPOTrainer",
    "torchao": "quantized weights are refused, before parallelize and after it",
    "bitsandbytes": "quantized weights are refused; autotp.from_pretrained refuses quantized checkpoints",
    "deepspeed": "not tested: use autotp.distribute(zero=1) in its place",
    "safetensors": "autotp.from_pretrained and save_pretrained need it",
    "tqdm": "a line about a call that takes longer than five seconds",
    "typer": "the command line needs it",
    "rich": "the command line needs it",
}
"""Library -> what works with it, in a line."""

VARIABLES = (
    *TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID",
    "SLURM_LOCALID", "SLURM_NODEID",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS",
    "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
)  # fmt: skip
"""The variables of launchers that autotp reads, and those that decide how ranks find and use what they have."""

Lines = list[tuple[str, Kind]]
BYTES = 2**24
"""The size of the all-reduce that is timed."""
TIMES = 9


@dataclass(frozen=True)
class Installed:
    """A package. version: "" if it is not installed; tested: the version that the tests run with, or ""."""

    DATA = ("version", "tested", "state", "works")

    name: str
    version: str
    tested: str

    @property
    def works(self) -> str:
        """What works with it, in a line."""
        return LIBRARIES.get(self.name, "")

    @property
    def state(self) -> str:
        """One of: missing, tested, untested."""
        if not self.version:
            return "missing"
        # A version of torch may end in its build, as 2.13.0+cpu.
        is_tested = self.version.partition("+")[0] == self.tested
        return "tested" if is_tested else "untested"


@dataclass(frozen=True)
class Exchange:
    """An all-reduce that was timed. seconds: the median; gigabytes: bytes of the tensor a second, in GB"""

    DATA = ("bytes", "seconds", "gigabytes")

    bytes: int
    seconds: float

    @property
    def gigabytes(self) -> float:
        """Bytes of the tensor a second, in GB."""
        return self.bytes / self.seconds / 1e9


@dataclass(frozen=True, repr=False)
class Environment(Shown):
    """What was found.

    Attributes:
        python: the version of Python.
        packages: autotp's requirements and the libraries it works with, by their names.
        launcher: how this process was started; None if it is alone.
        variables: the variables of launchers that are set.
        cores: of this machine.
        gpus: the names of the GPUs that this process sees.
        backend: that the ranks use, or would use: nccl or gloo.
        all_reduce: one that was timed among the ranks; None for a process that is alone.
        problems: what will not work, each with what to do.
        advice: what would be faster, each with what to do.
    """

    DATA = (
        "ok", "python", "packages", "launcher", "variables", "cores", "gpus", "backend", "all_reduce", "problems",
        "advice",
    )  # fmt: skip

    python: str
    packages: dict[str, Installed]
    launcher: Launch | None
    variables: dict[str, str]
    cores: int
    gpus: tuple[str, ...]
    backend: str
    all_reduce: Exchange | None
    problems: tuple[str, ...]
    advice: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """False if something will not work."""
        return not self.problems

    @property
    def untested(self) -> list[str]:
        """The libraries that are here in another version than the tests run with."""
        return [p.name for p in self.packages.values() if p.state == "untested" and p.tested]

    def summary(self) -> str:
        """Returns in a line whether a training would start here, and with which command."""
        if self.problems:
            return f"not ready: {len(self.problems)} problem{'s' * (len(self.problems) > 1)}, see above"
        versions = ", but not with the versions that were tested together" * bool(self.untested)
        if self.all_reduce is not None:
            return f"ready{versions}: the ranks find each other over {self.backend}"
        ranks = len(self.gpus) or self.cores
        return f"ready{versions}: torchrun --nproc-per-node {ranks} train.py starts {ranks} ranks over {self.backend}"

    def sheet(self) -> Sheet:
        """Returns the table of libraries, how the process was started, the machine, and the verdict."""
        rows = ((p.name, p.version or "missing", p.tested or "none", p.works) for p in self.packages.values())
        table = Table(("library", "here", "tests", "what works"), tuple(rows), ("", "good", "", "note"))
        untested: Lines = [(f"not the versions that were tested together: {', '.join(self.untested)}", "whole")]
        verdict: Lines = [(f"problem       {text}", "bad") for text in self.problems]
        verdict += [(f"verdict       {self.summary()}", "bad" if self.problems else "good")]
        parts = untested * bool(self.untested), self._started(), self._machine(), verdict
        codes = [Code(tuple(lines)) for lines in parts if lines]
        return Sheet(f"autotp {autotp.__version__}, Python {self.python}", (table, *codes))

    def _started(self) -> Lines:
        by = self.launcher
        lines: Lines = [(f"started by    {by.by if by else 'no launcher: one process, one rank'}", "")]
        if by is not None:
            lines += [(f"rank          {by.rank} of {by.size}; here {by.local_rank} of {by.local_size}", "")]
        lines += [(f"{name}={value}", "note") for name, value in self.variables.items()]
        return lines

    def _machine(self) -> Lines:
        sent, facts = self.all_reduce, {"cores": self.cores, "GPUs": ", ".join(self.gpus) or "none"}
        lines: Lines = [(f"{name:<14}{value}", "") for name, value in {**facts, "backend": self.backend}.items()]
        if sent is not None:
            speed = f"{sent.bytes / 1e6:.1f} MB in {sent.seconds * 1e3:.2f} ms, {sent.gigabytes:.2f} GB/s"
            lines += [(f"all-reduce    {speed}", "")]
        lines += [(f"faster with   {advice}", "whole") for advice in self.advice]
        return lines


def examine() -> Environment:
    """Looks at this process and its machine; the ranks of one launch call it together, and time an all-reduce.

    Raises:
        Error: the ranks cannot find each other.
    """
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    started, problems = launch(), problems_of(dict(os.environ), len(gpus))
    # With a problem the ranks may not meet, and each would wait for the others.
    exchange = None if started is None or problems else _timed()
    enough = bool(gpus) and len(gpus) >= (started.local_size if started is not None else 1)
    return Environment(
        python=platform.python_version(),
        packages={name: _installed(name) for name in ["torch", "numpy", *LIBRARIES]},
        launcher=started,
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        cores=os.cpu_count() or 1,
        gpus=gpus,
        backend=dist.get_backend() if dist.is_initialized() else "nccl" if enough else "gloo",
        all_reduce=exchange,
        problems=tuple(problems),
        advice=tuple(advice_of(dict(os.environ), [torch.cuda.get_device_capability(i)[0] for i in range(len(gpus))])),
    )


def _installed(name: str) -> Installed:
    try:
        installed = version(name)
    except PackageNotFoundError:
        installed = ""
    return Installed(name, installed, TESTED.get(name, ""))


def problems_of(variables: dict[str, str], gpus: int) -> list[str]:
    """Returns what will not work with these variables of the environment, and this number of GPUs."""
    problems = []
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < OLDEST_TORCH:
        problems.append(
            f"torch {torch.__version__} is too old: pip install 'torch>={'.'.join(map(str, OLDEST_TORCH))}'"
        )
    lacking = [name for name in TORCHRUN if name not in variables]
    # An address alone may be set by a cluster for its own ends.
    if 0 < len(lacking) < len(TORCHRUN) and {"RANK", "WORLD_SIZE"} & variables.keys():
        problems.append(f"some of torchrun's variables are set, but not {', '.join(lacking)}: use torchrun")
    numbers = [name for name in VARIABLES if name.endswith(("RANK", "SIZE", "PROCID", "LOCALID")) and name in variables]
    wrong = [f"{name}={variables[name]}" for name in numbers if not variables[name].isdecimal()]
    if wrong:
        problems.append(f"{', '.join(wrong)} is no number: start the script with torchrun, srun or mpirun")
    ranks = {"SLURM_PROCID", "RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"}
    if "SLURM_JOB_ID" in variables and not ranks & variables.keys():
        problems.append("in a SLURM allocation, but not started by srun: this process is alone; srun python train.py")
    local = variables.get("LOCAL_WORLD_SIZE") or variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") or "1"
    if gpus and local.isdecimal() and int(local) > gpus:
        problems.append(f"{local} processes here share {gpus} GPUs: start as many processes as GPUs")
    shared = Path("/dev/shm")
    if shared.is_dir() and os.statvfs(shared).f_bavail * os.statvfs(shared).f_frsize < 2**26 and gpus:
        problems.append("/dev/shm has less than 64 MB, which NCCL needs: docker run --shm-size 1g")
    return problems


BLACKWELL = 10
"""The first generation of NVIDIA's GPUs (major compute capability) that starts kernels in order without a setting."""


def advice_of(variables: dict[str, str], generations: Sequence[int]) -> list[str]:
    """Returns what would be faster with these variables of the environment, on GPUs of these generations.

    Backward starts a sum, and then computes gradients of weights. With several queues of work the products may begin
    first, and fill the GPU: then nothing runs beside them.
    """
    older = any(generation < BLACKWELL for generation in generations)
    if not older or variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return []
    return [
        "CUDA_DEVICE_MAX_CONNECTIONS=1, before CUDA starts: else products may hold up the sums that overlap with them"
    ]


def _timed() -> Exchange:
    """Times an all-reduce of BYTES among all ranks: the median, after one that is not counted."""
    device = start_distributed()
    tensor = torch.ones(BYTES // 4, device=device)
    seconds = []
    for _ in range(TIMES + 1):
        # All ranks begin together, so that nobody's wait is timed.
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        tensor.fill_(1)
    return Exchange(BYTES, statistics.median(seconds[1:]))
