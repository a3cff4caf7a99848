"""The one-line API."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.compiler import analyse
from autotp.diagnostics.plan_text import Plan, report
from autotp.distributed.mesh import expect_size, make_mesh
from autotp.errors import within
from autotp.options import CheckInputs, Experts, Options, Outputs, Recompute, expect_choices
from autotp.passes.capture.example_inputs import example_inputs as find_inputs
from autotp.passes.capture.skeleton import skeleton_of
from autotp.runtime.build import BEFORE, build, expect_ordinary
from autotp.runtime.module import ParallelModule


def parallelize(
    model: nn.Module,
    tp: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    example_inputs: Any = None,
    outputs: Outputs = "auto",
    randomness: Literal["fast", "exact"] = "fast",
    strict: bool = False,
    check_inputs: CheckInputs = "first",
    experts: Experts = "width",
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    without: Collection[str] = (),
    timeout: timedelta | None = None,
) -> ParallelModule:
    """This rank's part of `model`, which computes the same outputs, loss and gradients as `model` did.

    The parameters are taken over: each is broadcast from the first rank, cut, and the full one freed; `model` stays
    behind on `meta`. A model on `meta` is initialised piece by piece with its own initialisers.

    Args:
        model: an ordinary single-device model.
        tp: how many ranks; None means all of them.
        mesh: a DeviceMesh of one dimension or with one named "tp". Without it the process groups are made from
            torchrun's environment.
        device: where this rank computes; None is the mesh's, or the GPU of LOCAL_RANK, or the CPU.
        example_inputs: keyword arguments (a dict), positional ones (a tuple), or one tensor; of tensors only shapes
            and dtypes are read. None: the model's `dummy_inputs`, or found from its signature.
        outputs: "full" gathers cut outputs, "local" leaves them cut, "auto" leaves them cut in training beside a loss.
        randomness: "exact" draws the dropout masks that one device would, "fast" the rank's own masks for cut values.
        strict: True raises where a weight in a transformer block would stay whole.
        check_inputs: when ranks compare checksums of their inputs and random states.
        experts: "width" cuts every expert of a mixture; "expert" gives each rank as many whole ones where their number
            divides by `tp`: a rank works on the rows that chose its own, and waits for the device to know how many.
        sequence_parallel: True cuts what lies between a block's products (residuals, norms, dropouts) along the
            sequence: ranks keep 1/tp of it for backward, and send a quarter more (over NCCL), as what is gathered is
            gathered again in backward, beside work. gloo has no reduce-scatter and sends three quarters more.
        recompute: "full" keeps of each numbered block its inputs for backward, and computes it again there;
            "selective" all but the scores of attentions that are not fused; "none" everything.
        without: passes that are left out, to find the one that a difference or a slow step comes from. None changes
            what is computed; docs/performance.md has their names.
        timeout: how long a collective waits for other ranks; None is what the default process group was started with,
            or ten minutes where there is none yet. Of a mesh that is given None is its own.

    Raises:
        Error: bad input of any kind; nothing of `model` is changed then.
    """
    size = "" if tp is None else f", tp={tp}"
    settings = Options(outputs, experts, sequence_parallel, without, randomness, check_inputs, recompute)

    def run() -> ParallelModule:
        return build(model, make_mesh(tp, mesh, device, timeout), example_inputs, settings, strict)

    return within(f"parallelize({type(model).__name__}{size})", run)


def explain(
    model: nn.Module,
    tp: int,
    *,
    example_inputs: Any = None,
    outputs: Outputs = "auto",
    experts: Experts = "width",
    sequence_parallel: bool = False,
    without: Collection[str] = (),
) -> Plan:
    """What `parallelize(model, tp)` would cut, what it would cost and what would stay whole; `model` is not touched.

    Runs on any machine, without processes; the model may be on `meta`. Arguments as for `parallelize`.
    """

    def run() -> Plan:
        expect_size(tp)
        choices = Options(outputs, experts, sequence_parallel, without)
        expect_choices(choices)
        expect_ordinary(model, BEFORE.format("explain"))
        args, kwargs = find_inputs(model, example_inputs)
        return report(analyse(skeleton_of(model), args, kwargs, tp, choices), type(model).__name__)

    return within(f"explain({type(model).__name__}, tp={tp})", run)
