"""distribute: the one call that cuts a model for tensor, pipeline and data parallelism."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.distributed.mesh import TIMEOUT, start, world_size
from autotp.errors import Error, within
from autotp.options import Recompute, expect_choices
from autotp.runtime.build import expect_ordinary
from autotp.runtime.torch_hooks.install import watched
from autotp.training.pipeline_stage import ENGINES, Schedule, Training
from autotp.training.process_groups import mesh_of
from autotp.training.trainer import Trainer

DTYPES = (None, torch.bfloat16, torch.float16, torch.float32, torch.float64)


def distribute(
    model: nn.Module,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    microbatches: int = 1,
    schedule: Schedule = "1F1B",
    example_inputs: Any = None,
    randomness: Literal["fast", "exact"] = "fast",
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    zero: Literal[0, 1, 2, 3] = 0,
    compute_dtype: torch.dtype | None = None,
    loss_scaler: Any = None,
    timeout: timedelta = TIMEOUT,
) -> Trainer:
    """This rank's part of `model`, and the steps that train it on `tp * pp * dp` processes.

    Args:
        model: an ordinary single-device model that returns its loss. Its parameters are taken over, the first rank's
            values; on `meta` they are initialised piece by piece, as by `parallelize`.
        tp: ranks that share each operator, as in `parallelize`.
        pp: ranks that the blocks are divided among.
        dp: replicas of all that, each on a batch of its own.
        microbatches: parts that a replica's batch is computed in.
        schedule: in which order the parts go through the pipeline, as torch's schedules of these names have it;
            "interleaved" and the two that fill the bubble with weights' gradients give each rank two stages.
        example_inputs: as for `parallelize`; a microbatch.
        randomness, sequence_parallel, recompute: as for `parallelize`.
        zero: what each replica holds a part of only (Rajbhandari et al. 2020): the optimizer's state; 2: and gradients
            between microbatches (without a pipeline: torch's schedules reduce them once a step); 3: and parameters
            between their uses. Parameters are `DTensor`s over "dp" then, as `fully_shard` makes them.
        compute_dtype: such as torch.bfloat16: what is computed in; parameters, their gradients and the sums of these
            over microbatches and replicas stay in the dtype that the model has.
        loss_scaler: for float16, a `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`: steps scale their
            loss by it; `scaler.step(optimizer); scaler.update()` skips a step on all ranks where one overflows.
        timeout: how long a collective waits for other ranks.

    Raises:
        Error: bad input of any kind, the same on every rank; nothing of `model` is changed then.
    """
    training = Training(
        outputs="local", sequence_parallel=sequence_parallel, randomness=randomness, recompute=recompute, summed=True,
        microbatches=microbatches, schedule=schedule, zero=zero, compute_dtype=compute_dtype,
    )  # fmt: skip

    def run() -> Trainer:
        expect_ordinary(model, "distribute the original model once")
        expect_choices(training, {"schedule": tuple(ENGINES), "zero": (0, 1, 2, 3), "compute_dtype": DTYPES})
        sizes = {"pp": pp, "dp": dp, "tp": tp}
        for name, size in {**sizes, "microbatches": microbatches}.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise Error(f"{name}={size!r} is not a whole number of 1 or more", fix=f"{name}=2")
        return watched(Trainer(model, _mesh(sizes, timeout), training, example_inputs, loss_scaler, timeout))

    return within(f"distribute({type(model).__name__}, tp={tp}, pp={pp}, dp={dp})", run)


def _mesh(sizes: dict[str, int], timeout: timedelta) -> DeviceMesh:
    """The processes, by axis; each group of them waits no longer than `timeout`."""
    count, world = math.prod(sizes.values()), world_size()
    if count != world:
        raise Error(f"tp * pp * dp is {count}, and the world has {world}", fix=f"torchrun --nproc-per-node {count}")
    return mesh_of(sizes, start(timeout), timeout)
