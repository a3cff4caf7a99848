"""commands: the lines that start what a page shows: torchrun, and Python."""

from __future__ import annotations

from autotp.page.subject import Subject
from autotp.training.pipeline.schedules import ENGINES


def torchrun_line(subject: Subject) -> str:
    """Returns the command that starts all ranks; of several nodes, the one that each node runs."""
    estimate = subject.estimate
    devices = subject.program.tp * subject.program.options.cp if estimate is None else estimate.layout.devices
    node = devices if estimate is None else estimate.device.node
    if devices <= node:
        return f"torchrun --nproc-per-node {devices} train.py"
    nodes = -(-devices // node)
    meet = '--rdzv-backend c10d --rdzv-endpoint "$FIRST_NODE:29500"'
    return f"torchrun --nnodes {nodes} --nproc-per-node {node} {meet} train.py"


def python_line(subject: Subject) -> str:
    """Returns the call of `distribute`, or of `parallelize` for a plan."""
    estimate = subject.estimate
    if estimate is None:
        options = subject.program.options
        along = f", cp={options.cp}" * (options.cp > 1) + ", sequence_parallel=True" * options.sequence_parallel
        return f"model = autotp.parallelize(model, tp={subject.program.tp}{along})"
    layout = estimate.layout
    given = [f"{name}={getattr(layout, name)}" for name in ("tp", "pp", "dp")]
    given += [f"cp={layout.cp}"] * (layout.cp > 1) + [f"microbatches={layout.microbatches}"]
    given += [f'schedule="{layout.schedule}"'] * (layout.pp > 1 and layout.schedule != "1F1B")
    given += ["sequence_parallel=True"] * layout.sequence_parallel
    given += [f'recompute="{layout.recompute}"'] * (layout.recompute != "none")
    given += [f'overlap="{layout.overlap}"'] * (layout.overlap != "none")
    given += [f"zero={layout.zero}"] * bool(layout.zero)
    given += [f"compute_dtype={layout.dtype}"] * (layout.dtype is not None)
    return f"trainer = autotp.distribute(model, {', '.join(given)})"


def limits_of(subject: Subject) -> list[str]:
    """Returns what of the layout the lines cannot say."""
    layout = None if subject.estimate is None else subject.estimate.layout
    if layout is None or layout.interleave in (None, ENGINES[layout.schedule].rounds) or layout.pp == 1:
        return []
    rounds = ENGINES[layout.schedule].rounds
    return [
        f"The estimate has {layout.interleave} stages on each rank (interleave={layout.interleave}); distribute runs "
        f'schedule="{layout.schedule}" with {rounds}.'
    ]
