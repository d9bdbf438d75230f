"""Command-line parsing on all ranks; rank 0 alone prints argparse's messages."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable


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
