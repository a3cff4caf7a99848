"""torch_files: reads files of `torch.save` as plain data: tensors, numbers, texts, and containers of these.

NOTE [No code]
torch's restricted unpickler (`weights_only=True`) calls nothing but what makes tensors. Files of a training name other
classes besides: the argparse.Namespace of its arguments, enumerations, arrays of numpy. Each name that torch would
refuse stands for `Unread` here, an object without content. So no class is looked up by its name in a file, and no
function is called.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotp.checkpoint.files.checksums import READABLE, open_regular
from autotp.errors import Error


class Unread:
    """Stands for an object of a file whose class is not read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def read_torch_file(file: Path) -> Any:
    """Returns the content of a file. Tensors are mapped from the file; what is no plain data is `Unread`.

    Raises:
        Error: the file is missing, damaged, of a format before torch 1.6, or names a function that is blocked.
    """
    try:
        _expect_stored(file)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        with torch.serialization.safe_globals([(Unread, name) for name in names]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Error:
        raise
    except OSError as error:
        raise Error(f"{file} cannot be read: {error.strerror or error}", fix=READABLE) from error
    # A damaged file makes torch and zipfile raise exceptions of many classes.
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), type(error).__name__)
        raise Error(
            f"{file} is no file that can be read without running code: {' '.join(reason.split())[:200]}",
            fix="a file that torch.save wrote with torch 1.6 or newer, of tensors and plain data",
        ) from error


def _expect_stored(file: Path) -> None:
    """Raises Error if parts of a file are compressed: few bytes can stand for many. torch compresses nothing."""
    with open_regular(file) as source, zipfile.ZipFile(source) as parts:
        packed = [part.filename for part in parts.infolist() if part.file_size > part.compress_size]
    if packed:
        raise Error(f"{file} is compressed: {packed[0]}", fix="a file as torch.save writes it")


def _elements_of(name: str, tensor: Tensor, file: Path) -> Tensor:
    """Returns a tensor, if the file has an element for each of its elements.

    Raises:
        Error: it is a view that repeats elements, or is not dense.
    """
    stored = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta and not tensor.is_nested
    if not stored or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise Error(f"{file}: `{name}` has elements that are not in the file", fix="tensor.contiguous(), saved anew")
    return tensor


def state_dict_in(file: Path) -> dict[str, Tensor]:
    """Returns the tensors of a state dict in a file, also below the keys `model` or `state_dict`.

    Raises:
        Error: the file has something else.
    """
    content = read_torch_file(file)
    # Training loops keep a model's state dict under one of these keys.
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise Error(f"{file} has no state dict", expected="a dict: name -> tensor")
    non_tensors = [name for name, value in content.items() if not isinstance(value, Tensor)]
    if non_tensors:
        problem = f"{file}: `{non_tensors[0]}` is a {type(content[non_tensors[0]]).__name__}, and no tensor"
        raise Error(problem, fix="torch.save(model.state_dict(), file)")
    return {name: _elements_of(name, tensor, file) for name, tensor in content.items()}
