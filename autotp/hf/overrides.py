"""Methods of transformers and peft that work differently, or raise Error, on a parallel model.

Nothing here imports transformers or peft before the user has.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn, cast

from torch import nn

from autotp.errors import Error
from autotp.hf.generation import Generates


def overrides(original: type) -> tuple[type, ...]:
    """The classes that come before `original` in the class of a parallel model."""
    places = (
        ("transformers.generation.utils", "GenerationMixin", Generates),
        ("transformers.modeling_utils", "PreTrainedModel", Saves),
        ("peft.peft_model", "PeftModel", Adapts),
    )
    classes = ((getattr(sys.modules.get(module), name, None), mine) for module, name, mine in places)
    return tuple(mine for theirs, mine in classes if theirs is not None and issubclass(original, theirs))


class Saves:
    """A model of transformers: of a shard of it no checkpoint is written."""

    recompute: str

    def save_pretrained(self, save_directory: str | os.PathLike[str], **given: Any) -> None:
        """As `autotp.save_pretrained`: the whole model, by all ranks together.

        Raises:
            Error: an option that it does not have.
        """
        from autotp.hf.pretrained import save_pretrained

        others = given.keys() - {"max_shard_size"}
        if others:
            names = ", ".join(sorted(others))
            raise Error(
                f"a parallel model is not saved with {names}",
                fix="autotp.save_pretrained(model, path), on all ranks",
                alternative='with Trainer: save_strategy="no", and autotp.save_pretrained(model, path) after train()',
            )
        save_pretrained(cast(nn.Module, self), save_directory, **given)

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """As `parallelize(..., recompute="full")`: what a block computes is computed again in backward."""
        self.recompute = "full"

    def gradient_checkpointing_disable(self) -> None:
        """As `recompute="none"`."""
        self.recompute = "none"

    @property
    def is_gradient_checkpointing(self) -> bool:
        """True where blocks are computed again."""
        return bool(self.recompute == "full")

    def resize_token_embeddings(self, *_: Any, **__: Any) -> NoReturn:
        """Raises Error."""
        raise Error(
            "the embeddings of a parallel model are cut, and cannot be resized",
            fix="resize_token_embeddings on the original model, before autotp.parallelize",
        )

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        """Raises Error."""
        raise Error("a parallel model is not pushed to a hub", fix="autotp.save_pretrained(model, path)")


class Adapts:
    """A model of peft: what changes which adapters there are, or reads them whole, is done before or behind autotp."""

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        """Raises Error."""
        raise Error(
            "the adapters of a parallel model are cut",
            fix="autotp.full_state_dict(model, wanted) and peft on one device, as examples/hf_lora.py does",
        )

    def _before(self, *_: Any, **__: Any) -> NoReturn:
        raise Error(
            "adapters of a parallel model are not merged, switched off or exchanged",
            fix="do so with the peft model, and parallelize it then",
        )

    push_to_hub = save_pretrained
    disable_adapter = merge_adapter = unmerge_adapter = merge_and_unload = unload = _before
    add_adapter = delete_adapter = load_adapter = add_weighted_adapter = _before
