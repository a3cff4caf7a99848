"""The environment variables that torchrun, srun and mpirun give to a rank."""

from __future__ import annotations

import os
import re
import tempfile

NAMES = re.compile("^(RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC_|SLURM_|OMPI_|PMIX?_|MPI_)")
JOB = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "a1"}
"""What a shell in an allocation has, with or without a step."""


def of_srun(rank: int, size: int, per_node: str = "2") -> dict[str, str]:
    step = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_TASKS_PER_NODE": per_node}
    return {**JOB, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2)}


def of_open_mpi(rank: int, size: int, local_size: int = 2) -> dict[str, str]:
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank % 2, "LOCAL_SIZE": local_size}
    variables = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}
    return {**variables, "PMIX_NAMESPACE": "prterun-host-1234@1"}


def of_hydra(rank: int, size: int) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALRANKID": str(rank % 2), "MPI_LOCALNRANKS": "2"}


def of_torchrun(rank: int, size: int) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def put(variables: dict[str, str]) -> None:
    """Gives this process the variables of a launcher, and takes those of all others away."""
    for name in [name for name in os.environ if NAMES.match(name)]:
        del os.environ[name]
    os.environ.update(variables)
    tempfile.tempdir = None  # It is found again, in TMPDIR.


LAUNCHERS = {"torchrun": of_torchrun, "srun": of_srun, "mpirun": of_open_mpi}
