"""Process groups that only their own ranks make: their names, and how their ranks connect."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha1
from typing import Any

import torch.distributed as dist

from autotp.attached import Counts, attached
from autotp.torch_internals import NAMES_GROUP

MANY = 64
"""In groups of more ranks gloo connects two ranks when the first one sends, and not when the group is made."""
LATE = "TORCH_GLOO_LAZY_INIT"
"""torch's environment variable for that. With n ranks and without it, each of them asks the store 2n + 1 times."""


@contextmanager
def without_others(ranks: Sequence[int], axis: str) -> Iterator[None]:
    """A region in which `new_group(ranks, use_local_synchronization=True)` waits for nobody but these ranks.

    NOTE [Groups that only their ranks make]
    By torch's rule all ranks of the world make all groups: 2,112 calls on each of 8,192 ranks, of which a rank is in
    some six groups. `use_local_synchronization` lifts this rule, but for two things that are changed here:
    - torch names such a group by its ranks and by the number of groups that this process is in. Ranks that are in other
      groups besides, such as one of the user's, would use different names, and would wait for each other. Here the name
      has the number of groups of the same ranks that autotp has made: all members have made the same ones.
    - After the user's `init_process_group("nccl", device_id=...)` torch splits the communicator of the world, and NCCL
      wants all its ranks for that. A default group that is bound to no device is not split: the new group gets a
      communicator of its own when it is first used.
    """
    world: Any = dist.group.WORLD
    digest = sha1(repr(sorted(ranks)).encode(), usedforsecurity=False).hexdigest()
    # After `destroy_process_group()` names begin anew, as torch's do: its caches of device meshes keep names of groups.
    made = attached(world, Counts)
    name = f"autotp/{axis}/{digest}/{made['groups', digest]}"
    made["groups", digest] += 1
    device_before, world.bound_device_id = world.bound_device_id, None
    try:
        with NAMES_GROUP.replaced_by(lambda _: name), connecting_late(len(ranks)):
            yield
    finally:
        world.bound_device_id = device_before


@contextmanager
def connecting_late(size: int) -> Iterator[None]:
    """A region in which gloo connects the ranks of a new group of this size at once if they are few, else on use."""
    before = os.environ.get(LATE)
    if size > MANY and before is None:
        os.environ[LATE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(LATE, None)
