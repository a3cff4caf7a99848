"""doctor: the command that says what autotp finds where it runs, and what will not work there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import typer
from rich.text import Text

import autotp
from autotp.cli.flags import Debug, Json
from autotp.cli.output import DIFFERENT, console, print_json
from autotp.diagnostics.environment import LIBRARIES, Environment, examine
from autotp.display.sheet import Table, lines_of_table, rich_line
from autotp.display.text_table import WIDTH
from autotp.errors import within


def doctor(json: Json = False, debug: Debug = False) -> None:
    """Says which versions are here and whether they were tested together, how this process was started, and with what.

    Under torchrun, srun or mpirun it also times an all-reduce: torchrun --nproc-per-node 2 -m autotp doctor

    Example: autotp doctor --json
    """
    try:
        environment = within("doctor", examine)
        first = not dist.is_initialized() or dist.get_rank() == 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if first and json:
        print_json(_data(environment))
    elif first:
        to = console()
        to.print(*_text(environment, to.width - 2 if to.is_terminal else WIDTH), sep="\n", soft_wrap=True)
    if environment.problems:
        raise typer.Exit(DIFFERENT)


def _text(env: Environment, width: int) -> Iterator[Text]:
    yield Text(f"autotp {autotp.__version__}, Python {env.python}", style="bold")
    head = ("library", "here", "tests", "what works")
    rows = tuple((p.name, p.found or "missing", p.tested or "none", LIBRARIES.get(p.name, "")) for p in env.packages)
    for line in lines_of_table(Table(head, rows, ("", "good", "", "note")), width):
        yield Text("  ").append(rich_line(line))
    if untested := _untested(env):
        yield Text(f"  not the versions that were tested together: {', '.join(untested)}", style="yellow")
    yield Text("\nstarted", style="bold")
    by = env.launched
    yield Text(f"  by            {by.by if by else 'no launcher: one process, one rank'}")
    if by is not None:
        yield Text(f"  rank          {by.rank} of {by.size}; here {by.local_rank} of {by.local_size}")
    for name, value in env.variables.items():
        yield Text(f"  {name}={value}", style="dim")
    yield Text("\nmachine", style="bold")
    yield Text(f"  cores         {env.cores}")
    yield Text(f"  GPUs          {', '.join(env.gpus) or 'none'}")
    yield Text(f"  backend       {env.backend}")
    if env.exchange is not None:
        size, ms = env.exchange.bytes / 1e6, env.exchange.seconds * 1e3
        yield Text(f"  all-reduce    {size:.1f} MB in {ms:.2f} ms, {env.exchange.gigabytes:.2f} GB/s")
    for advice in env.advice:
        yield Text(f"  faster with   {advice}", style="yellow")
    for problem in env.problems:
        yield Text(f"\nproblem       {problem}", style="bold red")
    yield Text(f"\nverdict       {_verdict(env)}", style="bold red" if env.problems else "bold green")


def _verdict(env: Environment) -> str:
    """Returns in a line whether a training would start here, and with which command."""
    if env.problems:
        return f"not ready: {len(env.problems)} problem{'s' * (len(env.problems) > 1)}, see above"
    versions = ", but not with the versions that were tested together" * bool(_untested(env))
    if env.exchange is not None:
        return f"ready{versions}: the ranks find each other over {env.backend}"
    ranks = len(env.gpus) or env.cores
    return f"ready{versions}: torchrun --nproc-per-node {ranks} train.py starts {ranks} ranks over {env.backend}"


def _untested(env: Environment) -> list[str]:
    """Returns the libraries that are here in another version than the tests run with."""
    return [p.name for p in env.packages if p.state == "untested" and p.tested]


def _data(env: Environment) -> dict[str, Any]:
    by, exchange = env.launched, env.exchange
    return {
        "ok": not env.problems,
        "python": env.python,
        "packages": {
            p.name: {"version": p.found or None, "tested": p.tested or None, "state": p.state,
                     "works": LIBRARIES.get(p.name, "")}
            for p in env.packages
        },
        "launcher": None if by is None else {
            "by": by.by, "rank": by.rank, "size": by.size, "local_rank": by.local_rank, "local_size": by.local_size,
        },
        "variables": env.variables,
        "cores": env.cores,
        "gpus": list(env.gpus),
        "backend": env.backend,
        "all_reduce": None if exchange is None else {
            "bytes": exchange.bytes, "seconds": exchange.seconds, "gigabytes_a_second": exchange.gigabytes,
        },
        "problems": list(env.problems),
        "advice": list(env.advice),
    }  # fmt: skip
