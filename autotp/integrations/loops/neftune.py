"""NEFTune of transformers' trainers on a parallel model: noise on the embeddings, as operators of its graph.

transformers registers a hook on the embeddings, which are a part of a graph here, and draws noise between bounds that
it reads from a tensor. Here a `forward` of the embeddings adds the same noise: it draws the same random numbers.

This module does not import transformers before the user's program does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from autotp.runtime.module import ParallelModule
from autotp.runtime.tree import state_of


def noisy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns transformers' `activate_neftune`, which does so for a parallel model."""

    @wraps(function)
    def activate_neftune(model: Any, neftune_noise_alpha: float, accelerator: Any = None) -> Any:
        inner = model if accelerator is None else accelerator.unwrap_model(model)
        if not isinstance(inner, ParallelModule):
            return function(model, neftune_noise_alpha, accelerator)
        return _noise_of(inner, neftune_noise_alpha)

    return activate_neftune


def _noise_of(model: Any, alpha: float) -> Noise:
    # peft puts its own module around the model.
    adapted = model if "base_model" not in model._modules else model.get_base_model()
    embeddings = adapted.get_input_embeddings()
    embeddings.neftune_noise_alpha = alpha
    return Noise(embeddings)


class Noise:
    """The noise on a module of embeddings, until it is removed."""

    def __init__(self, embeddings: Any) -> None:
        state = state_of(embeddings)
        assert state is not None
        self.embeddings, self.before = embeddings, state.own.get("forward")
        plain = self.before

        def forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
            embedded = type(module).forward(module, *args, **kwargs) if plain is None else plain(*args, **kwargs)
            return _with_noise(embedded, module.neftune_noise_alpha) if module.training else embedded

        embeddings.forward = MethodType(forward, embeddings)

    def remove(self) -> None:
        """Removes the noise."""
        if self.before is None:
            del self.embeddings.forward
        else:
            self.embeddings.forward = self.before


def _with_noise(embedded: Tensor, alpha: float) -> Tensor:
    """Returns embeddings plus uniform noise. embedded: [batch sequence hidden]"""
    bound = alpha / torch.sqrt(torch.tensor(embedded.size(1) * embedded.size(2)))
    return embedded + (torch.rand_like(embedded) * (2 * bound) - bound)
