"""Explains, for a model that reads the values of a tensor, what to write instead."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from autotp import torch_internals as internals
from autotp.errors import Error
from autotp.model_library import library
from autotp.passes.capture.guards.values import READS, NeedsNumber, reads_values
from autotp.passes.capture.repeats.blocks import patched
from autotp.source_location import is_users, user_line

LAST_WAY_OUT = "autotp.opaque (every rank runs the code whole), or torch.library.custom_op and autotp.rule"
"""What to do with code that no graph can have."""
TAKES_FUNCTIONS = "the model calls an operator that takes functions (cond, while_loop, scan)"
WITHOUT_FUNCTIONS = "compute both branches and choose with torch.where; loop in Python, as often as shapes say"
LOOP = r"for .* in |while "
NUMBER = r"\.item\(|\.tolist\(|\bint\(|\bfloat\(|\bcomplex\(|\blen\(|\brange\("
CONVERTED = r"\bint\(|\bfloat\("
IS_EMPTY = r"(\blen\(.*\)|\.numel\(\)|\.shape\[.*\]|\.size\(.*\)) ?((==|!=|>|<=) ?0|(<|>=) ?1)\b|\bnot len\("
NO_ROWS = "no branch at all, if it only leaves out work on no rows: operators compute on no rows, too"
TEXT = r"""\bf["']|["'] % |\.format\(|\bformat\("""


class _Noted(TorchFunctionMode):
    """A mode that notes the exceptions of reads that only a capture raises: its tensors have no values and no memory.

    An exception that the read raises on one device, too (`.item()` of several numbers), is the model's own affair.
    """

    def __init__(self) -> None:
        super().__init__()
        self.raised: list[Exception] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            # A tensor of a capture has no memory, so asking for its address always raises, and never on one device.
            if (func in READS and reads_values(error)) or func is Tensor.data_ptr:
                self.raised.append(error)
            raise


@contextmanager
def none_caught() -> Iterator[None]:
    """A region in which the model must not catch exceptions that only a capture raises: that a value is not known.

    It would go on by another branch than it does with values. The exception is raised again at the end of the region.
    """
    noted = _Noted()
    raised = noted.raised

    def noting(make: Any) -> Any:
        def init(self: Exception, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            raised.append(self)

        return init

    with ExitStack() as stack:
        for row in internals.NOT_KNOWN:
            stack.enter_context(row.replaced_by(noting(row.original())))
        # Noted when they are made, because the model may catch them.
        for cls in (NeedsNumber, Error):
            stack.enter_context(patched(cls, {"__init__": noting(cls.__init__)}))
        stack.enter_context(noted)
        yield
    for error in raised:
        # A traceback begins at the frame that caught the exception.
        caught_by = error.__traceback__.tb_frame if error.__traceback__ is not None else None
        if caught_by is not None and is_users(caught_by):  # torch catches some itself.
            raise error


def refused(error: Exception, model: nn.Module) -> Error:
    """Returns the Error for a model that reads a tensor's values: in a loop, as a number, or in a branch."""
    frames = traceback.extract_tb(error.__traceback__)
    line = user_line(frames)
    # A line of torch's batch norm, which divides by this count.
    if any(frame.line and "self.num_batches_tracked" in frame.line for frame in frames):
        norm_paths = (p for p, m in model.named_modules() if isinstance(m, _NormBase) and m.momentum is None)
        text = "has momentum=None: its average makes a Python number of a tensor's values"
        return Error(f"`{next(norm_paths, '')}` {text}, which are not known in a graph", at=line, fix="momentum=0.1")
    code = line.partition("  ")[2]
    if "expert" in code and (instead := library().instead_of_expert_loop(model)):
        text = "the model loops over the experts that are hit: torch.export has no loop whose length depends on values"
        return Error(text, at=line, fix=instead)
    # A line of a comprehension with an `if` has read its condition: that is a branch.
    if re.match(LOOP, code) and not re.search(r"\bif\b", code):
        text = "the model has a loop whose length depends on the values of a tensor: torch.export has no such loop"
        return Error(text, at=line, fix=f"do all rounds, and mask with torch.where; or one operator: {LAST_WAY_OUT}")
    # The text of an assert is made only where it fails: what was read is its condition.
    if re.search(TEXT, code) and not code.startswith("assert "):
        text = "the model makes text of a tensor's values, which are not known in a graph"
        return Error(text, at=line, fix="return the tensor from forward, and make the text of what the call returns")
    # `if int(x) > 3:` is told as a branch below: with the number alone it would still branch.
    if re.search(NUMBER, code) and not re.match(r"(el)?if |assert ", code):
        text = "the model makes a Python number of a tensor's values, which are not known in a graph"
        item = "x.item(), if it only decides or is computed with; " if re.search(CONVERTED, code) else ""
        return Error(
            text,
            at=line,
            fix=f"{item}a mask, `torch.arange(n) < lengths[:, None]`; the number as an argument; or {LAST_WAY_OUT}",
        )
    if code.startswith("assert "):
        text = "the model asserts something about the values of a tensor, which are not known in a graph"
        return Error(text, at=line, fix="the assert before the call of the model")
    return Error(
        "the model branches on the values of a tensor, which one graph cannot do",
        at=line,
        fix=f"choose with torch.where, or branch on shapes and configuration only; or {LAST_WAY_OUT}",
        alternative=NO_ROWS if re.search(IS_EMPTY, code) else "",
    )
