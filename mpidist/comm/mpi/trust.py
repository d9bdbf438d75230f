"""``MPIDIST_TRUST``: whether objects from other ranks may be pickles, which run what their sender put in (pure).

``pickle``, or unset: any object travels. ``data``: plain data, tensors and arrays alone, and a
pickle is refused wherever objects come from other ranks. The setting is the job's: ``runtime``
compares it as MPI starts, and a rank with another one, or a word that is neither, is an error on
all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

ENV_TRUST = "MPIDIST_TRUST"
PICKLE, DATA, UNREADABLE = range(3)  # as numbers that ranks can compare
_CODES = {"": PICKLE, "pickle": PICKLE, "data": DATA}
_WORDS = ("'pickle' or unset", "'data'", "neither 'pickle' nor 'data'")


def code() -> int:
    """Return this process's setting as a number: ``PICKLE``, ``DATA`` or ``UNREADABLE``."""
    return _CODES.get(os.environ.get(ENV_TRUST, ""), UNREADABLE)


def is_data_only(asked: bool | None = None) -> bool:
    """Say whether objects from other ranks are read as data alone.

    Args:
        asked: What the caller asks for; None for what the variable says.

    Raises:
        ValueError: The variable is read and is neither ``pickle`` nor ``data``.
    """
    if asked is not None:
        return bool(asked)
    told = code()
    if told == UNREADABLE:
        raise ValueError(
            f"{ENV_TRUST} must be 'pickle' or 'data', or unset; got {os.environ[ENV_TRUST]!r}"
        )
    return told == DATA


def problem(codes: Sequence[int]) -> str | None:
    """Return what is wrong with the settings of all ranks, in rank order; None if they are one and readable."""
    if set(codes) in ({PICKLE}, {DATA}):
        return None
    told = ", ".join(f"{_WORDS[code]} on rank {codes.index(code)}" for code in sorted(set(codes)))
    return f"{ENV_TRUST} must be 'pickle' or 'data', the same on all ranks; it is {told}"
