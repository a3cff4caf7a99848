"""estimate: the commands that print `autotp.estimate` and `autotp.search` of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from autotp.costs.hardware import KINDS, LINE, hardware_of
from autotp.diagnostics.verify import Report, verify
from autotp.display.text_table import gib_text
from autotp.options import DEFAULTS
from autotp.tools.cli.flags import PLAIN, Debug, Html, Interleave, Json, ScheduleName, with_model, with_options_of
from autotp.tools.cli.model_argument import ModelArgument, dtype_named, on_meta
from autotp.tools.cli.output import DIFFERENT, WrongUse, arguments_in_use, expect_writable, print_json, show
from autotp.tools.estimation.estimate import estimate
from autotp.tools.estimation.layout import StepLayout
from autotp.tools.estimation.result import Estimate
from autotp.tools.estimation.search import expect_search, search
from autotp.tools.page.save_page import save_page, save_trace
from autotp.tools.page.stamp import stamp_data
from autotp.tools.page.subject import subject_of
from autotp.training.pipeline.schedules import engine_of

Gpu = Annotated[str, typer.Option("--gpu", metavar="KIND|LINE", help=f"{', '.join(KINDS)}, or a line such as '{LINE}'")]
Batch = Annotated[int, typer.Option("--batch", help="The rows of a step, over all replicas")]
Dtype = Annotated[str, typer.Option("--dtype", help="The dtype of computation")]
Compiled = Annotated[bool, typer.Option("--compiled", help="Blocks are compiled: pointwise operators are one kernel")]
Trace = Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Write the schedule for Perfetto, too")]
UNPROVED = ("capacity",)
"""Options of `estimate` that `verify` does not take."""
Sequence = Annotated[int | None, typer.Option("--sequence", help="The length of a sequence; else the longest")]


@with_model("dtype", "evaluation")
@with_options_of(estimate)
def estimate_command(
    gpu: Gpu,
    batch: Batch,
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline ranks")] = 1,
    dp: Annotated[int, typer.Option("--dp", help="Replicas")] = 1,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="The rows of a microbatch")] = 1,
    schedule: Annotated[ScheduleName, typer.Option("--schedule", help="The order of microbatches")] = PLAIN,
    interleave: Interleave = None,
    zero: Annotated[int, typer.Option("--zero", help="The stage of ZeRO")] = 0,
    dtype: Dtype = "bfloat16",
    compiled: Compiled = False,
    sequence: Sequence = None,
    html: Html = None,
    prove: Annotated[bool, typer.Option("--prove", help="Prove the layout with autotp.verify, for the page")] = False,
    trace: Trace = None,
    json: Json = False,
    debug: Debug = False,
    *,
    argument: ModelArgument,
    chosen: dict[str, Any],
) -> None:
    """Prints the predicted seconds, TFLOP/s and memory of a training step. Needs no GPU, weights or ranks.

    Example: autotp estimate file.py:factory --gpu a100-80gb --batch 32 --tp 2 --pp 2 --html plan.html

    The exit status is 1 if it does not fit.
    """
    expect_writable(html, trace)
    mesh: dict[str, Any] = {"pp": pp, "dp": dp, "zero": zero, "schedule": schedule.value, "interleave": interleave}
    if unproved := [name for name in UNPROVED if prove and chosen[name] != getattr(DEFAULTS, name)]:
        raise WrongUse(f"--prove: autotp.verify does not prove layouts with --{unproved[0]}")
    with arguments_in_use():
        device, computed = hardware_of(gpu), dtype_named(dtype)
        # These raise before the model is built, which may take long.
        StepLayout(
            batch=batch, micro_batch=micro_batch, dtype=computed, tp=tp, cp=chosen["cp"], ep=chosen["ep"], **mesh
        )
        engine_of(schedule.value, interleave)
    made, inputs = on_meta(argument), argument.example_inputs()
    expect_room(made, device.memory, tp * (dp if zero == 3 else 1))
    with arguments_in_use():  # A layout that does not fit is an estimate, not an Error.
        est = estimate(
            made, gpu=gpu, batch=batch, tp=tp, micro_batch=micro_batch, dtype=computed, compiled=compiled,
            sequence=sequence, example_inputs=inputs, **mesh, **chosen,
        )  # fmt: skip
    microbatches = est.layout.microbatches
    # It may have been built on the CPU. On meta the proof takes no memory for values.
    proved = {name: value for name, value in chosen.items() if name not in UNPROVED}
    proof = None if not prove else verify(
        made.to("meta"), tp, microbatches=microbatches, example_inputs=inputs, **mesh, **proved
    )  # fmt: skip
    if html is not None:
        save_page(est, html, proof=proof)
    if trace is not None:
        save_trace(est, trace)
    if json:
        print_json({**est.to_dict(), "proof": None if proof is None else proof_data(est, proof)})
    else:
        show(est)
        if proof is not None:
            show(proof)
    if not est.fits:
        raise typer.Exit(DIFFERENT)


def proof_data(est: Estimate, proof: Report) -> dict[str, Any]:
    """Returns a proof as plain data, with what the page's stamp says: what is proved, and what is not."""
    stamp = stamp_data(subject_of(est), proof)
    return {"proved": stamp["proved"], "not_proved": stamp["open"], **proof.to_dict()}


@with_model("dtype", "evaluation")
@with_options_of(search)
def search_command(
    gpus: Annotated[int, typer.Option("--gpus", help="The number of devices")],
    gpu: Gpu,
    batch: Batch,
    memory: Annotated[
        str,
        typer.Option(
            "--memory",
            metavar="BYTES|PERCENT|auto",
            help="What tensors may take of a device: 20GiB, 80%, or all that the estimate leaves them",
        ),
    ] = "auto",
    dtype: Dtype = "bfloat16",
    compiled: Compiled = False,
    sequence: Sequence = None,
    html: Html = None,
    json: Json = False,
    debug: Debug = False,
    *,
    argument: ModelArgument,
    chosen: dict[str, Any],
) -> None:
    """Prints the fastest layouts on a number of devices that fit, and why the obvious ones lost.

    Example: autotp search file.py:factory --gpus 8 --gpu a100-80gb --batch 32

    The exit status is 1 if no layout fits.
    """
    expect_writable(html)
    with arguments_in_use():
        is_part = memory.replace(".", "", 1).isdigit()
        budget: float | str = float(memory) if is_part else memory
        device, tensor_limit = expect_search(gpus, gpu, batch, budget)
    made = on_meta(argument)
    expect_room(made, min(device.memory, tensor_limit), gpus)
    result = search(
        made, gpus=gpus, gpu=gpu, batch=batch, memory=budget, dtype=dtype_named(dtype), compiled=compiled,
        sequence=sequence, example_inputs=argument.example_inputs(), **chosen,
    )  # fmt: skip
    if html is not None:
        save_page(result, html)
    show(result, json)


def expect_room(model: nn.Module, memory: float, ranks: int) -> None:
    """Raises WrongUse if a device has no room for its share of the largest parameter, whatever the layout.

    Args:
        memory: bytes of a device.
        ranks: the devices that share a parameter.
    """
    name, largest = max(
        ((name, p.nbytes) for name, p in model.named_parameters()),
        key=lambda pair: pair[1], default=("", 0),
    )  # fmt: skip
    if largest / ranks > memory:
        share = f"1/{ranks} of `{name}` takes {gib_text(largest / ranks)}"
        raise WrongUse(f"a device of {gib_text(memory)} has no room for its share of one parameter: {share}")
