"""Has the error that ends a run stand last in what the run prints, and once, not once for each rank.

torchrun prints a summary of some sixty lines when a rank fails, behind all that the ranks print. The summary has a
rank's error only if the rank wrote it to the file that the variable TORCHELASTIC_ERROR_FILE names, as torch's decorator
`record` around `main()` does.

NOTE [The last line]
The first rank of a machine that fails leaves its text beside torchrun's files. A rank with the same text says so in one
line. The first one prints its error once more, in one line: by itself, or, as torchrun's summary would come behind it,
by a process that waits until torchrun has ended. Where torchrun will start the ranks again, no such process is started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import TracebackType

from autotp.errors import Error
from autotp.torch_internals import EXCEPT_HOOK
from autotp.tracebacks import of_the_program

VARIABLE = "TORCHELASTIC_ERROR_FILE"
OURS = "autotp_reports"
"""Marks the function that is called for an error that ends the program, as ours, and an error that it has told."""
FIRST = "autotp_first_error"
"""The file with the text of the first error of a machine."""
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

    Returns False if another rank of this machine has failed with the same text before; True under other launchers.
    """
    file = Path(os.environ.get(VARIABLE, ""))
    if VARIABLE not in os.environ or file.exists():
        return True
    is_first, before = False, ""
    with suppress(OSError):  # The error itself is more important.
        if file.parent.name == os.environ.get("LOCAL_RANK"):  # Otherwise the folder above may be of other runs, too.
            first = file.parent.parent / FIRST
            try:
                with first.open("x") as opened:
                    is_first = opened.write(one_line(error)) > 0
            except FileExistsError:
                before = first.read_text()
        is_same = before == one_line(error)
        text = "the same error as the root cause" if is_same else "".join(traceback.format_exception(error))
        # torchrun takes the error that has the first whole second for the root cause.
        extra = {"py_callstack": text, "timestamp": str(int(time.time()) + is_same)}
        file.write_text(json.dumps({"message": {"message": one_line(error), "extraInfo": extra}}))
        if is_first:
            _print_behind_torchrun(f"{one_line(error)} (rank {rank})")
    return before != one_line(error)


def _print_behind_torchrun(text: str) -> None:
    """Starts a process that prints a text once torchrun, which started this one, has ended."""
    restarts = [os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if restarts[0] == restarts[1] is not None and hasattr(os, "pidfd_open"):
        torchrun = os.pidfd_open(os.getppid())
        command = [sys.executable, "-I", "-S", "-c", PRINT_LAST, str(torchrun), str(LONGEST * 1000), text]
        # A session of its own: torchrun ends the ranks with all that belongs to theirs.
        subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[torchrun], start_new_session=True)


def one_line(error: Exception) -> str:
    """Returns an error as one line: what is wrong, and what to write instead."""
    if not isinstance(error, Error):
        return traceback.format_exception_only(error)[-1].strip()
    problem = f"autotp.Error: {str(error).splitlines()[0]}"
    ways = (f" | {label}: {error.facts[label]}" for label in ("try", "expected") if label in error.facts)
    return problem + next(ways, "")


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
            return print(f"rank {rank} ends with the same error as another rank", file=sys.stderr)
        previous_hook(kind, error, error.__traceback__)
        if VARIABLE not in os.environ:
            print(f"{one_line(error)} (rank {rank})", file=sys.stderr)

    setattr(reported, OURS, True)
    EXCEPT_HOOK.put(reported)
