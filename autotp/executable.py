"""A call of a module of a parallel model: it finds its graph, or captures one, and runs it.

A module has one graph for each kind of call that it has met. A call hands its graph the parameters and the tensors
among the arguments, and puts the outputs back into the structure that the model returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autotp.agree import CheckInputs, agree_on_call, agree_on_graph, digest
from autotp.eager import alone
from autotp.entry import Entry, prepare
from autotp.errors import Error, within
from autotp.fsdp import dtypes, expect_whole
from autotp.layout import Layout
from autotp.mesh import Mesh
from autotp.outputs import mark, marked
from autotp.passes.own import BlockCall, Place, places, value_at, works
from autotp.passes.recompute import Recompute, Recomputed
from autotp.regions import Autocast, ambient
from autotp.settings import Settings, expect_choices
from autotp.sharded import Sharded
from autotp.structure import Signature, flatten, signature_of, states
from autotp.transform import analyse

CHECKED_CALLS = 2
"""How many calls of each graph `check_inputs="first"` compares."""

Key = tuple[Any, ...]


class Called(NamedTuple):
    """One call: its arguments flattened, the tensors among them, and what autocast is around it."""

    leaves: list[Any]
    spec: Any
    tensors: list[Tensor]
    autocast: Autocast


@dataclass
class Tree:
    """What all modules of a parallel model share.

    Attributes:
        mesh: the tensor-parallel axis and this rank's place on it.
        settings: what the user chose.
        version: counts what is set on the modules.
        compiles: options of torch.compile for what blocks compute, once they are compiled.
    """

    mesh: Mesh
    settings: Settings
    version: int = 0
    compiles: Mapping[str, Any] | None = None

    def set_recompute(self, how: Recompute) -> None:
        """Chooses what backward computes again, from the next call on."""
        settings = replace(self.settings, recompute=how)
        expect_choices(settings)
        self.settings = settings

    @contextmanager
    def outputs_stay_cut(self) -> Iterator[None]:
        """A region in which outputs are not gathered, as with `outputs="local"`."""
        before = self.settings
        self.settings = replace(before, outputs="local")
        try:
            yield
        finally:
            self.settings = before

    def __deepcopy__(self, memo: dict[int, Any]) -> Tree:
        memo[id(self)] = new = replace(self)  # Mesh and settings are values; the process group is the same.
        return new


@dataclass
class Executable:
    """The graphs of one module of a parallel model, and a call of it.

    Attributes:
        module: what is called.
        tree: what it shares with the other modules of its model.
        held_by: how a module's own parameters are held.
        calls: told each module that a graph calls.
        original: makes a copy on meta of the model that the module was, of its parameters and buffers by name.
        source: of a copied module: where the graphs come from that it begins with.
        entries: each graph with the key of its calls.
    """

    module: nn.Module
    tree: Tree
    held_by: Callable[[nn.Module], Mapping[str, Layout]]
    calls: Callable[[nn.Module], None]
    original: Callable[[nn.Module, Mapping[str, Tensor]], nn.Module]
    source: Executable | None = None
    entries: list[tuple[Key, Entry]] = field(default_factory=list)
    signature: Signature = field(init=False)
    first_names: dict[str, str] = field(init=False)
    places: dict[str, Place] = field(init=False)
    modules: list[nn.Module] = field(init=False)
    layouts: dict[str, Layout] = field(init=False)
    whole: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.signature = signature_of(self.module)
        self.first_names, self.places = places(self.module)
        self.modules = list(self.module.modules())
        held = {name: self.held_by(module).get(key) for name, (module, key) in self.places.items()}
        self.layouts = {name: layout for name, layout in held.items() if layout is not None}
        self.whole = {name: self._on_meta(name, tensor) for name, tensor in self.tensors().items()}
        if self.source is not None:  # Graphs never change: a copy uses the same, on its own parameters.
            for key, entry in self.source.entries:
                self.keep(key, entry)
            self.source = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Executable:
        return self  # `executable_of` makes the copied module's own, from this.

    @property
    def name(self) -> str:
        """The class of the module."""
        return type(self.module).__name__

    @property
    def mesh(self) -> Mesh:
        """The tensor-parallel axis and this rank's place on it."""
        return self.tree.mesh

    # ---- a call

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns for these arguments, which must be the same on all ranks of the axis."""
        args, kwargs = self.signature.by_name(args, kwargs)
        leaves, spec = flatten((args, kwargs))
        leaves = [marked(leaf) for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        called = Called(leaves, spec, tensors, ambient(self.mesh.device))
        held = self.tensors()
        key = self._key(leaves, spec, called.autocast, held)
        entry = self._find(key, tensors)
        if not torch.compiler.is_compiling():
            entry = self._agreed(entry, called, key[2:])
        elif entry is None:
            _refuse_capture(self.name)
        assert entry is not None  # Refused above otherwise.
        with called.autocast.off():
            found = entry.module(
                *(expect_whole(x, held[x]) if isinstance(x, str) else x for x in entry.operands),
                *(t.part if isinstance(t, Sharded) else t for t in tensors),
            )
        return self._returned(entry, found, states((args, kwargs)))

    def _returned(self, entry: Entry, found: Sequence[Any], changed: Sequence[Any]) -> Any:
        """The outputs as the model returns them, each tensor with a note of how it is held.

        Buffers are updated, and so are the arguments that the model changes; what they have of a cut is `Sharded`.
        """
        with torch.no_grad():
            # Backwards: a buffer that was written to and then set anew comes twice, what it was set to first.
            for name, value in reversed(list(zip(entry.updated, found[len(entry.held) :], strict=True))):
                value_at(self.places[name]).copy_(value)
        for value, held in zip(found, entry.held, strict=False):
            mark(value, held)
        captured = entry.analysis.captured
        return captured.outputs([marked(x) if i in captured.kept else x for i, x in enumerate(found)], changed)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers as they are now."""
        return {name: value_at(place) for name, place in self.places.items()}

    def _key(self, leaves: Sequence[Any], spec: Any, autocast: Autocast, held: Mapping[str, Tensor]) -> Key:
        """Everything about a call but its tensors' sizes and values."""
        kinds = tuple(_kind(leaf) if isinstance(leaf, Tensor) else plain(leaf) for leaf in leaves)
        modes = tuple(module.training for module in self.modules)
        settings = self.tree.settings
        return spec, kinds, modes, dtypes(self.module, held), autocast.dtype, settings.outputs, settings.recompute

    def _find(self, key: Key, tensors: Sequence[Tensor]) -> Entry | None:
        for known, entry in self.entries:
            if known == key and entry.analysis.captured.fits([t.shape for t in tensors]):
                return entry
        return None

    def _agreed(self, entry: Entry | None, called: Called, mode: Key) -> Entry:
        """The graph for a call, captured now if there is none, once the ranks agree on it.

        Args:
            mode: what of its key is not about the arguments.

        Raises:
            Error: the ranks were called differently, or the model cannot be captured; on every rank.
        """
        check = self.tree.settings.check_inputs
        if entry is not None and (check == "never" or (check == "first" and entry.calls >= CHECKED_CALLS)):
            return entry
        return within(f"{self.name}.forward", lambda: self._checked(entry, called, mode, check))

    def _checked(self, entry: Entry | None, called: Called, mode: Key, check: CheckInputs) -> Entry:
        if entry is None:
            if check != "never":
                agree_on_call(self.mesh, called.leaves, mode, False)
            entry = self._capture(called)
        if check != "never":
            agree_on_call(self.mesh, called.leaves, mode, entry.random)
        entry.calls += 1
        return entry

    def _capture(self, called: Called) -> Entry:
        """A further graph, for a signature not met before, on the parameters as they are held."""
        mesh, settings = self.mesh, self.tree.settings
        given = {i: t.held for i, t in enumerate(called.tensors) if isinstance(t, Sharded)}

        def make() -> Entry:
            args, kwargs = pytree.tree_unflatten(called.leaves, called.spec)
            skeleton = self.original(self.module, self._whole())
            analysis = analyse(skeleton, args, kwargs, mesh.size, settings, self.layouts, called.autocast, given)
            return prepare(analysis, mesh, settings)

        with alone():
            entry = agree_on_graph(mesh, make, lambda made: digest(made.analysis))
        return self.keep(self._key(called.leaves, called.spec, called.autocast, self.tensors()), entry)

    def _on_meta(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter or buffer as the original has it."""
        shape = self.layouts[name].shape if name in self.layouts else tensor.shape
        same = tuple(shape) == tuple(tensor.shape) and not isinstance(tensor, DTensor)
        empty = _empty_like(tensor) if same else torch.empty(shape, dtype=tensor.dtype, device="meta")
        return nn.Parameter(empty, tensor.requires_grad) if name in self.layouts else empty

    def _whole(self) -> dict[str, Tensor]:
        """Each parameter and buffer as the original has it, in the dtype that is computed in now."""
        used = dtypes(self.module, self.tensors())
        whole = zip(self.whole.items(), used, strict=True)
        return {name: tensor if tensor.dtype == dtype else _as(tensor, dtype) for (name, tensor), dtype in whole}

    def first(self, entry: Entry) -> None:
        """Takes the graph that was made with the model."""
        captured = entry.analysis.captured
        self.keep(self._key(captured.leaves, captured.spec, captured.autocast, self.tensors()), entry)

    def keep(self, key: Key, made: Entry) -> Entry:
        """A graph for calls to come, whose blocks read their parameters in this model."""
        parts = dict(self.module.named_modules(remove_duplicate=False))
        entry = made.on(self.places, lambda block: parts.get(block) if block else None)
        for part in entry.module.children():
            if isinstance(part, BlockCall):
                self.calls(part.owner[0])
        if self.tree.compiles is not None:
            _compile_blocks(entry.module, self.tree.compiles)
        self.entries.append((key, entry))
        return entry

    # ---- what a user reads

    @property
    def code(self) -> str:
        """What this rank computes in a call as the first was, as Python: each block once, however deep the model."""
        first = self.entries[0][1].module
        parts = [
            (f"{name}.{path}".rstrip("."), part)
            for name, work in works(first).items()
            for path, part in work.named_modules()
        ]
        graphs = [("", first), *((name, part) for name, part in parts if isinstance(part, fx.GraphModule))]
        return "\n".join(f"# {name}\n{part.code}" for name, part in graphs)

    def compile_blocks(self, **options: Any) -> None:
        """Compiles what a block computes, once for all blocks that compute alike, in the graphs there are and to come.

        `torch.compile(model)` takes longer the deeper a model is, this does not.

        Args:
            options: as for `torch.compile`.
        """
        if not self.tree.settings.optional("outline"):
            raise Error("compile_blocks: without=('outline',) left no blocks", **{"try": "torch.compile(model)"})
        self.tree.compiles = options
        for _, entry in self.entries:
            _compile_blocks(entry.module, options)

    def layout_of(self, name: str) -> Layout | None:
        """How the parameter of this name is held, under any of its names; None for a buffer."""
        return self.layouts.get(self.first_names.get(name, name))


def _compile_blocks(module: fx.GraphModule, options: Mapping[str, Any]) -> None:
    for part in works(module).values():  # What is computed again is the compiled part: each has code of its own.
        (part.inner if isinstance(part, Recomputed) else part).compile(**options)


def _empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    new = _empty_like(tensor, dtype)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _kind(tensor: Tensor) -> Any:
    """What of a tensor a graph is made for, but its sizes."""
    return tensor.dim(), tensor.dtype, tensor.cut if isinstance(tensor, Sharded) else None


def plain(leaf: Any) -> Any:
    """A plain argument as part of a key, in which undefined numbers are the same, and 1, 1.0 and True are not."""
    return type(leaf), "nan" if isinstance(leaf, float) and leaf != leaf else leaf


def _refuse_capture(name: str) -> None:
    raise Error(
        f"{name}.forward: the first call of its kind is inside torch.compile, where autotp cannot capture a graph",
        **{"try": "make one such call (same arguments, mode and dtypes) before the compiled one"},
    )


# Dynamo runs it while it traces, so that the user sees this error and not one of Dynamo's.
_refuse_capture.__dict__.update(_dynamo_marked_constant=True)
