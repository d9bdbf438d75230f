"""Command-line options of the scaling benchmark, by command."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
from pathlib import Path
from typing import Any

from harness import benchmark_options

# A rank of data-parallel training holds them all.
LEAST_PARAMETERS, MOST_PARAMETERS = 1e3, 1e11
OPERATIONS = ("all_reduce", "average", "all_gather", "reduce_scatter", "broadcast", "barrier")


def add_commands(commands: Any) -> None:
    """Add the parser of each command."""
    for add in (_add_measure, _add_sweep, _add_report, _add_startup, _add_advise):
        add(commands)


def _add_measure(commands: Any) -> None:
    parser = _command(
        commands, "measure", "this job, started by mpirun or srun; without a command, too"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--networks",
        nargs="+",
        type=_network,
        default=["512x4", "1024x8"],
        metavar="WIDTHxDEPTH",
        help="MLPs, the small first",
    )
    parser.add_argument("--batch", type=_positive, default=64, help="of each rank, in weak scaling")
    parser.add_argument(
        "--total-batch", type=_positive, default=192, help="of all ranks, in strong scaling"
    )
    parser.add_argument("--bucket-cap-mb", type=float, default=1.0)
    parser.add_argument(
        "--operations", nargs="+", choices=OPERATIONS, metavar="NAME", help=" ".join(OPERATIONS)
    )
    parser.add_argument(
        "--sizes", nargs="+", type=_positive, metavar="BYTES", help="8, 32, … 32 MiB if not given"
    )
    parser.add_argument("--rounds", type=_positive, default=5, help="for each size")
    parser.add_argument("--step-rounds", type=_positive, default=4, help="for each step")
    parser.add_argument("--burst-s", type=float, default=0.008)
    parser.add_argument(
        "--longest-call-s",
        type=float,
        default=0.12,
        help="an operation goes to no larger size after such a call",
    )
    parser.add_argument(
        "--longest-step-s",
        type=float,
        default=0.8,
        help="networks whose steps would take longer are left out",
    )
    parser.add_argument(
        "--link",
        type=_link,
        default=os.environ.get("MPIDIST_LINK", ""),
        help="rate of the link between nodes: 25gbit",
    )
    benchmark_options.add(parser, "output", "quick")


def _add_sweep(commands: Any) -> None:
    parser = _command(commands, "sweep", "jobs of several sizes on this machine, then the report")
    parser.add_argument(
        "--jobs", type=_positive, nargs="+", default=[1, 2, 3, 4, 6, 8], metavar="RANKS"
    )
    parser.add_argument(
        "--links",
        nargs="*",
        type=_link,
        default=[],
        metavar="RATE",
        help="as tc takes it: 10gbit 1gbit 100mbit (root, MPICH)",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=_positive,
        nargs="+",
        default=[1, 2, 3, 4],
        metavar="RANKS",
        help="on each of a link's two nodes",
    )
    parser.add_argument(
        "--mpich",
        type=Path,
        default=Path(__file__).resolve().parents[2] / ".mpich",
        metavar="FOLDER",
        help="of the MPICH for links",
    )
    parser.add_argument(
        "--launcher",
        type=_launcher,
        help="command line up to -n; mpirun --oversubscribe --bind-to none if not given",
    )
    parser.add_argument("--limit-s", type=float, default=150.0, help="for each job")
    benchmark_options.add(parser, "output", "quick")


def _add_report(commands: Any) -> None:
    parser = _command(commands, "report", "tables, model, JSON and plot from records of `measure`")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    benchmark_options.add(parser, "output")


def _add_startup(commands: Any) -> None:
    parser = _command(
        commands, "startup", "time to the first step, memory, files, threads, messages, by ranks"
    )
    parser.add_argument(
        "--jobs", type=_positive, nargs="+", default=[2, 4, 8, 16, 32], metavar="RANKS"
    )
    parser.add_argument(
        "--what",
        choices=("mpi4py", "mpidist"),
        help="be one rank of such a job, started by mpirun or srun",
    )
    parser.add_argument(
        "--launcher",
        type=_launcher,
        help="command line up to -n; mpirun --oversubscribe --bind-to none if not given",
    )
    parser.add_argument("--limit-s", type=float, default=120.0, help="for each job")
    benchmark_options.add(parser, "output")


def _add_advise(commands: Any) -> None:
    parser = _command(commands, "advise", "which hook pays in your case, or a rank's memory")
    parser.add_argument(
        "what",
        nargs="?",
        choices=("hook", "memory"),
        default="hook",
        help="hook: which communication hook is the fastest; memory: bytes of a rank",
    )
    parser.add_argument("--bandwidth", type=float, metavar="GBIT_S", help="hook: of a node's link")
    parser.add_argument(
        "--parameters", type=_parameters, required=True, help="of the network: 350e6"
    )
    parser.add_argument("--ranks", type=_positive, required=True, help="of the job")
    parser.add_argument("--ranks-per-node", type=_positive, default=1, help="hook: 1 if not given")
    parser.add_argument(
        "--compute-ms",
        type=float,
        help="hook: forward and backward pass of one rank; estimated if not given",
    )
    parser.add_argument("--bucket-cap-mb", type=_cap_mb, help="hook: DDP's; 25 if not given")
    parser.add_argument(
        "--processor",
        choices=("cpu", "gpu"),
        help="hook: of the ranks; gpu has an H100's hooks, from results/. A GPU that is seen here "
        "is taken if not given, and a terminal is asked",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="hook: measure hooks and computing here first, in a job of one rank",
    )
    parser.add_argument(
        "--model", type=Path, help="hook: JSON of sweep or report; the one in results/ if not given"
    )
    parser.add_argument("--launcher", type=_launcher, help="command line up to -n, for --measure")
    parser.add_argument("--limit-s", type=float, default=60.0, help="for --measure")
    parser.add_argument(
        "--optimizer", choices=("sgd", "momentum", "adam"), default="adam", help="memory: its state"
    )
    parser.add_argument(
        "--partition",
        choices=("none", "greedy", "balanced", "flat"),
        default="none",
        help="memory: OSS's; none: each rank has the whole state",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        default="float32",
        help="memory: of parameters, gradients and state",
    )
    parser.add_argument(
        "--powersgd-rank", type=_positive, default=0, metavar="R", help="memory: of the hook"
    )
    parser.add_argument(
        "--copy-gradients",
        action="store_true",
        help="memory: DDP with gradient_as_bucket_view=False",
    )
    parser.add_argument(
        "--activations-mib", type=float, default=0.0, metavar="MIB", help="memory: of your model"
    )


def _command(commands: Any, name: str, does: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=does, description=f"{does[0].upper()}{does[1:]}."
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _parameters(text: str) -> float:
    number = _number(text)
    if not LEAST_PARAMETERS <= number <= MOST_PARAMETERS:
        raise argparse.ArgumentTypeError(
            f"a network of {LEAST_PARAMETERS:.0f} to {MOST_PARAMETERS:g} parameters, which each "
            f"rank holds whole; got {text}"
        )
    return number


def _cap_mb(text: str) -> float:
    number = _number(text)
    # Of a byte at least.
    if not 1 / (1 << 20) <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of a bucket in MiB, as 25 or 0.5")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def _launcher(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no command line: {error}") from None
    if not words:
        raise argparse.ArgumentTypeError("a command line up to -n, as 'mpirun --oversubscribe'")
    return text


def _network(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no WIDTHxDEPTH, as in 1024x8")
    return text


def _link(text: str) -> str:
    if text and not re.fullmatch(r"[1-9]\d*(gbit|mbit)", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no rate of a link, as in 25gbit or 100mbit")
    return text
