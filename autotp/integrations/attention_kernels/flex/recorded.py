"""What stands for flex_attention and create_block_mask of torch while a model is captured.

    y = flex_attention(q, k, v, score_mod, create_block_mask(mask_mod, ...))
    graph: y, _, _ = autotp.flex_attention(q, k, v, [what the functions read], text, scale)

NOTE [Blocks of a mask]
A BlockMask has a function, and blocks that follow from it. A graph has the function alone. Where a kernel runs, each
rank makes the blocks of its own heads and queries. So a mask that is made in forward is not frozen: what its function
reads is an operand of the graph. One that a training loop makes is an argument like others: the tensors that its
function reads are inputs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from traceback import extract_stack
from typing import Any, NoReturn

import torch
from torch import Tensor

from autotp.errors import Error
from autotp.integrations.attention_kernels.flex.flex_attention import FLEX, Totals, by_products
from autotp.integrations.attention_kernels.flex.mods import Indices, Mods, recorded_mods, working_dtype
from autotp.sharding.axis import Size
from autotp.source_location import user_line
from autotp.torch_internals import BLOCK_MASK_CODE, FLEX_ATTENTION_CODE

MODULE = "torch.nn.attention.flex_attention"


def _recorded(  # type: ignore[no-untyped-def]
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
    kernel_options=None, *, return_aux=None,
):  # fmt: skip
    from autotp.integrations.attention_kernels.flex.recorded import as_torch_does, by_operator

    return as_torch_does(
        by_operator, query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux
    )


def _computed(  # type: ignore[no-untyped-def]
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
    kernel_options=None, *, return_aux=None,
):  # fmt: skip
    from autotp.integrations.attention_kernels.flex.recorded import as_torch_does, on_cpu

    return as_torch_does(
        on_cpu, query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux
    )


def _create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, *_, **__):  # type: ignore[no-untyped-def]
    from autotp.integrations.attention_kernels.flex.recorded import without_blocks

    return without_blocks(mask_mod, B, H, Q_LEN, KV_LEN)


@contextmanager
def _other_code(code: Any) -> Iterator[None]:
    """A region in which flex_attention has another code, by whatever name a model calls it.

    A model may have it in closures, and inside of torch.compile.
    """
    if MODULE not in sys.modules:
        yield
        return
    with (
        FLEX_ATTENTION_CODE.replaced_by(code), BLOCK_MASK_CODE.replaced_by(_create_block_mask.__code__),
        torch.compiler.set_stance("force_eager"), warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.filterwarnings("ignore", "torch.compile is ignored when called inside torch.export")
        yield


def flex_as_operators() -> AbstractContextManager[None]:
    """Returns a region in which calls of flex_attention become operators of a graph."""
    return _other_code(_recorded.__code__)


def by_products_alone() -> AbstractContextManager[None]:
    """Returns a region in which flex_attention computes by products: on CPUs torch's own has no backward."""
    return _other_code(_computed.__code__)


def as_torch_does(
    compute: Callable[..., Totals],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Any,
    return_aux: Any,
) -> Any:
    """Returns what torch's flex_attention returns; arguments as there.

    Args:
        compute: a function of queries, keys, values, both functions, the scale, whether the maximum is wanted, and
            the options of the kernel.

    Raises:
        Error: shapes or options do not fit, a mask is without its function, or `recorded_mods` refuses a function.
    """
    _expect_shapes(query, key, value, enable_gqa)
    _expect_options(kernel_options or {})
    if return_lse and return_aux is not None:
        raise _refused("gets return_lse and return_aux", "return_aux=AuxRequest(lse=True) alone")
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    mask_mod = _mask_mod(block_mask, query, key)
    score_mod = score_mod or (lambda score, *_: score)
    wants_peaks = return_aux is not None and return_aux.max_scores
    output, totals, peaks = compute(query, key, value, score_mod, mask_mod, scale, wants_peaks, kernel_options or {})
    if return_aux is not None:
        aux_values = (totals if return_aux.lse else None, peaks if return_aux.max_scores else None)
        return output, sys.modules[MODULE].AuxOutput(lse=aux_values[0], max_scores=aux_values[1])
    return (output, totals) if return_lse else output


def by_operator(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask_mod: Any, scale: float | None, peaks: bool,
    options: Mapping[str, Any],
) -> Any:  # fmt: skip
    """Returns the result of the operator, with the functions as a text."""
    mods = recorded_mods(score_mod, mask_mod, query, options)
    captured = [x if isinstance(x, Tensor) else _tensor(x, query) for x in mods.captured]
    return FLEX(query, key, value, captured, mods.text, scale, peaks)


def on_cpu(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask_mod: Any, scale: float | None, *_: Any
) -> Totals:
    """Returns the same by the functions themselves; the rest of the arguments is for kernels."""
    read = mask_mod or (lambda b, *_: b >= 0)
    mods = Mods(lambda score, b, h, q, k, *_: score_mod(score, b, h, q, k), lambda b, h, q, k, *_: read(b, h, q, k))
    with Indices():
        return by_products(query, key, value, (), mods, scale, (0, 0, 0))


def _tensor(number: Any, query: Tensor) -> Tensor:
    """Returns a number that is computed of sizes as a tensor, [ ]."""
    dtype = torch.int64 if isinstance(number, torch.SymInt) else working_dtype(query)
    return torch.full((), number, dtype=dtype, device=query.device)


def _expect_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    shapes = ", ".join(str([*x.shape]) for x in (query, key, value))
    if not query.dim() == key.dim() == value.dim() == 4:
        raise _refused(f"gets {shapes}", "queries, keys and values of [batch heads positions width]")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise _refused(f"gets {shapes}, whose heads differ", "enable_gqa=True, for keys that several heads read")
    if query.shape[1] % key.shape[1]:
        raise _refused(f"gets {shapes}", "heads that are a multiple of those of the keys")


def _expect_options(options: Mapping[str, Any]) -> None:
    """Raises Error for options of the kernel that are not right for each rank's part."""
    if options.get("BLOCKS_ARE_CONTIGUOUS"):
        problem = "gets BLOCKS_ARE_CONTIGUOUS in kernel_options, and each rank has other blocks"
        raise _refused(problem, "the other options alone")
    for name, value in options.items():
        if not isinstance(value, bool | int | float | str | None):
            raise _refused(f"gets kernel_options[{name!r}] that is no number and no text", "a number or a text")


def _mask_mod(mask: Any, query: Tensor, key: Tensor) -> Callable[..., Any] | None:
    """Returns the function of a BlockMask; None if all is read. Raises Error for a mask of other lengths."""
    if mask is None:
        return None
    is_all = mask.mask_mod is sys.modules[MODULE].noop_mask
    if is_all and "kv_indices" in vars(mask):  # No function tells its blocks.
        raise _refused("gets a BlockMask without mask_mod", "BlockMask.from_kv_blocks(..., mask_mod=...)")
    lengths = query.shape[2], key.shape[2]
    if any(Size.of(a) != Size.of(b) and a != b for a, b in zip(mask.seq_lengths, lengths, strict=True)):
        raise _refused(
            f"gets a BlockMask of {[*map(int, mask.seq_lengths)]} and {[*map(int, lengths)]} queries and keys",
            "create_block_mask(..., Q_LEN=query.shape[2], KV_LEN=key.shape[2])",
        )
    return None if is_all else mask.mask_mod


def _refused(what: str, instead: str) -> Error:
    return Error(f"flex_attention {what}", at=user_line(extract_stack()), fix=instead)


def without_blocks(mask_mod: Callable[..., Any], b: int | None, h: int | None, queries: int, keys: int) -> Any:
    """Returns a BlockMask with a function, and without blocks. NOTE [Blocks of a mask]"""
    base = sys.modules[MODULE].BlockMask
    attributes = {"__getattr__": _no_blocks, "shape": (b or 1, h or 1, queries, keys)}
    mask: Any = object.__new__(type("BlockMask", (base,), attributes))
    mask.seq_lengths, mask.mask_mod = (queries, keys), mask_mod
    return mask


def _no_blocks(mask: Any, name: str) -> NoReturn:
    raise _refused(
        f"gets a BlockMask of which forward reads `{name}`, and each rank has other blocks",
        "create_block_mask outside of forward, for what reads blocks; in forward flex_attention alone",
    )
