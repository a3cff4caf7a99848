"""run: one rank of a tensor-parallel model, as an nn.Module with the original parameter names.

It holds local shards, and one graph for each input signature it has met. A call finds its graph, hands it the
parameters and the tensors among the arguments, and puts the outputs back into the structure the model returns.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autotp.agree import CheckInputs, agree_on_graph, agree_on_inputs, draws
from autotp.errors import Error
from autotp.layout import Layout
from autotp.mesh import Mesh
from autotp.passes.bind import bind
from autotp.passes.capture import Captured
from autotp.report import Plan, report
from autotp.transform import Analysis, Outputs, analyse, rank_graph

CHECKED_CALLS = 2
"""How many calls of each graph `check_inputs="first"` compares."""


@dataclass(frozen=True)
class Settings:
    """What `parallelize` was asked for beyond the size."""

    outputs: Outputs = "auto"
    randomness: Literal["fast", "exact"] = "fast"
    check_inputs: CheckInputs = "first"


@dataclass
class Entry:
    """A graph that is ready to run, and the calls it is for.

    Attributes:
        key: everything about a call but its tensors' sizes and values.
        captured: for the guard on the sizes, and the structure of the outputs.
        module: the bound graph.
        sources: for each placeholder before the inputs: ("parameter" | "buffer", name) or a constant.
        updated: buffers that the graph returns new values of, last.
        calls: how many there were.
    """

    key: tuple[Any, ...]
    captured: Captured
    module: fx.GraphModule
    sources: list[Any]
    updated: list[str]
    analysis: Analysis
    random: bool
    calls: int = 0


class Shell(nn.Module):
    """A submodule of a parallel model: it holds parameters under their names, the graph does the work."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise Error(
            "a submodule of a parallel model cannot be called by itself: its work is part of the model's graph",
            **{"try": "call the whole model, or parallelize the submodule"},
        )


class ParallelModule(nn.Module):
    """One rank of a tensor-parallel model. Made by `autotp.parallelize`.

    Parameters and buffers have the names of the original model; parameters that are cut hold this rank's part
    (`layouts` tells which). Plain attributes and methods of the model (`.config`, `.generate`) are reached through it.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        analysis: Analysis,
        tensors: Mapping[str, Tensor],
        mesh: Mesh,
        settings: Settings,
    ) -> None:
        super().__init__()
        self.__dict__.update(_skeleton=skeleton, _mesh=mesh, _settings=settings, _entries=[])
        self.__dict__["layouts"] = dict(analysis.layouts)
        self.__dict__["_parameters_at"], self.__dict__["_buffers_at"] = mirror(skeleton, self, tensors)
        self.__dict__["_modes"] = [(name, module) for name, module in self.named_modules()]
        self._add(analysis, self._key(analysis.captured.leaves, analysis.captured.spec))

    # ---- what a user reads

    @property
    def plan(self) -> Plan:
        """What is cut, what it costs, and what stayed whole."""
        return report(self._entries[0].analysis, type(self._skeleton).__name__)

    @property
    def mesh(self) -> Mesh:
        """The tensor-parallel axis and this rank's place on it."""
        return self.__dict__["_mesh"]

    def layout_of(self, name: str) -> Layout | None:
        """How the parameter of this name is held, under any of its names; None for a buffer."""
        parameter = dict(self.named_parameters(remove_duplicate=False)).get(name)
        first = next((n for n, p in self.named_parameters() if p is parameter), None)
        return self.layouts[first] if first is not None else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            skeleton = self.__dict__.get("_skeleton")
            if skeleton is None or name.startswith("__"):
                raise
            return _borrowed(self, skeleton, name)

    # ---- a call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments, which must be the same on all ranks of the axis."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        entry = self._find(self._key(leaves, spec), tensors)
        if entry is None:
            entry = self._capture(args, kwargs, leaves, spec)
        if not torch.compiler.is_compiling():
            agree_on_inputs(self.mesh, self._settings.check_inputs, entry.calls < CHECKED_CALLS, tensors, entry.random)
            entry.calls += 1
        found = entry.module(*self._values(entry), *tensors)
        for name, value in zip(entry.updated, found[len(found) - len(entry.updated) :], strict=True):
            self._buffers_at[name].copy_(value)
        return entry.captured.outputs(found)

    def _values(self, entry: Entry) -> list[Tensor]:
        """The placeholders before the inputs. Read at each call: functional_call swaps them."""
        values = []
        for kind, source in entry.sources:
            if kind == "constant":
                values.append(source)
            else:
                module, name = source
                values.append(getattr(module, name))
        return values

    def _key(self, leaves: Sequence[Any], spec: Any) -> tuple[Any, ...]:
        kinds = tuple((leaf.dim(), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        modes = tuple(module.training for _, module in self._modes)
        dtypes = tuple(getattr(module, name).dtype for module, name in self._parameters_at.values())
        device = self.mesh.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return spec, kinds, modes, dtypes, autocast

    def _find(self, key: tuple[Any, ...], tensors: Sequence[Tensor]) -> Entry | None:
        for entry in self._entries:
            if entry.key == key and entry.captured.fits([t.shape for t in tensors]):
                return entry
        return None

    def _capture(self, args: Any, kwargs: Any, leaves: Sequence[Any], spec: Any) -> Entry:
        """A further graph, for a signature not met before, on the parameters as they are held."""
        skeleton = self._skeleton
        _follow(skeleton, self)
        analysis = analyse(skeleton, args, kwargs, self.mesh.size, self._settings.outputs, self.layouts)
        agree_on_graph(self.mesh, analysis)
        return self._add(analysis, self._key(leaves, spec))

    def _add(self, analysis: Analysis, key: tuple[Any, ...]) -> Entry:
        graph = rank_graph(analysis, self.mesh.rank, self._settings.randomness)
        bound = bind(graph, self.mesh.device, {self.mesh.axis: self.mesh.group})
        module = fx.GraphModule(nn.Module(), bound)
        sources = list(self._sources(analysis))
        updated = [analysis.captured.buffers[name] for name in analysis.updated]
        entry = Entry(key, analysis.captured, module, sources, updated, analysis, draws(bound))
        self._entries.append(entry)
        return entry

    def _sources(self, analysis: Analysis) -> Iterator[tuple[str, Any]]:
        captured = analysis.captured
        for node in analysis.graph.nodes:
            if node.op == "placeholder" and node.name in captured.parameters:
                yield "parameter", self._parameters_at[captured.parameters[node.name]]
            elif node.op == "placeholder" and node.name in captured.buffers:
                yield "buffer", self._buffers_at[captured.buffers[node.name]]
            elif node.op == "placeholder" and node.name in captured.constants:
                yield "constant", captured.constants[node.name].to(self.mesh.device)


Place = tuple[nn.Module, str]


def mirror(skeleton: nn.Module, root: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Place], dict[str, Place]]:
    """Builds the skeleton's tree of modules below `root`, holding `tensors`; where each parameter and buffer lies.

    Args:
        tensors: first name -> local tensor, for parameters and buffers.
    """
    shells: dict[str, nn.Module] = {"": root}
    root.training = skeleton.training
    for name, module in skeleton.named_modules(remove_duplicate=False):
        if name:
            above, _, own = name.rpartition(".")
            shells[name] = shells[above]._modules.setdefault(own, Shell())  # type: ignore[assignment]
            shells[name].training = module.training
    made: dict[int, Tensor] = {}
    parameters, buffers = {}, {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        above, _, own = name.rpartition(".")
        local = made.setdefault(id(parameter), nn.Parameter(tensors[name], parameter.requires_grad) if id(parameter) not in made else parameter)
        shells[above].register_parameter(own, local)
        parameters[name] = (shells[above], own)
    for name, buffer in skeleton.named_buffers(remove_duplicate=False):
        above, _, own = name.rpartition(".")
        keep = own not in skeleton.get_submodule(above)._non_persistent_buffers_set
        shells[above].register_buffer(own, made.setdefault(id(buffer), tensors.get(name)), persistent=keep)
        buffers[name] = (shells[above], own)
    return parameters, buffers


def _borrowed(module: ParallelModule, skeleton: nn.Module, name: str) -> Any:
    """A plain attribute of the model, or a method or property of its class, bound to the parallel model."""
    if name in skeleton.__dict__:
        return skeleton.__dict__[name]
    found = getattr(type(skeleton), name, None)
    if isinstance(found, types.FunctionType):
        return types.MethodType(found, module)
    if isinstance(found, property) and found.fget is not None:
        return found.fget(module)
    if found is not None:
        return found
    raise AttributeError(f"'{type(skeleton).__name__}' (parallel) has no attribute '{name}'")


def _follow(skeleton: nn.Module, module: ParallelModule) -> None:
    """Gives the skeleton the train/eval flags and the dtypes that the parallel model has now."""
    theirs = dict(skeleton.named_modules(remove_duplicate=False))
    for name, mine in module.named_modules(remove_duplicate=False):
        theirs[name].training = mine.training
    for name, parameter in skeleton.named_parameters():
        own = getattr(*module._parameters_at[name])
        parameter.data = parameter.data.to(own.dtype)
    for name, buffer in skeleton.named_buffers():
        buffer.data = buffer.data.to(getattr(*module._buffers_at[name]).dtype)
