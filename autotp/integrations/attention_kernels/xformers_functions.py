"""xformers_functions: xformers' memory_efficient_attention as the operator of a graph, or as torch's own attention.

    memory_efficient_attention(q, k, v, LowerTriangularMask())               attention_kernel(q, k, v, ..., after=0)
    memory_efficient_attention(q, k, v, BlockDiagonalMask.from_seqlens(...)) attention_kernel(q, k, v, ends, ends, ...)
    memory_efficient_attention(q, k, v, bias)                                F.scaled_dot_product_attention(..., bias)

A mask that the loop makes is an argument: where its documents end is an input of the graph, and one graph serves all.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from autotp.errors import Error
from autotp.integrations.attention_kernels.kernel_operator import KERNEL
from autotp.sharding.axis import Size
from autotp.source_location import user_line
from autotp.torch_internals import set_until_undone

FUNCTION, BIASES = "xformers.ops.fmha", "xformers.ops.fmha.attn_bias"
SQUARE = {"LowerTriangularMask": "LowerTriangularFromBottomRightMask",
          "BlockDiagonalCausalMask": "BlockDiagonalCausalFromBottomRightMask"}  # fmt: skip
"""Causal masks from the first query and key on -> those up to the last ones, as all kernels here count."""
CAUSAL = {*SQUARE, *SQUARE.values()}
PACKED = ("BlockDiagonalMask", "BlockDiagonalCausalMask", "BlockDiagonalCausalFromBottomRightMask")
KNOWN = {*CAUSAL, *PACKED}


def _code(*args, **kwargs):  # type: ignore[no-untyped-def]
    from autotp.integrations.attention_kernels.xformers_functions import xformers_attention

    return xformers_attention(*args, **kwargs)


@contextmanager
def xformers_as_operators() -> Iterator[None]:
    """A region in which xformers' function computes by operators, by whatever name a model calls it."""
    function = getattr(sys.modules.get(FUNCTION), "memory_efficient_attention", None)
    if function is None:
        yield
        return
    undo = set_until_undone(function, "__code__", _code.__code__)
    try:
        yield
    finally:
        undo()


def xformers_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None,
    *, op: Any = None, output_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Returns what xformers' memory_efficient_attention returns; arguments as there.

    Args:
        query: [batch seq heads width], [batch seq width], or [batch seq groups heads width].
        key, value: the same.

    Raises:
        Error: the bias, or an option, is one without a rule.
    """
    if op is not None or output_dtype not in (None, query.dtype):
        raise _refused("gets op= or output_dtype=, which hold for one kernel", "a call without them")
    q, k, v = _with_shared_heads(query, key, value)
    name = type(attn_bias).__name__
    if attn_bias is None or name in KNOWN:
        output = _by_kernel(q, k, v, attn_bias, name, p, scale)
    elif isinstance(attn_bias, Tensor) and not hasattr(attn_bias, "materialize"):
        bias = attn_bias.unsqueeze(1) if query.dim() == 3 else attn_bias.flatten(1, -3)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        output = F.scaled_dot_product_attention(
            q, k, v, bias, dropout_p=p, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        ).transpose(1, 2)
    else:
        instead = f"a tensor, or one of {', '.join(sorted(KNOWN))}"
        raise _refused(f"gets the bias {name}, for which autotp has no rule", instead)
    return output.reshape(*query.shape[:-1], value.shape[-1])


def _with_shared_heads(*tensors: Tensor) -> list[Tensor]:
    """Returns the tensors as [batch seq heads width]; keys that are repeated for the heads of a group, once."""

    def of_heads(x: Tensor) -> Tensor:
        if x.dim() == 3:
            return x.unsqueeze(2)
        return x if x.dim() == 4 else x.flatten(2, 3)

    query, key, value = tensors
    repeated = key.dim() == value.dim() == 5 and key.stride(3) == value.stride(3) == 0
    return [of_heads(query), *(x.select(3, 0) if repeated else of_heads(x) for x in (key, value))]


def _by_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Any, name: str, p: float, scale: float | None) -> Tensor:
    """Returns the result of the operator, [batch seq heads width]."""
    causal = name in CAUSAL
    settings = repr({"softmax_scale": scale, "dropout_p": p, "causal": causal})
    kernel = f"{__name__}:{MemoryEfficient.__name__}"
    rest = None, None, None, None, scale, -1, 0 if causal else -1, 0.0, p, kernel, settings
    if name not in PACKED:
        is_square = Size.of(q.shape[1]) == Size.of(k.shape[1]) or q.shape[1] == k.shape[1]
        _expect_square(name, is_square)
        return KERNEL(q, k, v, None, None, *rest)[0]
    if q.shape[0] != 1:
        raise _refused(f"gets {name} for {q.shape[0]} rows", "one row, [1 tokens heads width]")
    queries, keys = mask.q_seqinfo, mask.k_seqinfo
    _expect_square(name, queries is keys)
    of_queries = queries.seqstart.to(q.device)
    of_keys = of_queries if queries is keys else keys.seqstart.to(q.device)
    longest = queries.max_seqlen, keys.max_seqlen
    q, k, v = (x.squeeze(0) for x in (q, k, v))
    output: Tensor = KERNEL(q, k, v, of_queries, of_keys, None, None, *longest, *rest[4:])[0]
    return output.unsqueeze(0)


def _expect_square(name: str, same_lengths: bool) -> None:
    if name in SQUARE and not same_lengths:
        raise _refused(f"gets {name} for queries and keys of different lengths", SQUARE[name])


def _refused(what: str, instead: str) -> Error:
    return Error(f"memory_efficient_attention {what}", at=user_line(traceback.extract_stack()), fix=instead)


class MemoryEfficient:
    """xformers' function with the arguments of a kernel's torch.autograd.Function, for this rank's heads and tokens.

    Attributes:
        TAKES: the dtypes that it computes in, and its widest head.
    """

    TAKES = (torch.float16, torch.bfloat16, torch.float32), 65536

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
        softmax_scale: float | None, dropout_p: float, causal: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns attention; without its log-sum-exp, which the function does not return.

        Of packed rows the host waits for the lengths, from which xformers makes its masks.
        """
        biases: Any = sys.modules[BIASES]
        packed, shared = cu_seqlens_q is not None, q.shape[-2] != k.shape[-2]
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            of_documents = biases.BlockDiagonalCausalFromBottomRightMask if causal else biases.BlockDiagonalMask
            bias = of_documents.from_seqlens(*(ends.diff().tolist() for ends in (cu_seqlens_q, cu_seqlens_k)))
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        else:
            bias = biases.LowerTriangularFromBottomRightMask() if causal else None
        if shared:
            heads = q.shape[-2] // k.shape[-2]
            q = q.unflatten(2, (-1, heads))
            k, v = (x.unsqueeze(3).expand(*x.shape[:3], heads, -1) for x in (k, v))
        function: Any = sys.modules[FUNCTION]
        output = function.memory_efficient_attention(q, k, v, bias, dropout_p, softmax_scale)
        output = output.flatten(2, 3) if shared else output
        return output.squeeze(0) if packed else output, output.new_empty(0)

    @classmethod
    def apply(cls, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Returns attention, as `forward`; autograd records what xformers records."""
        return cls.forward(None, *arguments)


# ---- masks among the arguments of a model


class MaskedDocuments(NamedTuple):
    """Where the documents of a mask end, in place of xformers' own object, while a model is captured."""

    seqstart: Tensor
    max_seqlen: int

    def __getattr__(self, name: str) -> Any:
        raise Error(
            f"`{name}` of a mask that comes from outside is not known: the next call may have other documents",
            at=user_line(traceback.extract_stack()),
            fix="a mask that is made in forward",
        )


def register_masks() -> None:
    """Tells torch how to take xformers' masks apart, once their module is loaded."""
    for name in KNOWN:
        mask: Any = getattr(sys.modules.get(BIASES), name, None)
        if mask is not None and mask not in pytree.SUPPORTED_NODES:
            if name in PACKED:
                pytree.register_pytree_node(mask, lambda x: (_documents(x), type(x)), _mask_of)
            else:
                pytree.register_pytree_node(mask, lambda x: ([], type(x)), lambda _, of_class: of_class())


def _documents(mask: Any) -> list[Any]:
    infos = [mask.q_seqinfo, *([] if mask.k_seqinfo is mask.q_seqinfo else [mask.k_seqinfo])]
    return [value for info in infos for value in (info.seqstart, info.max_seqlen)]


def _mask_of(children: Any, of_class: Any) -> Any:
    queries, *keys = (MaskedDocuments(*children[i : i + 2]) for i in range(0, len(children), 2))
    mask = object.__new__(of_class)
    mask.q_seqinfo, mask.k_seqinfo = queries, keys[0] if keys else queries
    return mask
