"""Whether memory may be written over: only where tensors are just tensors, and nobody comes back for them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_plain(x: Tensor) -> bool:
    """True in eager mode, outside transforms: nothing traces or maps `x`, or carries tangents along."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    functorch = torch._C._functorch
    return not (functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x))


def is_last_backward() -> bool:
    """True inside a backward that frees what was saved for it (no `retain_graph`), and is not differentiated itself."""
    return not torch.is_grad_enabled() and not torch._C._autograd._get_current_graph_task_keep_graph()
