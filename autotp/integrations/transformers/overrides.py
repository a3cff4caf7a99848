"""Methods of transformers that work differently, or raise Error, on a parallel model.

This module does not import transformers before the user's program does.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from torch import nn

from autotp.distributed.agreement import agree, on_first_replica
from autotp.errors import Error
from autotp.integrations.loops.replicas import whole_for_file
from autotp.integrations.transformers.adapters import Adapts, is_saved
from autotp.integrations.transformers.generation import Generates
from autotp.runtime.tree import Tree, state_of


def overrides(original: type) -> tuple[type, ...]:
    """Returns the classes that come before `original` in the bases of a parallel model's class."""
    places = (
        ("transformers.generation.utils", "GenerationMixin", Generates),
        ("transformers.modeling_utils", "PreTrainedModel", Saves),
        ("peft.peft_model", "PeftModel", Adapts),
    )
    classes = ((getattr(sys.modules.get(module), name, None), override) for module, name, override in places)
    return tuple(override for base, override in classes if base is not None and issubclass(original, base))


class Saves:
    """Methods of transformers' models that save, and that switch recomputation."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Saves the whole model by `autotp.save_pretrained`, or a whole state dict by transformers, on the first rank.

        Call it on every rank.

        Args:
            save_directory: the folder.
            options: `max_shard_size`, or `state_dict`, that of the model or the whole on the first rank, with any of
                transformers' options.

        Raises:
            Error: on every rank: `autotp.save_pretrained` does not have an option, or the file system fails.
        """
        from autotp.integrations.transformers.pretrained import save_pretrained

        if is_saved(self):
            return
        model = cast(nn.Module, self)
        # accelerate's way to save passes these: the first rank writes by itself.
        rest = {name: x for name, x in options.items() if name not in ("is_main_process", "save_function")}
        state = rest.pop("state_dict", None)
        if state is not None:
            _save_whole(self, model, save_directory, state, rest)
            return
        if refused := {name for name in rest if rest[name] is not None} - {"max_shard_size"}:
            names = ", ".join(sorted(refused))
            raise Error(
                f"a parallel model is not saved with {names}",
                fix="model.save_pretrained(path), on all ranks: it gathers the whole model",
                alternative="state_dict=autotp.full_state_dict(model): transformers saves it, with all of its options",
            )
        save_pretrained(model, save_directory, **rest)

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Sets `recompute="full"`, as in `parallelize`: backward computes the activations of a block again.

        Args:
            activation_checkpointing_kwargs: of `torch.utils.checkpoint`; autotp has one way to compute again.
            every_n_layers: all blocks are computed again; another number than 1 is a warning.
            offload: what is kept stays where it is; True is a warning.
        """
        if every_n_layers != 1 or offload:
            warnings.warn(
                "every block of a parallel model is computed again, and nothing is moved to the CPU: every_n_layers "
                "and offload have no effect",
                stacklevel=2,
            )
        _tree_of(self).set_recompute("full")

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """The same, by its name before transformers 5.24."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, every_n_layers, offload)

    def activation_checkpointing_disable(self) -> None:
        """Sets `recompute="none"`, as in `parallelize`."""
        _tree_of(self).set_recompute("none")

    def enable_input_require_grads(self) -> None:
        """Does nothing: `recompute` finds the gradients of trained parameters behind frozen ones by itself."""

    def disable_input_require_grads(self) -> None:
        """Does nothing."""

    def gradient_checkpointing_disable(self) -> None:
        """The same, by its name before transformers 5.24."""
        self.activation_checkpointing_disable()

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether backward computes the activations of blocks again."""
        return _tree_of(self).settings.recompute == "full"

    @property
    def is_activation_checkpointing(self) -> bool:
        """The same, by its name from transformers 5.24 on."""
        return _tree_of(self).settings.recompute == "full"

    def resize_token_embeddings(self, *_: Any, **__: Any) -> NoReturn:
        """Raises Error."""
        raise Error(
            "the embeddings of a parallel model are cut, and cannot be resized",
            fix="resize_token_embeddings on the original model, before autotp.parallelize",
        )

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        """Raises Error."""
        raise Error("a parallel model is not pushed to a hub", fix="autotp.save_pretrained(model, path)")


def _tree_of(model: Any) -> Tree:
    """Returns the state of a parallel model, for the model or for a part of it: peft puts modules around a model."""
    state = state_of(model)
    assert state is not None
    return state.tree


def _save_whole(saves: Saves, model: Any, folder: str | os.PathLike[str], state: Any, rest: Mapping[str, Any]) -> None:
    """Saves a state dict, whole on the first rank, by transformers."""
    parent: Any = super(Saves, saves)
    state = whole_for_file(state, model.mesh.everyone)

    def write() -> None:
        if model.mesh.rank == 0:
            # transformers would write a part under the name of the whole.
            wrong = [
                name for name, x in state.items() if name in model.layouts and x.shape != model.layouts[name].shape
            ]
            if wrong:
                raise Error(
                    f"`{wrong[0]}` is a part in the state dict",
                    fix="state_dict=autotp.full_state_dict(model), which all ranks call",
                )
            parent.save_pretrained(folder, state_dict=state, **rest)

    on_first_replica(model.mesh, lambda: agree(model.mesh.alone(), write))
