"""capture: an nn.Module and example inputs -> a torch.fx graph of ATen operators, and its guards.

Before: nn.Module, on any device or on meta
After:  graph(parameters..., buffers..., constants..., tensor inputs...) -> flat tensor outputs
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy
from torch import Tensor, fx, nn
from torch._export.non_strict_utils import _override_builtin_ops
from torch._export.utils import _compiling_state_context
from torch._subclasses import FakeTensorMode
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autotp.errors import Error
from autotp.model_library import NeedsExactCapture
from autotp.passes.builder import ancestors, subgraph
from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.captured import FIRST_ATTEMPT, Attempt, Captured, Opened, OutputAt
from autotp.passes.capture.exported_program import convert_program, like
from autotp.passes.capture.flatten import Flat
from autotp.passes.capture.guards.gradient_queries import GradientQueries, GradientsWanted
from autotp.passes.capture.guards.input_values import InputValues
from autotp.passes.capture.guards.looks import has_values, without_padding
from autotp.passes.capture.guards.values import (
    NO_VALUES,
    Answers,
    KnownValues,
    NeedsNumber,
    Outcome,
    Place,
    Reading,
    first_other,
    reads_values,
)
from autotp.passes.capture.patches import CAPTURING, around_capture, around_export
from autotp.passes.capture.python_state.walk import spelled, values_by_path
from autotp.passes.capture.pytree import computes_by_itself, flatten, is_dense
from autotp.passes.capture.repeats.queries import Entangled
from autotp.passes.capture.repeats.repeats import Repeats
from autotp.passes.capture.replacements.opaque import recorded_calls
from autotp.passes.capture.skeleton import copy_on
from autotp.passes.capture.unsupported.explain_failure import explain_failure
from autotp.passes.capture.unsupported.function_caches import empty_caches
from autotp.passes.capture.unsupported.long_sizes import FEWER, LongSize, Symbols, asks_too_much, short_sizes
from autotp.rules.call import returned
from autotp.rules.traits import draws

OFF = Autocast()
"""A call on the CPU without autocast."""
ALWAYS = GradientsWanted()


def capture(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autocast: Autocast = OFF,
    wanted: GradientsWanted = ALWAYS,
    attempt: Attempt = FIRST_ATTEMPT,
) -> Captured:
    """Returns the graph of `skeleton(*args, **kwargs)`, with every input dimension symbolic where the model allows.

    NOTE [Sizes that become numbers] says where fewer dimensions are symbols.

    Args:
        skeleton: the model, on `meta` (see `skeleton_of`); its train/eval flags count.
        args, kwargs: example arguments; of tensors shapes and dtypes are read, and values where the model reads them.
        autocast: the settings of autocast around the call, and the kind of device on which the model will run. It is
            captured with tensors of this kind, without memory, so that code which asks for the device gets the answer
            that it gets in a run. (Not with tensors on `meta`: there a constant of the model has no values, and
            autocast does nothing.)
        wanted: the answers to the model's questions about gradients: see `GradientsWanted`.
        attempt: what is tried first.

    Raises:
        Error: the model needs values that are not known, or fails on these inputs; names the source line.
    """
    leaves, spec = flatten((args, kwargs))
    _expect_plain_tensors(leaves)
    leaves = [leaf.copy() if isinstance(leaf, numpy.ndarray) else leaf for leaf in leaves]  # Constants of the graph.
    with CAPTURING, empty_caches(skeleton):
        call = _Call(skeleton, leaves, spec, autocast, wanted)
        attempt = replace(attempt, values=replace(attempt.values, likely=attempt.looks and without_padding(kwargs)))
        try:
            return _captured(call, attempt)
        except NeedsExactCapture:
            return _captured(call, replace(attempt, exactly=True))


def _expect_plain_tensors(leaves: list[Any]) -> None:
    """Raises Error for a sparse or nested tensor, whose sizes do not say which numbers it has, or one with own code."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and computes_by_itself(type(leaf)):
            raise Error(
                f"an argument is a {type(leaf).__name__}, a tensor with operators of its own, and a graph has torch's",
                fix="x.as_subclass(torch.Tensor)",
            )
        if isinstance(leaf, Tensor) and not is_dense(leaf):
            layout = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise Error(
                f"an argument is a {layout} tensor, and a graph takes dense tensors",
                fix="x.to_dense(); for sequences of several lengths a padded tensor and a mask",
            )


@dataclass(frozen=True)
class _Call:
    """A call that is captured.

    Attributes:
        skeleton: the model on meta.
        leaves, spec: its flattened arguments.
        autocast, wanted: the modes around it.
    """

    skeleton: nn.Module
    leaves: list[Any]
    spec: Any
    autocast: Autocast
    wanted: GradientsWanted


@dataclass(frozen=True)
class _NeedsValues:
    """The exporter needed values of tensors.

    Attributes:
        instead: the Error for a model of which they cannot be known; or the graph in which they are symbols.
        places: the places at which they are needed, if the exporter knows.
    """

    instead: Error | Captured
    places: frozenset[Place] = frozenset()

    def without(self, values_read: Error | KnownValues) -> Captured:
        """Returns the graph without the values. Raises Error if there is none: the one that was found, if any."""
        if isinstance(self.instead, Error):
            raise values_read if isinstance(values_read, Error) else self.instead
        return self.instead


def _captured(call: _Call, first: Attempt) -> Captured:
    """Captures as often as a capture says what the next one tries: NOTE [How often forward runs]"""
    # A run without the exporter is made only where values are known to be needed.
    values_read = _reads(call, first) if first.values.places else first.values
    expected = values_read if isinstance(values_read, KnownValues) else NO_VALUES
    attempt = replace(first, values=replace(expected, likely=first.values.likely))
    while True:
        result = _tried(call, attempt, first)
        if isinstance(result, Captured):
            return result
        attempt = result


def _tried(call: _Call, attempt: Attempt, first: Attempt) -> Captured | Attempt:
    """Returns the graph, or what to try next."""
    repeats = None if attempt.blocks == "each" else Repeats(attempt.blocks == "by objects")
    # After another reason the blocks may well be captured once, so they are tried from the first way on.
    following = replace(attempt, blocks=first.blocks)
    try:
        result = _capture(call, attempt, repeats)
    except LongSize:
        return replace(following, symbols=FEWER[attempt.symbols])
    except (Entangled, Error):
        if repeats is None:
            raise
        # A capture without repeats decides whether the model fails.
        plainer = repeats.met_objects and attempt.blocks == "by objects"
        return replace(attempt, blocks="by tensors" if plainer else "each")
    if isinstance(result, Opened):
        if attempt.opened | result == attempt.opened:
            names = ", ".join(f"`{spelled(slot)}`" for slot in sorted(result.slots))
            fix = "a buffer for that state, written by self.name.copy_(value)"
            raise Error(f"forward writes into {names} in a way that a graph cannot", fix=fix)
        return replace(following, opened=attempt.opened | result)
    if isinstance(result, _NeedsValues):
        places = attempt.values.places | result.places
        values_read = _reads(call, replace(attempt, values=replace(first.values, places=places)))
        if isinstance(values_read, Error) or values_read.places == attempt.values.places:
            return result.without(values_read)
        return replace(following, values=values_read)
    try:
        outcomes = _other_looks(result, call, len(attempt.values.outcomes))
    except _NotOfInputs:
        return replace(following, looks=False)
    if outcomes is None:
        return result
    return replace(following, values=replace(attempt.values, outcomes=outcomes, likely=outcomes[-1].value))


class _NotOfInputs(Exception):
    """A look is at a mask that does not follow from the arguments alone."""


def _other_looks(captured: Captured, call: _Call, first: int) -> tuple[Outcome, ...] | None:
    """Returns the outcomes of a call's reads up to the first look that is not the assumed one; None if there is none.

    Args:
        call: has the arguments.
        first: the number of reads whose outcomes are known.

    Raises:
        _NotOfInputs: there is a look at something else than arguments.
    """
    assumed = [i for i, read in enumerate(captured.asked) if read.look and i >= first]
    results = returned(captured.graph)
    positions = [x.at for i in assumed for x in captured.asked[i].given if isinstance(x, OutputAt)]
    # All that a look depends on: it can be computed before a call only from the arguments and without draws.
    nodes = ancestors(results[i] for i in positions)
    needed = {node.name for node in nodes if node.op == "placeholder"}
    if needed - {*captured.inputs, *captured.constants} or any(map(draws, nodes)):
        raise _NotOfInputs
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
    values = captured.constants | dict(zip(captured.inputs, tensors, strict=False))
    if not assumed or not all(name in values and has_values(values[name]) for name in needed):
        return None
    part = subgraph(captured.graph, [results[i] for i in positions], nodes)
    inputs = [values[node.name].detach().to(call.autocast.device) for node in part.find_nodes(op="placeholder")]
    made = dict(zip(positions, fx.GraphModule(nn.Module(), part)(*inputs), strict=True))
    return first_other(
        captured.asked,
        lambda i, read: i in assumed,
        lambda read: read.made(lambda x: made[x.at] if isinstance(x, OutputAt) else x),
    )


def _capture(call: _Call, attempt: Attempt, repeats: Repeats | None) -> Captured | Opened | _NeedsValues:
    """Captures once. Calls of the model's blocks go through `repeats`.

    Returns:
        The graph; or the further attributes that have to be inputs of it; or that values are needed.
    """
    opened, expected = attempt.opened, attempt.values
    with around_capture(call.autocast):
        reading = Answers(expected, repeats.expect_outside) if repeats else Answers(expected)
        with FakeTensorMode(allow_non_fake_inputs=True):
            flat, inputs, queries = _flat(call, attempt, reading)
        with around_export(flat.model, repeats) as reads:
            program = _exported(flat, inputs, attempt.symbols)
        if attempt.symbols in FEWER and isinstance(program, Exception) and asks_too_much(program):
            raise LongSize from program
        if opened | flat.returned.before != opened:
            return flat.returned.before
        if isinstance(program, Exception):
            plain = _raised_plainly(call, attempt)
            explained = explain_failure(program, plain, flat.model)
            explained.__cause__ = plain or program  # The exporter's trace is a page long.
            needed = reading.places_of(program) if reads_values(program) else reading.symbolic()
            if needed or reads_values(program):
                return _NeedsValues(explained, needed)
            raise explained
    slots = reads.slots(repeats.same if repeats else ())
    result = convert_program(program, flat, inputs, call.autocast, slots, attempt)
    if not isinstance(result, Captured):
        return result
    result = replace(result, wanted=queries.relevant(), symbolic=reading.in_sizes(result.graph))
    places = reading.taken(result.graph)
    return _NeedsValues(result, places) if places else result


def _flat(call: _Call, attempt: Attempt, reading: Reading) -> tuple[Flat, tuple[Any, ...], GradientQueries]:
    """Returns the model as a function of tensors, and these, in the fake mode that is active."""
    originals: dict[int, Tensor] = {}
    model = copy_on(call.skeleton, call.autocast.device, originals)
    opened = attempt.opened
    attributes = values_by_path(model, opened.slots, opened.numbers - opened.fixed)
    queries = GradientQueries(call.wanted)
    flat = Flat(model, call.spec, call.leaves, list(attributes), queries, reading, attempt.exactly, attempt.looks)
    flat.originals, flat.opaque_calls = originals, recorded_calls()
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
    return flat, _example([*tensors, *attributes.values()], call.autocast, call.wanted), queries


def _raised_plainly(call: _Call, attempt: Attempt) -> Exception | None:
    """Runs the model with the call's sizes and values; returns the exception that it raises, if none of values."""
    reading = InputValues(attempt.values, call.autocast.device, {}, ())
    try:
        _run_plainly(call, attempt, reading)
    except NeedsExactCapture:
        raise
    except Exception as error:
        # That values are needed, the exporter has said already. Any other exception is the model's own.
        return None if reads_values(error) else error
    return None


def _run_plainly(call: _Call, attempt: Attempt, reading: InputValues) -> None:
    """Runs the model without an exporter."""
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with around_capture(call.autocast), fake:
        flat, inputs, _ = _flat(call, attempt, reading)
        # The exporter opens both around a model, so the model takes the same branches here.
        with _compiling_state_context(), _override_builtin_ops():
            flat(*inputs)


def _reads(call: _Call, attempt: Attempt) -> KnownValues | Error:
    """Runs the model without an exporter; returns all that Python reads at the places where values are needed.

    An Error, if the values are not known.

    Raises:
        Error: the model fails on these values.
    """
    expected = attempt.values
    places, turned, blocked = set(expected.places), dict[int, bool](), set[Place]()
    while True:
        # Each round learns of a further place, of a place without values, or of an outcome that was assumed wrongly.
        known_values = replace(expected, places=frozenset(places - blocked))
        reading = InputValues(known_values, call.autocast.device, turned, blocked)
        try:
            _run_plainly(call, attempt, reading)
        except NeedsNumber as error:
            if error.place in blocked:
                return explain_failure(error, error, call.skeleton)
            if more := reading.symbolic() - blocked:  # Perhaps the number follows from one of these.
                places |= more
            else:
                blocked.add(error.place)
        except NeedsExactCapture:
            raise
        except Exception as error:
            needed = reading.places_of(error) - blocked
            last = next((i for i in reversed(reading.assumed) if i not in turned), None)
            if needed:
                places |= needed
            elif reads_values(error):
                return explain_failure(error, error, call.skeleton)
            elif last is not None:  # Perhaps it was assumed wrongly.
                turned[last] = not reading.outcomes[last].value
            elif isinstance(error, Error):
                raise
            else:
                raise explain_failure(error, error, call.skeleton) from error
        else:
            return KnownValues(frozenset(reading.places), tuple(reading.outcomes))


def _example(values: list[Any], autocast: Autocast, gradients: GradientsWanted) -> tuple[Any, ...]:
    """Returns the inputs that the exporter runs the model on: tensors like those of the call, and numbers."""
    inputs = [like(x, autocast.device) if isinstance(x, Tensor) else x for x in values]
    flags = [*(gradients.inputs or ()), *[False] * len(inputs)]
    # Clones are not leaves of autograd: the model may write into them.
    return tuple(x.requires_grad_().clone() if flag else x for x, flag in zip(inputs, flags, strict=False))


def _symbolic(x: Any, symbols: Symbols) -> Any:
    """Returns the dynamic shape of an input for the exporter: numbers, and dimensions above 1 that are symbols."""
    if not isinstance(x, Tensor):
        return Dim.AUTO
    symbolic_dims = {"all": x.dim(), "first": 1, "none": 0}[symbols]
    # torch makes numbers of lengths of 0 and 1 in any case.
    return {d: Dim.AUTO if d < symbolic_dims else Dim.STATIC for d, n in enumerate(x.shape) if n > 1}


def _exported(flat: Flat, inputs: tuple[Any, ...], symbols: Symbols) -> ExportedProgram | Exception:
    dynamic = (tuple(_symbolic(x, symbols) for x in inputs),) if inputs else ()
    try:
        with short_sizes(symbols), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the exporter asks
            # An LSTM refreshes a list of its weights. What a model assigns is put back, or refused, after the capture.
            warnings.filterwarnings("ignore", "The tensor attributes? self.*during export")
            return export(flat, inputs, dynamic_shapes=dynamic, strict=False)
    except (Entangled, Error, NeedsExactCapture):
        raise
    # Not raised: `_capture` first asks whether another attempt would do better.
    except Exception as error:
        return error
