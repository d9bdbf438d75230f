"""Who takes part: names and ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mpidist.errors import MpidistError

_MAX_NAME = 128
_NAME = re.compile(r"[A-Za-z0-9\-_:]+")


@dataclass(frozen=True, slots=True, order=True)
class WorkerInfo:
    """A worker.

    Attributes:
        name: Letters, digits, ``-``, ``_`` and ``:``; fewer than 128 characters.
        id: Its rank.

    Raises:
        MpidistError: A name that is none (a ``RuntimeError``, as torch has it).
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        check_name(self.name)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


def check_name(name: str) -> None:
    """Raise a RuntimeError for what cannot be a worker's name."""
    if not isinstance(name, str):
        raise TypeError(f"a worker's name is a str; got {type(name).__name__}")
    if not name:
        raise MpidistError("Worker name must be non-empty")
    if len(name) >= _MAX_NAME:
        raise MpidistError(f"Worker name must be shorter than {_MAX_NAME} characters; got {len(name)}")
    if not _NAME.fullmatch(name):
        raise MpidistError(f"Worker name must match {_NAME.pattern}; got {name!r}")


def doubled(workers: Sequence[WorkerInfo]) -> list[str]:
    """Return the names that more than one worker has."""
    names = [worker.name for worker in workers]
    return sorted({name for name in names if names.count(name) > 1})
