"""start_lines: the lines that start a training in a layout: torchrun, and Python."""

from __future__ import annotations

import textwrap

from autotp.tools.estimation.layout import StepLayout

TERMINAL = 80
"""The characters of a terminal's line: one that it breaks by itself cannot be copied."""


def in_lines(text: str, end: str = "") -> list[str]:
    """Returns a line of code in lines that fit a terminal. end: what ends all but the last, as "\\" in a shell"""
    lines = textwrap.wrap(
        text, TERMINAL - len(end) - 1, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return [f"{line} {end}".rstrip() for line in lines[:-1]] + lines[-1:]


def torchrun_line(devices: int, node: int) -> str:
    """Returns the command that starts so many ranks; on several nodes, each node runs it.

    Args:
        node: the devices of a node.
    """
    if devices <= node:
        return f"torchrun --nproc-per-node {devices} train.py"
    nodes = -(-devices // node)
    meet = '--rdzv-backend c10d --rdzv-endpoint "$FIRST_NODE:29500"'
    return f"torchrun --nnodes {nodes} --nproc-per-node {node} {meet} train.py"


def python_line(layout: StepLayout) -> str:
    """Returns the call of `distribute` for a layout."""
    arguments = [f"{name}={getattr(layout, name)}" for name in ("tp", "pp", "dp")]
    arguments += [f"{name}={getattr(layout, name)}" for name in ("cp", "ep") if getattr(layout, name) > 1]
    arguments += [f"microbatches={layout.microbatches}"]
    arguments += [f'schedule="{layout.schedule}"'] * (layout.pp > 1 and layout.schedule != "1F1B")
    arguments += [f"interleave={layout.interleave}"] * (layout.pp > 1 and layout.interleave is not None)
    arguments += ["sequence_parallel=True"] * layout.sequence_parallel
    arguments += [f'recompute="{layout.recompute}"'] * (layout.recompute != "none")
    budget = f'"{layout.memory}"' if isinstance(layout.memory, str) else layout.memory
    arguments += [f"memory={budget}"] * (layout.memory is not None)
    arguments += [f"{name}={x}" for name in ("state_bytes", "capacity") if (x := getattr(layout, name)) is not None]
    arguments += [f'overlap="{layout.overlap}"'] * (layout.overlap != "none")
    arguments += [f'cp_attention="{layout.cp_attention}"'] * (layout.cp_attention != "auto")
    arguments += [f"zero={layout.zero}"] * bool(layout.zero)
    arguments += [f"compute_dtype={layout.dtype}"] * (layout.dtype is not None)
    return f"trainer = autotp.distribute(model, {', '.join(arguments)})"
