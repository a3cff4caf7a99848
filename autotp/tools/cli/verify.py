"""verify: the command that compares ranks with one device, and finds what a difference comes from."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer
from torch import nn

from autotp.diagnostics.verify import (
    Report,
    compare_calls,
    expect_blocks,
    expect_layout,
    microbatches_of,
    training_of,
    verify,
)
from autotp.display.plain_data import as_plain_data
from autotp.errors import within
from autotp.options import Options
from autotp.passes.capture.example_inputs import Inputs
from autotp.passes.capture.example_inputs import example_inputs as find_inputs
from autotp.runtime.build import expect_usable
from autotp.tools.bisect import Blame, bisect
from autotp.tools.cli.flags import PLAIN, Debug, Html, Interleave, Json, ScheduleName, with_model, with_options_of
from autotp.tools.cli.model_argument import ModelArgument, on_meta, with_values
from autotp.tools.cli.output import DIFFERENT, WrongUse, arguments_in_use, expect_writable, print_json, show
from autotp.tools.page.save_page import save_report

Result = tuple[Report, Blame | None]


@with_model("dtype")
@with_options_of(verify)
def verify_command(
    tp: Annotated[list[int], typer.Option("--tp", min=1, help="The numbers of ranks, each verified: --tp 2 3 4")],
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline ranks, as of `autotp.distribute`")] = 1,
    dp: Annotated[int, typer.Option("--dp", min=1, help="Replicas")] = 1,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", min=1, help="Parts of a replica's batch; default: --pp")
    ] = None,
    schedule: Annotated[ScheduleName, typer.Option("--schedule", help="The order of microbatches")] = PLAIN,
    interleave: Interleave = None,
    zero: Annotated[int, typer.Option("--zero", min=0, max=3, help="The stage of ZeRO")] = 0,
    meta: Annotated[bool, typer.Option("--meta", help="Prove it on meta, without values")] = False,
    bisects: Annotated[bool, typer.Option("--bisect/--no-bisect", help="Find what a difference comes from")] = True,
    html: Html = None,
    json: Json = False,
    debug: Debug = False,
    *,
    argument: ModelArgument,
    chosen: dict[str, Any],
) -> None:
    """Compares the outputs, every gradient and a step of TP ranks with one device, in one process and in float64.

    Example: autotp verify file.py:factory --tp 2 3 --layers 1

    The exit status is 1 if they are DIFFERENT, or the model is refused; 2 if this layout cannot be. Where they are
    DIFFERENT, the guilty weight, pass and rule are found by halving. With --pp, --dp, --ep or --microbatches, it proves
    and compares the step that `autotp.distribute` would train:
    autotp verify path/to/config.json --tp 8 --pp 16 --dp 64 --microbatches 16 --meta
    """
    expect_writable(html)
    if html is not None and len(tp) > 1:
        raise WrongUse("--html writes the page of one number of ranks: --tp 2")
    settings, example_inputs = Options(**chosen), argument.example_inputs()
    parts = microbatches_of(pp) if microbatches is None else microbatches
    order = {"schedule": schedule.value, "interleave": interleave}
    mesh = {"pp": pp, "dp": dp, "microbatches": parts, "zero": zero, **order}
    training = training_of(settings, parts, schedule.value, cast(Any, zero), interleave)
    with arguments_in_use():
        for size in tp:
            # A layout that cannot be is found before the model is built.
            expect_layout(settings, training, (size, pp, dp))
    built = on_meta(argument) if meta else with_values(argument)
    with arguments_in_use():
        expect_blocks(built, training, pp)
    results: list[Result] = []
    for size in tp:
        # Halving compares the ranks of one model: it knows no stages and no replicas.
        if training.is_stepped(pp, dp):
            results.append((verify(built, size, example_inputs=example_inputs, **mesh, **chosen), None))
        else:
            report, call = _verified(built, example_inputs, size, settings)
            results.append((report, bisect(built, call, size, settings) if bisects and not report.ok else None))
        for result in results[-1] if not json else ():
            if result is not None:
                show(result)
    if html is not None:
        save_report(*results[0], html)
    right = all(report.ok for report, _ in results)
    if json:
        rows = [{"tp": report.plan.tp, **report.to_dict(), "guilty": as_plain_data(blame)} for report, blame in results]
        print_json({"ok": right, "reports": rows})
    if not right:
        raise typer.Exit(DIFFERENT)


def _verified(model: nn.Module, example_inputs: Any, tp: int, settings: Options) -> tuple[Report, Inputs]:
    """Returns what `verify` returns, and the arguments of the call."""

    def run() -> tuple[Report, Inputs]:
        expect_usable("verify", model, tp, settings)
        call = find_inputs(model, example_inputs)
        return compare_calls(model, call, tp, settings), call

    return within(f"verify({type(model).__name__}, tp={tp})", run)
