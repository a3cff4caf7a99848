"""`distribute`: divides a model for tensor, pipeline and data parallelism."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from autotp.arguments import expect_arguments
from autotp.distributed.mesh import TIMEOUT, expect_timeout, start_distributed, tell_errors, world_size
from autotp.errors import Error, within
from autotp.model_library import library
from autotp.options import Balance, TrainingOptions, expect_choices, expect_options, lists_options
from autotp.runtime.build import expect_ordinary
from autotp.runtime.torch_hooks.install import watched
from autotp.training.pipeline.schedules import ENGINES, Schedule, Training, engine_of
from autotp.training.process_groups import mesh_of
from autotp.training.trainer import OpensModel, Trainer

COMPUTE_DTYPES = (None, torch.bfloat16, torch.float16, torch.float32, torch.float64)


@lists_options
def distribute(
    model: nn.Module | str | os.PathLike[str],
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    ep: int = 1,
    microbatches: int = 1,
    schedule: Schedule = "1F1B",
    interleave: int | None = None,
    example_inputs: Any = None,
    balance: Balance = "batch",
    zero: Literal[0, 1, 2, 3] = 0,
    dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
    loss_scaler: GradScaler | None = None,
    timeout: timedelta = TIMEOUT,
    **options: Unpack[TrainingOptions],
) -> Trainer:
    """Returns a Trainer: this rank's part of `model` on `tp * cp * pp * dp` processes, and the step that trains it.

    Call it on every rank.

    Args:
        model: an ordinary single-device model that returns its loss: the first floating tensor without dimensions, or
            the output of this name. The first rank's parameters are used; a model on `meta` is initialised piece by
            piece, as by `parallelize`. It is left on `meta`: `Trainer` has the parameters. Or a local folder that
            transformers wrote, of which each rank reads only its part.
        tp: tensor parallelism: the number of ranks that share each operator, as in `parallelize`.
        pp: pipeline parallelism: the number of ranks that the model's blocks are divided among.
        dp: data parallelism: the number of replicas, of `tp * cp * pp` ranks each, with its own part of the batch each.
        cp: context parallelism: the number of ranks that sequences are cut over, as in `parallelize`.
        ep: expert parallelism: the number of ranks that experts are cut over: of neighbouring replicas, and where there
            are fewer, of ranks along `cp`. It divides `dp * cp`: these ranks send each other the rows of a mixture of
            experts, and each has some experts whole, or cut by `tp` in width.
        microbatches: the number of parts in which a replica computes its part of the batch.
        schedule: the order in which microbatches go through the pipeline, named as torch's schedules. Under
            "interleaved", "zero-bubble" and "zero-bubble-v" each rank has two stages.
        interleave: the number of stages of each rank under "interleaved": the bubble is so many times smaller
            (Narayanan et al. 2021, section 2.2), and stages send so many times as much.
        example_inputs: as for `parallelize`; tensors are those of one microbatch, [batch/dp/microbatches ...].
        balance: the rows over which a loss takes the means that it multiplies, as a balancing loss of experts does.
            "batch": over the whole batch, as one device does; with microbatches or stages, forward runs once more
            before each step. "microbatch": over each microbatch of each replica, and the loss is the mean of theirs.
        options: as for `parallelize`. Replicas, stages and microbatches
            draw masks of their own, so that "exact" draws those of one device only where `tp` alone is larger than 1.
        zero: the stage of ZeRO (Rajbhandari et al. 2020), which says of which tensors a replica keeps only a part.
            1: the optimizer's state. 2: also the gradients between microbatches (in a pipeline they are summed once a
            step). 3: also the parameters between uses. With 1 to 3, parameters are `DTensor`s over "dp", in rows as
            those of `fully_shard`.
        dtype: the dtype of the parameters, of a model that is read from a folder; None means the checkpoint's.
            torch.float32 beside `compute_dtype=torch.bfloat16` keeps masters in float32.
        compute_dtype: the dtype that forward and backward compute in, such as torch.bfloat16. Parameters, gradients,
            and the sums of gradients over microbatches and replicas stay in the model's own dtype.
        loss_scaler: for float16, a `torch.amp.GradScaler` or a
            `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`. A step scales its loss by it;
            `scaler.step(optimizer); scaler.update()` skips a step on all ranks where a gradient overflows on any.
        timeout: the longest time that a collective waits for other ranks.

    Raises:
        Error: the model, an option or the number of processes cannot be used. `model` is then unchanged. The error is
            the same on every rank.

    Example:
        One process is a world of one. With `tp=2, pp=2, dp=2` the same lines run under
        `torchrun --nproc-per-node 8 train.py`.

        >>> from autotp.models.gpt import GPT, GPTConfig
        >>> model = GPT(GPTConfig(block_size=8, vocab_size=32, n_layer=2, n_head=2, n_embd=8))
        >>> trainer = autotp.distribute(model, tp=1, pp=1, dp=1, microbatches=2)
        >>> tokens = torch.randint(32, (4, 8))  # tokens: [batch seq]
        >>> optimizer = torch.optim.AdamW(autotp.weight_decay_groups(trainer, 0.01), lr=1e-3)
        >>> loss = trainer.step(tokens, labels=tokens)
        >>> optimizer.step()
        >>> bool(trainer.evaluate(tokens, labels=tokens) < loss)
        True
    """

    def run() -> Trainer:
        tell_errors()
        expect_options(distribute, options)
        training = Training(
            outputs="local", summed=True, balance=balance, cp=cp, ep=ep, microbatches=microbatches, schedule=schedule,
            interleave=interleave, zero=zero, compute_dtype=compute_dtype, **options,
        )  # fmt: skip
        # What one process can check alone comes first: `_mesh` connects the processes.
        opened = _expect_model(model, dtype)
        expect_training(training, pp, dp, tp)
        sizes = {"pp": pp, "dp": dp, **({"cp": cp} if cp > 1 else {}), "tp": tp}
        expect_arguments(distribute, timeout=timeout, loss_scaler=loss_scaler)
        expect_timeout(timeout)
        return watched(Trainer(opened, _mesh(sizes, timeout), training, example_inputs, loss_scaler, timeout))

    more, name = f", cp={cp}" * (cp != 1), type(model).__name__ if isinstance(model, nn.Module) else str(model)
    more += f", ep={ep}" * (ep != 1)
    return within(f"distribute({name}, tp={tp}, pp={pp}, dp={dp}{more})", run)


def _expect_model(model: Any, dtype: torch.dtype | None) -> nn.Module | OpensModel:
    """Returns the model, or the function that opens a folder; raises Error if the model cannot be trained."""
    if isinstance(model, str | os.PathLike):
        return library().folder_opener(os.fspath(model), dtype)
    expect_ordinary(model, "distribute the original model once")
    if dtype is not None:
        raise Error("dtype is for a model that is read from a folder", fix="model.to(dtype), before distribute")
    ordinary: nn.Module = model
    return ordinary


def expect_training(training: Training, pp: int, dp: int, tp: int) -> None:
    """Raises Error if `distribute` does not have an option, or a size is no whole number of 1 or more."""
    expect_choices(training, {"schedule": tuple(ENGINES), "zero": (0, 1, 2, 3), "compute_dtype": COMPUTE_DTYPES})
    sizes = {"pp": pp, "dp": dp, "tp": tp, "cp": training.cp, "ep": training.ep, "microbatches": training.microbatches}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise Error(f"{name}={size!r} is not a whole number of 1 or more", fix=f"{name}=2")
    engine_of(training.schedule, training.interleave)
    expect_experts(training, dp)


def expect_experts(training: Training, dp: int) -> None:
    """Raises Error if experts cannot be cut over replicas in this layout, or beside another option."""
    ep, cp = training.ep, training.cp
    of_dp = math.gcd(ep, dp)
    if cp % (ep // of_dp):
        ranks = f"dp={dp}" if cp == 1 else f"dp={dp} times cp={cp}"
        raise Error(
            f"ep={ep} does not divide {ranks}: experts are cut over replicas, and over parts of sequences",
            fix=f"dp={-(-dp // ep) * ep}, with as many times more ranks, or a smaller tp",
            alternative=f"ep={of_dp}",
        )
    if ep == 1:
        return
    if training.capacity is not None and ep != of_dp:
        problem = f"ep={ep} over cp={cp} beside capacity={training.capacity}: parts of a sequence differ in length"
        raise Error(problem, fix="ep that divides dp", alternative="capacity=None")
    if training.zero and ep != of_dp:
        problem = f"ep={ep} over cp={cp} beside zero={training.zero}: its experts are not divided over replicas"
        raise Error(problem, fix="ep that divides dp", alternative="zero=0")
    if training.capacity is None and (training.memory is not None or training.recompute == "full"):
        option = 'recompute="full"' if training.memory is None else f"memory={training.memory!r}"
        problem = f"ep={ep} beside {option}: how many rows come to a rank's experts is known only when they are there"
        fix = "capacity=1.25, with which all sizes are known"
        raise Error(problem, fix=fix, alternative='recompute="selective", without memory=')
    if ENGINES[training.schedule].halves:
        problem = f"ep={ep} beside schedule={training.schedule!r}: in its halves of backward rows do not travel"
        raise Error(problem, fix='schedule="1F1B"')


def _mesh(sizes: dict[str, int], timeout: timedelta) -> DeviceMesh:
    """Returns the mesh of all processes; raises Error if their number is not the product of the sizes."""
    count, world = math.prod(sizes.values()), world_size()
    if count != world:
        cp = "cp * " * ("cp" in sizes)
        raise Error(f"tp * {cp}pp * dp is {count}, and the world has {world}", fix=f"torchrun --nproc-per-node {count}")
    return mesh_of(sizes, start_distributed(timeout), timeout)
