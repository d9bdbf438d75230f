"""Types of command-line options: value, name on the command line and help text."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from mpidist.cli.bench import RANKS
from mpidist.cli.launch_request import BINDINGS
from mpidist.slurm.job_plan import names


def job_scripts() -> list[str]:
    """Return what a shell proposes for the name of a job script."""
    return [name for name in names() if name != "rpc-het"]


Binding = Enum("Binding", {name: name for name in BINDINGS}, type=str)  # type: ignore[misc]
Benchmark = Enum("Benchmark", {name: name for name in RANKS}, type=str)  # type: ignore[misc]
Ranks = Annotated[int | None, typer.Option("-n", "--ranks", min=1, help="ranks to start")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="print the command line, and start nothing")
]
DrySubmit = Annotated[
    bool, typer.Option("--dry-run", help="print the job script, and submit nothing")
]
GpusPerNode = Annotated[
    str, typer.Option(metavar="N", help="GPUs of a node, one rank each; 0: none")
]
TasksPerNode = Annotated[
    int | None, typer.Option(help="ranks of a node, where they are not the GPUs")
]
Memory = Annotated[
    str, typer.Option(metavar="MB", help="memory of a node: 64000, 64G; 0: all of it")
]
TimeLimit = Annotated[
    str, typer.Option(metavar="TIME", help="limit: minutes, 1:00:00 or 1-12:00:00")
]
Sbatch = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="any other option of sbatch")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="a value of env.sh for this job"),
]
EnvFile = Annotated[
    Path | None, typer.Option(help="your env.sh; else that of $MPIDIST_SLURM, else the shipped one")
]
JobScript = Annotated[
    str,
    typer.Argument(metavar="NAME", help="the job script; see below", autocompletion=job_scripts),
]
