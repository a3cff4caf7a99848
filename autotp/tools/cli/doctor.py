"""doctor: the command that says what autotp finds where it runs, and what will not work there."""

from __future__ import annotations

import torch.distributed as dist
import typer

from autotp.errors import within
from autotp.tools.cli.flags import Debug, Json
from autotp.tools.cli.output import DIFFERENT, show
from autotp.tools.environment import examine


def doctor(json: Json = False, debug: Debug = False) -> None:
    """Says which versions are here and whether they were tested together, how this process was started, and with what.

    Under torchrun, srun or mpirun it also times an all-reduce: torchrun --nproc-per-node 2 -m autotp doctor

    Example: autotp doctor --json
    """
    try:
        environment = within("doctor", examine)
        first = not dist.is_initialized() or dist.get_rank() == 0
    finally:
        if dist.is_initialized():
            # NCCL warns about a group that is still there when the process ends.
            dist.destroy_process_group()
    if first:
        show(environment, json)
    if environment.problems:
        raise typer.Exit(DIFFERENT)
