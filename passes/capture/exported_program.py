"""exported_program: torch.export's program -> a graph whose placeholders have the model's names.

Before: graph(p_model_up_weight, p_model_tied, c_lifted_tensor_0, x) with a placeholder for each name of a tensor
After:  graph(p_model_up_weight, c_lifted_tensor_0, x) with repeated blocks written out and unread inputs removed
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from autotp.errors import Error
from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.captured import Attempt, Captured, InputSize, Opened
from autotp.passes.capture.flatten import Flat
from autotp.passes.capture.guards.sizes import SizeAssumptions
from autotp.passes.capture.inline import inline
from autotp.passes.capture.python_state.attribute_writes import AnyChange, Change
from autotp.passes.capture.python_state.code_names import named
from autotp.passes.capture.python_state.walk import (
    GONE,
    Path,
    Slot,
    everything,
    found_at,
    key_of,
    slot_of,
    spelled,
)
from autotp.passes.capture.pytree import within_states
from autotp.passes.capture.repeats.unfold import unfold_calls
from autotp.passes.capture.replacements.opaque import with_opaque_calls
from autotp.passes.capture.skeleton import storage_of
from autotp.rules.call import writes


def convert_program(
    program: ExportedProgram,
    flat: Flat,
    example: Sequence[Any],
    autocast: Autocast,
    reads: frozenset[Slot],
    attempt: Attempt,
) -> Captured | Opened:
    """Returns the graph of a program with its facts; or the attributes that have to be inputs in addition.

    Args:
        example: the inputs that `flat` ran on.
        reads: the attributes that the model read.
        attempt: what the capture tries.
    """
    graph = with_opaque_calls(unfold_calls(inline(program.graph_module.graph)), flat.opaque_calls)
    placeholders = _placeholders(program, graph, flat)
    if slots := _written_into(graph, placeholders.constants, flat.model):
        return Opened(slots)
    # The attributes come before this: as inputs of the next capture they may have gradients.
    _expect_no_gradients(placeholders.constants)
    _expect_unshared(flat)
    paths = placeholders.paths(flat)
    # Noted now, because placeholders of numbers are erased below.
    sizes_of = {n.name: _shape(n.meta["val"]) for n in graph.nodes if n.name in placeholders.inputs}
    if used := [path for name, path in paths.items() if _is_read_number(graph, name)]:
        return Opened(fixed=frozenset(used))
    _drop_copies(graph, {name for name, path in paths.items() if path not in flat.returned.moved})
    unread = _drop_unread(graph, {name for name, path in paths.items() if slot_of(path) not in reads})
    inputs = {name: x for name, x in zip(placeholders.inputs, example, strict=True) if name not in unread}
    sizes = SizeAssumptions([sizes_of[name] for name in inputs], _environment(graph), program)
    returned = flat.returned
    written = {placeholders.inputs[i] for i, _ in returned.outputs.into}
    name_of = {buffer: name for name, buffer in placeholders.buffers.items()}
    return Captured(
        graph=graph,
        parameters=placeholders.parameters,
        buffers=placeholders.buffers,
        # The user's own tensors, and not the copies that stood for them.
        constants={name: flat.originals.get(id(x), x) for name, x in placeholders.constants.items()},
        inputs=[name for name, x in inputs.items() if isinstance(x, Tensor)],
        outputs=replace(returned.outputs, assigned=tuple(name_of[buffer] for buffer in returned.outputs.assigned)),
        owned=_of_states(flat, placeholders.inputs) | frozenset(paths) | written,
        fits=sizes.fits(),
        example=tuple(tuple(_shape(x)) for x in inputs.values()),
        leaves=tuple(like(leaf, "meta") if isinstance(leaf, Tensor) else leaf for leaf in flat.leaves),
        spec=flat.spec,
        autocast=autocast,
        reads=reads,
        opened=tuple(path for name, path in paths.items() if name not in unread),
        attempt=attempt,
        changes=tuple(_computed(change, sizes) for change in returned.changes),
        asked=tuple(returned.asked),
    )


def like(leaf: Tensor, device: str) -> Tensor:
    """Returns a tensor without values, of the same shape and dtype."""
    return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device=device)


@dataclass(frozen=True)
class _Placeholders:
    """The placeholders of a graph by kind: see `Captured`."""

    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    inputs: list[str]

    def paths(self, flat: Flat) -> dict[str, Path]:
        """Name of a placeholder -> path of the attribute's tensor or number that it stands for."""
        return dict(zip(self.inputs[len(self.inputs) - len(flat.opened) :], flat.opened, strict=True))


def _placeholders(program: ExportedProgram, graph: fx.Graph, flat: Flat) -> _Placeholders:
    """Returns the placeholders: one for each tensor, however many names it has in the model."""
    names = _targets(program)
    parameters = _first_names(names.get(InputKind.PARAMETER, {}), dict(flat.named_parameters(remove_duplicate=False)))
    buffers = _first_names(names.get(InputKind.BUFFER, {}), dict(flat.named_buffers(remove_duplicate=False)))
    _merge_tied(graph, buffers)
    constants = {name: program.constants[target] for name, target in names.get(InputKind.CONSTANT_TENSOR, {}).items()}
    # This may find a second placeholder of a parameter, so the tied ones are merged after it.
    parameters |= _taken_from(constants, flat)
    _merge_tied(graph, parameters)
    _expect_own(constants, flat.model)
    _expect_values(constants)
    return _Placeholders(parameters, buffers, constants, list(names.get(InputKind.USER_INPUT, {})))


def _taken_from(constants: dict[str, Tensor], flat: Flat) -> dict[str, str]:
    """Removes parameters from the constants (a plain list or a function held them). Placeholder -> first name."""
    name_by_storage = {p.untyped_storage()._cdata: name.removeprefix("model.") for name, p in flat.named_parameters()}
    fakes = [name for name, constant in constants.items() if isinstance(constant, FakeTensor)]
    fake_parameters = [name for name in fakes if constants[name].untyped_storage()._cdata in name_by_storage]
    return {name: name_by_storage[constants.pop(name).untyped_storage()._cdata] for name in fake_parameters}


def _of_states(flat: Flat, inputs: Sequence[str]) -> frozenset[str]:
    """Returns the inputs that belong to a state: an argument that the call changes."""
    inside = within_states(pytree.tree_unflatten(flat.leaves, flat.spec))
    of_tensors = [of_state for of_state, leaf in zip(inside, flat.leaves, strict=True) if isinstance(leaf, Tensor)]
    # Not strict: behind the arguments come the values of attributes, which are no states.
    return frozenset(name for name, of_state in zip(inputs, of_tensors, strict=False) if of_state)


def _shape(value: Any) -> Sequence[Any]:
    """Returns a tensor's sizes; a number as the size of a single dimension."""
    return tuple(value.shape) if isinstance(value, Tensor) else (value,)


def _computed(change: AnyChange, sizes: SizeAssumptions) -> AnyChange:
    """Returns a change whose sizes are functions of the shapes of a call."""
    if not isinstance(change, Change):
        return change

    def computed(leaf: Any) -> Any:
        return replace(leaf, expression=sizes.value(leaf.expression)) if isinstance(leaf, InputSize) else leaf

    return Change(
        change.path, {k: v if v is GONE else ([*map(computed, v[0])], v[1]) for k, v in change.values.items()}
    )


def _written_into(graph: fx.Graph, constants: Mapping[str, Tensor], model: nn.Module) -> frozenset[Slot]:
    """Returns the attributes whose tensors must be inputs: the graph writes into them, or they require a gradient."""
    slots = {id(value): slot_of(path) for path, value in everything(model) if isinstance(value, Tensor)}
    written_slots = {slots[id(x)] for x in constants.values() if x.requires_grad and id(x) in slots}
    for node in filter(writes, graph.nodes):
        root: Any = node
        while isinstance(root, fx.Node) and root.op == "call_function" and root.args:
            # A view, and an operator that writes, take the tensor as their first operand.
            root = root.args[0]
        if isinstance(root, fx.Node) and id(constants.get(root.name)) in slots:
            written_slots.add(slots[id(constants[root.name])])
    return frozenset(written_slots)


def _drop_copies(graph: fx.Graph, names: Collection[str]) -> None:
    """Removes the copies that `Flat` makes of these tensors; nothing writes into them."""
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.name in names]:
        copied = next(user for user in node.users if user.target is torch.ops.aten.clone.default)  # Of `Flat.forward`.
        copied.replace_all_uses_with(node)
        graph.erase_node(copied)


def _drop_unread(graph: fx.Graph, names: Collection[str]) -> set[str]:
    """Removes the placeholders of unread tensors among these, and returns their names.

    An attribute that Python read is not among them: of its tensor it may have read the sizes, of which a graph is made.
    """
    unread = [n for n in graph.nodes if n.op == "placeholder" and n.name in names and not n.users]
    for node in [node for node in unread if isinstance(node.meta["val"], Tensor)]:
        graph.erase_node(node)
    return {node.name for node in unread if isinstance(node.meta["val"], Tensor)}


def _is_read_number(graph: fx.Graph, name: str) -> bool:
    """True for a number that an operator on tensors reads. A number that none reads loses its placeholder."""
    node = next((n for n in graph.nodes if n.op == "placeholder" and n.name == name), None)
    if node is None or isinstance(node.meta.get("val"), Tensor):
        return False
    queue, order = [node], []
    while queue:
        current = queue.pop()
        if isinstance(current.meta.get("val"), Tensor) or current.op == "output":
            return True
        order.append(current)
        queue += current.users
    # From the last to the first: a node can be erased once nothing reads it.
    for current in sorted(set(order), key=list(graph.nodes).index, reverse=True):
        graph.erase_node(current)
    return False


def _expect_unshared(flat: Flat) -> None:
    """Raises Error if forward writes into a plain tensor that shares memory with another tensor of the model."""
    modules = dict(flat.model.named_modules())
    for path in flat.returned.moved:
        tensor = found_at(modules, path)
        for other_path, value in everything(flat.model):
            shared = isinstance(value, Tensor) and value is not tensor and storage_of(value) == storage_of(tensor)
            if shared and storage_of(tensor) is not None:
                raise Error(
                    f"forward writes into `{spelled(path)}`, with which `{spelled(other_path)}` shares memory",
                    fix="make the view in forward",
                )


def _expect_own(constants: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raises Error if forward uses a tensor of a module that is no submodule: training would not change it."""
    keys, used = {key_of(module) for module in model.modules()}, {storage_of(x) for x in constants.values()} - {None}
    locations = [(f"`{spelled(path)}`", value) for path, value in everything(model, "held")]
    locations += [(f"`{name}`", name.value) for name in named(model, ())]
    for where, value in locations:
        if not isinstance(value, nn.Module) or key_of(value) in keys:
            continue
        if any(storage_of(x) in used or isinstance(x, FakeTensor) for x in (*value.parameters(), *value.buffers())):
            raise Error(
                f"{where} leads to a {type(value).__name__} that is no submodule: what it learns would be lost",
                fix="self.name = module, nn.ModuleList or nn.ModuleDict, before autotp.parallelize",
            )


def _expect_no_gradients(constants: Mapping[str, Tensor]) -> None:
    trainable = [x for x in constants.values() if x.requires_grad or isinstance(x, nn.Parameter)]
    if trainable:
        raise Error(
            f"forward uses a tensor {list(trainable[0].shape)} that needs a gradient, and no module holds it",
            fix="self.name = nn.Parameter(...)",
        )


def _expect_values(constants: dict[str, torch.Tensor]) -> None:
    for name, constant in constants.items():
        if constant.is_meta or isinstance(constant, FakeTensor):
            raise Error(
                "a tensor of the model that is neither a parameter nor a buffer has no values: "
                f"{name} {list(constant.shape)}",
                fix="make it in forward, or register it as a buffer with an initialiser",
            )


def _targets(program: ExportedProgram) -> dict[InputKind, dict[str, str]]:
    """Kind -> (placeholder name -> name in the model)."""
    targets: dict[InputKind, dict[str, str]] = {}
    for spec in program.graph_signature.input_specs:
        targets.setdefault(spec.kind, {})[spec.arg.name] = spec.target or spec.arg.name
    return targets


def _first_names(targets: dict[str, str], tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Placeholder name -> the first name of its tensor in the model."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    # `Flat` holds the user's model as its attribute `model`.
    return {place: first[id(tensors[target])].removeprefix("model.") for place, target in targets.items()}


def _merge_tied(graph: fx.Graph, names: dict[str, str]) -> None:
    """Keeps one placeholder for each tensor: the exporter makes one for each name of a tied tensor."""
    node_by_name: dict[str, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.name in names]:
        first = node_by_name.setdefault(names[node.name], node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            del names[node.name]


def _environment(graph: fx.Graph) -> Any:
    """Returns the exporter's ShapeEnv, which has its assumptions about sizes; None if all sizes are numbers."""
    values = (node.meta.get("val") for node in graph.nodes)
    modes = (getattr(value, "fake_mode", None) for value in values)
    return next((mode.shape_env for mode in modes if mode is not None), None)
