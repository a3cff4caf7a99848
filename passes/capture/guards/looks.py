"""looks: a library's looks at padding, which decide whether attention gets a mask; a graph is right for one outcome.

    Before: if padding_mask.all(): mask = None        in transformers, before the first block
    After:  the outcome is assumed, and compared with the call's padding before the graph runs

NOTE [Looks at masks]
On one device transformers looks at the padding of a batch. Without padding attention gets no mask, and a flash kernel
computes it. With padding there is a mask. So a model has two graphs, and a call's padding selects one, as other values
select graphs that Python reads (NOTE [What Python reads of tensors] in `values.py`). Two things are simpler here:
- The outcome is likely, before any run of the model: that of all masks among the arguments. So the exporter runs once.
- A graph with masks is right for each batch: its mask says where there is no padding. A model that is compiled as a
  whole and a recorded CUDA graph cannot look: they keep the masks, as transformers does there.
The microbatches of a step run one graph: `training/pipeline/full_masks.py` decides for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autotp.distributed.cut_tensors.sharded_tensor import Sharded

_looking: ContextVar[bool] = ContextVar("looking", default=False)


@contextmanager
def looking() -> Iterator[None]:
    """A region of a capture in which truth values of tensors are looks: they are assumed, and may be assumed anew."""
    token = _looking.set(True)
    try:
        yield
    finally:
        _looking.reset(token)


def is_looking() -> bool:
    """True in a region of `looking`."""
    return _looking.get()


def has_values(x: Any) -> bool:
    """True for a plain tensor with values."""
    return isinstance(x, Tensor) and not isinstance(x, Sharded | FakeTensor) and not x.is_meta


def without_padding(arguments: Mapping[str, Any]) -> bool:
    """Returns whether no mask among a call's named arguments has padding, as far as they have values."""
    masks = [x for name, x in arguments.items() if "mask" in name and has_values(x)]
    return all(bool(mask.detach().bool().all()) for mask in masks)
