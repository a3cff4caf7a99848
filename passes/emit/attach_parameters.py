"""attach_parameters: lets a block read its parameters from its module, when the module is called.

    Before: b = block(x, w0); c = block(b, w1)     After: b = h_0(x); c = h_1(b), on the tensors in `h.0` and `h.1`

So hooks on a module run at the right time: `fully_shard` gathers its parameters before a call and frees them after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.profiler import record_function
from torch.distributed.fsdp import FSDPModule

from autotp.ops.coalesced import sums_at_once
from autotp.passes.builder import copied
from autotp.source_location import block_in, block_of

ParameterPlace = tuple[nn.Module, str]
"""A module, and the name of a parameter or buffer in it."""
ReadParameter = Callable[[ParameterPlace], Tensor]
CONTAINER = nn.ModuleList.forward
"""The forward of a module that cannot be called, such as nn.ModuleList. (`fully_shard` refuses such modules.)"""


class BlockCall(nn.Module):
    """The call of one block: its graph, and the module whose parameters it reads.

    Attributes:
        work: the graph, shared by all blocks that compute alike.
        given: for each argument of `work` its place among the arguments of this call; None for the next parameter.
        read_places: the places of the parameters, in order.
        name: the name of the block in the model, such as `h.0`; torch.profiler shows it.
        gathers: whether the graph gathers its parameters, and sums their gradients when its backward ends.
    """

    def __init__(
        self,
        work: nn.Module,
        owner: nn.Module,
        operands: list[int | ParameterPlace],
        read: ReadParameter,
        name: str,
        gathers: bool = False,
    ) -> None:
        super().__init__()
        self.work, self.read, self.name, self.gathers = work, read, name, gathers
        self.given = [x if isinstance(x, int) else None for x in operands]
        self.read_places = [x for x in operands if not isinstance(x, int)]
        self.owner = (owner,)  # In a tuple, so that it is no submodule of this module.

    def forward(self, *inputs: Any) -> Any:
        """Calls the block's module, which calls `run`; an nn.ModuleList cannot be called, so then `run` is called."""
        # A region of the profiler takes time in each call, also where no profiler runs.
        if torch.autograd.profiler._is_profiler_enabled and not torch.compiler.is_compiling():
            with record_function(self.name):
                return self._called(inputs)
        return self._called(inputs)

    def _called(self, inputs: tuple[Any, ...]) -> Any:
        owner = self.owner[0]
        return self.run(inputs) if type(owner).forward is CONTAINER else owner(self, *inputs)

    def run(self, inputs: tuple[Any, ...]) -> Any:
        """Runs the block on the present parameters of its module."""
        work = self.work
        run = work.forward if isinstance(work, fx.GraphModule) else work  # Nothing is registered on a shared graph.
        # The gradients are read when the block's backward ends.
        if self.gathers or isinstance(self.owner[0], FSDPModule):
            with sums_at_once():
                return run(*self.operands_of(inputs))
        return run(*self.operands_of(inputs))

    def operands_of(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the arguments for `work`."""
        read = values_at(self.read_places) if self.read is value_at else list(map(self.read, self.read_places))
        values = iter(read)
        return [next(values) if x is None else inputs[x] for x in self.given]


class Owner(nn.Module):
    """A module that holds a block's parameters, and runs the block when it is called with its `BlockCall`."""

    def forward(self, call: BlockCall, *inputs: Any) -> Any:
        """Runs the block."""
        return call.run(inputs)


def value_at(place: ParameterPlace) -> Tensor:
    """Returns the present tensor at a place: functional_call replaces parameters. (Other names are looked up.)"""
    module, key = place
    parameter = module._parameters.get(key)
    tensor: Tensor = getattr(module, key) if parameter is None else parameter
    return tensor


def values_at(places: Iterable[ParameterPlace]) -> list[Tensor]:
    """Returns the present tensors at some places, as `value_at` does: one call in Python for the ten of a layer."""
    values = []
    for module, key in places:
        parameter = module._parameters.get(key)
        values.append(getattr(module, key) if parameter is None else parameter)
    return values


@contextmanager
def in_places(tensors: Mapping[ParameterPlace, Tensor]) -> Iterator[None]:
    """A region in which modules hold other tensors in these places."""
    before = {(module, key): module._parameters[key] for module, key in tensors}
    try:
        for (module, key), tensor in tensors.items():
            # Into the dict: the attribute of a parameter takes no plain tensor.
            module._parameters[key] = tensor  # type: ignore[assignment]
        yield
    finally:
        for (module, key), parameter in before.items():
            module._parameters[key] = parameter


def places(root: nn.Module) -> tuple[dict[str, str], dict[str, ParameterPlace]]:
    """Returns two dicts: every name of a parameter or buffer -> its first name, and first name -> its place."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    places_by_name: dict[str, ParameterPlace] = {}
    # A module under two names has its parameters under both.
    for prefix, module in root.named_modules(remove_duplicate=False):
        for key, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None:
                name = f"{prefix}.{key}" if prefix else key
                names[name] = first.setdefault(id(tensor), name)
                places_by_name.setdefault(names[name], (module, key))
    return names, places_by_name


def ties(
    root: nn.Module, names: Mapping[str, str], places: Mapping[str, ParameterPlace]
) -> dict[str, tuple[ParameterPlace, str]]:
    """Returns, for each further name of a tied parameter, its place under this name and its first name.

    Args:
        names, places: as `places` returns them.
    """
    tied = {name: (place_in(root, name), first) for name, first in names.items() if name != first}
    return {
        name: ((module, key), first)
        for name, ((module, key), first) in tied.items()
        # A module with two names is one place, at which nothing is tied.
        if key in module._parameters and (module, key) != places[first]
    }


def place_in(root: nn.Module, name: str) -> ParameterPlace:
    """Returns the place of the parameter or buffer of this name."""
    path, _, key = name.rpartition(".")
    return module_at(root, path), key


def module_at(root: nn.Module, path: str, module_class: type[nn.Module] = nn.Module) -> nn.Module:
    """Returns the module of this name; makes one of this kind if there is none.

    It reads `_modules`, because a submodule may have the name of one of our attributes, such as `plan`.
    """
    for key in path.split(".") if path else ():
        last, above = path.endswith(f".{key}") or path == key, root
        root = above._modules.setdefault(key, module_class() if last else nn.Module())  # type: ignore[assignment]
    return root


def works(module: nn.Module) -> dict[str, nn.Module]:
    """Name -> graph of the blocks, each shared graph once: `block`, `block_1`, ..."""
    parts = dict.fromkeys(part.work if isinstance(part, BlockCall) else part for part in module.children())
    return {f"block_{i}" if i else "block": part for i, part in enumerate(parts)}


def attach_parameters(
    outlined: fx.GraphModule,
    names: Mapping[str, str],
    places: Mapping[str, ParameterPlace],
    owner_of: Callable[[str], nn.Module | None],
    read: ReadParameter = value_at,
) -> fx.GraphModule:
    """Returns an outlined graph whose blocks read their own parameters; the graph passes shared parameters to them.

    Args:
        outlined: from `outline`; the result uses its submodules.
        names: placeholder name -> name of the parameter.
        places: name of a parameter -> its place.
        owner_of: name of a block, such as `h.0` -> the module of that name, or None.
        read: returns the tensor at a place.
    """
    root, attached, env = nn.Module(), fx.Graph(), dict[fx.Node, fx.Node]()
    for node in outlined.graph.nodes:
        if node.op == "placeholder" and owner_of(block_that_reads(node, names)) is not None:
            continue
        owner = owner_of(block_of(node)) if node.op == "call_module" else None
        if owner is None:
            env[node] = copied(attached, node, env.__getitem__)
            if node.op in ("call_module", "get_attr"):
                root.add_module(str(node.target), outlined.get_submodule(str(node.target)))
            continue
        # A parameter that only this block reads has no node in the new graph: the block takes it from its module.
        passed = [n for n in node.args if n in env]
        operands: list[int | ParameterPlace] = [
            passed.index(n) if n in env else places[names[n.name]] for n in node.args
        ]
        name = f"{block_of(node).replace('.', '_')}_{len(root._modules)}"
        work = outlined.get_submodule(str(node.target))
        gathers = any(x.target == "arrive" for n in passed for x in n.all_input_nodes)
        root.add_module(name, BlockCall(work, owner, operands, read, block_of(node), gathers))
        env[node] = attached.call_module(name, tuple(env[n] for n in passed))
        env[node].meta = dict(node.meta)
    return fx.GraphModule(root, attached)


def block_that_reads(node: fx.Node, names: Mapping[str, str], apart: type | tuple[type, ...] = ()) -> str:
    """Returns the block of a parameter if only calls of this block read it; else "".

    Args:
        apart: types of operators that do not read values.
    """
    block, users = (
        block_in(names.get(node.name, "")),
        [user for user in node.users if not isinstance(user.target, apart)],
    )
    return block if all(user.op == "call_module" and block_of(user) == block for user in users) else ""
