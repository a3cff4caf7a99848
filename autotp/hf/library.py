"""Answers for transformers and peft what autotp asks of a library of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from autotp.hf import generation, overrides
from autotp.model_library import ModelLibrary
from autotp.rules.products import grouped_mm


class Transformers(ModelLibrary):
    """What transformers' models, caches and operators are to autotp."""

    package = "transformers"
    rules = {"transformers::grouped_mm_fallback": grouped_mm}  # noqa: RUF012  Nobody changes it.

    def classes_before(self, original: type) -> tuple[type, ...]:
        """Those that generate, save and adapt."""
        return overrides.overrides(original)

    def is_state(self, x: Any) -> bool:
        """True for a key-value cache, or one layer of it."""
        return generation.is_state(x)

    def shown_attribute(self, name: str, value: Any) -> Any:
        """An attribute of a cache as the leaves of a structure."""
        return generation.shown_attribute(name, value)

    def read_attribute(self, name: str, value: Any, among: Sequence[Any]) -> Any:
        """The attribute of a cache that such leaves stand for."""
        return generation.read_attribute(name, value, among)

    def recomputes(self, model: Any) -> bool:
        """True for a model of which `gradient_checkpointing_enable()` was called."""
        return any(getattr(module, "gradient_checkpointing", False) is True for module in _modules(model))

    def is_own_hook(self, hook: Any) -> bool:
        """True for those that collect hidden states and attentions: a model registers them in its first such call."""
        return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"

    def keep_activations(self, model: Any) -> None:
        """What is computed twice is computed alike; autograd's second time has no modes."""
        for module in _modules(model):
            if getattr(module, "gradient_checkpointing", False) is True:
                module.gradient_checkpointing = False  # type: ignore[assignment]

    def instead_of_expert_loop(self, model: Any) -> str:
        """Another implementation, for a mixture whose configuration asks for the loop."""
        configs = (getattr(module, "config", None) for module in _modules(model))
        loops = any(getattr(config, "_experts_implementation", None) == "eager" for config in configs)
        if not loops or not hasattr(model, "set_experts_implementation"):
            return ""
        return 'model.set_experts_implementation("grouped_mm"), which has no loop'


def _modules(model: Any) -> list[nn.Module]:
    return list(model.modules()) if isinstance(model, nn.Module) else []
