"""Functions of torch that an exporter cannot take, and what stands for them while a model is captured."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from autotp.ops.losses import ctc_loss

DATA = getattr(Tensor, "data").__get__  # noqa: B009  mypy sees a tensor.


class ReplacedFunctions(TorchFunctionMode):
    """A mode in which each of these functions is another one, which gives the same."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == DATA:
            func = Tensor.detach  # The exporter loses what `x.data` comes from.
        elif func in ctc_loss.REPLACED:
            func = ctc_loss.ctc_loss
        given = dict(kwargs or {})
        if given.get("generator", func) is None:  # The operator with a generator takes no symbols as sizes.
            del given["generator"]
        return func(*args, **given)
