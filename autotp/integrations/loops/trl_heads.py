"""The head that TRL's trainers put into a model, as a formula that can be cut along the vocabulary.

SFTTrainer and DPOTrainer replace a model's `forward` by one whose head is a torch.autograd.Function. It loops over
tiles of the logits, so that they are never in memory at once, and its number of turns depends on the number of rows: no
graph can contain it. In a parallel model the logits are cut along the vocabulary, and the formula takes its place.

This module does not import TRL before the user's program does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def formula_of(function: type) -> Callable[..., Any] | None:
    """Returns `log_probabilities` for TRL's Function, None for others."""
    is_of_trl = function.__name__ == "ChunkedLogProbFunction" and function.__module__.startswith("trl.")
    return log_probabilities if is_of_trl else None


def log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
) -> Outputs:
    """Returns the log-probability of each target, and of each row what `outputs` names, None for the rest: [rows] each.

    In float32 from the logits on. Only the log-probability and the entropy have gradients.

    Args:
        hidden: [rows hidden]
        weight, bias: [words hidden], [words]
        targets: [rows]
        temperature: divides the logits.
        chunk_size: TRL's tiles; not used.
        final_logit_softcapping: if given, logits are bounded by it, through tanh.
        logit_scale: multiplies the logits.
        outputs: of "entropy"; "log_sum_sq_probs", the logarithm of the sum of squared probabilities; "mean_logits";
            "is_top1", whether the target is the first of the greatest logits.
    """
    logits = F.linear(hidden, weight, bias).float() * logit_scale  # [rows words]
    if final_logit_softcapping is not None:
        logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
    logits = logits / temperature
    log_probability = -F.cross_entropy(logits, targets, reduction="none")
    every = F.log_softmax(logits, -1)
    entropy = -(every.exp() * every).sum(-1) if "entropy" in outputs else None
    fixed = logits.detach()
    squares = torch.logsumexp(2 * every.detach(), -1) if "log_sum_sq_probs" in outputs else None
    mean = fixed.mean(-1) if "mean_logits" in outputs else None
    top = fixed.argmax(-1) == targets if "is_top1" in outputs else None
    return log_probability, entropy, squares, mean, top


def watch_trl() -> None:
    """Has TRL's head score all rows while a graph is captured, also where it would pick those with labels."""
    module: Any = sys.modules.get("trl.trainer.utils")
    original = getattr(module, "_use_triton", None)
    if original is not None and original.__module__ != __name__:

        def _use_triton(device: torch.device) -> bool:
            return not torch.compiler.is_exporting() and bool(original(device))

        module._use_triton = _use_triton
