"""explain_failure: torch.export's exception -> an Error with the user's line and a fix."""

from __future__ import annotations

import traceback

from torch import SymBool, SymFloat, SymInt, nn
from torch._export.non_strict_utils import _tensor_min_max
from torch._functorch import vmap
from torch._subclasses import FakeTensor

from autotp.errors import Error
from autotp.passes.capture.guards.values import reads_values
from autotp.passes.capture.pytree import is_dense
from autotp.passes.capture.unsupported.tensor_values import LAST_WAY_OUT, TAKES_FUNCTIONS, WITHOUT_FUNCTIONS, refused
from autotp.source_location import user_line
from autotp.torch_internals import NEEDS_NUMBERS, NO_NUMPY, OTHER_MODE

VMAP: str = vmap.__file__
"""The file of torch's vmap."""

TRACED = (FakeTensor.__name__, SymInt.__name__, SymFloat.__name__, SymBool.__name__)
"""The classes of values that a model sees only while it is captured."""


def explain_failure(error: Exception, plain: Exception | None, model: nn.Module) -> Error:
    """Returns an Error for the exporter's exception, with the user's line and a fix.

    Args:
        plain: the exception that the model raises without symbolic sizes, if any.
    """
    if plain is not None and any(name in str(plain) for name in TRACED):
        error, plain = plain, None  # On one device the model would not see such a value.
    cause = plain or error
    # It says already what to write: a replaced function has raised it in the user's terms.
    if isinstance(cause, Error):
        return cause
    if NO_NUMPY in str(cause):
        return Error(
            "the model computes with numpy, which a graph does not see",
            at=user_line(traceback.extract_tb(cause.__traceback__)),
            fix=f"torch's operators, or {LAST_WAY_OUT}",
        )
    if reads_values(error):
        return refused(error, model)
    if any(text in str(cause) for text in NEEDS_NUMBERS):
        return Error(
            "a function of torch takes numbers here, and gets values of tensors, which are not known in a graph",
            at=user_line(traceback.extract_tb(cause.__traceback__)),
            fix=f"numbers that shapes or arguments give (`x.shape[1]`, not `mask.sum()`); a mask; or {LAST_WAY_OUT}",
        )
    if OTHER_MODE in str(cause):
        return Error(
            "forward computes with a tensor that is not one of the model's, such as a buffer in a plain attribute",
            at=user_line(traceback.extract_tb(cause.__traceback__)),
            fix="read it by its own name, or keep a copy: self.name = self.buffer.clone()",
        )
    if "fake impl" in str(cause) or "UnsupportedOperator" in type(cause).__name__:
        if sparse := [name for name, x in model.named_buffers() if not is_dense(x)]:
            return Error(
                f"forward computes with a sparse tensor, as `{sparse[0].removeprefix('model.')}` is one",
                at=user_line(traceback.extract_tb(cause.__traceback__)),
                fix="x.to_dense(), of which a graph has operators",
            )
        return Error(
            "the model calls an operator that does not say what shape it returns",
            at=user_line(traceback.extract_tb(cause.__traceback__)),
            fix="torch.library.register_fake, on the operator",
        )
    if "HigherOrderOp" in type(cause).__name__:
        return Error(TAKES_FUNCTIONS, at=user_line(traceback.extract_tb(cause.__traceback__)), fix=WITHOUT_FUNCTIONS)
    if isinstance(cause, TypeError) and (function := _compared_itself(cause)):
        return Error(
            f"Python's `{function}` of one tensor compares the values of its rows, which are not known in a graph",
            at=user_line(traceback.extract_tb(cause.__traceback__)),
            fix=f"x.a{function}(0), which has one operator",
        )
    class_name, text = type(cause).__name__, str(cause).strip()
    message = f"{class_name}: {text.splitlines()[0] if text else ''}".rstrip(": ")
    line = user_line(traceback.extract_tb(cause.__traceback__))
    facts = {"at": line} if line != "?" else {}
    if plain is None and any(frame.filename == VMAP for frame in traceback.extract_tb(cause.__traceback__)):
        return Error(
            f"torch.vmap of a function that torch.export cannot trace: {message}",
            **facts,
            fix="operators on the whole batch, or dropout before the vmap or behind it",
        )
    # The model itself runs on these inputs: it is the exporter that fails.
    if plain is None:
        instead = f"other operators at this line, or {LAST_WAY_OUT}"
        return Error(f"torch.export cannot trace the model: {message}", **facts, fix=instead)
    return Error(
        f"the model does not run on these inputs: {message}",
        **facts,
        fix="arguments that the original model accepts; example_inputs={...}, if you gave none",
    )


def _compared_itself(error: TypeError) -> str:
    """Returns "max" or "min" if the model called this function of Python on a tensor; else ""."""
    called = any(frame.name == _tensor_min_max.__name__ for frame in traceback.extract_tb(error.__traceback__))
    names = (of for of in ("max", "min") if called and str(error).startswith(f"{of}imum() missing"))
    return next(names, "")
