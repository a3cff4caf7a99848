"""save_page: writes the page of a plan, an estimate or a search as one file of HTML; tables; a schedule as a trace."""

from __future__ import annotations

import json
import os
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

import autotp
from autotp.arguments import expect_arguments
from autotp.costs.hardware import GIB
from autotp.diagnostics.plan import Plan
from autotp.diagnostics.verify import Report
from autotp.display.sheet import Sheet, html
from autotp.display.text_table import bytes_text
from autotp.errors import Error, within
from autotp.tools.bisect import Blame
from autotp.tools.estimation.result import Estimate
from autotp.tools.estimation.search import Search
from autotp.tools.page.page_data import page_data
from autotp.tools.page.timeline import packed, trace_events


def save_page(
    found: Plan | Estimate | Search | Report, path: str | os.PathLike[str], *, proof: Report | None = None
) -> None:
    """Writes the page of a plan, an estimate, the best layout of a search, or a report: one file of HTML.

    It needs no network. It shows the layout with its error bars, what is proved, and what was compared; the model's
    source lines with the shape of each value; a block with what it sends, forward and backward; the ranks with their
    parameters and memory; the schedule; and what stayed whole. The file is written under another name first: there is a
    whole page, or the one before.

    Args:
        found: what `explain`, `estimate`, `search` or `verify` returned in this process.
        path: the file.
        proof: what `verify` returned for the same layout: stages, schedule and replicas are proved, too. Without it,
            the page says what the checker proves of tensor-parallel ranks.

    Raises:
        Error: the result comes from another process, the proof is of another layout, or the file cannot be written.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        >>> plan = autotp.explain(model, 2, example_inputs=torch.ones(2, 4))
        >>> autotp.save_page(plan, "plan.html")
    """

    def run() -> None:
        expect_arguments(save_page, found=found, path=path, proof=proof)
        _write(Path(path), page_text(page_data(found, proof)))

    within("save_page", run)


def save_report(report: Report, blame: Blame | None, path: Path) -> None:
    """Writes the page of a report, with what a difference comes from.

    Raises:
        Error: the file cannot be written.
    """
    within("save_page", lambda: _write(path, page_text(page_data(report, blame=blame))))


def save_sheet(sheet: Sheet, path: Path) -> None:
    """Writes a page of a sheet as one file of HTML that needs no network.

    Raises:
        Error: the file cannot be written.
    """
    page = {"title": sheet.title, "version": autotp.__version__, "shown": Markup(html(sheet))}
    within("save_page", lambda: _write(path, _rendered("sheet.html.jinja", **page)))


def save_trace(estimate: Estimate, path: str | os.PathLike[str]) -> None:
    """Writes the schedule of an estimate as a trace that Perfetto (ui.perfetto.dev) and Chrome open.

    Args:
        estimate: what `estimate` returned in this process.
        path: the file, such as `trace.json`.

    Raises:
        Error: the estimate comes from another process, or the file cannot be written.

    Example:
        >>> from autotp.models.gpt import GPT, GPTConfig
        >>> with torch.device("meta"):
        ...     model = GPT(GPTConfig(vocab_size=51200, n_layer=4, n_head=8, n_embd=1024))
        >>> est = autotp.estimate(model, gpu="a100-80gb", pp=2, batch=8)
        >>> autotp.save_trace(est, "trace.json")
    """

    def run() -> None:
        expect_arguments(save_trace, estimate=estimate, path=path)
        _write(Path(path), json.dumps(trace_events(estimate)))

    within("save_trace", run)


def page_text(data: dict[str, Any]) -> str:
    """Returns the page of what `page_data` returned."""
    script_data = {"ranks": data["ranks"], "timeline": data["timeline"] and _packed(data["timeline"])}
    script_data["kinds"] = list(data["memory"]["kinds"]) if data["memory"] else []
    return _rendered("page.html.jinja", d=data, shown=script_data, js=Markup(_file("page.js")))


def _rendered(template: str, **variables: Any) -> str:
    """Returns a page of a template of this folder, in the style of all pages."""
    # Names and source lines of a model may contain `<`. A key that the data lacks raises, and is not left blank.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(bytes=bytes_text, gib=lambda size: f"{size / GIB:.1f}")
    return environment.from_string(_file(template)).render(css=Markup(_file("page.css")), **variables)


def _file(name: str) -> str:
    return files("autotp.tools.page").joinpath(name).read_text("utf-8")


def _packed(timeline: dict[str, Any]) -> dict[str, Any]:
    """Returns the timeline with the actions of each row as a text."""
    return {**timeline, "rows": [{**row, "actions": packed(row["actions"])} for row in timeline["rows"]]}


def _write(path: Path, text: str) -> None:
    """Writes a file under another name, and renames it."""
    temporary = ""
    try:
        # In the same folder: a rename is one step within one file system only.
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=".autotp-", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
        # tempfile makes files that only their owner can read.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise Error(f"{path} cannot be written: {error.strerror or error}", fix="another path") from error
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def _umask() -> int:
    # It can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
