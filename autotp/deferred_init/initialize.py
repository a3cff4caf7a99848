"""A model on `meta` -> one rank's shards, with the values that the whole model would have had.

Before: a model on meta, the layouts of its parameters, the random state
After:  this rank's part of what its constructors would have drawn; the random state as after drawing all of it
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
# A constructor builds its children and ends in its own initialiser (`reset_parameters`); a model with `_init_weights`
# then applies that to all below it, children first (nanoGPT, Hugging Face). So the events and their order follow from
# the structure, and running them again draws every random number again, also those that are overwritten later. Whether
# the constructors really kept to this can be checked: `_version` of a parameter on meta counts the in-place writes
# since it was made, and a first replay, on meta, has to count the same. The model itself is never written: during an
# event a function mode puts stand-ins in the place of its tensors, and they are cut when the event is over.
# The events are found in `events.py`, checked in `write_counts.py` and run again in `replay.py`.


def initialize(model: nn.Module, layouts: Mapping[str, Layout], rank: int, device: torch.device) -> dict[str, Tensor]:
    """This rank's parameters (cut) and buffers (whole) by first name: those of the model built whole on `device`.

    Bit for bit, from the random state as it is now; afterwards that is as after building the model whole. At any time
    the device holds the shards and the parameters of the one module that is being initialised. What an initialiser
    needs for itself (torch's `trunc_normal_`: up to three copies) comes on top. All is drawn in the dtype it has now:
    bit for bit under `torch.set_default_dtype`, not after `model.to(dtype)`, of which nothing can be seen.

    Args:
        model: built under `torch.device("meta")`, and left there. What is not on meta keeps its value.
        layouts: first parameter name -> how it is cut; what is not in it stays whole.

    Raises:
        Error: something has no initialiser, or the constructors did other than the initialisers do.
    """
    tied = places_of(model)
    done: set[str] = set()
    with untied(tied):
        events = events_of(model)
        kept = check_traces(model, tied, events)
        # At once and first (as the random states): made one by one, they would sit in holes that full tensors left.
        parts = {p[0].name: _empty_part(p[0], layouts.get(p[0].name), rank, device) for p in tied}

        def keep(i: int, place: TensorPlace, it: StandIn) -> None:
            name = kept.get(id(place.tensor))
            if name is not None:
                _fill(parts[name], it.tensor.detach(), layouts.get(name), rank)
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
    """`layout.take`, into memory that is there."""
    if layout is None or layout.dim is None:
        part.copy_(full)
        return
    at = 0
    for start, stop in layout.pieces[rank]:
        part.narrow(layout.dim, at, stop - start).copy_(full.narrow(layout.dim, start, stop - start))
        at += stop - start
