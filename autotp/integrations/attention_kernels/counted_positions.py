"""counted_positions: positions that a model counts itself are those of one text in a row.

    position_ids = torch.arange(seq) + past                      no packed texts: nothing is read
    position_ids = batch["position_ids"]                         their values tell, which transformers reads

    input_ids, position_ids: [rows tokens]       cu_seq_lens_q=[0, 6, 9], ..., which `distribute` gives beside them

Before a flash kernel transformers asks the values of `position_ids` whether several texts lie in a row. The answer for
counted ones is known without values, so a capture has no read of them: parts of a batch could not share one.
A step of `distribute` reads before forward where positions start again, and gives the model the ends of documents.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autotp.integrations.attention_kernels.padded_rows import UTILITIES

QUESTION, MASK, TOKENS = "_is_packed_sequence", "attention_mask", ("input_ids", "inputs_embeds")
SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
ROWS = {torch.unsqueeze, Tensor.unsqueeze}


def with_ends_of_positions(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a step with the ends of documents that its positions say, for a flash kernel.

    They are those of `DataCollatorWithFlattening(return_flash_attn_kwargs=True)`; of one document, too, so that each
    step has the same arguments. The host waits once for positions on a GPU. Each row begins with a document: of several
    rows transformers itself looks at no positions, but it asks for those of each row that it gets alone.
    """
    positions = kwargs.get("position_ids")
    is_flash = "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
    names = [f"{name}_{of}" for name in ("cu_seq_lens", "max_length") for of in "qk"]
    tells_documents = any(kwargs.get(name) is not None for name in (*names, MASK))
    if UTILITIES not in sys.modules or not is_flash or tells_documents or not isinstance(positions, Tensor):
        return kwargs
    tokens = next((kwargs[name] for name in TOKENS if isinstance(kwargs.get(name), Tensor)), positions)
    if positions.is_meta or positions.dim() != 2 or not positions.numel() or len(positions) != len(tokens):
        return kwargs
    ends = _ends_of(positions.cpu())
    longest = int(ends.diff().max())
    return {**kwargs, **dict(zip(names, (ends, ends, longest, longest), strict=True))}


def _ends_of(positions: Tensor) -> Tensor:
    """Returns where documents begin and end, [documents + 1]: they begin at the least position, as in transformers.

    Args:
        positions: [rows tokens].
    """
    begins = positions == positions.min()
    begins[:, 0] = True
    return F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=positions.numel()).int()


@contextmanager
def counted_positions() -> Iterator[None]:
    """A region in which transformers finds one text in a row whose positions the model has counted."""
    utilities = sys.modules.get(UTILITIES)
    if utilities is None or not hasattr(utilities, QUESTION):
        yield
        return
    with ExitStack() as stack:
        counts = stack.enter_context(_Counts())
        stack.enter_context(patch.object(utilities, QUESTION, _answered(counts, getattr(utilities, QUESTION))))
        yield


def _answered(counts: _Counts, real: Callable[..., Any]) -> Callable[..., Any]:
    def is_packed(position_ids: Any, batch_size: Any) -> Any:
        return False if counts.has(position_ids) else real(position_ids, batch_size)

    return is_packed


class _Counts(TorchFunctionMode):
    """Notes the tensors of whole numbers that ascend by one: `arange`, plus a number, as a row.

    Attributes:
        tensors: these tensors, none of which was written into.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def has(self, x: Any) -> bool:
        """True for a tensor that is known to ascend by one."""
        return any(x is tensor for tensor in self.tensors)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._ascends(func, args, kwargs, result):
            self.tensors.append(result)
        elif self.tensors and _writes(func, kwargs):
            self.tensors.clear()  # Perhaps into one of them, or into what shares its memory.
        return result

    def _ascends(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        if not isinstance(result, Tensor) or result.dtype not in (torch.int64, torch.int32):
            return False
        if func is torch.arange:
            return 0 < len(args) < 3 and not kwargs.keys() - {"device", "dtype"}
        if kwargs or len(args) != 2:
            return False
        if func in ROWS:
            return self.has(args[0]) and args[1] == 0
        return func in SUMS and any(self.has(x) and _is_number(y) for x, y in (args, args[::-1]))


def _is_number(x: Any) -> bool:
    return not x.dim() if isinstance(x, Tensor) else isinstance(x, int | torch.SymInt)


def _writes(func: Any, kwargs: Any) -> bool:
    """True for a function that may write into a tensor."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    assigned = name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")  # As `__iadd__`.
    return in_place or assigned or name in ("__setitem__", "__set__") or "out" in kwargs
