"""The one-line API."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.compiler import Choices, Experts, Outputs, analyse
from autotp.diagnostics.plan_text import Plan, report
from autotp.distributed.consistency import CheckInputs, agree_on_graph, digest
from autotp.distributed.live_models import models
from autotp.distributed.mesh import Mesh, expect_size, make_mesh
from autotp.errors import Error, within
from autotp.hf.overrides import checkpoints
from autotp.options import Settings, expect_choices
from autotp.passes.capture.autocast_regions import ambient
from autotp.passes.capture.example_inputs import example_inputs as find_inputs
from autotp.passes.capture.pytree import signature_of
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.recompute import Recompute
from autotp.runtime.graph_entry import Entry, prepare
from autotp.runtime.module import ParallelModule, Part, adopt, classes_of, executable_of
from autotp.runtime.shard_parameters import TAKEN, take
from autotp.runtime.torch_hooks.install import watched
from autotp.runtime.torch_hooks.wrappers import expect_unwrapped
from autotp.runtime.tree import Tree, state_of
from autotp.sharding.layout import Layout

Read = Callable[[Mapping[str, Layout]], Mapping[str, Tensor]]


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
    settings = Settings(outputs, experts, sequence_parallel, without, randomness, check_inputs, recompute)

    def run() -> ParallelModule:
        return on_mesh(model, make_mesh(tp, mesh, device, timeout), example_inputs, settings, strict)

    return within(f"parallelize({_name(model)}{size})", run)


def on_mesh(
    model: nn.Module, place: Mesh, given: Any, settings: Settings, strict: bool, read: Read | None = None
) -> ParallelModule:
    """As `parallelize`, on a mesh that is there.

    Args:
        read: layouts by first parameter name -> this rank's part of tensors that are not taken from the model.
    """

    if settings.recompute == "none" and checkpoints(model):
        settings = replace(settings, recompute="full")

    def make() -> tuple[Entry, Mapping[nn.Module, type[Part]]]:
        expect_ordinary(model)
        expect_choices(settings)
        args, kwargs = signature_of(model).by_name(*find_inputs(model, given))
        analysis = analyse(skeleton_of(model), args, kwargs, place.size, settings, autocast=ambient(place.device))
        if strict:
            _expect_cut(report(analysis, _name(model)))
        return prepare(analysis, place, settings), classes_of(model)

    # Whatever can fail is behind us when the first parameter is touched, on every rank.
    first, classes = agree_on_graph(place, make, lambda made: f"{digest(made[0].analysis)} {settings} {_flags(model)}")
    layouts = first.analysis.layouts
    taken = take(model, layouts, place.rank, place, read(layouts) if read else {})
    adopt(model, classes, taken, Tree(place, settings), layouts)
    executable_of(model).first(first)
    return watched(cast(ParallelModule, model))


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
        choices = Choices(outputs, experts, sequence_parallel, without)
        expect_choices(choices)
        expect_ordinary(model, BEFORE.format("explain"))
        args, kwargs = find_inputs(model, example_inputs)
        return report(analyse(skeleton_of(model), args, kwargs, tp, choices), _name(model))

    return within(f"explain({_name(model)}, tp={tp})", run)


def _flags(model: nn.Module) -> str:
    """Which parameters want a gradient, and what is in training: what backward waits for on all ranks."""
    return f"{[p.requires_grad for p in model.parameters()]} {[m.training for m in model.modules()]}"


def _name(model: Any) -> str:
    return type(model).__name__


BEFORE = "{} the original model, before autotp.parallelize"


def expect_ordinary(model: Any, remedy: str = "parallelize the original model once") -> None:
    """Raises Error where a model is none, or was cut already.

    Args:
        remedy: what to do with one that is parallel already.
    """
    if not isinstance(model, nn.Module):
        raise Error(f"a {_name(model)} is no torch.nn.Module", **{"try": "pass the model itself"})
    parallel = set(models())
    if any(state_of(module) is not None or module in parallel for module in model.modules()):
        raise Error("the model is parallel already", **{"try": remedy})
    if any(hasattr(tensor, TAKEN) for tensor in model.parameters()):
        raise Error(
            "the model was parallelized before, which took its parameters over",
            **{"try": "use what parallelize returned then"},
        )
    expect_unwrapped(model)


def _expect_cut(plan: Plan) -> None:
    whole = [w for w in plan.whole if w.in_block]
    if whole:
        rows = "; ".join(f"{w.name} ({w.reason}, {w.at})" for w in whole)
        raise Error(
            f"strict=True, and weights in a block would stay whole: {rows}",
            **{"try": "strict=False, or autotp.rule(...)"},
        )
