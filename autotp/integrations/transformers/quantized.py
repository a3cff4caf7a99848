"""Finds weights that a library keeps quantized: no rule says how to cut a block of them with its scales.

This module imports none of these libraries: it knows their classes by the packages that define them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LIBRARIES = {
    "torchao": "torchao", "bitsandbytes": "bitsandbytes", "hqq": "HQQ", "gptqmodel": "GPTQModel",
    "auto_gptq": "AutoGPTQ",
    "awq": "AutoAWQ", "optimum.quanto": "quanto", "quanto": "quanto", "eetq": "EETQ", "aqlm": "AQLM", "vptq": "VPTQ",
    "compressed_tensors": "compressed-tensors", "transformers.integrations": "transformers",
    "torch.ao.nn.quantized": "torch.ao",
}  # fmt: skip
"""Package of a class -> the library's name, as users know it."""
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def quantized_weight(model: nn.Module) -> str:
    """Returns the name of the first quantized weight of a model and who quantized it, as text; "" if there is none."""
    for path, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        for key, tensor in tensors.items():
            if tensor is not None and (tensor.is_quantized or _library_of(type(tensor))):
                name = f"{path}.{key}" if path else key
                return f"`{name}` is quantized by {_library_of(type(tensor)) or 'torch'} (a {type(tensor).__name__})"
        library = _library_of(type(module))
        if library and (library == "torch.ao" or any(_is_packed(tensor) for tensor in tensors.values())):
            return f"`{path}` is quantized by {library} (a {type(module).__name__})"
    return ""


def _is_packed(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype not in PLAIN


def _library_of(cls: type) -> str:
    """Returns the name of the library that defines a class of modules or tensors, or one that it is derived from.

    A mixin says nothing: each model of transformers has one of `transformers.integrations`, for adapters.
    """
    packages = [f"{base.__module__}." for base in cls.__mro__ if issubclass(base, (nn.Module, Tensor))]
    return next((name for start, name in LIBRARIES.items() if any(x.startswith(f"{start}.") for x in packages)), "")
