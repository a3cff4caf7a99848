"""stamp: what was proved of a layout, by the checker and by `verify`, and what was not."""

from __future__ import annotations

from typing import Any

from autotp.diagnostics.mesh_proof import NOT_PROVED, MeshProof
from autotp.diagnostics.verify import Report
from autotp.errors import Error
from autotp.tools.page.subject import Subject
from autotp.training.pipeline.schedules import engine_of


def stamp_data(subject: Subject, report: Report | None = None) -> dict[str, Any]:
    """Returns what was proved, what was not, and the error if something is wrong.

    Args:
        report: what `verify` returned for the same layout; None: the checker types the captured blocks only.

    Raises:
        Error: the report is of another layout.
    """
    if report is None:
        error = "" if subject.proof is None else str(subject.proof)
        return {"proved": [] if error else _typed(subject), "open": _open(subject), "error": error or None, "by": ""}
    expect_same_layout(subject, report)
    proved = _rows(report.mesh) if report.mesh else _typed(subject)
    compared = len(report.outputs), len(report.gradients), len(report.steps)
    if report.computed and report.ok:
        proved.append(
            "numbers: {} outputs, {} gradients and {} parameters after a step equal one device's, in float64".format(
                *compared
            )
        )
    return {
        "proved": proved if report.ok else [], "open": _open(subject, report), "by": "by autotp.verify",
        "error": None if report.ok else f"{report}",
    }  # fmt: skip


def _rows(mesh: MeshProof) -> list[str]:
    """Returns the rows of a proof, without the bytes of stages, which are for its small example."""
    return [f"{name}: {text.partition('; at most')[0]}" for name, text, *_ in mesh.table().rows]


def _typed(subject: Subject) -> list[str]:
    """Returns what the checker proves of the captured blocks."""
    tp, captured = subject.program.tp, len({like for _, like in subject.order})
    if tp == 1 and subject.program.options.cp > 1:
        return ["The graph of the first part of a sequence computes what one device does, and so do its gradients."]
    if tp == 1:
        return ["One tensor-parallel rank computes what one device does: nothing is cut, and nothing has to be summed."]
    proved = [
        f"Each of the {len(subject.types):,} values on each of the {tp} tensor-parallel ranks has the placement that "
        "its readers ask for, and so has its gradient: no sum over ranks and no gather is missing.",
        "Placements are derived anew from the ranks' graphs, by rules that tests prove on slices of every operator.",
    ]
    if captured < len(subject.order):
        proved.append(
            f"{captured} of {len(subject.order)} blocks were captured and proved. The others have the same classes, "
            "parameters and settings, and the captured blocks between the ends compute the same."
        )
    return proved


def _open(subject: Subject, report: Report | None = None) -> list[str]:
    """Returns what was not proved."""
    layout = None if subject.estimate is None else subject.estimate.layout
    mesh = None if report is None else report.mesh
    gaps = []
    if report is None or not report.computed:
        gaps.append("The numbers. autotp verify compares a model that has values with one device, in float64.")
    if subject.program.options.cp > 1 and mesh is None:
        gaps.append("The graphs of the other parts of a sequence: autotp verify proves those of all.")
    if layout is not None and layout.pp > 1 and mesh is None:
        gaps.append("What stages send each other, and the order of the schedule: autotp verify proves them.")
    if layout is not None and layout.dp > 1 and mesh is None:
        gaps.append("The sums of gradients over replicas: autotp verify proves that they are those of the batch.")
    zero = 0 if mesh is None or not mesh.divides else mesh.zero
    if layout is not None:
        # One replica has nothing to divide.
        zero = layout.zero if layout.dp > 1 else 0
    if zero:
        gaps.append(f"ZeRO {zero}: {NOT_PROVED}.")
    if layout is not None:
        gaps.append("Seconds and bytes of memory are estimates, with their error bars.")
    return gaps


def expect_same_layout(subject: Subject, report: Report) -> None:
    """Raises Error if a report is not of the layout of a page."""
    layout, mesh = None if subject.estimate is None else subject.estimate.layout, report.mesh
    along = report.plan.along_sequence is not None
    options = subject.program.options
    got: tuple[object, ...] = (report.plan.model, report.plan.tp, report.plan.cp, along)
    expected: tuple[object, ...] = (subject.model, subject.program.tp, options.cp, options.sequence_parallel)
    names: tuple[str, ...] = ("model", "tp", "cp", "sequence_parallel")
    if layout is not None:
        names = (*names, "pp", "dp", "microbatches", "schedule", "stages of a rank")
        got += (1, 1, 1) if mesh is None else (mesh.pp, mesh.dp, mesh.microbatches)
        expected += (layout.pp, layout.dp, layout.microbatches)
        # Without a pipeline the schedule changes nothing.
        if layout.pp > 1:
            got += (mesh.schedule, engine_of(mesh.schedule, mesh.interleave).rounds) if mesh else ("", 0)
            expected += (layout.schedule, engine_of(layout.schedule, layout.interleave).rounds)
    if got != expected:
        texts = [", ".join(f"{n}={x}" for n, x in zip(names, values, strict=False)) for values in (expected, got)]
        fix = "autotp.verify with the sizes of the estimate, and microbatches = batch / dp / micro_batch"
        raise Error("the proof is of another layout", expected=texts[0], got=texts[1], fix=fix)
