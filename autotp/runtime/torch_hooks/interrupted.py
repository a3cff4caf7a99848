"""Compares where the ranks are, after an exception left a forward or a backward on one of them.

NOTE [After an exception]
Ranks pair their collectives by order. An exception that leaves a forward or a backward on one rank only (no memory, an
interrupt, a hook of the user's) leaves the other ranks waiting in it. If the user's code catches the exception and goes
on, the next collective of this rank would pair with theirs, and all further numbers would be wrong. So before its next
collective in a group this rank waits for the others of that group, through the store, and all compare how many
collectives each has started in it. If all ranks raised at the same place, as for a wrong argument, they go on. A rank
that waits in a collective does not come: after the group's timeout it is an error on all ranks. Without an exception
this costs one look at a dictionary.

The waiting rank tells the others that it waits. A rank that has started more collectives than the waiting one has
passed the place of the exception, and will not come. The thread of its heartbeat says so, and the waiting rank need not
wait for the timeout.

A group is compared by itself, and not with the other groups of a model: several models may use it, and the ranks may
not have the same models any more.

NOTE [Where a backward fails]
torch calls no hook if a backward raises. Every backward (`Tensor.backward`, `torch.autograd.grad`, torch.func,
checkpoints) runs through one function, which `torch.autograd` looks up when it is called: it is replaced while a
parallel model exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autotp import torch_internals as internals
from autotp.attached import Counts, attached
from autotp.distributed.agreement import Fact
from autotp.distributed.live_models import Undo, models
from autotp.distributed.mesh import Mesh, group_of, numbered_groups
from autotp.distributed.peers.heartbeat import leave_note, on_each_look, on_news, take_note_back, tell
from autotp.distributed.peers.store_gather import store_gather
from autotp.errors import Error
from autotp.groups.failures import compare_after_exceptions, note_interrupted, uncompared
from autotp.groups.point_to_point import started_collectives
from autotp.groups.process_group import process_group

OURS = "autotp.ops."
"""Where the modules of autotp's own autograd functions are: some of them communicate in backward."""
WAITS, PASSED = "interrupted", "passed"
"""Topics of news: a rank waits for others after an exception; a rank has passed the place where another waits."""
REMEDY = {
    "fix": "let the exception end the program on all ranks, and start again from a checkpoint",
    "alternative": "raise it on all ranks alike, before forward or after backward: one decision, by one all_reduce",
}


def interrupted(error: BaseException) -> None:
    """Notes that an exception left a forward or a backward of a parallel model on this rank."""
    if type(error).__module__ == "torch.utils.checkpoint":  # Ends a call that torch's checkpointing makes again.
        return
    compare_after_exceptions(_compare)
    for group in numbered_groups():
        note_interrupted(group)
    if not isinstance(error, Error):  # All ranks raise that one.
        leave_note(error)


_waiting: dict[str, dict[int, int]] = {}
"""Key of a comparison -> global rank that waits there -> the number of collectives that it has started."""
_passed: dict[str, str] = {}
"""Key of a comparison -> the rank that has passed the place."""


def _compare(group: str) -> None:
    """Raises Error unless all ranks of a group come here, after equally many collectives."""
    place, started = numbered_groups()[group], started_collectives(group)
    key, members = _key(place), dist.get_process_group_ranks(process_group(group))

    def passed() -> str:
        """Returns which rank has passed the place. The others are asked once this rank has waited for a second."""
        tell(members, WAITS, [key, started])
        return f"{_passed[key]} went on without one" if key in _passed else ""

    try:
        texts = store_gather(str(started), place, unless=passed)
    except Error as error:
        why = f"an exception left a forward or backward on some ranks only: {error.problem}"
        raise Error(why, **REMEDY) from error.__cause__
    # So the next comparison of this group meets under another key of the store.
    attached(group_of(place), Counts)[WAITS] += 1
    _waiting.pop(key, None)
    _passed.pop(key, None)
    problem, alternative = "left a forward or backward by an exception at another place", REMEDY["alternative"]
    details = {"alternative": alternative}
    Fact("started", started, problem, REMEDY["fix"], details=lambda *ranks: details).expect(
        dict(enumerate(texts)), place
    )
    # All ranks are at one place again, so the exception of this rank is settled.
    take_note_back()


def _key(place: Mesh) -> str:
    """Returns the key of the next comparison of a group."""
    return f"{WAITS}/{place.number}/{place.group}/{attached(group_of(place), Counts)[WAITS]}"


def _look() -> None:
    """Tells a rank that waits for this one that this one has passed the place."""
    for group, place in numbered_groups().items() if _waiting else ():
        started_here = started_collectives(group)
        late = [rank for rank, started in _waiting.get(_key(place), {}).items() if started_here > started]
        # A rank that has to be compared itself has not passed the place.
        if late and group not in uncompared:
            tell(late, PASSED, [_key(place), place.named([place.rank])])


def install() -> Undo:
    """Notes exceptions that leave a backward; returns the undo."""
    on_each_look(_look)
    on_news(WAITS, lambda sender, message: _waiting.setdefault(message[0], {}).update({sender: message[1]}))
    on_news(PASSED, lambda sender, message: _passed.update({message[0]: message[1]}))
    run = internals.RUNS_BACKWARD.original()

    @wraps(run)
    def call(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(outputs, *args, **kwargs)
        except BaseException as error:
            if _is_of_model(outputs):
                interrupted(error)
            raise

    return internals.RUNS_BACKWARD.put(call)


def _is_of_model(outputs: Iterable[Any]) -> bool:
    """True if the graph behind these tensors or edges has a function of autotp, or a parameter of a parallel model."""
    parameters = {id(p) for model in models() for p in model.parameters()}
    nodes = [x.grad_fn if isinstance(x, Tensor) else getattr(x, "node", None) for x in outputs]
    visited = set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        function = getattr(type(node), "_forward_cls", None)
        if getattr(function, "__module__", "").startswith(OURS) or id(getattr(node, "variable", None)) in parameters:
            return True
        nodes += [following for following, _ in node.next_functions]
    return False
