"""main: the console script `autotp`. It needs typer only when it runs."""

from __future__ import annotations

import sys

from autotp.tools.cli.output import error_text

NEEDED = ("typer", "rich")


def main() -> int:
    """Runs the command line on the arguments of the process; returns the exit status."""
    try:
        from autotp.tools.cli.app import run
    except ModuleNotFoundError as error:
        # Another missing module is a broken installation, which the extra would not repair.
        if (error.name or "").partition(".")[0] not in NEEDED:
            raise
        problem = f"the command line needs {error.name}: pip install 'autotp[cli]'"
        print(f"autotp: {problem}", file=sys.stderr)
        if "--json" in sys.argv:
            print(error_text(problem))
        return 2
    return run(sys.argv[1:])
