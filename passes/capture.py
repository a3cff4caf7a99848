"""capture: an nn.Module and example inputs -> a torch.fx graph of ATen operators, and the guards it is right under.

Before: nn.Module, on any device or on meta
After:  graph(parameters..., buffers..., constants..., tensor inputs...) -> flat tensor outputs
"""

from __future__ import annotations

import copy
import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from autotp.asked import Entangled
from autotp.decided import Decided
from autotp.eager import alone
from autotp.errors import Error
from autotp.lost import nothing_lost
from autotp.passes.inline import inline
from autotp.passes.unfold import unfold
from autotp.regions import Autocast
from autotp.repeats import Repeats
from autotp.source import user_line
from autotp.structure import flatten, outcome, settled, states, within_states
from autotp.values import reads_values, refused

Shapes = Sequence[Sequence[int]]

DEVICE = "cpu"
"""Where models are captured, on tensors without memory. Not `meta`: there a constant that the model makes has no value,
and autocast does nothing. (Under autocast it is the kind of device that this is for.)"""

OFF = Autocast(DEVICE)


@dataclass(frozen=True)
class Captured:
    """One graph of a model.

    A state is an argument that the model changes (`autotp/structure.py`): its tensors may be written to.

    Attributes:
        graph: placeholders in the order parameters, buffers, constants, inputs; one output, a tuple of tensors.
        parameters: placeholder name -> the parameter's first name in the model; a tied one has one placeholder.
        buffers: placeholder name -> the buffer's first name in the model.
        constants: placeholder name -> the tensor the model made while it was captured.
        inputs: placeholder names of the tensor inputs, in the order of the flattened arguments.
        assigned: placeholder names of the buffers that the model sets anew; their values are the last outputs.
        outputs: rebuilds the model's output from the flat list of outputs, and gives the states what they hold now.
        owned: those of `inputs` that belong to a state.
        kept: positions of the outputs that belong to a state.
        fits: True for shapes of the tensor inputs that the graph is right for.
        example: shapes of the inputs it was captured with.
        leaves, spec: the flattened arguments, tensors on meta, and their structure.
        autocast: what was on around the model; its `device` is the one that the graph names.
    """

    graph: fx.Graph
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: list[str]
    assigned: list[str]
    outputs: Callable[[Sequence[Any], Sequence[Any]], Any]
    owned: frozenset[str]
    kept: frozenset[int]
    fits: Callable[[Shapes], bool]
    example: tuple[tuple[int, ...], ...]
    leaves: tuple[Any, ...]
    spec: Any
    autocast: Autocast


class _Returned:
    """What the model returned while it was captured: the leaves, or where they are in the outputs; the structure."""

    leaves: Sequence[Any] = ()
    spec: Any = None
    kept: Sequence[int] = ()
    assigned: Sequence[str] = ()


class _Flat(nn.Module):
    """The model as a function of its tensor inputs alone; what is no tensor is closed over."""

    def __init__(self, model: nn.Module, spec: Any, leaves: Sequence[Any]) -> None:
        super().__init__()
        self.model, self.spec, self.leaves = model, spec, leaves
        self.returned = _Returned()  # An object: the exporter undoes what a forward sets on the module itself.

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        queue = iter(tensors)
        leaves = [next(queue) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        before = dict(self.model.named_buffers())
        with nothing_lost(self.model), Decided():
            changed = states((args, kwargs))
            result = self.model(*args, **kwargs)
            found, self.returned.spec = outcome(result, changed)
        assigned = _assigned(before, self.model)
        sizes = [leaf for leaf in found if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)]
        computed: list[Any] = [leaf for leaf in found if isinstance(leaf, torch.Tensor)] + sizes
        places = {id(leaf): _Place(i) for i, leaf in enumerate(computed)}
        self.returned.leaves = [places.get(id(leaf), leaf) for leaf in found]
        inside = [*within_states(result, changed), *within_states(changed)]
        self.returned.kept = [
            places[id(leaf)].at for leaf, one in zip(found, inside, strict=True) if one and id(leaf) in places
        ]
        self.returned.assigned = list(assigned)
        return (*computed, *assigned.values())


def _assigned(before: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a forward has set anew (`self.mean = ...`), which the exporter does not see."""
    found = {name: now for name, now in model.named_buffers() if now is not before.get(name)}
    for name, now in found.items():
        if name not in before or now.shape != before[name].shape:
            raise Error(
                f"the model gives its buffer `{name}` another shape, {list(now.shape)}",
                **{"try": "a buffer as long as it may become, of which forward takes a slice"},
            )
    return found


@dataclass(frozen=True)
class _Place:
    """Stands for the output of the graph at this position."""

    at: int


CAPTURING = threading.RLock()
"""torch.export, and what it is captured under, are for one thread at a time."""


def capture(
    skeleton: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: Autocast = OFF, once: bool = True
) -> Captured:
    """The graph of `skeleton(*args, **kwargs)`, with every input dimension symbolic where the model allows.

    Args:
        skeleton: the model, on `meta` (see `skeleton_of`); its train/eval flags count.
        args, kwargs: example arguments; of tensors only shapes and dtypes are read.
        autocast: what is on around the model.
        once: whether blocks that are alike are captured once (`autotp/repeats.py`), which gives the same graph sooner.

    Raises:
        Error: the model branches on data, or fails on these inputs; names the source line.
    """
    leaves, spec = flatten((args, kwargs))
    with CAPTURING:
        for with_objects in (True, False) if once else ():
            repeats = Repeats(with_objects)
            with suppress(Entangled, Error):  # What fails while its blocks are watched is to fail, or not, as it is.
                return _capture(skeleton, leaves, spec, autocast, repeats.watched)
            if not repeats.met_objects:
                break
        return _capture(skeleton, leaves, spec, autocast, nullcontext)


def _capture(
    skeleton: nn.Module, leaves: list[Any], spec: Any, autocast: Autocast, region: Callable[[nn.Module], Any]
) -> Captured:
    """As `capture`; the model runs in the region that `region(model)` opens."""
    with alone(), autocast.on(), _quiet():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            flat = _Flat(_copy_on(skeleton, autocast.device), spec, leaves)
            tensors = tuple(_like(leaf, autocast.device) for leaf in leaves if isinstance(leaf, torch.Tensor))
        dynamic = tuple({d: Dim.AUTO for d, n in enumerate(t.shape) if n > 1} for t in tensors)
        with region(flat.model):
            program = _exported(flat, tensors, dynamic)
        if isinstance(program, Exception):
            plain = _plain(flat, tensors, mode)
            raise _explained(program, plain, flat.model) from plain or program  # The exporter's trace is a page long.
    return _captured(program, flat, tensors, autocast)


def _exported(flat: _Flat, tensors: tuple[torch.Tensor, ...], dynamic: Any) -> ExportedProgram | Exception:
    try:
        return export(flat, tensors, dynamic_shapes=(dynamic,), strict=False)
    except (Entangled, Error):
        raise
    except Exception as error:
        return error


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs and prints a page about what an Error says in three lines."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)


def skeleton_of(model: nn.Module) -> nn.Module:
    """A copy of `model` on `meta`: its code, structure and flags, none of its numbers. The model is not touched."""
    return _copy_on(model, "meta")


def _copy_on(model: nn.Module, device: str) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        empty = torch.empty_like(tensor, device=device, requires_grad=False)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    plain = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    memo.update({id(tensor): tensor for tensor in plain if tensor.is_leaf})  # constants of the graph
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise Error(
            f"copy.deepcopy fails on the model: {first}",
            **{"try": "delete computed tensors and open handles from its attributes before the call"},
        ) from error


def _like(leaf: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device=device)


def _captured(program: ExportedProgram, flat: _Flat, tensors: Sequence[torch.Tensor], autocast: Autocast) -> Captured:
    graph, names = unfold(inline(program.graph_module.graph)), _targets(program)
    parameters = _first_names(names.get(InputKind.PARAMETER, {}), dict(flat.named_parameters(remove_duplicate=False)))
    buffers = _first_names(names.get(InputKind.BUFFER, {}), dict(flat.named_buffers(remove_duplicate=False)))
    _merge_tied(graph, parameters)
    _merge_tied(graph, buffers)
    inputs = list(names.get(InputKind.USER_INPUT, {}))
    example = [node.meta["val"] for node in graph.nodes if node.op == "placeholder" and node.name in inputs]
    constants = {name: program.constants[target] for name, target in names.get(InputKind.CONSTANT_TENSOR, {}).items()}
    _expect_values(constants)
    places = {name: place for place, name in buffers.items()}
    assigned = [places[name] for name in flat.returned.assigned]
    shapes = tuple(tuple(t.shape) for t in tensors)
    inside = within_states(pytree.tree_unflatten(flat.leaves, flat.spec))
    of_tensors = [one for one, leaf in zip(inside, flat.leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    owned = frozenset(name for name, one in zip(inputs, of_tensors, strict=True) if one)
    rebuild, kept = _rebuilding(flat.returned), frozenset(flat.returned.kept)
    leaves = tuple(_like(leaf, "meta") if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves)
    fits = guard(example, program)
    return Captured(
        graph, parameters, buffers, constants, inputs, assigned, rebuild, owned, kept, fits, shapes, leaves, flat.spec,
        autocast,
    )  # fmt: skip


def _expect_values(constants: dict[str, torch.Tensor]) -> None:
    for name, constant in constants.items():
        if constant.is_meta:
            raise Error(
                f"a tensor of the model, no parameter and no buffer, has no values: {name} {list(constant.shape)}",
                **{"try": "make it in forward, or register it as a buffer with an initialiser"},
            )


def _targets(program: ExportedProgram) -> dict[InputKind, dict[str, str]]:
    """Placeholder name -> what it is in the model, by kind."""
    found: dict[InputKind, dict[str, str]] = {}
    for spec in program.graph_signature.input_specs:
        found.setdefault(spec.kind, {})[spec.arg.name] = spec.target or spec.arg.name
    return found


def _first_names(targets: dict[str, str], tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Placeholder name -> the first of the names that its tensor has in the model."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {place: first[id(tensors[target])].removeprefix("model.") for place, target in targets.items()}


def _merge_tied(graph: fx.Graph, names: dict[str, str]) -> None:
    """One placeholder for each tensor: the exporter gives a tied one a placeholder for each of its names."""
    kept: dict[str, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.name in names]:
        first = kept.setdefault(names[node.name], node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            del names[node.name]


def _rebuilding(returned: _Returned) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """The function that puts outputs of the graph back into the structure the model returns, and into its states."""
    leaves, spec = returned.leaves, returned.spec

    def rebuild(found: Sequence[Any], mine: Sequence[Any]) -> Any:
        return settled([found[leaf.at] if isinstance(leaf, _Place) else leaf for leaf in leaves], spec, mine)

    return rebuild


def guard(example: Sequence[torch.Tensor], program: ExportedProgram) -> Callable[[Shapes], bool]:
    """What the exporter assumed of the input shapes, as a plain Python function of them.

    Every size must be the number or the symbol it was captured as, symbols stay in their ranges, and the
    comparisons that the model made keep their outcome.
    """
    symbols: dict[str, str] = {}
    tests: list[str] = []
    for i, tensor in enumerate(example):
        for d, size in enumerate(tensor.shape):
            expr = sympy.Integer(size) if isinstance(size, int) else size.node.expr
            place = f"shapes[{i}][{d}]"
            if expr.is_Symbol and str(expr) not in symbols:
                symbols[str(expr)] = place
            else:
                tests.append(f"{place} == {_python(expr)}")
    for symbol, bounds in program.range_constraints.items():
        if str(symbol) in symbols:
            tests += [f"{symbol} >= {bounds.lower}"] if bounds.lower.is_Integer else []
            tests += [f"{symbol} <= {bounds.upper}"] if bounds.upper.is_Integer else []
    environment = example[0].fake_mode.shape_env if example else None  # type: ignore[attr-defined]
    tests += (
        [_python(g.expr) for g in environment.guards if {str(s) for s in g.expr.free_symbols} <= set(symbols)]
        if environment
        else []
    )
    head = "".join(f"    {name} = {place}\n" for name, place in symbols.items())
    source = f"def fits(shapes):\n{head}    return {' and '.join(f'({test})' for test in tests) or 'True'}\n"
    scope: dict[str, Any] = {"math": __import__("math")}
    exec(source, scope)
    return scope["fits"]


def _python(expr: sympy.Basic) -> str:
    return PythonPrinter().doprint(expr)


def _plain(flat: _Flat, tensors: Sequence[torch.Tensor], mode: FakeTensorMode) -> Exception | None:
    """What the model raises on inputs of exactly these sizes, if anything: there no symbols stand for sizes."""
    try:
        with mode:
            flat(*tensors)
    except Exception as error:
        return error
    return None


def _explained(error: Exception, plain: Exception | None, model: nn.Module) -> Error:
    """The exporter's complaint, with the user's line and what to change."""
    if reads_values(error):
        return refused(error, model)
    shown = plain or error
    if "fake impl" in str(shown) or "UnsupportedOperator" in type(shown).__name__:
        return Error(
            "the model calls an operator that does not say what shape it returns",
            at=user_line(traceback.extract_tb(shown.__traceback__)),
            **{"try": "torch.library.register_fake, on the operator"},
        )
    kind, text = type(shown).__name__, str(shown).strip()
    at = user_line(traceback.extract_tb(shown.__traceback__))
    return Error(
        f"the model does not run on these inputs: {kind}: {text.splitlines()[0] if text else ''}".rstrip(": "),
        **({"at": at} if at != "?" else {}),
        **{"try": "arguments that the original model accepts; example_inputs={...}, if you gave none"},
    )
