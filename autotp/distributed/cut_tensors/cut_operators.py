"""What the functions that torch calls on a part ask for: its values, its size, its gradient, or facts of the object."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any

SIZES = ("size", "numel", "nelement", "__len__", "shape", "nbytes", "stride", "is_same_size")
ABOUT = """
    dim ndimension ndim element_size storage_offset data_ptr untyped_storage storage
    is_contiguous is_floating_point is_complex is_signed get_device requires_grad_ retain_grad backward
    __hash__ __repr__ __str__
    __format__ __deepcopy__ __reduce_ex__ __dir__ share_memory_ pin_memory set_ is_set_to is_pinned
    is_shared swap_tensors
"""
"""Functions that read facts of the object, which are the same for the part and the whole, or its memory."""
VALUES = ("data", "T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__")
"""Attributes with values."""


class Access(Enum):
    """What a function asks for."""

    ABOUT = "facts of the object, or its memory"
    SIZE = "its size"
    GRADIENT = "its gradient"
    GRADIENTS = "gradients of several tensors"
    SET = "to replace its data or its gradient"
    HOOK = "a hook on its gradient"
    REPLICAS = "to be sent to other ranks, or combined with theirs"
    VALUES = "its values"


@cache
def access_of(func: Any) -> Access:
    """Returns what a function asks for. An unknown one asks for values."""
    name, module = getattr(func, "__name__", ""), getattr(func, "__module__", None) or ""
    # An attribute comes as a method of its descriptor, which knows the attribute's name.
    if name in ("__get__", "__set__", "__delete__"):
        return _of_attribute(name, getattr(getattr(func, "__self__", None), "__name__", ""))
    if module.startswith("torch.distributed."):
        return Access.REPLICAS
    if module.startswith("torch.autograd") and name == "grad":
        return Access.GRADIENTS
    if name in ("register_hook", "register_post_accumulate_grad_hook"):
        return Access.HOOK
    if name in SIZES:
        return Access.SIZE
    # Kernels of torch's optimizers and of its scaler, which are right on parts.
    if name in ABOUT.split() or name.startswith(("_fused_", "_amp_")):
        return Access.ABOUT
    return Access.VALUES


def _of_attribute(access: str, name: str) -> Access:
    if access == "__get__":
        if name == "grad":
            return Access.GRADIENT
        if name in SIZES:
            return Access.SIZE
        return Access.VALUES if name in VALUES else Access.ABOUT
    return Access.SET if access == "__set__" and name in ("data", "grad") else Access.ABOUT
