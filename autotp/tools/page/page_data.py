"""page_data: all that a page shows, as one plain dict: numbers, texts, and lists and dicts of these."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import autotp
from autotp.costs.hardware import GIB
from autotp.diagnostics.attention_kernels import attention_table
from autotp.diagnostics.plan import Plan
from autotp.diagnostics.verify import Report
from autotp.display.plain_data import as_plain_data
from autotp.tools.bisect import Blame
from autotp.tools.estimation.error_bars import row_bar
from autotp.tools.estimation.result import Estimate
from autotp.tools.estimation.search import Search
from autotp.tools.page.axes import LETTERS, PageAxes, symbol_names
from autotp.tools.page.blocks import block_data
from autotp.tools.page.commands import python_line, torchrun_line
from autotp.tools.page.differences import difference_data
from autotp.tools.page.ranks import rank_data
from autotp.tools.page.source_lines import source_data
from autotp.tools.page.stamp import stamp_data
from autotp.tools.page.subject import Subject, subject_of
from autotp.tools.page.timeline import timeline_data
from autotp.tools.page.whole import whole_data

VERSION = 1
"""Changes if a key gets another meaning."""
BARS = 12
"""The most pipeline ranks whose memory is drawn on top of the page."""
STRONG, QUIET = 7, 6
"""The colours for axes that are cut, and for others; page.css has them."""


def page_data(
    result: Plan | Estimate | Search | Report, proof: Report | None = None, blame: Blame | None = None
) -> dict[str, Any]:
    """Returns the data of the page of a result; of a search that of its best layout, and why others lost.

    Args:
        proof: what `verify` returned for the same layout.
        blame: of a report: what a difference comes from, if it was looked for.

    Raises:
        Error: the result was not made by autotp in this process, or the proof is of another layout.
    """
    subject, compared = subject_of(result), result if isinstance(result, Report) else None
    axes, estimate = PageAxes(subject), subject.estimate
    blocks = block_data(subject, axes)
    source, ranks = source_data(subject, axes, blocks), rank_data(subject, axes, blocks)
    return {
        "version": VERSION,
        "autotp": autotp.__version__,
        "model": subject.model,
        "title": _title(subject) if compared is None else compared.title,
        "layout": [] if estimate is None else _layout(estimate),
        "spent": [] if estimate is None else _spent(estimate),
        "savings": [] if estimate is None else as_plain_data(estimate.savings_table()),
        "memory": None if estimate is None else _memory(estimate),
        "budget": None if estimate is None else _budget(estimate),
        "sizes": _sizes(subject),
        "report": None if compared is None else difference_data(compared, blame),
        "proof": stamp_data(subject, proof or compared),
        "axes": _coloured(axes.data(), {n for row in ranks["parameters"] for n in row["value"]["axes"]}),
        "source": source,
        "blocks": blocks,
        "ranks": ranks,
        "timeline": None if estimate is None else timeline_data(estimate),
        "whole": whole_data(subject),
        "attention": as_plain_data(attention_table(subject.plan.attention)),
        "torchrun": torchrun_line(subject),
        "python": python_line(subject),
        "others": as_plain_data(result.tables()) if isinstance(result, Search) else [],
    }


def _coloured(axes: list[dict[str, Any]], weighted: Collection[int]) -> list[dict[str, Any]]:
    """Returns the axes with a colour each: a strong one for those that are cut, a quiet one for the others.

    Args:
        weighted: the axes of parameters: these and batch and sequence are listed on top of the page.
    """
    cut, whole = itertools.count(), itertools.count()
    coloured = []
    for axis in axes:
        listed = axis["number"] in weighted or axis["cut"] or axis["label"] in LETTERS
        colour = f"c{next(cut) % STRONG}" if axis["cut"] else f"q{next(whole) % QUIET}" if listed else "q0"
        coloured.append({**axis, "listed": listed, "colour": colour})
    return coloured


def _title(subject: Subject) -> str:
    estimate = subject.estimate
    if estimate is None:
        return f"{subject.model} on {subject.plan.sizes}"
    return f"{subject.model} on {estimate.layout.devices:,} x {estimate.device.name}"


def _layout(estimate: Estimate) -> list[dict[str, str]]:
    """Returns the cells of the row of the layout: name, value, error bar."""
    layout, error = estimate.layout, estimate.error
    rounds = f" x {layout.interleave}" if layout.interleave else ""
    schedule = f"{layout.schedule}{rounds}" if layout.pp > 1 else "none"
    cells = (
        ("GPUs", f"{layout.devices:,}", ""), ("tensor", str(layout.tp), ""),
        *[("context", str(layout.cp), "")] * (layout.cp > 1), ("pipeline", str(layout.pp), ""),
        ("data", str(layout.dp), ""), ("batch", f"{layout.batch:,}", "rows"),
        ("micro-batch", str(layout.micro_batch), "rows"),
        ("schedule", schedule, ""), ("sequence", "cut" if layout.sequence_parallel else "whole", ""),
        *[("recompute", layout.recompute, "")] * (layout.memory is None),
        *[("budget", f"{layout.memory}", "")] * (layout.memory is not None),
        ("ZeRO", str(layout.zero), estimate.gathers_text),
        ("seconds a step", f"{estimate.seconds:.3g}", f"± {estimate.seconds * error:.1g}"),
        ("TFLOP/s a GPU", f"{estimate.tflops:.0f}", f"± {estimate.tflops * error:.0f}"),
        ("of peak", f"{estimate.mfu:.1%}", f"± {estimate.mfu * error:.1%}"),
        ("GiB", f"{estimate.fullest.total / GIB:.1f}", f"± {estimate.fullest.error_bytes / GIB:.1f}"),
    )  # fmt: skip
    return [dict(zip(("name", "value", "error"), cell, strict=True)) for cell in cells]


def _spent(estimate: Estimate) -> list[dict[str, Any]]:
    """Returns what the seconds of the busiest pipeline rank are spent on, the longest first."""
    error = row_bar(estimate.device, estimate.layout.zero)
    rows = sorted(estimate.spent.items(), key=lambda item: -item[1])
    return [{"name": name, "seconds": s, "share": s / estimate.seconds, "error": s * error} for name, s in rows]


def _memory(estimate: Estimate) -> dict[str, Any]:
    ranks = len(estimate.memory)
    some = {round(i * (ranks - 1) / (BARS - 1)) for i in range(BARS)}
    return {
        "ranks": sorted(some if ranks > BARS else range(ranks)),
        "fits": estimate.fits, "reserved": estimate.fullest.reserved, "limit": estimate.device.memory,
        "kinds": estimate.memory_error,
    }  # fmt: skip


def _budget(estimate: Estimate) -> dict[str, Any] | None:
    """Returns the table of the largest kept values, and the lines about the budget of each stage; None without one."""
    tables = estimate.budget_table()
    return {"table": as_plain_data(tables[0]), "lines": list(estimate.budget_lines())} if tables else None


def _sizes(subject: Subject) -> dict[str, int]:
    """Returns the length of b and s, for which the page's bytes are."""
    return {LETTERS[name]: subject.sizes[s] for s, name in symbol_names(subject).items() if s in subject.sizes}
