"""Has torchrun's summary show the error of a rank, as torch's decorator `record` around `main()` does.

torchrun prints a summary when a rank fails. It has the rank's error only if the rank wrote it to the file that the
variable TORCHELASTIC_ERROR_FILE names.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import wraps
from types import TracebackType

from autotp.torch_internals import EXCEPT_HOOK

VARIABLE = "TORCHELASTIC_ERROR_FILE"
OURS = "autotp_reports"
"""Marks the function that is called for an error that ends the program, as ours."""


def write_error(error: Exception) -> None:
    """Writes an error into torchrun's file, unless there is one already; does nothing under other launchers."""
    if VARIABLE not in os.environ or os.path.exists(os.environ[VARIABLE]):
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with suppress(Exception):  # The error itself is more important.
        try:
            raise error  # torch's handler writes the exception that is being handled.
        except Exception as raised:
            get_error_handler().record_exception(raised)


def report_errors() -> None:
    """Writes an error that ends the program, from here on, to torchrun's file; does nothing under other launchers."""
    previous_hook = EXCEPT_HOOK.original()
    if VARIABLE not in os.environ or hasattr(previous_hook, OURS):
        return

    @wraps(previous_hook)
    def reported(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            write_error(error)
            # `write_error` has raised it once more, which adds a frame.
            error.__traceback__ = trace
        previous_hook(kind, error, trace)

    setattr(reported, OURS, True)
    EXCEPT_HOOK.put(reported)
