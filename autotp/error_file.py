"""Has the error that ends a run stand last in what the run prints, and once, not once for each rank.

torchrun prints a summary of some sixty lines when a rank fails, behind all that the ranks print. The summary has a
rank's error only if the rank wrote it to the file that the variable TORCHELASTIC_ERROR_FILE names, as torch's decorator
`record` around `main()` does.

NOTE [The last line]
The first rank of a machine that fails leaves a mark beside torchrun's files, and so does the first one with each error.
A rank with the same error, which is the same text from the same lines, says so in one line; its own file for torchrun
has all of it, and the user's own `sys.excepthook` gets it, too. The first rank prints its error once more, in one line:
by itself, or, as torchrun's summary would come behind it, by a process that waits until torchrun has ended. Where
torchrun will start the ranks again, no such process is started.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import traceback
from contextlib import redirect_stderr, suppress
from functools import wraps
from io import StringIO
from pathlib import Path
from types import TracebackType

from autotp.errors import Error
from autotp.torch_internals import EXCEPT_HOOK
from autotp.tracebacks import of_the_program

VARIABLE = "TORCHELASTIC_ERROR_FILE"
OURS = "autotp_reports"
"""Marks the function that is called for an error that ends the program, as ours, and an error that it has told."""
FIRST = "autotp_first_error"
"""The file that the first rank of a machine to fail makes; with a hash behind its name, the first one with an error."""
LONGEST = 60  # seconds from a rank's end to torchrun's
PRINT_LAST = """
import select, sys
ended = select.poll()
ended.register(int(sys.argv[1]), select.POLLIN)
if ended.poll(int(sys.argv[2])):
    print(sys.argv[3], file=sys.stderr, flush=True)
"""


def write_error(error: Exception, rank: int) -> bool:
    """Writes an error to torchrun's file, and has it printed behind torchrun's summary if it is this machine's first.

    Returns False if another rank of this machine has failed with the same error before; True under other launchers.
    """
    if VARIABLE not in os.environ:
        return True
    file, is_new = Path(os.environ[VARIABLE]), True
    with suppress(OSError, ValueError):  # The error itself is more important.
        if file.exists():
            return True
        text = "".join(traceback.format_exception(error))
        # Otherwise the folder above may be of other runs, too.
        is_torchrun_s = file.parent.name == os.environ.get("LOCAL_RANK")
        is_first = is_torchrun_s and _make(file.parent.parent / FIRST)
        digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
        is_new = not is_torchrun_s or _make(file.parent.parent / f"{FIRST}_{digest}")
        # torchrun takes the error that has the first whole second for the root cause.
        extra = {"py_callstack": text, "timestamp": str(int(time.time()) + (is_torchrun_s and not is_first))}
        content = json.dumps({"message": {"message": one_line(error), "extraInfo": extra}})
        file.write_text(content, encoding="utf-8", errors="backslashreplace")
        if is_first:
            _print_behind_torchrun(f"{one_line(error)} (rank {rank})")
    return is_new


def _make(file: Path) -> bool:
    """Makes an empty file; returns False if it exists."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _print_behind_torchrun(text: str) -> None:
    """Starts a process that prints a text once torchrun, which started this one, has ended."""
    restarts = [os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if restarts[0] == restarts[1] is not None and hasattr(os, "pidfd_open"):
        torchrun = os.pidfd_open(os.getppid())
        command = [sys.executable, "-I", "-S", "-c", PRINT_LAST, str(torchrun), str(LONGEST * 1000)]
        # Bytes: not every locale has each character of a text.
        last = text.encode("utf-8", "backslashreplace")
        # A session of its own: torchrun ends the ranks with all that belongs to theirs.
        subprocess.Popen([*command, last], stdin=subprocess.DEVNULL, pass_fds=[torchrun], start_new_session=True)


def one_line(error: Exception) -> str:
    """Returns an error as one line: what is wrong, and what to write instead."""
    if isinstance(error, Error):
        ways = (f" | {label}: {_line_of(error.facts[label])}" for label in ("try", "expected") if label in error.facts)
        return f"autotp.Error: {_line_of(str(error))}{next(ways, '')}"
    module, name = type(error).__module__, type(error).__qualname__
    name = name if module in ("builtins", "__main__") else f"{module}.{name}"
    # By `traceback`, as `__str__` of a user's class may raise.
    line = _line_of(str(traceback.TracebackException(type(error), error, None))).removeprefix(f"{name}: ")
    return f"{name}: {line}" if line else name


def _line_of(text: str) -> str:
    """Returns the first line that has text; of a text with a traceback, as a DataLoader's, the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(iter(lines[::-1] if "Traceback (most recent call last)" in text else lines), "")


def report_errors(rank: int) -> None:
    """Has an error that ends the program, from here on, be told as NOTE [The last line] says. rank: of this process"""
    previous_hook = EXCEPT_HOOK.original()
    if hasattr(previous_hook, OURS):
        return  # torch's process group puts a hook around it: then there are two, and the error says who came first.

    @wraps(previous_hook)
    def reported(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception) or hasattr(error, OURS):
            return previous_hook(kind, error, trace)
        setattr(error, OURS, True)
        error.__traceback__ = of_the_program(error, trace)
        if not write_error(error, rank):
            with redirect_stderr(StringIO()):  # For a hook of the user's, such as that of a tracker.
                previous_hook(kind, error, error.__traceback__)
            return print(f"rank {rank} ends with the same error as another rank", file=sys.stderr)
        previous_hook(kind, error, error.__traceback__)
        if VARIABLE not in os.environ:
            print(f"{one_line(error)} (rank {rank})", file=sys.stderr)

    setattr(reported, OURS, True)
    EXCEPT_HOOK.put(reported)
