"""Entry point of the ``mpidist`` command, which says what to install where typer and rich are missing."""

from __future__ import annotations

import importlib.util
import sys

_MISSING = (
    "mpidist: the command needs typer and rich, which are not installed; pip install 'mpidist[cli]'"
)
_STATUS_OF_MISSING = 2


def main() -> None:
    """Run the command; the exit status is 0, or that of the job it started, 1 for what it found wrong, 2 for a wrong call."""
    if any(importlib.util.find_spec(name) is None for name in ("typer", "rich")):
        print(_MISSING, file=sys.stderr)
        raise SystemExit(_STATUS_OF_MISSING)
    from mpidist.cli.app import app

    app(prog_name="mpidist")
