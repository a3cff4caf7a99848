"""Functions of torch that an exporter cannot take, and what stands for them while a model is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
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


@contextmanager
def known_causality() -> Iterator[None]:
    """A region in which attention may be told by a size whether it is causal, such as `is_causal=x.shape[1] > 1`.

    Torch's function takes no symbol for a truth value. The symbol is asked for its value, which makes a guard.
    """
    attention: Any = F.scaled_dot_product_attention

    def asked(*args: Any, **kwargs: Any) -> Tensor:
        known = [bool(x) if isinstance(x, torch.SymBool) else x for x in args]
        named = {name: bool(x) if isinstance(x, torch.SymBool) else x for name, x in kwargs.items()}
        found: Tensor = attention(*known, **named)
        return found

    with patch.object(F, "scaled_dot_product_attention", asked):
        yield
