"""main: the console script `autotp`. It needs typer only when it runs."""

from __future__ import annotations

import sys

NEEDED = ("typer", "rich")


def main() -> int:
    """Runs the command line on the arguments of the process; returns the exit status."""
    try:
        from autotp.cli.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in NEEDED:
            raise
        print(f"autotp: the command line needs {error.name}: pip install 'autotp[cli]'", file=sys.stderr)
        return 2
    return run(sys.argv[1:])
