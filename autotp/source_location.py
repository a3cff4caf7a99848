"""Finds the line of the user's code that a value comes from."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from traceback import FrameSummary
from types import FrameType

import torch
from torch import fx

from autotp.torch_internals import READ_THROUGH, TO_FILL

_PACKAGE = os.path.dirname(__file__)
# Each ends in a separator: the folder `autotp2` is another one.
_LIBRARIES = tuple(os.path.join(folder, "") for folder in (os.path.dirname(torch.__file__), _PACKAGE))
_MODELS = os.path.join(_PACKAGE, "models", "")
"""Ordinary models, as users write them: errors name their lines, too."""


def is_library_file(file: str) -> bool:
    """True for a file of torch or autotp; False for autotp's ordinary models."""
    return file.startswith(_LIBRARIES) and not file.startswith(_MODELS)


def user_line(frames: Sequence[FrameSummary]) -> str:
    """Returns the deepest frame outside of torch and autotp, as `file.py:12  the code`."""
    for frame in reversed(frames):
        if not is_library_file(frame.filename) and not frame.filename.startswith("<"):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}  {frame.line or ''}".rstrip()
    return "?"


def calling_frame(depth: int = 1) -> FrameType:
    """Returns the frame of the code that calls the function which asks: one above it, or `depth`."""
    return sys._getframe(depth + 1)


def is_users(frame: FrameType) -> bool:
    """True for a frame of the user's code: not of torch or autotp, nor of code that these generate."""
    if frame.f_code.co_filename.startswith("<eval_with_key>"):
        return False
    name = str(frame.f_globals.get("__name__", ""))
    return name.split(".")[0] not in ("torch", "autotp") or name.startswith("autotp.models.")


def reads_for_caller(frame: FrameType) -> bool:
    """True for code of torch that reads the state dict of a model or an optimizer to give it to its caller.

    The model may be a submodule of what the user reads, or the user calls `get_model_state_dict`.
    """
    name = f"{frame.f_globals.get('__name__')}."
    return name.startswith(READ_THROUGH) and not reads_to_fill(frame)


def reads_to_fill(frame: FrameType) -> bool:
    """True for code of a library that reads a state dict only to load tensors into what it belongs to."""
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) in TO_FILL


def line_of(node: fx.Node) -> str:
    """Returns the source line of a node, as `file.py:12  the code`; for torch's layers the line that calls them."""
    place = source_place(node)
    return "?" if place is None else f"{os.path.basename(place[0])}:{place[1]}  {place[2]}"


def source_place(node: fx.Node) -> tuple[str, int, str] | None:
    """Returns file, line number and code of a node's source line, as `line_of` has it; None if it is not known."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', node.meta.get("stack_trace") or "")
    user_frames = [row for row in frames if not is_library_file(row[0])] or frames
    if not user_frames:
        return None
    # The innermost frame is the last one.
    path, line, code = user_frames[-1]
    return path, int(line), code.strip()


def block_of(node: fx.Node) -> str:
    """Returns the numbered block of a node, such as `h.0`; "" for a node outside of blocks."""
    return block_in(layer_of(node))


def block_in(name: str) -> str:
    """Returns the numbered block of a module or parameter: `h.0` for `h.0.attn.c_attn`; "" if there is none."""
    # By the first number: `h.0.experts.3` is in block `h.0`.
    match = re.match(r"(.*?\.\d+)(?:\.|$)", name)
    return match.group(1) if match else ""


def layer_of(node: fx.Node) -> str:
    """Returns the name of the innermost module of a node, such as `h.0.attn.c_attn`."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return re.sub(r"^(L\['self'\]\.|_?model\.?)", "", path)
