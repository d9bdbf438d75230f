"""Command-line options that several benchmarks share, and the number of ranks that they need."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"


def add_output(parser: argparse.ArgumentParser, contents: str = "JSON") -> None:
    """Add ``--output``, the folder of a run's files."""
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"folder of the {contents}")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, where the tensors are."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda",
        help="cpu: check that all runs, with the host as the device",
    )


def add_link(parser: argparse.ArgumentParser) -> None:
    """Add ``--link``; ``slow_link.sh`` sets its default."""
    parser.add_argument(
        "--link",
        default=os.environ.get("MPIDIST_LINK", ""),
        help="name of the network, for the record",
    )


def add_quick(parser: argparse.ArgumentParser) -> None:
    """Add ``--quick``, a run that only checks the program."""
    parser.add_argument(
        "--quick",
        action="store_true",
        help="check that all runs: few cases, few rounds, figures without meaning",
    )


def require_two_ranks(ranks: int) -> None:
    """End the program with the command that starts it, unless it has two ranks or more."""
    if ranks < 2:
        program = Path(sys.argv[0]).name
        raise SystemExit(
            f"start at least 2 ranks: mpirun --bind-to none -n 2 python benchmarks/{program}"
        )
