"""What autotp asks about kernels of attention: which calls are operators of a graph, and their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autotp.integrations.attention_kernels import kernel_rule
from autotp.integrations.attention_kernels.counted_positions import counted_positions, with_ends_of_positions
from autotp.integrations.attention_kernels.flash_functions import flash_formula
from autotp.integrations.attention_kernels.flex.flex_attention import add_operator
from autotp.integrations.attention_kernels.flex.mask_arguments import register_block_mask
from autotp.integrations.attention_kernels.flex.recorded import flex_without_kernels
from autotp.integrations.attention_kernels.kvcache_functions import add_cache, caches_in_operators
from autotp.integrations.attention_kernels.padded_rows import padding_in_operators
from autotp.integrations.attention_kernels.varlen_attn import VarlenAsOperator, add_varlen_reference
from autotp.integrations.attention_kernels.xformers_functions import register_masks, xformers_as_operators
from autotp.model_library import ModelLibrary


class AttentionKernels(ModelLibrary):
    """The operators of kernels of attention."""

    def formula_of(self, function: type) -> Callable[..., Any] | None:
        """Returns what makes one operator of a call of flash-attn's functions."""
        return flash_formula(function) or super().formula_of(function)

    def add_operators(self) -> None:
        """Adds the operators of kernels, and a reference where torch has none. NOTE [Kernels that a machine lacks]"""
        kernel_rule.add_kernel()
        add_cache()
        add_varlen_reference()
        add_operator()
        register_block_mask()
        register_masks()
        super().add_operators()

    def with_documents(self, model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments with the ends of documents that positions say, for a flash kernel of transformers."""
        return super().with_documents(model, with_ends_of_positions(model, kwargs))

    @contextmanager
    def during_capture(self, exactly: bool, looks: bool) -> Iterator[None]:
        """Attention of torch's flex and varlen_attn, of xformers, with a cache, and with padding, is an operator."""
        with (
            flex_without_kernels(), VarlenAsOperator(), xformers_as_operators(), caches_in_operators(),
            padding_in_operators(), counted_positions(), super().during_capture(exactly, looks),
        ):  # fmt: skip
            yield

    @contextmanager
    def without_kernels(self) -> Iterator[None]:
        """torch's flex_attention has a backward on a CPU, too, and what packages of kernels lack there runs."""
        with flex_without_kernels(), xformers_as_operators(), caches_in_operators(), super().without_kernels():
            yield
