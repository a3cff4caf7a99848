"""run: one rank of a tensor-parallel model, as an nn.Module with the original parameter names.

It holds local shards, and one graph for each input signature it has met. A call finds its graph, hands it the
parameters and the tensors among the arguments, and puts the outputs back into the structure the model returns.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autotp.agree import CheckInputs, agree_on_call, agree_on_graph, digest
from autotp.eager import alone
from autotp.entry import Entry, prepare
from autotp.errors import Error, within
from autotp.fsdp import dtypes, expect_whole
from autotp.layout import Layout
from autotp.mesh import Mesh
from autotp.outputs import mark, marked
from autotp.passes.own import BlockCall, value_at, works
from autotp.passes.recompute import Recompute, Recomputed
from autotp.regions import Autocast, ambient
from autotp.report import Plan, report
from autotp.settings import Settings, expect_choices
from autotp.sharded import Sharded
from autotp.shells import Leaf, Shell, mirror, places
from autotp.structure import flatten, signature_of, states
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


class Running(Shell):
    """A module of a parallel model with the graphs it has met calls for: the whole, or a part that is called by itself.

    NOTE [A part by itself]
    The whole's graphs contain the work of its parts. A part that is called by itself (an encoder, before its decoder
    generates) captures graphs of its own, in which its parameters are held as they are.
    """

    def __init__(self, original: nn.Module, mesh: Mesh, settings: Settings) -> None:
        super().__init__(original)
        self.__dict__.update(_mesh=mesh, _settings=settings)

    def _begin(self) -> None:
        """What a first call needs to know: signature, where parameters lie and how they are held."""
        self.__dict__["_signature"] = signature_of(self._original)
        self.__dict__["_first_names"], self.__dict__["_places"] = places(self)
        self.__dict__["_modules_in_order"] = list(self.modules())
        held = {name: getattr(module, "_held", {}).get(key) for name, (module, key) in self._places.items()}
        self.__dict__["layouts"] = {name: layout for name, layout in held.items() if layout is not None}
        self.__dict__["_entries"] = []

    @property
    def mesh(self) -> Mesh:
        """The tensor-parallel axis and this rank's place on it."""
        return self.__dict__["_mesh"]

    @contextmanager
    def outputs_stay_cut(self) -> Iterator[None]:
        """A region in which outputs are not gathered, as with `outputs="local"`."""
        before = self._settings
        self.__dict__["_settings"] = replace(before, outputs="local")
        try:
            yield
        finally:
            self.__dict__["_settings"] = before

    # ---- a call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments, which must be the same on all ranks of the axis."""
        if args and isinstance(args[0], BlockCall):
            return args[0].run(args[1:])
        if "_entries" not in vars(self):
            self._begin()
        args, kwargs = self._signature.by_name(args, kwargs)
        leaves, spec = flatten((args, kwargs))
        leaves = [marked(leaf) for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        called = Called(leaves, spec, tensors, ambient(self.mesh.device))
        held = self._tensors()
        key = self._key(leaves, spec, called.autocast, held)
        entry = self._find(key, tensors)
        if not torch.compiler.is_compiling():
            entry = self._agreed(entry, called, key[2:])
        elif entry is None:
            _refuse_capture(type(self._original).__name__)
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
                getattr(*self._places[name]).copy_(value)
        for value, held in zip(found, entry.held, strict=False):
            mark(value, held)
        captured = entry.analysis.captured
        return captured.outputs([marked(x) if i in captured.kept else x for i, x in enumerate(found)], changed)

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers as they are now."""
        return {name: value_at(place) for name, place in self._places.items()}

    def _key(self, leaves: Sequence[Any], spec: Any, autocast: Autocast, held: Mapping[str, Tensor]) -> Key:
        """Everything about a call but its tensors' sizes and values."""
        kinds = tuple(_kind(leaf) if isinstance(leaf, Tensor) else plain(leaf) for leaf in leaves)
        modes = tuple(module.training for module in self._modules_in_order)
        return spec, kinds, modes, dtypes(self, held), autocast.dtype, self._settings.outputs, self._settings.recompute

    def _find(self, key: Key, tensors: Sequence[Tensor]) -> Entry | None:
        for known, entry in self._entries:
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
        check = self._settings.check_inputs
        if entry is not None and (check == "never" or (check == "first" and entry.calls >= CHECKED_CALLS)):
            return entry
        return within(f"{type(self._original).__name__}.forward", lambda: self._checked(entry, called, mode, check))

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
        mesh, settings = self.mesh, self._settings
        given = {i: t.held for i, t in enumerate(called.tensors) if isinstance(t, Sharded)}

        def make() -> Entry:
            _follow(self._original, self)
            args, kwargs = pytree.tree_unflatten(called.leaves, called.spec)
            analysis = analyse(self._original, args, kwargs, mesh.size, settings, self.layouts, called.autocast, given)
            return prepare(analysis, mesh, settings)

        with alone():
            entry = agree_on_graph(mesh, make, lambda made: digest(made.analysis))
        return self._keep(self._key(called.leaves, called.spec, called.autocast, self._tensors()), entry)

    def _keep(self, key: Key, made: Entry) -> Entry:
        """A graph for calls to come, whose blocks read their parameters in this model."""
        parts = dict(self.named_modules(remove_duplicate=False))
        entry = made.on(self._places, lambda block: parts.get(block) if block else None)
        for part in entry.module.children():
            if isinstance(part, BlockCall):
                part.owner[0].__dict__["_is_block"] = True
        if "_compiles" in vars(self):
            _compile_blocks(entry.module, self._compiles)
        self._entries.append((key, entry))
        return entry


class Part(Running, Leaf):
    """A submodule of a parallel model."""


class ParallelModule(Running):
    """One rank of a tensor-parallel model. Made by `autotp.parallelize`.

    Parameters and buffers have the names of the original model; parameters that are cut hold this rank's part
    (`layouts` tells which). Plain attributes and methods of the model (`.config`, `.generate`) are reached through it.
    """

    def __init__(
        self, skeleton: nn.Module, first: Entry, tensors: Mapping[str, Tensor], mesh: Mesh, settings: Settings
    ) -> None:
        super().__init__(skeleton, mesh, settings)
        mirror(skeleton, self, tensors, lambda module: Part(module, mesh, settings))
        names = places(self)[0]
        for prefix, module in self.named_modules():
            held = {
                key: names[f"{prefix}.{key}" if prefix else key]
                for key, p in module._parameters.items()
                if p is not None
            }
            vars(module)["_held"] = {key: first.analysis.layouts[name] for key, name in held.items()}
        self._begin()
        captured = first.analysis.captured
        self._keep(self._key(captured.leaves, captured.spec, captured.autocast, self._tensors()), first)

    # ---- what a user reads

    def extra_repr(self) -> str:
        """Where this rank is, and how parameters are held that are in no submodule."""
        return ", ".join(text for text in (str(self.mesh), super().extra_repr()) if text)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As torch's, of this rank's parts: what `model.state_dict()` gave.

        Raises:
            Error: it is the original model's.
        """
        whole = [n for n, it in self.layouts.items() if n in state_dict and it.dim is not None]
        if any(state_dict[name].shape != self.get_parameter(name).shape for name in whole):
            raise Error(
                "load_state_dict: these are not the parts that this rank holds",
                **{"try": "autotp.load_full_state_dict(model, state), for the original model's"},
            )
        return super().load_state_dict(state_dict, *args, **kwargs)

    @property
    def plan(self) -> Plan:
        """What is cut, what it costs, and what stayed whole."""
        return report(self._entries[0][1].analysis, type(self._original).__name__)

    @property
    def recompute(self) -> Recompute:
        """What backward computes again; may be set, and holds from the next call on (which captures anew)."""
        found: Recompute = self._settings.recompute
        return found

    @recompute.setter
    def recompute(self, how: Recompute) -> None:
        settings = replace(self._settings, recompute=how)
        expect_choices(settings)
        for module in self.modules():
            if isinstance(module, Running):
                module.__dict__["_settings"] = settings

    @property
    def code(self) -> str:
        """What this rank computes in a call as the first was, as Python: each block once, however deep the model."""
        first = self._entries[0][1].module
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
        if not self._settings.optional("outline"):
            raise Error("compile_blocks: without=('outline',) left no blocks", **{"try": "torch.compile(model)"})
        for module in self.modules():
            if isinstance(module, Running):
                module.__dict__["_compiles"] = options
                for _, entry in vars(module).get("_entries", ()):
                    _compile_blocks(entry.module, options)

    def layout_of(self, name: str) -> Layout | None:
        """How the parameter of this name is held, under any of its names; None for a buffer."""
        return self.layouts.get(self._first_names.get(name, name))

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        kept: dict[nn.Module, Any] = {
            module: module._entries for module in self.modules() if "_entries" in vars(module)
        }
        memo |= {id(entries): [] for entries in kept.values()}
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for module, entries in kept.items():  # The graphs never change: the copy uses the same, on its own parameters.
            for key, entry in entries:
                memo[id(module)]._keep(key, entry)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Error(
            "a parallel model cannot be pickled: it is tied to its process group",
            **{"try": "save model.state_dict() on each rank, or autotp.full_state_dict(model)"},
        )


def _compile_blocks(module: fx.GraphModule, options: Mapping[str, Any]) -> None:
    for part in works(module).values():  # What is computed again is the compiled part: each has code of its own.
        (part.inner if isinstance(part, Recomputed) else part).compile(**options)


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


def _follow(original: nn.Module, module: Running) -> None:
    """Gives the skeleton the train/eval flags and the dtypes that the parallel model has now."""
    for theirs, mine in zip(original.modules(), module.modules(), strict=True):
        theirs.training = mine.training
    held = module._tensors()
    used = dict(zip(held, dtypes(module, held), strict=True))
    for name, tensor in [*original.named_parameters(), *original.named_buffers()]:
        dtype = used[name]
        if tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
