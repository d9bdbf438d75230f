"""Command lines of benchmarks: shared options, and the number of ranks that they need."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
_OPTIONS: dict[str, dict[str, Any]] = {
    "device": {
        "choices": ("cpu", "cuda"),
        "default": "cuda",
        "help": "cpu: check that all runs, with the host as the device",
    },
    # slow_link.sh sets its default.
    "link": {
        "default": os.environ.get("MPIDIST_LINK", ""),
        "help": "name of the network, for the record",
    },
    "output": {"type": Path, "default": RESULTS, "help": "folder of the record"},
    "quick": {
        "action": "store_true",
        "help": "check that all runs: few cases, few rounds, figures without meaning",
    },
}


def parser(
    docstring: str, *names: str, rounds: int | None = None, burst_s: float | None = None
) -> argparse.ArgumentParser:
    """Return a parser of a benchmark's command line, with ``--output`` and other shared options.

    Args:
        docstring: Of the benchmark; its first line is the description.
        names: Of the shared options: device, link, quick.
        rounds: Default of ``--rounds``; None: no such option.
        burst_s: Default of ``--burst-s``; None: no such option.
    """
    made = argparse.ArgumentParser(description=docstring.splitlines()[0])
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help="bursts of each contender")
    if burst_s is not None:
        made.add_argument("--burst-s", type=float, default=burst_s, help="seconds of a burst")
    add(made, *names, "output")
    return made


def add(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add shared options by name: device, link, output, quick."""
    for name in names:
        parser.add_argument(f"--{name}", **_OPTIONS[name])


def require_ranks(ranks: int, least: int = 2) -> None:
    """End the program with the command that starts it, unless it has ranks enough."""
    if ranks < least:
        program = Path(sys.argv[0]).name
        raise SystemExit(
            f"start at least {least} ranks: mpirun --bind-to none -n {least} python "
            f"benchmarks/{program}"
        )
