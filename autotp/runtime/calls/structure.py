"""The present parameters, buffers and modules of a module of a parallel model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.passes.capture.captured import Captured
from autotp.passes.capture.guards.gradient_queries import GradientsWanted, wanted_now
from autotp.passes.capture.python_state.walk import found_at
from autotp.passes.capture.pytree import signature_of
from autotp.passes.emit.attach_parameters import places, ties, values_at
from autotp.runtime.fsdp import dtypes
from autotp.runtime.tree import Tree, held_in, original_class
from autotp.sharding.layout import Layout


class Structure:
    """The parameters, buffers and modules of a module as they are now.

    Attributes:
        module: the module.
        tree: the state that all modules of the model share.
        seen: the tree's version when the following attributes were computed.
        signature: the signature of the module's forward.
        first_names, places: first names and places of its parameters and buffers.
        ties: further names of tied parameters, with the place and the first name of each.
        modules: the modules by path.
        layouts: first parameter name -> layout.
        whole: parameters and buffers with the original's shapes, on meta.
        facts: the modules, and the layouts of parameters; a graph is right for one structure.
        seen_modes, modes: `Tree.modes` when it was last looked at, and which modules are in training.
    """

    def __init__(self, module: nn.Module, tree: Tree) -> None:
        self.module, self.tree = module, tree
        self.look_again()

    @property
    def name(self) -> str:
        """The class of the module."""
        return type(self.module).__name__

    def look_again(self) -> None:
        """Reads the module's present structure."""
        self.seen = self.tree.version
        self.signature = signature_of(self.module)
        self.first_names, self.places = places(self.module)
        self.ties = ties(self.module, self.first_names, self.places)
        self.modules = dict(self.module.named_modules())
        self.look_at_modes()
        layouts = {name: held_in(module).get(key) for name, (module, key) in self.places.items()}
        self.layouts = {name: layout for name, layout in layouts.items() if layout is not None}
        self.whole = {name: self._on_meta(name, tensor) for name, tensor in self.tensors().items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in self.whole.items()}
        modules = self.module.named_modules(remove_duplicate=False)
        every = [(path, id(module), original_class(type(module))) for path, module in modules]
        caches = {name: x.held for name, x in self.tensors().items() if isinstance(x, Sharded)}
        now = every, self.first_names, shapes, self.layouts, caches
        if now != getattr(self, "facts", None):  # Otherwise keeps the old object: comparing it is fast.
            self.facts = now

    def look_at_modes(self) -> None:
        """Reads which modules are in training."""
        self.seen_modes = self.tree.modes
        self.modes = tuple(module.training for module in self.modules.values())

    def tensors(self) -> dict[str, Tensor]:
        """Returns the present parameters and buffers by first name."""
        return dict(zip(self.places, values_at(self.places.values()), strict=True))

    def graph_inputs(self, captured: Captured, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Sequence[int]]]:
        """Returns a graph's input tensors (those of arguments, then those of attributes), and all shapes."""
        opened = [found_at(self.modules, path) for path in captured.opened]
        every = [*tensors, *opened]
        with torch._C.DisableTorchFunctionSubclass():  # A part would look for the user's code.
            shapes: list[Sequence[int]] = [x.shape if isinstance(x, Tensor) else (x,) for x in every]
        return [x for x in every if isinstance(x, Tensor)], shapes

    def gradients_wanted(self, tensors: Sequence[Tensor], model_tensors: Mapping[str, Tensor]) -> GradientsWanted:
        """Returns the gradient modes of a call."""
        with torch._C.DisableTorchFunctionSubclass():  # A cut parameter would look for the user's code.
            return wanted_now(tensors, [model_tensors[name] for name in self.layouts])

    def whole_tensors(self) -> dict[str, Tensor]:
        """Returns each parameter and buffer on meta with the original's shape and the present compute dtype."""
        model_tensors = self.tensors()
        wholes = {}
        for (name, tensor), dtype in zip(model_tensors.items(), dtypes(self.module, model_tensors), strict=True):
            stand_in = self.whole[name]
            flag = (tensor if isinstance(tensor, nn.Parameter) else stand_in).requires_grad
            fits = stand_in.dtype == dtype and stand_in.requires_grad == flag
            wholes[name] = stand_in if fits else _as(stand_in, dtype, flag)
        return wholes

    def layout_of(self, name: str) -> Layout | None:
        """Returns the layout of a parameter, by any of its names; None for a buffer."""
        return self.layouts.get(self.first_names.get(name, name))

    def _on_meta(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a parameter or buffer on meta with the original's shape."""
        # An empty tensor of the whole's shape takes its strides, too.
        shape = self.layouts[name].shape if name in self.layouts else tensor.shape
        has_shape = tuple(shape) == tuple(tensor.shape) and not isinstance(tensor, DTensor | Sharded)
        empty = _empty_like(tensor) if has_shape else torch.empty(shape, dtype=tensor.dtype, device="meta")
        return nn.Parameter(empty, tensor.requires_grad) if name in self.layouts else empty


def _empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)


def _as(tensor: Tensor, dtype: torch.dtype, requires_grad: bool) -> Tensor:
    empty = _empty_like(tensor, dtype)
    return nn.Parameter(empty, requires_grad) if isinstance(tensor, nn.Parameter) else empty
