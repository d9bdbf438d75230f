"""Entry point of the ``mpidist`` command, with an error text if typer or rich is missing."""

from __future__ import annotations

import importlib.util
import sys

_MISSING = (
    "mpidist: the command needs typer and rich, which are not installed; pip install 'mpidist[cli]'"
)
_STATUS_OF_MISSING = 2


def main() -> None:
    """Run the command.

    The exit status is that of a started job; otherwise 0, 1 if problems were found, or 2 for wrong
    arguments.
    """
    if any(importlib.util.find_spec(name) is None for name in ("typer", "rich")):
        print(_MISSING, file=sys.stderr)
        raise SystemExit(_STATUS_OF_MISSING)
    from mpidist.cli.app import app

    app(prog_name="mpidist")
