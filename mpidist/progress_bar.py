"""Progress bars of long work in a terminal, by rich; a spinner for one operation.

Nothing is shown on other ranks than 0, in files and pipes, or where rich is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

# Set by the command in the environment of ranks whose launcher writes stdout and stderr to a
# terminal: they have pipes to the launcher.
VARIABLE = "MPIDIST_TERMINAL"

_AFTER_S = 1.0


def is_shown(rank: int) -> bool:
    """Return whether this rank's progress is shown: on rank 0 with a terminal behind stderr."""
    if rank != 0 or importlib.util.find_spec("rich") is None:
        return False
    return sys.stderr.isatty() or bool(os.environ.get(VARIABLE))


def track(items: Sequence[T], text: str, rank: int) -> Iterator[T]:
    """Yield items, and show a bar with the number of those that are done.

    Args:
        items: The items; their number is the bar's length.
        text: Description in front of the bar.
        rank: This process's rank.
    """
    with bar(text, len(items), rank) as advance:
        for item in items:
            yield item
            advance()


@contextmanager
def bar(text: str, total: int, rank: int) -> Iterator[Callable[[], None]]:
    """Show a bar while the block lasts; give the function that advances it by one.

    Args:
        text: Description in front of the bar.
        total: Calls of the function that fill it.
        rank: This process's rank.
    """
    if not is_shown(rank):
        yield lambda: None
        return
    from rich.progress import Progress

    # Drawn by the calls alone: a thread that draws would disturb what is measured.
    with Progress(auto_refresh=False, **_on_terminal()) as shown:
        task = shown.add_task(text, total=total)

        def advance() -> None:
            shown.advance(task)
            shown.refresh()

        shown.refresh()
        yield advance


@contextmanager
def spinner(text: str, rank: int, after_s: float = _AFTER_S) -> Iterator[None]:
    """Show a spinner and the elapsed time while the block lasts, if it lasts long.

    Args:
        text: Description of the operation.
        rank: This process's rank.
        after_s: Seconds after which it appears.
    """
    if not is_shown(rank):
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    shown = Progress(*columns, **_on_terminal())
    shown.add_task(text, total=None)
    ended = threading.Event()

    def show() -> None:
        if not ended.wait(after_s):
            shown.start()
            ended.wait()
            shown.stop()

    thread = threading.Thread(target=show, name="mpidist-progress-bar", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _on_terminal() -> dict[str, Any]:
    """Return the options of a bar that is drawn on stderr and leaves nothing there."""
    from rich.console import Console

    # rich prints what the work prints above the bar, on stderr: not what goes into a file.
    is_above = sys.stdout.isatty() or bool(os.environ.get(VARIABLE))
    console = Console(file=sys.stderr, force_terminal=True)
    return {"console": console, "transient": True, "redirect_stdout": is_above}
