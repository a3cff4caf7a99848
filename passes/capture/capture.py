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
from autotp.passes.capture.captured import NOTHING, Captured, Opened
from autotp.passes.capture.exported_program import captured, like
from autotp.passes.capture.flatten import Flat
from autotp.passes.capture.guards.attribute_paths import spelled, values_at
from autotp.passes.capture.guards.python_state import Asked, GradientsWanted
from autotp.passes.capture.patches import CAPTURING, around_capture, around_export
from autotp.passes.capture.pytree import flatten
from autotp.passes.capture.repeats.queries import Entangled
from autotp.passes.capture.repeats.repeats import Repeats
from autotp.passes.capture.skeleton import copy_on
from autotp.passes.capture.unsupported.explain_failure import explained, raised_plainly

DEVICE = "cpu"
"""Where models are captured, on tensors without memory. Not `meta`: there a constant that the model makes has no value,
and autocast does nothing. (Under autocast it is the kind of device that this is for.)"""

OFF = Autocast(DEVICE)
ALWAYS = GradientsWanted()


def capture(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autocast: Autocast = OFF,
    once: bool = True,
    opened: Opened = NOTHING,
    wanted: GradientsWanted = ALWAYS,
) -> Captured:
    """The graph of `skeleton(*args, **kwargs)`, with every input dimension symbolic where the model allows.

    Args:
        skeleton: the model, on `meta` (see `skeleton_of`); its train/eval flags count.
        args, kwargs: example arguments; of tensors only shapes and dtypes are read.
        autocast: what is on around the model.
        once: whether blocks that are alike are captured once (`repeats/repeats.py`): the same graph, sooner.
        opened: attributes that change from call to call, besides those that the model itself writes.
        wanted: of what gradients are wanted in the call, should the model ask.

    Raises:
        Error: the model branches on data, or fails on these inputs; names the source line.
    """
    leaves, spec = flatten((args, kwargs))
    leaves = [leaf.copy() if isinstance(leaf, numpy.ndarray) else leaf for leaf in leaves]  # Constants of the graph.
    with CAPTURING:
        while True:
            found = _captured_once(skeleton, leaves, spec, autocast, once, opened, wanted)
            if isinstance(found, Captured):
                return found
            if opened | found == opened:
                names = ", ".join(f"`{spelled(slot)}`" for slot in sorted(found.slots))
                raise Error(f"forward writes into {names} in a way that a graph cannot", fix="a buffer")
            opened |= found


def _captured_once(
    skeleton: nn.Module,
    leaves: list[Any],
    spec: Any,
    autocast: Autocast,
    once: bool,
    opened: Opened,
    wanted: GradientsWanted,
) -> Captured | Opened:
    """The graph; or what has to be opened besides."""
    for with_objects in (True, False) if once else ():
        repeats = Repeats(with_objects)
        with suppress(Entangled, Error):  # What fails while its blocks are watched is to fail, or not, as it is.
            return _capture(skeleton, leaves, spec, autocast, repeats, opened, wanted)
        if not repeats.met_objects:
            break
    return _capture(skeleton, leaves, spec, autocast, None, opened, wanted)


def _capture(
    skeleton: nn.Module, leaves: list[Any], spec: Any, autocast: Autocast, repeats: Repeats | None,
    opened: Opened, wanted: GradientsWanted,
) -> Captured | Opened:  # fmt: skip
    """As `capture`; the calls of its blocks go through `repeats`."""
    with around_capture(autocast):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model = copy_on(skeleton, autocast.device)
            held = values_at(model, opened.slots, opened.numbers - opened.fixed)
            asked = Asked(wanted)
            flat = Flat(model, spec, leaves, list(held), asked)
            given = _example([*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *held.values()], autocast, wanted)
        with around_export(flat.model, repeats) as reads:
            program = _exported(flat, given)
        if opened | flat.returned.before != opened:
            return flat.returned.before
        if isinstance(program, Exception):
            plain = raised_plainly(flat, given, mode)
            raise explained(program, plain, flat.model) from plain or program  # The exporter's trace is a page long.
    found = captured(program, flat, given, autocast, reads.slots(repeats.same if repeats else ()), opened)
    return replace(found, wanted=asked.relevant()) if isinstance(found, Captured) else found


def _example(values: list[Any], autocast: Autocast, wanted: GradientsWanted) -> tuple[Any, ...]:
    """What the exporter runs the model on: tensors like those of the call, and numbers."""
    given = [like(x, autocast.device) if isinstance(x, Tensor) else x for x in values]
    flags = [*(wanted.inputs or ()), *[False] * len(given)]
    # No leaves: the model may write into them.
    return tuple(x.requires_grad_().clone() if flag else x for x, flag in zip(given, flags, strict=False))


def _symbolic(x: Any) -> Any:
    """Which dimensions of a tensor may have other sizes, and that a number may be another."""
    return {d: Dim.AUTO for d, n in enumerate(x.shape) if n > 1} if isinstance(x, Tensor) else Dim.AUTO


def _exported(flat: Flat, given: tuple[Any, ...]) -> ExportedProgram | Exception:
    dynamic = tuple(_symbolic(x) for x in given)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the exporter asks
            return export(flat, given, dynamic_shapes=(dynamic,), strict=False)
    except (Entangled, Error):
        raise
    except Exception as error:
        return error
