"""commands: the lines that start what a page shows: torchrun, and Python."""

from __future__ import annotations

from autotp.tools.estimation import start_lines
from autotp.tools.estimation.layout import StepLayout
from autotp.tools.page.subject import Subject


def torchrun_line(subject: Subject) -> str:
    """Returns the command that starts all ranks; of several nodes, the one that each node runs."""
    estimate = subject.estimate
    if estimate is not None:
        return start_lines.torchrun_line(estimate.layout.devices, estimate.device.node)
    devices = subject.mesh.ranks if subject.mesh is not None else subject.program.tp * subject.program.options.cp
    return start_lines.torchrun_line(devices, node=devices)


def python_line(subject: Subject) -> str:
    """Returns the call of `distribute`; for a plan, and a report without a mesh, that of `parallelize`."""
    if subject.estimate is not None:
        return start_lines.python_line(subject.estimate.layout)
    options = subject.program.options
    if (mesh := subject.mesh) is not None:
        layout = StepLayout(
            batch=mesh.microbatches * mesh.dp, tp=mesh.tp, pp=mesh.pp, dp=mesh.dp, cp=mesh.cp, zero=mesh.zero,
            schedule=mesh.schedule, interleave=mesh.interleave, sequence_parallel=options.sequence_parallel,
        )  # fmt: skip
        return start_lines.python_line(layout)
    along = f", cp={options.cp}" * (options.cp > 1) + ", sequence_parallel=True" * options.sequence_parallel
    return f"model = autotp.parallelize(model, tp={subject.program.tp}{along})"
