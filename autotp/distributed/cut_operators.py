"""Names of operators that are right on a rank's part of a tensor, because they work element by element."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any

ELEMENTWISE = """
    add sub mul div true_divide multiply subtract divide neg negative reciprocal addcmul addcdiv lerp clamp clamp_min
    clamp_max clip abs absolute square sqrt rsqrt sign sgn exp exp2 expm1 log log1p log2 log10 pow float_power where
    zero fill copy nan_to_num isnan isinf isfinite isclose maximum minimum fmax fmin eq ne lt gt le ge truediv floordiv
    floor_divide mod remainder fmod tanh sigmoid relu sin cos tan erf round floor ceil trunc logical_and logical_or
    logical_xor logical_not zeros ones constant masked_fill detach clone to cpu cuda float double half bfloat16
    type contiguous type_as real imag data zeros_like ones_like empty_like full_like
"""
"""In place, reflected (`__rmul__`) and over lists (`_foreach_mul_`) as well; copies, too, and what is made in its
image: noise is drawn into that."""
SIZES = ("size", "numel", "nelement", "__len__", "shape", "nbytes")
ABOUT = """
    dim ndimension element_size stride storage_offset data_ptr untyped_storage storage
    is_contiguous is_floating_point is_complex is_signed get_device requires_grad_ retain_grad backward
    register_post_accumulate_grad_hook new_empty new_zeros new_ones new_full new_tensor __hash__ __repr__ __str__
    __format__ __deepcopy__ __reduce_ex__ __dir__ share_memory_ pin_memory set_ is_set_to is_pinned
    is_shared is_same_size swap_tensors
"""
"""What is asked of a tensor, or made from sizes, whatever its values."""
TRANSPOSED = ("T", "mT", "H", "mH")
SUMMED = ("broadcast", "all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter")
"""Collectives that take what the ranks have for the same tensor, as replicas have it."""


class Kind(Enum):
    """What an operator does to a part."""

    EACH = "to every element for itself: its result is a part as well"
    ABOUT = "does not look at its values"
    SIZE = "asks for its size"
    GRADIENT = "reads its gradient"
    GRADIENTS = "computes gradients of several"
    SET = "puts another tensor in its place"
    HOOK = "has a function called with its gradient"
    REPLICAS = "takes it for what the other ranks have, too"
    WHOLE = "takes it for the whole"


@cache
def kind_of(func: Any) -> Kind:
    """What an operator does to a part. One that is not known takes it for the whole."""
    name, module = getattr(func, "__name__", ""), getattr(func, "__module__", None) or ""
    if name in ("__get__", "__set__", "__delete__"):
        return _of_attribute(name, getattr(getattr(func, "__self__", None), "__name__", ""))
    if module.startswith("torch.distributed."):
        return Kind.REPLICAS if name in SUMMED else Kind.ABOUT
    if module.startswith("torch.autograd") and name == "grad":
        return Kind.GRADIENTS
    if name == "register_hook":
        return Kind.HOOK
    if name in SIZES:
        return Kind.SIZE
    if name in ABOUT.split() or name.startswith(("_fused_", "_amp_")):
        return Kind.ABOUT
    bare = name.removeprefix("_foreach_").strip("_")
    spellings = {bare, bare.removeprefix("i"), bare.removeprefix("r")}
    return Kind.EACH if spellings & set(ELEMENTWISE.split()) else Kind.WHOLE


def _of_attribute(access: str, name: str) -> Kind:
    if access == "__get__":
        if name == "grad":
            return Kind.GRADIENT
        if name in SIZES:
            return Kind.SIZE
        return Kind.WHOLE if name in TRANSPOSED else Kind.EACH if name in ELEMENTWISE.split() else Kind.ABOUT
    return Kind.SET if access == "__set__" and name in ("data", "grad") else Kind.ABOUT
