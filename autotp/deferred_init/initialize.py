"""initialize: a model on `meta` -> one rank's shards, with the values that the whole model would have.

Before: a model on meta, the layouts of its parameters, the random state
After:  this rank's part of the numbers that its constructors would draw; the random state after drawing all of them
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autotp.deferred_init.events import TensorPlace, events_of, places_of, untied
from autotp.deferred_init.replay import Replay, StandIn
from autotp.deferred_init.write_counts import check_traces, expect_all
from autotp.sharding.layout import Layout

# NOTE [Replaying a construction]
# A constructor builds its children and ends with its own initialiser (`reset_parameters`); a model with `_init_weights`
# then applies it to all its modules, children first (nanoGPT, Hugging Face). So the events and their order follow from
# the structure, and running them again draws every random number again, also numbers that are overwritten later. The
# assumption is checked: `_version` of a parameter on meta counts the in-place writes since it was made, and a first
# replay, on meta, has to count the same. The model itself is never written to: during an event a function mode replaces
# its tensors by stand-ins, which are cut after the event.
# The events are found in `events.py`, checked in `write_counts.py` and run again in `replay.py`.


def initialize(model: nn.Module, layouts: Mapping[str, Layout], rank: int, device: torch.device) -> dict[str, Tensor]:
    """Returns this rank's parameters (cut) and buffers (whole) by first name, as of the model built whole on `device`.

    They are the same bit for bit, for the present random state; afterwards the random state is that after building the
    whole model. At any time the device holds the shards, the parameters of the module that is being initialised, and
    the memory that an initialiser needs (torch's `trunc_normal_`: up to three copies). Numbers are drawn in the present
    dtype: bit for bit under `torch.set_default_dtype`, but not after `model.to(dtype)`, which cannot be seen.

    Args:
        model: built under `torch.device("meta")`, and left there. Tensors that are not on meta keep their values.
        layouts: first parameter name -> layout; other tensors stay whole.

    Raises:
        Error: a tensor has no initialiser, or the constructors wrote something else than the initialisers.
    """
    tied = places_of(model)
    done: set[str] = set()
    with untied(tied):
        events = events_of(model)
        names_by_id = check_traces(model, tied, events)
        # Allocated first and together (as the random states are): otherwise they would fragment the freed memory.
        parts = {p[0].name: _empty_part(p[0], layouts.get(p[0].name), rank, device) for p in tied}

        def keep(i: int, place: TensorPlace, stand_in: StandIn) -> None:
            name = names_by_id.get(id(place.tensor))
            if name is not None:
                _fill(parts[name], stand_in.tensor.detach(), layouts.get(name), rank)
                done.add(name)

        Replay(tied, events, device, keep).run()
    for place in [places[0] for places in tied if not places[0].tensor.is_meta]:
        _fill(parts[place.name], place.tensor.detach(), layouts.get(place.name), rank)
        done.add(place.name)
    expect_all(tied, done)
    return parts


def _empty_part(place: TensorPlace, layout: Layout | None, rank: int, device: torch.device) -> Tensor:
    shape = place.tensor.shape if layout is None else layout.local_shape(rank)
    return torch.empty(shape, dtype=place.tensor.dtype, device=device)


def _fill(part: Tensor, full: Tensor, layout: Layout | None, rank: int) -> None:
    """Copies this rank's part into an existing tensor, as `layout.take` does into a new one."""
    full = full if layout is None else layout.own_rows(full)
    if layout is None or layout.dim is None:
        part.copy_(full)
        return
    offset = 0
    for start, stop in layout.pieces[rank]:
        part.narrow(layout.dim, offset, stop - start).copy_(full.narrow(layout.dim, start, stop - start))
        offset += stop - start
