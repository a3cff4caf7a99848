"""capture: an nn.Module and example inputs -> a torch.fx graph of ATen operators, and its guards.

Before: nn.Module, on any device or on meta
After:  graph(parameters..., buffers..., constants..., tensor inputs...) -> flat tensor outputs
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.export import Dim, ExportedProgram, export

from autotp.errors import Error
from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.captured import NOTHING_OPENED, Captured, Opened
from autotp.passes.capture.exported_program import convert_program, like
from autotp.passes.capture.flatten import Flat
from autotp.passes.capture.guards.attribute_paths import spelled, values_at
from autotp.passes.capture.guards.python_state import GradientQueries, GradientsWanted
from autotp.passes.capture.patches import CAPTURING, around_capture, around_export
from autotp.passes.capture.pytree import flatten, is_dense
from autotp.passes.capture.repeats.queries import Entangled
from autotp.passes.capture.repeats.repeats import Repeats
from autotp.passes.capture.skeleton import copy_on
from autotp.passes.capture.unsupported.explain_failure import explain_failure, raised_plainly

DEVICE = "cpu"
"""The device on which models are captured, with tensors without memory; under autocast the device of autocast. Not
`meta`: there a constant that the model creates has no values, and autocast does nothing."""

OFF = Autocast(DEVICE)
ALWAYS = GradientsWanted()


def capture(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autocast: Autocast = OFF,
    once: bool = True,
    opened: Opened = NOTHING_OPENED,
    wanted: GradientsWanted = ALWAYS,
) -> Captured:
    """Returns the graph of `skeleton(*args, **kwargs)`, with every input dimension symbolic where the model allows.

    Args:
        skeleton: the model, on `meta` (see `skeleton_of`); its train/eval flags count.
        args, kwargs: example arguments; of tensors only shapes and dtypes are read.
        autocast: the settings of autocast around the call.
        once: whether blocks that are alike are captured once (`repeats/repeats.py`): the same graph, faster.
        opened: attributes that change from call to call, in addition to those that the model itself writes.
        wanted: the answers to the model's questions about gradients: see `GradientsWanted`.

    Raises:
        Error: the model branches on values, or fails on these inputs; names the source line.
    """
    leaves, spec = flatten((args, kwargs))
    _expect_dense(leaves)
    leaves = [leaf.copy() if isinstance(leaf, numpy.ndarray) else leaf for leaf in leaves]  # Constants of the graph.
    with CAPTURING:
        while True:
            result = _captured_once(skeleton, leaves, spec, autocast, once, opened, wanted)
            if isinstance(result, Captured):
                return result
            if opened | result == opened:
                names = ", ".join(f"`{spelled(slot)}`" for slot in sorted(result.slots))
                raise Error(f"forward writes into {names} in a way that a graph cannot", fix="a buffer")
            opened |= result


def _expect_dense(leaves: list[Any]) -> None:
    """Raises Error for a sparse or nested tensor, whose sizes do not say which numbers it has."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not is_dense(leaf):
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise Error(
                f"an argument is a {kind} tensor, and a graph takes dense tensors",
                fix="x.to_dense(); for sequences of several lengths a padded tensor and a mask",
            )


def _captured_once(
    skeleton: nn.Module,
    leaves: list[Any],
    spec: Any,
    autocast: Autocast,
    once: bool,
    opened: Opened,
    wanted: GradientsWanted,
) -> Captured | Opened:
    """Returns the graph; or the further attributes that have to be inputs of it."""
    for with_objects in (True, False) if once else ():
        repeats = Repeats(with_objects)
        with suppress(Entangled, Error):  # Capturing again below, without repeats, decides whether the model fails.
            return _capture(skeleton, leaves, spec, autocast, repeats, opened, wanted)
        if not repeats.met_objects:
            break
    return _capture(skeleton, leaves, spec, autocast, None, opened, wanted)


def _capture(
    skeleton: nn.Module, leaves: list[Any], spec: Any, autocast: Autocast, repeats: Repeats | None,
    opened: Opened, wanted: GradientsWanted,
) -> Captured | Opened:  # fmt: skip
    """Captures once, as `capture` says; calls of the model's blocks go through `repeats`."""
    with around_capture(autocast):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model = copy_on(skeleton, autocast.device)
            held = values_at(model, opened.slots, opened.numbers - opened.fixed)
            asked = GradientQueries(wanted)
            flat = Flat(model, spec, leaves, list(held), asked)
            given = _example([*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *held.values()], autocast, wanted)
        with around_export(flat.model, repeats) as reads:
            program = _exported(flat, given)
        if opened | flat.returned.before != opened:
            return flat.returned.before
        if isinstance(program, Exception):
            plain = raised_plainly(flat, given, mode)
            raise explain_failure(program, plain, flat.model) from (
                plain or program
            )  # The exporter's trace is a page long.
    result = convert_program(program, flat, given, autocast, reads.slots(repeats.same if repeats else ()), opened)
    return replace(result, wanted=asked.relevant()) if isinstance(result, Captured) else result


def _example(values: list[Any], autocast: Autocast, wanted: GradientsWanted) -> tuple[Any, ...]:
    """Returns the inputs that the exporter runs the model on: tensors like those of the call, and numbers."""
    given = [like(x, autocast.device) if isinstance(x, Tensor) else x for x in values]
    flags = [*(wanted.inputs or ()), *[False] * len(given)]
    # Clones are not leaves of autograd: the model may write into them.
    return tuple(x.requires_grad_().clone() if flag else x for x, flag in zip(given, flags, strict=False))


def _symbolic(x: Any) -> Any:
    """Returns the dynamic shape of an input for the exporter: every dimension above 1, and every number, may vary."""
    return {d: Dim.AUTO for d, n in enumerate(x.shape) if n > 1} if isinstance(x, Tensor) else Dim.AUTO


def _exported(flat: Flat, given: tuple[Any, ...]) -> ExportedProgram | Exception:
    dynamic = (tuple(_symbolic(x) for x in given),) if given else ()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the exporter asks
            return export(flat, given, dynamic_shapes=dynamic, strict=False)
    except (Entangled, Error):
        raise
    except Exception as error:
        return error
