"""`python -m autotp`: the command line."""

import sys

from autotp.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
