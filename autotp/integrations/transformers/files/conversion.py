"""conversion: the names of tensors in transformers' files, for those of its modules, and back.

For most models they are the same. Of others, transformers joins, splits or renames tensors (experts, prefixes).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from autotp.errors import Error
from autotp.integrations.transformers.files.configuration import (
    ModelArguments,
    first_line,
    offline_and_silent,
    transformers_module,
)
from autotp.integrations.transformers.files.from_configuration import model_from_configuration
from autotp.integrations.transformers.files.lazy_tensor import Lazy
from autotp.integrations.transformers.files.tensor_sources import InMemory, Source
from autotp.integrations.transformers.pretrained import lazy_model


def as_in_modules(folder: Path) -> dict[str, Source]:
    """Returns the tensors of a folder of transformers, under the names and in the shapes of the model's modules.

    Raises:
        Error: as `autotp.from_pretrained`.
    """
    model, sources = lazy_model(folder, ModelArguments(None, None, {}, "error", "error"))
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    sources_by_name: dict[str, Source] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # A buffer, which has been read already.
        if id(tensor) not in first:
            sources_by_name[name] = InMemory(tensor)
        # A tied parameter has one source, under its first name.
        elif first[id(tensor)] == name:
            sources_by_name[name] = sources[name]
    return sources_by_name


def as_in_files(tensors: Mapping[str, Source], config: Path) -> dict[str, Source]:
    """Returns tensors of a model's modules, under the names and in the shapes of transformers' files.

    Args:
        config: a folder with the configuration, or its file.

    Raises:
        Error: the tensors are not those of the configuration's model.
    """
    with torch.device("meta"):
        model = model_from_configuration(config, {})
    state = model.state_dict()
    unlike = [name for name, x in tensors.items() if name not in state or tuple(state[name].shape) != tuple(x.shape)]
    tied = {id(p): name for name, p in model.named_parameters()}
    missing = [name for name, p in model.named_parameters() if name not in tensors and tied[id(p)] == name]
    if unlike or missing:
        facts = {"unlike": ", ".join(unlike[:4]), "missing": ", ".join(missing[:4])}
        class_name = type(model).__name__
        facts = {"at": str(config), **{k: v for k, v in facts.items() if v}}
        raise Error(f"the tensors are not those of {class_name}", fix="the configuration of this checkpoint", **facts)
    transformers_module()
    from transformers.core_model_loading import revert_weight_conversion

    lazies = {name: Lazy(source) for name, source in tensors.items()}
    try:
        with torch.no_grad(), offline_and_silent():
            saved = revert_weight_conversion(model, lazies)  # type: ignore[arg-type]
    except Exception as error:
        problem = f"transformers cannot convert the tensors: {first_line(error)}"
        raise Error(problem, at=str(config), fix="the configuration of this checkpoint") from error
    return {name: lazy.source for name, lazy in saved.items()}
