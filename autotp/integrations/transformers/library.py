"""Implements the interface `ModelLibrary` for transformers and peft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from autotp.integrations import liger, scipy_assignment
from autotp.integrations.loops import (
    accelerate_state,
    accelerator_methods,
    torchmetrics_calls,
    trainer_calls,
    trl_heads,
)
from autotp.integrations.loops.after_import import after_import, change_all
from autotp.integrations.transformers import adapters, caches, masks, overrides, quantized, spec_augment
from autotp.integrations.transformers.pages.attention_to_pages import add_pages, pages_in_operators
from autotp.model_library import ModelLibrary
from autotp.options import COLUMNS, ROWS
from autotp.rules.common import entire
from autotp.rules.products import grouped_mm
from autotp.rules.registry import add_rows, loaded_operator
from autotp.rules.row import Row

WATCHED = (
    "accelerate.accelerator", "transformers.training_args",
    "transformers.trainer", "trl.trainer.utils", torchmetrics_calls.WATCHED, *adapters.WATCHED,
)  # fmt: skip
"""Modules of other libraries that are changed once they are imported."""
PACKAGES = ("transformers", "peft")
ROWS_BY_NAME: Mapping[str, Row] = {
    "transformers::grouped_mm_fallback": Row(grouped_mm),
    spec_augment.NAME: Row(entire),
    scipy_assignment.NAME: Row(entire),
}
COMMUNICATION = ""
STYLES: Mapping[str, str | int] = {
    **dict.fromkeys(("colwise_gather_output", "colwise_rep", "packed_colwise", "local_colwise"), COLUMNS),
    **dict.fromkeys(("rowwise_split_input", "packed_rowwise", "local_rowwise", "rowwise_rep"), ROWS),
    "embedding_rowwise": 0,
    "grouped_gemm": "experts",
    # These say how values are sent around a module, which follows from the cuts.
    **dict.fromkeys(
        ("moe_tp_experts", "ep_router", "replicated_with_grad_allreduce", "replicated", "mla_kv_a_proj", "gather",
         "sequence_parallel", "local"), COMMUNICATION,
    ),
}  # fmt: skip
"""Style in a `tp_plan` of transformers -> what it cuts."""


class Transformers(ModelLibrary):
    """The models, caches and operators of transformers."""

    def has_models_in(self, package: str) -> bool:
        """True for transformers and peft."""
        return package in PACKAGES or super().has_models_in(package)

    def add_operators(self) -> None:
        """Adds the operators that transformers registers, and those that stand for numpy's and scipy's work."""
        rows = {loaded_operator(name): row for name, row in ROWS_BY_NAME.items()}
        add_rows({op: row for op, row in rows.items() if op is not None})
        add_pages()
        super().add_operators()

    def cut_along(self, style: str) -> str | int | None:
        """Returns what a style of a `tp_plan` cuts."""
        return STYLES.get(style, super().cut_along(style))

    def folder_opener(self, path: str, dtype: Any) -> Callable[[Any], tuple[Any, Callable[..., Any]]]:
        """Opens a folder as `from_pretrained` does."""
        from autotp.integrations.transformers.files.configuration import ModelArguments
        from autotp.integrations.transformers.pretrained import open_folder

        arguments = ModelArguments(dtype, None, {}, "error", "error")
        return lambda mesh: open_folder(Path(path), arguments, mesh)

    def draws_from_numpy(self, operator: str) -> bool:
        """True for the masks of SpecAugment."""
        return operator == spec_augment.NAME or super().draws_from_numpy(operator)

    def classes_before(self, original: type) -> tuple[type, ...]:
        """Returns the classes whose methods replace those of transformers and peft on a parallel model."""
        return (*overrides.overrides(original), *super().classes_before(original))

    def is_state(self, x: Any) -> bool:
        """True for a key-value cache, or a layer of one."""
        return caches.is_state(x) or super().is_state(x)

    def shown_attribute(self, name: str, value: Any) -> Any:
        """Returns an attribute of a cache in a form that can be flattened."""
        return super().shown_attribute(name, caches.shown_attribute(name, value))

    def rewrites(self, name: str) -> bool:
        """False for the name of an attribute that is in a graph as it is."""
        return caches.rewrites(name) or super().rewrites(name)

    def read_attribute(self, name: str, value: Any, among: Sequence[Any]) -> Any:
        """Returns the attribute that `shown_attribute` was given."""
        return caches.read_attribute(name, super().read_attribute(name, value, among), among)

    def recomputes(self, model: Any) -> bool:
        """True if `gradient_checkpointing_enable()` was called on a model."""
        switched_on = any(getattr(module, "gradient_checkpointing", False) is True for module in _modules(model))
        return switched_on or super().recomputes(model)

    def is_own_hook(self, hook: Any) -> bool:
        """True for those that collect hidden states and attentions: a model registers them in its first such call."""
        is_of_transformers = getattr(hook, "__module__", "") == "transformers.utils.output_capturing"
        return is_of_transformers or super().is_own_hook(hook)

    def quantized_weight(self, model: nn.Module) -> str:
        """Returns which weight of a model a library keeps quantized."""
        return quantized.quantized_weight(model) or super().quantized_weight(model)

    def watch_calls(self) -> None:
        """Has accelerate see replicas as its processes, and Trainer save the whole, also if they are imported later."""
        after_import(WATCHED, partial(change_all, CHANGES))
        super().watch_calls()

    def keep_activations(self, model: Any) -> None:
        """Switches gradient checkpointing off for the capture: autograd would recompute outside the capturing modes."""
        for module in _modules(model):
            if getattr(module, "gradient_checkpointing", False) is True:
                module.gradient_checkpointing = False  # type: ignore[assignment]
        super().keep_activations(model)

    def instead_of_expert_loop(self, model: Any) -> str:
        """Returns the remedy for a mixture of experts whose configuration asks for the loop, else an empty text."""
        configs = (getattr(module, "config", None) for module in _modules(model))
        loops = any(getattr(config, "_experts_implementation", None) == "eager" for config in configs)
        if not loops or not hasattr(model, "set_experts_implementation"):
            return super().instead_of_expert_loop(model)
        return 'model.set_experts_implementation("grouped_mm"), which has no loop'

    def instead_of_python_random(self, model: Any) -> str:
        """Returns the setting for a model of sound that masks steps at random (SpecAugment), else an empty text."""
        configs = (getattr(m, "config", None) for m in _modules(model))
        # Models read the setting with the default True: Data2VecAudio's configuration does not have it.
        masks_steps = any(getattr(c, "apply_spec_augment", hasattr(c, "mask_time_prob")) for c in configs)
        return "model.config.apply_spec_augment = False" if masks_steps else super().instead_of_python_random(model)

    @contextmanager
    def during_capture(self, exactly: bool, looks: bool) -> Iterator[None]:
        """Attention leaves out the masks that it leaves out on one device, where this makes a difference.

        Masks of SpecAugment, and assignments of scipy, are operators. attention to pages is one.
        """
        with (
            pages_in_operators(), masks.as_on_one_device(exactly, looks), spec_augment.masks_as_operators(),
            scipy_assignment.assignments_as_operators(), adapters.adapters_as_operators(),
            super().during_capture(exactly, looks),
        ):  # fmt: skip
            yield

    def formula_of(self, function: type) -> Callable[..., Any] | None:
        """Returns the formula of the head that TRL's trainers put into a model, or of a function of Liger."""
        return trl_heads.formula_of(function) or liger.liger_formula(function) or super().formula_of(function)


CHANGES = (
    accelerate_state.show_replicas, accelerator_methods.watch_accelerator,
    trainer_calls.watch_trainer, trl_heads.watch_trl,
    torchmetrics_calls.watch_torchmetrics, adapters.watch_peft,
)  # fmt: skip
"""Functions that change what is imported of these modules."""


def _modules(model: Any) -> list[nn.Module]:
    return list(model.modules()) if isinstance(model, nn.Module) else []
