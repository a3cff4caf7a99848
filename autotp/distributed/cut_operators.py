"""Names of operators that are right on a rank's part of a tensor, because they are elementwise."""

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
"""Their in-place, reflected (`__rmul__`) and list forms (`_foreach_mul_`) count, too. Copies and `zeros_like` are among
them: noise may be drawn into their result."""
SIZES = ("size", "numel", "nelement", "__len__", "shape", "nbytes")
ABOUT = """
    dim ndimension element_size stride storage_offset data_ptr untyped_storage storage
    is_contiguous is_floating_point is_complex is_signed get_device requires_grad_ retain_grad backward
    register_post_accumulate_grad_hook new_empty new_zeros new_ones new_full new_tensor __hash__ __repr__ __str__
    __format__ __deepcopy__ __reduce_ex__ __dir__ share_memory_ pin_memory set_ is_set_to is_pinned
    is_shared is_same_size swap_tensors
"""
"""Operators that read properties of a tensor, or make tensors from sizes, and do not read values."""
TRANSPOSED = ("T", "mT", "H", "mH")
SUMMED = ("broadcast", "all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter")
"""Collectives that expect the same tensor on all ranks, as replicas have it."""


class Kind(Enum):
    """The effect of an operator on a part."""

    EACH = "is elementwise: its result is a part, too"
    ABOUT = "does not read its values"
    SIZE = "reads its size"
    GRADIENT = "reads its gradient"
    GRADIENTS = "computes gradients of several tensors"
    SET = "replaces its data or its gradient"
    HOOK = "registers a hook on its gradient"
    REPLICAS = "expects the same tensor on other ranks"
    WHOLE = "uses it as the whole"


@cache
def kind_of(func: Any) -> Kind:
    """Returns the effect of an operator on a part. An unknown operator uses it as the whole."""
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
