"""Command lines on all ranks: rank 0 alone prints messages, and tries the folder of results."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from mpidist import whole_file
from mpidist.comm import ProcessGroup


def positive(text: str) -> int:
    """Return the value of an option that must be a positive integer."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text}")
    return value


def parse(
    parser: argparse.ArgumentParser,
    rank: int,
    problem_of: Callable[[argparse.Namespace], str | None] | None = None,
) -> argparse.Namespace:
    """Parse the command line; an invalid one ends all ranks, so that no rank waits for another.

    Args:
        parser: Parser with the program's options.
        rank: Rank of this process.
        problem_of: Returns a problem of otherwise valid options, or None.
    """
    with contextlib.ExitStack() as stack:
        if rank != 0:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        options = parser.parse_args()
        problem = problem_of(options) if problem_of is not None else None
        if problem:
            parser.error(problem)
    return options


def require_folder(group: ProcessGroup, folder: Path) -> None:
    """End all ranks unless rank 0 can write into a folder, which it makes; before the work.

    Collective: over ``group``.
    """
    problem = ""
    if group.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            problem = whole_file.problem_of(folder / "results")
        except OSError as error:
            problem = f"{folder}: {error.strerror or error}"
    problem = group.broadcast_object(problem, 0)
    if problem:
        text = f"the results cannot be written: {problem}; --output names another folder"
        sys.exit(text if group.rank == 0 else 1)
