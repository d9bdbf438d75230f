"""Subcommands of ``mpidist`` as typer sees them: options and their help; each hands over to its own module."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

# Each subcommand's examples, printed at the end of its help.
EXAMPLES = {
    "doctor": ["mpidist doctor", "mpirun -n 4 mpidist doctor --json found.json"],
}


def _epilog(name: str) -> str:
    return "\n\n".join(["Example:", *EXAMPLES[name]])


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Distributed PyTorch over MPI: look at a machine, start jobs, measure, submit to Slurm.",
    epilog="\n\n".join(["Example:", "mpidist doctor", "mpidist run -n 4 train.py"]),
)


@app.callback()
def _main() -> None:
    pass


@app.command(epilog=_epilog("doctor"))
def doctor(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="also write all facts and findings there")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="exit with 1 for a warning, too")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="seconds to wait for the other ranks, and for each operation")] = 20.0,
    launcher: Annotated[bool, typer.Option("--launcher/--no-launcher", help="alone: start two ranks by mpirun")] = True,
    try_device: Annotated[bool, typer.Option("--try-device", help="try what MPI does with device memory (minutes)")] = False,
) -> None:
    """Look at MPI, devices, cores, memory and versions, alone or on every rank of a job; say what is wrong and what to do.

    The exit status is 1 if something would stop jobs, else 0.
    """
    from mpidist.cli import doctor as examination
    from mpidist.cli import tables

    report = examination.examine(dict(os.environ), timeout, launcher, try_device)
    if report.is_mine:
        tables.print_report(report, tables.console(is_rank=report.ranks[0].tasks is not None))
        if json_file is not None:
            json_file.write_text(json.dumps(report.as_data(), indent=1, default=str) + "\n", encoding="utf-8")
        sys.stdout.flush()
    raise typer.Exit(report.exit_code(strict))
