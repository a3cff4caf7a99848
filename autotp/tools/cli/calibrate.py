"""calibrate: the command that measures the device of this process, beside the numbers of a known kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer

from autotp.costs.hardware import KINDS, hardware_of
from autotp.errors import Error
from autotp.tools.cli.flags import Debug, Html, Json
from autotp.tools.cli.output import WrongUse, expect_writable, show
from autotp.tools.estimation.calibrate import calibrate, expect_json
from autotp.tools.page.save_page import save_sheet


def calibrate_command(
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="KIND", help=f"The kind to compare with: {', '.join(KINDS)}")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, help="That the measurements take, about")] = 40.0,
    save: Annotated[
        str | None, typer.Option("--save", metavar="FILE.json", help="Write the numbers, for --gpu FILE.json")
    ] = None,
    html: Html = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measures the GPU or the CPU of this process, and says where a known kind differs. Prints the line for --gpu.

    Under torchrun the ranks measure their links: torchrun --nproc-per-node 8 -m autotp calibrate

    Example: autotp calibrate --seconds 4 --save device.json
    """
    expect_writable(html)
    try:
        device = None if gpu is None else hardware_of(gpu)
        path = None if save is None else expect_json(save)
    except Error as error:
        raise WrongUse(str(error)) from error
    try:
        calibration = calibrate(gpu=device, seconds=seconds)
        # While there is a group: afterwards no process knows its rank.
        first = not dist.is_initialized() or dist.get_rank() == 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if not first:
        return
    if path is not None:
        calibration.save(Path(path))
    if html is not None:
        save_sheet(calibration.sheet(), html)
    show(calibration, json)
