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
from contextlib import contextmanager
from traceback import extract_stack
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from autotp.errors import Error
from autotp.integrations.attention_kernels.flex.flex_attention import FLEX, FlexCall, Totals, by_products
from autotp.integrations.attention_kernels.flex.mods import Indices, Mods, recorded_mods, working_dtype
from autotp.sharding.axis import Size
from autotp.source_location import user_line
from autotp.torch_internals import BLOCK_MASK_CODE, FLEX_ATTENTION_CODE

MODULE = "torch.nn.attention.flex_attention"
OF_BLOCKS = ("separate_full_blocks", "compute_dq_write_order", "dq_kv_order")
"""The last arguments of create_block_mask, which say what is kept of blocks."""


def _flex_attention(  # type: ignore[no-untyped-def]
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
    kernel_options=None, *, return_aux=None,
):  # fmt: skip
    from autotp.integrations.attention_kernels.flex.recorded import as_torch_does

    return as_torch_does(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux
    )


def _create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, *arguments, **named):  # type: ignore[no-untyped-def]
    from autotp.integrations.attention_kernels.flex.recorded import without_blocks

    return without_blocks(mask_mod, B, H, Q_LEN, KV_LEN, arguments, named)


@contextmanager
def flex_without_kernels() -> Iterator[None]:
    """A region in which flex_attention is recorded as an operator while a graph is captured, and else computed by
    products: on CPUs torch's own has no backward.

    It gets another code, for a model may have it in closures, and inside of torch.compile.
    """
    if MODULE not in sys.modules:
        yield
        return
    with (
        FLEX_ATTENTION_CODE.replaced_by(_flex_attention.__code__),
        BLOCK_MASK_CODE.replaced_by(_create_block_mask.__code__),
        torch.compiler.set_stance("force_eager"), warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.filterwarnings("ignore", "torch.compile is ignored when called inside torch.export")
        yield


def as_torch_does(
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
    if detect_fake_mode(query) is None:
        output, totals, peaks = _by_functions(query, key, value, score_mod, mask_mod, scale)
    else:
        mods = recorded_mods(score_mod, mask_mod, query, kernel_options, mask_mod and _made_by(block_mask))
        captured = [x if isinstance(x, Tensor) else _tensor(x, query) for x in mods.captured]
        wants_peaks = return_aux is not None and return_aux.max_scores
        output, totals, peaks = FLEX(query, key, value, captured, mods.text, scale, wants_peaks)
    if return_aux is not None:
        aux_values = (totals if return_aux.lse else None, peaks if return_aux.max_scores else None)
        return output, sys.modules[MODULE].AuxOutput(lse=aux_values[0], max_scores=aux_values[1])
    return (output, totals) if return_lse else output


def _by_functions(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask_mod: Any, scale: Any) -> Totals:
    """Returns the same by products, by the functions themselves."""
    read = mask_mod or (lambda b, *_: b >= 0)
    mods = Mods(lambda score, b, h, q, k, *_: score_mod(score, b, h, q, k), lambda b, h, q, k, *_: read(b, h, q, k))
    with Indices():
        return by_products(FlexCall(query, key, value, (), mods, scale, (0, 0, 0, 0)))


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


def _made_by(mask: Any) -> dict[str, Any]:
    """Returns the arguments of create_block_mask that say how the blocks of a mask were made."""
    if "kv_indices" not in vars(mask):
        made_by: dict[str, Any] = mask.made_by
    else:
        made_by = {"BLOCK_SIZE": mask.BLOCK_SIZE}
        if mask.full_kv_indices is None:
            made_by["separate_full_blocks"] = False
        if getattr(mask, "dq_write_order", None) is not None:
            made_by |= {"compute_dq_write_order": True, "dq_kv_order": bool(mask.dq_kv_order_spt)}
    size = made_by.get("BLOCK_SIZE")
    return made_by | ({"BLOCK_SIZE": tuple(map(int, size))} if isinstance(size, tuple | list) else {})


def _refused(what: str, instead: str) -> Error:
    return Error(f"flex_attention {what}", at=user_line(extract_stack()), fix=instead)


def without_blocks(
    mask_mod: Callable[..., Any],
    b: int | None,
    h: int | None,
    queries: int,
    keys: int,
    arguments: tuple[Any, ...] = (),
    named: Mapping[str, Any] = {},
) -> Any:
    """Returns a BlockMask with a function, and without blocks. NOTE [Blocks of a mask]

    Args:
        arguments, named: the further arguments of create_block_mask.
    """
    base = sys.modules[MODULE].BlockMask
    attributes = {"__getattr__": _no_blocks, "shape": (b or 1, h or 1, queries, keys)}
    mask: Any = object.__new__(type("BlockMask", (base,), attributes))
    mask.seq_lengths, mask.mask_mod = (queries, keys), mask_mod
    by_name = dict(zip(("device", "BLOCK_SIZE", "_compile", *OF_BLOCKS), arguments, strict=False)) | dict(named)
    mask.made_by = {name: x for name, x in by_name.items() if name in ("BLOCK_SIZE", *OF_BLOCKS)}
    return mask


def _no_blocks(mask: Any, name: str) -> NoReturn:
    raise _refused(
        f"gets a BlockMask of which forward reads `{name}`, and each rank has other blocks",
        "create_block_mask outside of forward, for what reads blocks; in forward flex_attention alone",
    )
