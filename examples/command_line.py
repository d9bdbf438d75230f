"""Command lines of the examples: all ranks parse them, and rank 0 alone prints what argparse has to say."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable


def positive(text: str) -> int:
    """Return an option's value, a whole number above 0."""
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
    """Parse this process's command line; a wrong one ends all ranks alike, so that none waits for another.

    Args:
        parser: Knows the options.
        rank: This process's.
        problem_of: Says what is wrong with options that fit the parser, if anything.
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
