"""Versions of torch: that which is installed, and those that the tests have run on."""

from __future__ import annotations

import logging

# Numbers of the oldest and the newest release that the tests run on; tests/torch_versions.sh.
OLDEST, NEWEST = (2, 11), (2, 15)

_log = logging.getLogger(__name__)


def numbers(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, as ``(2, 15)`` for "2.15.0+cu130"."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())


def newer_than_tested(text: str) -> str | None:
    """Return a sentence about a release newer than ``NEWEST``, or None."""
    if numbers(text) <= NEWEST:
        return None
    newest = ".".join(map(str, NEWEST))
    return f"torch is {text}, newer than {newest}, the newest that mpidist was tested on"


def warn_if_newer(text: str) -> None:
    """Log one line if torch is newer than the newest that was tested; no error by itself."""
    sentence = newer_than_tested(text)
    if sentence is not None:
        _log.warning("%s; mpidist doctor says more", sentence)
