"""A parameter that is a rank's part, and says so when it is taken for the whole.

What an optimizer does to every element for itself is right on parts; so are copies, dtypes, gradients. A norm, a row, a
product, numbers drawn anew by `nn.init` are of the part alone: the first time that the user's code does such a thing
to a cut parameter, it is warned. Inside the model's graphs nothing of this is looked at.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from autotp.layout import Layout
from autotp.source import is_users

ELEMENTWISE = """
    add sub mul div neg addcmul addcdiv lerp clamp clamp_min clamp_max abs square sqrt rsqrt sign exp log pow where zero
    fill copy nan_to_num isnan isinf isfinite maximum minimum eq ne lt gt le ge zeros ones constant
"""
"""Operators on every element for itself; in place, reflected (`__rmul__`) and over lists (`_foreach_mul_`) as well."""
ABOUT = """
    dim size numel nelement element_size stride storage_offset data_ptr untyped_storage storage is_contiguous
    is_floating_point is_complex get_device type requires_grad_ retain_grad register_hook backward detach
    register_post_accumulate_grad_hook detach_ clone to cpu cuda float double half bfloat16 contiguous expand_as view_as
    type_as zeros_like ones_like empty_like full_like new_empty new_zeros new_ones new_full new_tensor __hash__ __repr__
    __str__ __format__ __deepcopy__ __reduce_ex__ __len__ __dir__ share_memory_ pin_memory set_ is_set_to is_pinned
    is_shared is_same_size swap_tensors
"""
"""What is asked of a tensor, and copies of it."""
TRANSPOSED = ("T", "mT", "H", "mH")
FUSED = ("_foreach_", "_fused_")


class CutParameter(nn.Parameter):
    """A parameter of which this rank holds a part.

    Attributes:
        autotp_part: its name in the model, and how it is held.
    """

    autotp_part: tuple[str, Layout]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        given = (*args, *(kwargs or {}).values())
        part = next((x for x in given if isinstance(x, CutParameter)), None)
        if part is not None and not _is_right(func):
            depth = _depth()
            if _draws(func) or is_users(sys._getframe(depth)):
                _warn(part, func, depth)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> CutParameter:
        new: CutParameter = super().__deepcopy__(memo)
        new.autotp_part = self.autotp_part
        return new


def as_cut(parameter: nn.Parameter, name: str, layout: Layout) -> nn.Parameter:
    """The parameter itself, which knows from here on that it is a part, if it is."""
    if layout.dim is not None and type(parameter) is nn.Parameter:
        parameter.__class__ = CutParameter
        _spare_dynamo()
    if isinstance(parameter, CutParameter):
        parameter.autotp_part = name, layout
    return parameter


def _is_right(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in TRANSPOSED
    bare = name.strip("_")
    spellings = {bare, bare.removeprefix("i"), bare.removeprefix("r")}
    return name in ABOUT.split() or name.startswith(FUSED) or bool(spellings & set(ELEMENTWISE.split()))


THROUGH = ("torch._tensor", "torch.overrides", "torch.functional", "torch.nn.functional", __name__)
"""Where torch passes a call on."""


def _depth() -> int:
    """How far up the frame is that made the call."""
    depth = 1
    while sys._getframe(depth).f_globals.get("__name__") in THROUGH:
        depth += 1
    return depth - 1


def _draws(func: Any) -> bool:
    """True for `nn.init`, whose own code is torch's."""
    return getattr(func, "__module__", "") == "torch.nn.init"


def _warn(part: CutParameter, func: Any, depth: int) -> None:
    name, layout = part.autotp_part
    if part.__dict__.get("autotp_warned"):
        return
    part.__dict__["autotp_warned"] = True
    warnings.warn(
        f"`{name}` is this rank's part {list(part.shape)} of {list(layout.shape)}, and `{func.__name__}` is computed "
        "of that alone. autotp.full_state_dict(model, lambda name: ...) gives the whole, and "
        "autotp.load_full_state_dict takes it back",
        stacklevel=depth + 2,
    )


def is_ordinary(tensor: Tensor) -> bool:
    """True for a parameter that is torch's own, or cut."""
    return type(tensor) in (nn.Parameter, CutParameter)


@cache
def _spare_dynamo() -> None:
    """Has Dynamo leave the wrapper alone: its own operators come there, and it would compile it without end."""
    from torch._dynamo.eval_frame import skip_code  # It takes a second, and export has it by now.

    skip_code(CutParameter.__torch_function__.__func__.__code__)  # type: ignore[attr-defined]
