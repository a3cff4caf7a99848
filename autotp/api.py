"""`parallelize` and `explain`, the calls that cut a model along one mesh axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from autotp.arguments import expect_arguments
from autotp.compiler import analyse
from autotp.diagnostics.plan import Plan
from autotp.diagnostics.report import report
from autotp.distributed.agreement import agree
from autotp.distributed.mesh import make_mesh, own_kind, tell_errors
from autotp.errors import within
from autotp.options import Options, ParallelOptions, PlanOptions, expect_options, lists_options
from autotp.passes.capture.autocast_regions import ambient
from autotp.passes.capture.example_inputs import example_inputs as find_inputs
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.program.program import CallState
from autotp.runtime.build import build, expect_usable
from autotp.runtime.module import ParallelModule


@lists_options
def parallelize(
    model: nn.Module,
    tp: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    example_inputs: Any = None,
    strict: bool = False,
    cp: int | None = None,
    timeout: timedelta | None = None,
    **options: Unpack[ParallelOptions],
) -> ParallelModule:
    """Makes `model` this rank's part of a tensor-parallel model, and returns it.

    The outputs, the loss and the gradients are those of the original model. The model is changed in place: the same
    object comes back, an instance of its own class. Each parameter is broadcast from the first rank and cut, and the
    whole parameter is freed. A model on `meta` is initialised piece by piece, with its own initialisers. Call it on
    every rank.

    Args:
        model: an ordinary single-device model.
        tp: the number of ranks that weights are cut over; None means all of them. Of more processes than `tp * cp`, so
            many neighbours each hold the model, and are
            replicas of one another. transformers.Trainer and accelerate divide rows among replicas and average their
            gradients; in another loop, replicas with other gradients are an Error before the optimizer's step.
        mesh: a DeviceMesh of one dimension, or with a dimension named "tp", and perhaps one named "cp". Without a mesh,
            the process groups are made from the environment that torchrun sets.
        device: where this rank computes; None means the mesh's device, the GPU of LOCAL_RANK or the only one that
            this process sees, or the CPU.
        example_inputs: keyword arguments (a dict), positional arguments (a tuple), or one tensor. Of the tensors
            ([batch ...]) only shapes and dtypes are read. None means the model's `dummy_inputs`, or inputs that are
            found from the signature of `forward`.
        outputs: "full" gathers outputs that are cut, "local" leaves them cut: `output.to_local()` is this rank's part.
            "auto" gathers them, except in training for an output that comes beside a loss: logits [batch seq vocab].
            "loss" is "auto" for all calls but those in training that return a loss: they compute nothing beside it but
            numbers, so that the logits of a large vocabulary are never in memory. Reading them is an Error then.
        randomness: "exact" draws the dropout masks that one device would draw; "fast" lets each rank draw its own masks
            for values that are cut.
        strict: True raises Error where a weight in a transformer block would stay whole.
        check_inputs: "first" compares the ranks' inputs and random states (by checksum) in the first calls, "always" in
            each call, "never" in none. With "first", packed documents on a CPU are compared in each call, too.
        experts: "width" cuts every expert of a mixture through its width. "expert" gives each rank some experts whole,
            where the number of experts divides by `tp`: a rank computes the rows that chose its experts.
        sequence_parallel: True cuts the values between a block's products (residuals, norms, dropouts) along the
            sequence. Each rank keeps 1/tp of them for backward, and sends a quarter more bytes (three quarters more
            over gloo, which has no reduce-scatter).
        recompute: "full" keeps only the inputs of each numbered block for backward, and computes the block again there;
            "selective" computes the scores of attention again, where attention is not fused; "none" keeps everything.
        memory: the bytes that this rank may use ("20GiB", "24GB", a number), "auto" for what the device has for
            tensors, or "50%" of what a call keeps for backward. Parameters, gradients and the optimizer's states
            (`state_bytes`) are subtracted. For every value that backward needs, the budget then decides: it stays, it
            is computed again, it goes to the host, or it stays in fewer bytes where that is exact. It chooses what
            takes the least time, for the sizes of each call; `model.plan` shows it. In place of `recompute`.
        state_bytes: the bytes that the optimizer's states take on a device for each element of a parameter, which
            `memory` subtracts. None means two numbers in the parameter's dtype, as AdamW has them; 2.03 is for
            `autotp.low_memory` in 8 bits, 0 for SGD, or for states on the host.
        overlap: "batch" computes a batch in two halves that take turns: while the partial sums of one half are added
            over the ranks, the other half computes, in forward and in backward. It divides a batch, or the sequence
            of its one row, in training.
        cp: context parallelism: the number of ranks that sequences are cut over. `tp * cp` ranks hold the model
            together and get the same batch; each computes a part of every sequence. None means the size of the mesh's
            dimension "cp", or 1.
        cp_attention: how attention reads a whole sequence over `cp`. "gather" gathers keys and values; of a
            window, or of packed documents, only those that a rank's queries see. "heads" exchanges heads for the
            sequence (all-to-all): a rank computes some heads for all positions. That is an Error where the heads of
            keys and values do not divide by `tp * cp`. "auto" takes for each attention what sends fewer bytes, and
            gathers where heads do not suffice; the plan shows both.
        without: names of passes to leave out, to find the pass that a difference or a slow step comes from. No pass
            that can be left out changes what is computed; docs/performance.md lists the names.
        cut: what is cut along what, where you choose: `{"lm_head": "whole", "layers.*.mlp": "width"}`.
            A key is a name of a module or a parameter, or a part of one, in which `*` stands for any text. A value is
            an axis as the plan prints it ("heads", "kv_heads", "group", "experts", "width", "vocab"), a dimension,
            "colwise" or "rowwise", or "whole". Of several keys that fit a parameter the last one counts. The plan of a
            model of transformers (`model._tp_plan`) may stand here, too. The rest is chosen as without `cut`.
        capacity: None computes all rows that chose an expert of a mixture. With a factor, an expert computes at most
            `ceil(capacity * tokens * top_k / experts)` rows of a rank in a call, the first ones in the batch; for the
            other rows its result is zero. All sizes are known then, and the host reads no counts.
        timeout: how long a collective waits for other ranks. None means the timeout of the default process group, or of
            `mesh`, or ten minutes where there is neither.

    Raises:
        Error: the model, an option or the launch cannot be used. `model` is then unchanged. The error is the same on
            every rank.

    Example:
        One process is one rank. With `tp=8` the same lines run under `torchrun --nproc-per-node 8 train.py`.

        >>> model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        >>> model = autotp.parallelize(model, tp=1, example_inputs=torch.ones(2, 4))
        >>> model(torch.ones(3, 4)).shape
        torch.Size([3, 4])
    """
    size = "".join(f", {name}={n}" for name, n in {"tp": tp, "cp": cp}.items() if n is not None)

    def run() -> ParallelModule:
        tell_errors()
        expect_options(parallelize, options)
        settings = Options(**options)
        place = make_mesh(tp, mesh, device, timeout, cp)
        agree(place, lambda: expect_arguments(parallelize, strict=strict))
        return build(model, place, example_inputs, settings, strict)

    return within(f"parallelize({type(model).__name__}{size})", run)


@lists_options
def explain(
    model: nn.Module,
    tp: int,
    *,
    example_inputs: Any = None,
    cp: int = 1,
    expect: Mapping[str, int] | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Returns the plan of `parallelize(model, tp)`: what would be cut, what it would cost, and what would stay whole.

    It runs on any machine, without processes. The model may be on `meta`, and is not changed.

    Args:
        model: an ordinary single-device model.
        tp: the number of ranks.
        example_inputs, cp: as for `parallelize`.
        options: as for `parallelize`.
        expect: the most collectives of a block, such as `{"all_reduce": 2, "all_gather": 0}`: see `Plan.expect`.

    Raises:
        Error: `parallelize` could not use the model or an option either; or a block sends more than `expect` allows.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        >>> plan = autotp.explain(model, 2, example_inputs=torch.ones(2, 4))
        >>> for cut in plan.cuts:
        ...     print(cut.name, cut.layout)
        0.weight [16@tp, 4]
        0.bias [16@tp]
        2.weight [4, 16@tp]
    """

    def run() -> Plan:
        tell_errors()
        expect_options(explain, options)
        settings = Options(cp=cp, **options)
        expect_usable("explain", model, tp, settings)
        expect_arguments(explain, expect=expect)
        args, kwargs = find_inputs(model, example_inputs)
        # Autocast of the device on which `parallelize` would capture.
        call = CallState(autocast=ambient(torch.device(own_kind())))
        program = analyse(skeleton_of(model), args, kwargs, tp, settings, call)
        plan = replace(report(program, type(model).__name__), source=program)
        plan.expect(expect or {})
        return plan

    return within(f"explain({type(model).__name__}, tp={tp}{f', cp={cp}' * (cp != 1)})", run)
