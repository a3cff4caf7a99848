"""weight_decay_groups: the parameters of an optimizer that decay, and those that do not."""

from __future__ import annotations

from typing import Any

from torch import nn

from autotp.arguments import expect_arguments
from autotp.errors import within


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns two groups of parameters for an optimizer: matrices, which decay, and vectors, which do not.

    Vectors are parameters of at most one dimension: biases and the weights of norms. Every rank has both groups, even
    if one of them is empty there. Frozen parameters are left out.

    Args:
        model: what `distribute` or `parallelize` returned, or any module.
        weight_decay: the weight decay of the matrices.

    Raises:
        Error: `model` is no module, or `weight_decay` no number.

    Example:
        >>> groups = autotp.weight_decay_groups(nn.Linear(4, 6), 0.01)
        >>> [(group["weight_decay"], [list(p.shape) for p in group["params"]]) for group in groups]
        [(0.01, [[6, 4]]), (0.0, [[6]])]
        >>> optimizer = torch.optim.AdamW(groups, lr=1e-3)
    """
    arguments = {"model": model, "weight_decay": weight_decay}
    within("weight_decay_groups", lambda: expect_arguments(weight_decay_groups, **arguments))
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
