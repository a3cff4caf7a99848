"""Makes a model parallel: plans it, compares the plan between ranks, and shards the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autotp.compiler import analyse
from autotp.diagnostics.plan import Plan
from autotp.diagnostics.report import report
from autotp.distributed.agreement import agree
from autotp.distributed.cut_tensors.cut_parameter import CutTensor
from autotp.distributed.live_models import models
from autotp.distributed.mesh import Mesh, broadcast_from_first, expect_size
from autotp.errors import Error
from autotp.model_library import library
from autotp.options import Options, expect_choices
from autotp.passes.capture.autocast_regions import ambient
from autotp.passes.capture.example_inputs import example_inputs as find_inputs
from autotp.passes.capture.pytree import signature_of
from autotp.passes.capture.skeleton import expect_copyable, skeleton_of
from autotp.passes.emit.memory.budget import budget_on
from autotp.passes.program.program import CallState
from autotp.runtime.calls.graph_digest import digest, same_graph
from autotp.runtime.calls.graph_entry import GraphEntry, prepare
from autotp.runtime.module import ParallelModule, Part, adopt, classes_of, executable_of
from autotp.runtime.shard_parameters import shard_parameters, was_taken
from autotp.runtime.torch_hooks.gradient_nodes import expect_no_node_hooks
from autotp.runtime.torch_hooks.install import watched
from autotp.runtime.torch_hooks.wrappers import expect_unwrapped
from autotp.runtime.tree import Tree, state_of
from autotp.sharding.layout import Layout

ReadParts = Callable[[Mapping[str, Layout]], Mapping[str, Tensor]]


def build(
    model: nn.Module, place: Mesh, example_inputs: Any, settings: Options, strict: bool, read: ReadParts | None = None
) -> ParallelModule:
    """Makes a model parallel on an existing mesh; `parallelize` explains the options.

    Args:
        example_inputs: as the user gave them.
        read: (layouts by first parameter name) -> this rank's parts of tensors that are not taken from the model.
    """

    # With cp=None the dimension `cp` of a user's own mesh decides.
    world = dist.get_world_size() if dist.is_initialized() else 1
    memory = budget_on(settings.memory, place.device, (place.size, place.cp, world // (place.size * place.cp)))
    settings = replace(settings, cp=place.cp, memory=memory)
    if settings.recompute == "none" and settings.memory is None and library().recomputes(model):
        settings = replace(settings, recompute="full")

    def make() -> tuple[GraphEntry, Mapping[nn.Module, type[Part]]]:
        expect_ordinary(model)
        expect_choices(settings)
        args, kwargs = signature_of(model).by_name(*find_inputs(model, example_inputs))
        call = CallState(autocast=ambient(place.device))
        analysis = analyse(skeleton_of(model), args, kwargs, place.size, settings, call, cp_rank=place.cp_rank)
        _expect_plain(model, analysis.layouts)
        if strict:
            _expect_cut(report(analysis, _name(model)))
        return prepare(analysis, place, settings), classes_of(model)

    def text(made: tuple[GraphEntry, Any]) -> str:
        return f"{digest(made[0].analysis)} {settings} {_flags(model)}"

    # Everything that can fail comes before the first change of a parameter, on every rank.
    replicas = place.replicas
    agreed_on = partial(agree, place, make, lambda made: made[0].facts(text(made), place))
    # Replicas are compared, too: an error in one of them would leave the others waiting in the broadcasts below.
    if replicas is not None:
        agreed_on = partial(agree, replicas, agreed_on, lambda made: [same_graph(text(made), replicas)])
    first, classes = agreed_on()
    layouts = first.analysis.layouts
    parts = shard_parameters(model, layouts, place.rank, place, read(layouts) if read else {})
    adopt(model, classes, parts, Tree(place, settings), layouts)
    if replicas is not None:
        # So far each replica has the values of its own first rank: now all get those of the first replica.
        for tensor in (*model.parameters(), *model.buffers()):
            sent = broadcast_from_first(tensor.data, replicas)
            if tensor.layout is not torch.strided:  # Its elements are in other memory now.
                tensor.data = sent
    executable_of(model).first(first)  # Behind the broadcasts, of wholes: it cuts caches.
    parallel = watched(cast(ParallelModule, model))
    library().watch_calls()  # Last: libraries are asked about this model, too.
    return parallel


def _flags(model: nn.Module) -> str:
    """Returns the parameters' `requires_grad` and the modules' training flags as text: they must agree on all ranks."""
    return f"{[p.requires_grad for p in model.parameters()]} {[m.training for m in model.modules()]}"


def _name(model: Any) -> str:
    return type(model).__name__


def expect_usable(call: str, model: Any, tp: Any, options: Options) -> None:
    """Raises Error if explain, stages or verify (`call`) cannot use a model, a number of ranks or an option."""
    expect_size(tp)
    expect_size(options.cp, "cp")
    expect_choices(options)
    expect_ordinary(model, f"{call} the original model, before autotp.parallelize")


def expect_ordinary(model: Any, remedy: str = "parallelize the original model once") -> None:
    """Raises Error if `model` is not a module, or is parallel already.

    Args:
        remedy: what to do with a parallel model.
    """
    if not isinstance(model, nn.Module):
        raise Error(f"a {_name(model)} is not a torch.nn.Module", fix="pass the model itself")
    expect_copyable(model)
    parallel = set(models())
    if state_of(model) is not None or any(module in parallel for module in model.modules()):
        raise Error("the model is parallel already", fix=remedy)
    parallel_names = [path for path, module in model.named_modules() if state_of(module) is not None]
    # A model without a parallel module may still share a parameter with a parallel model.
    parallel_names += [name for name, p in model.named_parameters() if isinstance(p, CutTensor)]
    if parallel_names:
        raise _shared(parallel_names[0])
    if was_taken(model):
        raise Error(
            "the model was made parallel before, and its parameters are in that parallel model",
            fix="use the model that autotp.parallelize or autotp.distribute returned then",
        )
    if lazy := [name for name, p in model.named_parameters() if is_lazy(p)]:
        raise Error(
            f"`{lazy[0]}` has no size yet: its module takes it from a first call",
            fix="model(...) once, on one device, before autotp.parallelize",
        )
    if subject := library().quantized_weight(model):
        raise Error(
            f"{subject}, and weights that are quantized cannot be cut",
            fix="the model in its own dtype, without quantize_ or quantization_config: each rank holds 1/tp of it",
            alternative="dtype=torch.bfloat16, and LoRA: autotp.parallelize(get_peft_model(model, config))",
        )
    expect_unwrapped(model)
    expect_no_node_hooks(model)
    _expect_forward(model)


def _expect_forward(model: nn.Module) -> None:
    """Raises Error if a call of the model runs nothing: policies and agents may have methods of other names only."""
    methods = type(model).forward, type(model).__call__
    if "forward" in vars(model) or methods != (nn.Module.forward, nn.Module.__call__):
        return
    parts = [name for name, part in model.named_children() if type(part).forward is not nn.Module.forward]
    name = parts[0] if parts else "part"
    raise Error(
        f"the class {_name(model)} has no `forward`, and autotp cuts what a call of the model computes",
        fix=f"model.{name} = autotp.parallelize(model.{name}), for each part that the methods call",
        alternative="`def forward(self, ...)` with what the training loop computes, and a call of the model there",
    )


def _shared(name: str) -> Error:
    return Error(
        f"`{name}` is part of another parallel model",
        fix="one module that holds both models and calls the one that is asked for, parallelized once",
        alternative="models that share nothing: copy.deepcopy",
    )


def _expect_plain(model: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Raises Error for a parameter of a class of its own that would be cut: its part would be taken for the whole."""
    kinds = {name: type(p) for name, p in model.named_parameters()}
    for name in (name for name, layout in layouts.items() if layout.dim is not None):
        if kinds.get(name, nn.Parameter) is not nn.Parameter:
            raise Error(
                f"`{name}` is a {kinds[name].__name__}, and a parameter of a class of its own cannot be cut",
                fix="nn.Parameter(weight.detach())",
            )


def _expect_cut(plan: Plan) -> None:
    whole = [w for w in plan.whole if w.in_block]
    if whole:
        rows = "; ".join(f"{w.name} ({w.reason}, {w.at})" for w in whole)
        raise Error(
            f"strict=True, and weights in a block would stay whole: {rows}",
            fix="strict=False, or autotp.rule(...)",
        )
