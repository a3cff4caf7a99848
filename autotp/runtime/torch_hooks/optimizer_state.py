"""Warns where the user's code reads an optimizer's `state_dict()` that has what this rank steps only.

States of cut parameters behave as wholes, and are saved as wholes. A rank of a pipeline has the states of some
parameters, and so has a rank of an optimizer with owners (`OwnedStates`).

torch has no hook for the state dicts of all optimizers, so each gets one at its first step. It has no state before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from torch import Tensor
from torch.optim import Optimizer

from autotp.attached import Marks, all_attached, attached, first_time
from autotp.distributed.cut_tensors.cut_parameter import tell_user
from autotp.distributed.live_models import sorted_by_model
from autotp.errors import Error
from autotp.runtime.holdings import Holdings, holdings_of
from autotp.source_location import calling_frame, is_users, reads_for_caller
from autotp.torch_internals import BETWEEN

WHOLE = "its state dict is whole"
"""The mark of an optimizer in a region of `not_watched`."""
OF_RANK = "of_rank"
"""The entry of a state dict of owned states with the rank that it is of, and the number of ranks."""


class OwnedStates:
    """A base of optimizers that keep the state of a parameter whole, on one of the ranks that hold it: its owner.

    Such an optimizer compares its states itself before each step. Checkpoints take each state from its owner, and give
    it to the owner.
    """

    def choose_owners(self) -> None:
        """Chooses the owners, if the parameters are others than in the last step. Call it on every rank."""
        raise NotImplementedError

    def owner(self, parameter: Tensor) -> int | None:
        """Returns the rank that owns a parameter's state, of all that hold the model; None if no owner is chosen."""
        raise NotImplementedError


class InBackward:
    """The state of an optimizer that steps parameters in backward, and frees their gradients there."""


def expect_norm(gradients: Collection[object]) -> None:
    """Raises Error if there is no gradient of which to compute a norm, since an optimizer has stepped in backward."""
    for optimizer, _ in all_attached(InBackward) if not gradients else ():
        raise Error(
            f"{type(optimizer).__name__} steps in backward, and there is no gradient left whose norm could be clipped",
            fix="autotp.low_memory(..., in_backward=False)",
            alternative="parameter.register_hook(lambda grad: grad.clamp(-1, 1)), before the optimizer is made",
        )


def watch_state(optimizer: Optimizer) -> None:
    """Lets an optimizer warn, once for each line of the user's code that reads its state dict."""
    if first_time(optimizer, "watch_state"):
        optimizer.register_state_dict_pre_hook(_before_state_dict)


@contextmanager
def not_watched(optimizer: Optimizer) -> Iterator[None]:
    """A region in which the state dict of an optimizer is whole, so reading it is no mistake."""
    attached(optimizer, Marks).add(WHOLE)
    try:
        yield
    finally:
        attached(optimizer, Marks).discard(WHOLE)


def _before_state_dict(optimizer: Optimizer) -> None:
    if WHOLE in attached(optimizer, Marks):
        return
    frame = _reader(calling_frame())
    if frame is None:
        return
    by_model, _ = sorted_by_model(p for group in optimizer.param_groups for p in group["params"])
    for model, parameters in by_model.items():
        text = _missing(optimizer, holdings_of(model, "state_dict"), parameters)
        if text and first_time(optimizer, (frame.f_code.co_filename, frame.f_lineno)):
            tell_user(
                f"`{type(optimizer).__name__}.state_dict()` has what this rank steps only: {text}. "
                "autotp.save_checkpoint, with autotp.distribute in place of autotp.parallelize, saves the whole of "
                "optimizer and model; autotp.full_state_dict(model), on all ranks, has the whole model",
                frame,
            )


def _reader(frame: FrameType | None) -> FrameType | None:
    """Returns the frame that reads the state dict, if it is the user's: torch and autotp know what parts are."""
    while frame is not None and _is_between(frame):
        frame = frame.f_back
    return frame if frame is not None and is_users(frame) else None


def _is_between(frame: FrameType) -> bool:
    return f"{frame.f_globals.get('__name__')}.".startswith(BETWEEN) or reads_for_caller(frame)


def _missing(optimizer: Optimizer, parts: Holdings, parameters: Mapping[str, Tensor]) -> str:
    """Returns what this rank does not have of the optimizer's state, as text; "" if it has the whole."""
    if isinstance(optimizer, OwnedStates):
        owners = {name: optimizer.owner(p) for name, p in parameters.items()}
        elsewhere = [(name, rank) for name, rank in owners.items() if rank not in (None, parts.everyone.rank)]
        for name, rank in elsewhere[:1]:
            more = f", and {len(elsewhere) - 1} more are on other ranks" if elsewhere[1:] else ""
            return f"the state of `{name}` is on {parts.everyone.named([rank])}{more}"
    has_state = any(optimizer.state.get(parameter) for parameter in parameters.values())
    return "it has the parameters of this rank's stages" if has_state and parts.pipeline is not None else ""
