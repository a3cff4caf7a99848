"""Methods of transformers and peft that work differently, or raise Error, on a parallel model.

This module does not import transformers or peft before the user's program does.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, cast

from torch import Tensor, nn

from autotp.checkpoint.state_dict import full_state_dict
from autotp.distributed.consistency import agree, on_first_replica
from autotp.errors import Error
from autotp.hf.generation import Generates

_saved: ContextVar[tuple[Any, ...]] = ContextVar("saved", default=())


@contextmanager
def already_saved(model: nn.Module) -> Iterator[None]:
    """A region in which `model.save_pretrained` does nothing: Trainer calls it on the first rank alone."""
    token = _saved.set((*_saved.get(), model))
    try:
        yield
    finally:
        _saved.reset(token)


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
        """Saves the whole model by `autotp.save_pretrained`, or a whole state dict by transformers, on the first rank.

        Call it on every rank.

        Args:
            save_directory: the folder.
            given: `max_shard_size`, or `state_dict`, whole on the first rank, with any of transformers' options.

        Raises:
            Error: on every rank: `autotp.save_pretrained` does not have an option, or the file system fails.
        """
        from autotp.hf.pretrained import save_pretrained

        if self in _saved.get():
            return
        model = cast(nn.Module, self)
        # accelerate's way to save passes these: the first rank writes by itself.
        rest = {name: x for name, x in given.items() if name not in ("is_main_process", "save_function")}
        state = rest.pop("state_dict", None)
        if state is not None:
            _save_whole(self, model, save_directory, state, rest)
            return
        if others := {name for name in rest if rest[name] is not None} - {"max_shard_size"}:
            names = ", ".join(sorted(others))
            raise Error(
                f"a parallel model is not saved with {names}",
                fix="model.save_pretrained(path), on all ranks: it gathers the whole model",
                alternative="state_dict=autotp.full_state_dict(model): transformers saves it, with all of its options",
            )
        save_pretrained(model, save_directory, **rest)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Returns the number of elements of the whole model's parameters.

        Args:
            only_trainable: whether those count only that require gradients.
            exclude_embeddings: whether weights of embeddings do not count.
        """
        model = cast(nn.Module, self)
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        left_out = {id(table.weight) for table in tables if exclude_embeddings}
        return whole_size(model, lambda p: id(p) not in left_out and (p.requires_grad or not only_trainable))

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
        self.recompute = "full"

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
        self.recompute = "none"

    def gradient_checkpointing_disable(self) -> None:
        """The same, by its name before transformers 5.24."""
        self.recompute = "none"

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether backward computes the activations of blocks again."""
        return bool(self.recompute == "full")

    @property
    def is_activation_checkpointing(self) -> bool:
        """The same, by its name from transformers 5.24 on."""
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
    """Methods of peft's models that save adapters whole, or raise Error because they change the set of adapters."""

    peft_config: Mapping[str, Any]

    def save_pretrained(self, save_directory: str | os.PathLike[str], **given: Any) -> None:
        """Gathers the adapters, and saves them by peft on the first rank; call it on every rank.

        Args:
            save_directory: the folder.
            given: peft's options.

        Raises:
            Error: on every rank: an adapter is a prompt that peft computes, or the file system fails.
        """
        if self in _saved.get():
            return
        model: Any = self
        if any(config.is_prompt_learning for config in self.peft_config.values()):
            raise Error(
                "peft computes the prompt that it saves from the weights, and these are cut",
                fix="autotp.full_state_dict(model), and peft on one device",
            )
        state = full_state_dict(model, _names_of_adapters(model).__contains__)
        others = {name: value for name, value in given.items() if name not in ("state_dict", "is_main_process")}

        def write() -> None:
            if model.mesh.rank == 0:
                theirs: Any = super(Adapts, model)
                theirs.save_pretrained(save_directory, state_dict=state, **others)

        on_first_replica(model.mesh, lambda: agree(model.mesh.alone(), write))

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        """Raises Error."""
        raise Error("a parallel model is not pushed to a hub", fix="model.save_pretrained(path)")

    def _raise_error(self, *_: Any, **__: Any) -> NoReturn:
        raise Error(
            "adapters of a parallel model are not merged, switched off or exchanged",
            fix="do so with the peft model, and parallelize it then",
        )

    disable_adapter = merge_adapter = unmerge_adapter = merge_and_unload = unload = _raise_error
    add_adapter = delete_adapter = add_weighted_adapter = _raise_error

    def load_adapter(self, folder: str | os.PathLike[str], adapter_name: str, is_trainable: bool = False) -> Any:
        """Reads the weights of an adapter that the model has, as a resumed Trainer does. Call it on every rank.

        Args:
            folder: what `save_pretrained` wrote, on every rank.
            adapter_name: the adapter of the model.
            is_trainable: as of peft: without it, the model is in eval mode then.

        Returns:
            What `load_state_dict` returns.

        Raises:
            Error: on every rank, and nothing is changed: the model has no such adapter, or the folder has another kind.
        """

        def read() -> Any:
            from peft import PeftConfig, load_peft_weights

            if not os.path.isdir(folder):  # peft would ask a hub.
                raise Error(f"there is no folder {folder}", fix="the folder that model.save_pretrained wrote")
            mine, theirs = self.peft_config.get(adapter_name), PeftConfig.from_pretrained(str(folder))
            if mine is None or _kind_of_adapter(mine) != _kind_of_adapter(theirs):
                raise Error(
                    f"a parallel model takes the weights of its own adapters, and {adapter_name!r} of {folder} is none",
                    fix="PeftModel.from_pretrained(model, folder), and parallelize it then",
                )
            return load_peft_weights(str(folder), device="cpu")

        model: Any = self
        weights = agree(model.mesh, read)
        from peft import set_peft_model_state_dict

        found = set_peft_model_state_dict(model, weights, adapter_name=adapter_name)
        if not is_trainable:
            model.eval()
        return found


def _kind_of_adapter(config: Any) -> dict[str, Any]:
    """Returns the settings of an adapter that decide on its weights."""
    free = ("inference_mode", "base_model_name_or_path", "revision", "peft_version", "auto_mapping")
    return {key: x for key, x in config.to_dict().items() if key not in free}


def _save_whole(saves: Saves, model: Any, folder: str | os.PathLike[str], state: Any, given: Mapping[str, Any]) -> None:
    """Saves a state dict, whole on the first rank, by transformers."""
    theirs: Any = super(Saves, saves)

    def write() -> None:
        if model.mesh.rank == 0:
            wrong = [
                name for name, x in state.items() if name in model.layouts and x.shape != model.layouts[name].shape
            ]
            if wrong:
                raise Error(
                    f"`{wrong[0]}` is a part in the state dict",
                    fix="state_dict=autotp.full_state_dict(model), which all ranks call",
                )
            theirs.save_pretrained(folder, state_dict=state, **given)

    on_first_replica(model.mesh, lambda: agree(model.mesh.alone(), write))


def _names_of_adapters(model: Any) -> set[str]:
    """Returns the names, in the state dict, of the tensors that peft saves."""
    from peft import get_peft_model_state_dict

    own = nn.Module.state_dict(model)
    saved = {
        id(value)
        for name in model.peft_config
        for value in get_peft_model_state_dict(model, state_dict=dict(own), adapter_name=name).values()
    }
    return {name for name, value in own.items() if id(value) in saved}


def whole_size(model: Any, counts: Callable[[Tensor], bool]) -> int:
    """Returns the number of elements of a parallel model's parameters, of all ranks together."""
    shapes = [model.layouts[name].shape for name, p in model.named_parameters() if counts(p)]
    return sum(math.prod(shape) for shape in shapes)
