"""attach_parameters: lets a block read its parameters itself, where its module is called.

    Before: b = block(x, w0); c = block(b, w1)     After: b = h_0(x); c = h_1(b), each `block` on what `h.0`, `h.1` hold

What hangs on a module then has a time: hooks that gather its parameters before (`fully_shard`) and free them behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from autotp.source_location import block_of, numbered

ParameterPlace = tuple[nn.Module, str]
"""A module, and the name there of a parameter or buffer."""
ReadParameter = Callable[[ParameterPlace], Tensor]
CONTAINER = nn.ModuleList.forward
"""The forward of a module that has none. (`fully_shard` refuses such a module: nothing is to happen at its call.)"""


class BlockCall(nn.Module):
    """One block's call: what it computes, and the module whose parameters it reads.

    Attributes:
        work: a graph, the same for all blocks that compute alike.
    """

    def __init__(
        self, work: nn.Module, owner: nn.Module, operands: list[int | ParameterPlace], read: ReadParameter
    ) -> None:
        super().__init__()
        self.work, self.read, self.operands = work, read, operands
        self.owner = (owner,)  # In a tuple: it is no part of this.

    def forward(self, *given: Any) -> Any:
        """What the block returns. Its module is called, and runs `run`; a list of modules cannot be called."""
        owner = self.owner[0]
        return self.run(given) if type(owner).forward is CONTAINER else owner(self, *given)

    def run(self, given: tuple[Any, ...]) -> Any:
        """What the block returns, on the parameters that its module holds now."""
        return self.work(*self.operands_of(given))

    def operands_of(self, given: Sequence[Any]) -> list[Any]:
        """What `work` is called with."""
        return [given[x] if isinstance(x, int) else self.read(x) for x in self.operands]


class Owner(nn.Module):
    """A module that holds a block's parameters, and runs the block when it is called with its `BlockCall`."""

    def forward(self, call: BlockCall, *given: Any) -> Any:
        """What the block returns."""
        return call.run(given)


def value_at(place: ParameterPlace) -> Tensor:
    """A parameter or buffer as it is now: functional_call swaps them. (What is no parameter is looked up.)"""
    module, key = place
    parameter = module._parameters.get(key)
    found: Tensor = getattr(module, key) if parameter is None else parameter
    return found


def places(root: nn.Module) -> tuple[dict[str, str], dict[str, ParameterPlace]]:
    """For every name of a parameter or buffer the first name it has, and for every first name where it lies."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    found: dict[str, ParameterPlace] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for key, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None:
                name = f"{prefix}.{key}" if prefix else key
                names[name] = first.setdefault(id(tensor), name)
                found.setdefault(names[name], (module, key))
    return names, found


def place_of(root: nn.Module, name: str) -> ParameterPlace:
    """Where the parameter or buffer of this name lies."""
    path, _, key = name.rpartition(".")
    return module_at(root, path), key


def module_at(root: nn.Module, path: str, kind: type[nn.Module] = nn.Module) -> nn.Module:
    """The module of this name, made of this kind where there is none; by the tables: a part may be called `plan`."""
    for key in path.split(".") if path else ():
        last, above = path.endswith(f".{key}") or path == key, root
        root = above._modules.setdefault(key, kind() if last else nn.Module())  # type: ignore[assignment]
    return root


def works(module: nn.Module) -> dict[str, nn.Module]:
    """What the blocks of a graph compute, each once: `block`, `block_1`, ..."""
    parts = dict.fromkeys(part.work if isinstance(part, BlockCall) else part for part in module.children())
    return {f"block_{i}" if i else "block": part for i, part in enumerate(parts)}


def attach_parameters(
    outlined: fx.GraphModule,
    names: Mapping[str, str],
    places: Mapping[str, ParameterPlace],
    owner_of: Callable[[str], nn.Module | None],
    read: ReadParameter = value_at,
) -> fx.GraphModule:
    """An outlined graph whose blocks read their parameters themselves; what several read, the graph hands them.

    Args:
        outlined: from `outline`; its submodules are taken over.
        names: placeholder name -> name of the parameter.
        places: name of a parameter -> where it lies.
        owner_of: name of a block, as `h.0` -> the module of that name, if there is one.
        read: what a block reads of a place.
    """
    root, new, env = nn.Module(), fx.Graph(), dict[fx.Node, fx.Node]()
    for node in outlined.graph.nodes:
        if node.op == "placeholder" and owner_of(_reader(node, names)) is not None:
            continue
        owner = owner_of(block_of(node)) if node.op == "call_module" else None
        if owner is None:
            env[node] = new.node_copy(node, lambda old: env[old])
            if node.op == "call_module":
                root.add_module(str(node.target), outlined.get_submodule(str(node.target)))
            continue
        given = [n for n in node.args if n in env]
        operands: list[int | ParameterPlace] = [
            given.index(n) if n in env else places[names[n.name]] for n in node.args
        ]
        name = f"{block_of(node).replace('.', '_')}_{len(root._modules)}"
        root.add_module(name, BlockCall(outlined.get_submodule(str(node.target)), owner, operands, read))
        env[node] = new.call_module(name, tuple(env[n] for n in given))
        env[node].meta = dict(node.meta)
    return fx.GraphModule(root, new)


def _reader(node: fx.Node, names: Mapping[str, str]) -> str:
    """The block that a parameter is in, if nothing but its calls reads it; "" otherwise."""
    block = numbered(names.get(node.name, ""))
    return block if all(user.op == "call_module" and block_of(user) == block for user in node.users) else ""
