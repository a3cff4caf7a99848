"""Runs the python blocks of pages, in order and each by itself, on every rank of torchrun: FOLDER PAGE..."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from torch import distributed as dist


def blocks(page: Path) -> list[str]:
    """Returns the python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def main(folder: str, *pages: str) -> None:
    """Runs the blocks in a folder; prints how many have run."""
    os.chdir(folder)
    count = 0
    for page in pages:
        for i, code in enumerate(blocks(Path(page))):
            exec(compile(code, f"<block {i} of {page}>", "exec"), {"__name__": "__main__"})
            count += 1
            if dist.is_initialized():
                dist.barrier()
    if os.environ["RANK"] == "0":
        print(f"{count} blocks ran")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
