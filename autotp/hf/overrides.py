"""Methods of transformers and peft that work differently, or raise Error, on a parallel model.

This module does not import transformers or peft before the user's program does.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn, cast

from torch import nn

from autotp.errors import Error
from autotp.hf.generation import Generates


def overrides(original: type) -> tuple[type, ...]:
    """Returns the classes that come before `original` in the bases of a parallel model's class."""
    places = (
        ("transformers.generation.utils", "GenerationMixin", Generates),
        ("transformers.modeling_utils", "PreTrainedModel", Saves),
        ("peft.peft_model", "PeftModel", Adapts),
    )
    classes = ((getattr(sys.modules.get(module), name, None), mine) for module, name, mine in places)
    return tuple(mine for theirs, mine in classes if theirs is not None and issubclass(original, theirs))


class Saves:
    """Methods of transformers' models that save, and that switch recomputation."""

    recompute: str

    def save_pretrained(self, save_directory: str | os.PathLike[str], **given: Any) -> None:
        """Saves the whole model by `autotp.save_pretrained`; call it on every rank.

        Raises:
            Error: `autotp.save_pretrained` does not have an option.
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
        """Sets `recompute="full"`, as in `parallelize`: backward computes the activations of a block again."""
        self.recompute = "full"

    def gradient_checkpointing_disable(self) -> None:
        """Sets `recompute="none"`, as in `parallelize`."""
        self.recompute = "none"

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether backward computes the activations of blocks again."""
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
    """Methods of peft's models that raise Error: they need whole adapters, or change the set of adapters."""

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        """Raises Error."""
        raise Error(
            "the adapters of a parallel model are cut",
            fix="autotp.full_state_dict(model, wanted) and peft on one device, as examples/hf_lora.py does",
        )

    def _raise_error(self, *_: Any, **__: Any) -> NoReturn:
        raise Error(
            "adapters of a parallel model are not merged, switched off or exchanged",
            fix="do so with the peft model, and parallelize it then",
        )

    push_to_hub = save_pretrained
    disable_adapter = merge_adapter = unmerge_adapter = merge_and_unload = unload = _raise_error
    add_adapter = delete_adapter = load_adapter = add_weighted_adapter = _raise_error
