"""Entry point of the ``mpidist`` command, with an error text if typer or rich is missing.

Ctrl-C and the end of who reads the output end it without a traceback, also while it imports.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys

_MISSING = (
    "mpidist: the command needs typer and rich, which are not installed; pip install 'mpidist[cli]'"
)
_STATUS_OF_ERROR = 2
_STATUS_OF_INTERRUPT = 128 + signal.SIGINT
_STATUS_OF_PIPE = 1


def main() -> None:
    """Run the command.

    The exit status is that of a started job; otherwise 0, 1 if problems were found, or 2 for wrong
    arguments. Ctrl-C is 130, as in a shell, and an output that nobody reads 1, as in typer.
    """
    if sys.stdout is None:
        # The caller has closed it (>&-).
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        try:
            _run()
        finally:
            # Here, because Python's own at exit says what nobody wants to know.
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(_STATUS_OF_INTERRUPT) from None
    except BrokenPipeError:
        _drop_output()
        raise SystemExit(_STATUS_OF_PIPE) from None
    except OSError as error:
        _drop_output()
        print(f"mpidist: the output cannot be written: {error}", file=sys.stderr)
        raise SystemExit(_STATUS_OF_ERROR) from None


def _run() -> None:
    if any(importlib.util.find_spec(name) is None for name in ("typer", "rich")):
        print(_MISSING, file=sys.stderr)
        raise SystemExit(_STATUS_OF_ERROR)
    from mpidist.cli.app import app

    app(prog_name="mpidist")


def _drop_output() -> None:
    """Have the rest of the output go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
