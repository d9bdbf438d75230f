"""Entry point of the ``mpidist`` command."""

from __future__ import annotations


def main() -> None:
    """Run the command."""
    raise SystemExit("mpidist: no subcommand is installed")
