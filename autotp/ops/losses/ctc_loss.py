"""The CTC loss as one operator whose sizes follow from its operands' sizes.

Torch's own operator also returns a table whose size is the longest target, which a graph does not know. Here backward
makes this table again.

Source: Graves et al. 2006, Connectionist Temporal Classification.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("autotp::ctc_loss", mutates_args=())
def ctc(log_probs: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    """Returns minus the logarithm of the probability of each target: [batch]

    Args:
        log_probs: [steps batch classes], or [steps classes] of a single sequence
        targets: [batch longest], or the targets one after the other
        steps: [batch] the number of steps of each sequence
        lengths: [batch] the length of each target
        blank: the class that stands for no label.
        zero_infinity: whether the gradient is zero where the loss is infinite.
    """
    return aten._ctc_loss.Tensor(log_probs, targets, steps, lengths, blank, zero_infinity)[0]


@ctc.register_fake
def _(log_probs: Tensor, targets: Tensor, steps: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(steps.shape)


@torch.library.custom_op("autotp::ctc_loss_backward", mutates_args=())
def ctc_backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Returns the gradient of `ctc` with respect to `log_probs`; arguments as there."""
    operands = log_probs, targets, steps, lengths
    loss, table = aten._ctc_loss.Tensor(*operands, blank, zero_infinity)
    return aten._ctc_loss_backward.Tensor(grad.contiguous(), *operands, loss, table, blank, zero_infinity)


@ctc_backward.register_fake
def _(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return ctc_backward(grad, *ctx.saved_tensors, *ctx.settings), *[None] * 5


ctc.register_autograd(_backward, setup_context=_keep)

OPERATOR = torch.ops.autotp.ctc_loss.default
BACKWARD = torch.ops.autotp.ctc_loss_backward.default


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: Any = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Returns what `torch.nn.functional.ctc_loss` and `torch.ctc_loss` return, by the operator of this file."""
    alone = log_probs.dim() == 2
    probs = log_probs[:, None] if alone else log_probs
    steps, lengths = (_as_tensor(x, probs) for x in (input_lengths, target_lengths))
    losses: Tensor = OPERATOR(probs, targets, steps, lengths, blank, zero_infinity)
    if zero_infinity:
        # The operator's own flag concerns gradients only; torch, too, replaces the losses behind its operator.
        losses = torch.where(losses == float("inf"), 0.0, losses)
    match reduction:
        case "mean" | 1:
            # As torch: each loss is divided by the length of its target, and an empty target counts as 1.
            return (losses / lengths.clamp(min=1)).mean()
        case "sum" | 2:
            return losses.sum()
        case _:
            return losses[0] if alone else losses


def _as_tensor(lengths: Any, probs: Tensor) -> Tensor:
    """Returns lengths as a tensor [batch]: a list stands for one, and so does a number."""
    return (lengths if isinstance(lengths, Tensor) else torch.tensor(lengths, device=probs.device)).reshape(-1)


REPLACED = (F.ctc_loss, torch.ctc_loss)
"""The functions of torch that `ctc_loss` stands for while a graph is captured."""
